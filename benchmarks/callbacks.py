"""Steps per second of the default recipe without callbacks, and with all that the zoo has.

python -m benchmarks.callbacks

The trackers are extras: pip install -e '.[tensorboard,wandb,mlflow]'. Whole runs, of each kind in
turn, round after round. The table is printed, and saved as JSON and markdown under
benchmarks/results/.
"""

import contextlib
import dataclasses
import io
import itertools
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import tyro
from jaxtyping import PyTree

import zoo
from benchmarks.report import Table, provenance, save
from benchmarks.timing import PAUSE_SECONDS
from recipes import lm
from zoo import callbacks, language, losses, transformer
from zoo.data.text import Text
from zoo.training.compiled import CompiledStep
from zoo.training.description import Training

WARM_UP = 5  # steps
Make = Callable[[zoo.Run, Text], list[callbacks.Callback]]


def average(run: zoo.Run, data: Text) -> list[callbacks.Callback]:
    """The average of the weights alone: of all of them, the one that computes at each step."""
    return [callbacks.Average()]


def built_in(run: zoo.Run, data: Text) -> list[callbacks.Callback]:
    """All of them, but trackio; patience that never ends, and a sample at each evaluation."""
    again = zoo.evaluator(run, losses.next_token, data.held_out)

    def sample(model: PyTree) -> str:
        return language.sample(model, data.tokenizer, num_tokens=16, seed=0)

    return [
        callbacks.Average(),
        callbacks.EarlyStopping(patience=10**6),
        callbacks.BestCheckpoint(),
        callbacks.Evaluations({"again": again}),
        callbacks.Samples(sample, every=run.config.eval_every),
        callbacks.Norms(every=run.config.eval_every),
        callbacks.TensorBoard(),
        callbacks.Wandb(),
        callbacks.MLflow(),
    ]


KINDS: dict[str, Make] = {
    "no callbacks": lambda run, data: [],
    "no callbacks, again": lambda run, data: [],  # the difference that is noise
    "average": average,
    "all": built_in,
}


@dataclass(frozen=True)
class Config:
    """Time the default recipe without callbacks and with them, and save the result."""

    recipe: lm.Config = lm.Config(steps=60, eval_every=30, checkpoint_every=1000, eval_batches=4)
    """The run that is timed: its flags are those of recipes.lm."""
    rounds: int = 4
    """Rounds; every kind has one run per round."""
    results: Path = Path(__file__).parent / "results"
    """Folder for the results."""


class TimedStep:
    """A compiled step that takes down when it is called; two steps at most are under way."""

    def __init__(self, step: CompiledStep, times: list[float]):
        self._step, self._times = step, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def __call__(self, state: PyTree, batch: PyTree) -> Any:
        """Run a step."""
        self._times.append(time.perf_counter())
        return self._step(state, batch)


@dataclass(frozen=True, kw_only=True)
class TimedTraining(Training):
    """A training whose steps are timed."""

    times: list[float]

    def step(self, **options: Any) -> Any:
        """The train step."""
        return TimedStep(super().step(**options), self.times)


def run_once(config: lm.Config, make: Make) -> list[float]:
    """When each step of a run was dispatched, in seconds."""
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        config = dataclasses.replace(config, run_dir=Path(folder, "run"))
        with zoo.Run(config) as run, contextlib.redirect_stdout(io.StringIO()):
            data = language.read_text(run)
            model = lm.model_config(config, data)
            training = language.training(
                run, config.optimizer, data, lambda key: transformer.Transformer(model, key=key)
            )
            zoo.fit(run, TimedTraining(**vars(training), times=times), make(run, data))
    return times


def measure(config: Config) -> Table:
    """Seconds per step between evaluations, and at one, by kind."""
    every = config.recipe.eval_every
    steps: dict[str, list[float]] = {name: [] for name in KINDS}
    evaluations: dict[str, list[float]] = {name: [] for name in KINDS}
    for turn in range(config.rounds + 1):  # the first one fills the caches
        for name, make in KINDS.items():
            time.sleep(PAUSE_SECONDS)
            gaps = [b - a for a, b in itertools.pairwise(run_once(config.recipe, make))]
            if turn:
                # Gap k - 1 is from the dispatch of step k to the next one's.
                at = set(range(every, config.recipe.steps, every))
                plain = [g for k, g in enumerate(gaps, 1) if k > WARM_UP and not {k, k - 1} & at]
                steps[name].append(statistics.mean(plain))
                evaluations[name].append(statistics.mean(gaps[k - 1] for k in at))
    table = Table("python -m recipes.lm, with callbacks")
    baseline = steps["no callbacks"]
    for name, seconds in steps.items():
        ratios = [a / b for a, b in zip(seconds, baseline, strict=True)]
        table.rows.append(
            {
                "callbacks": name,
                "steps/s": 1 / statistics.median(seconds),
                "time / none": statistics.median(ratios),
                "at an evaluation, s": statistics.median(evaluations[name]),
            }
        )
    table.notes.append(
        f"steps/s: {config.recipe.steps} steps without those of an evaluation, the median of "
        f"{config.rounds} rounds; time / none: the median of the rounds' ratios; at an evaluation: "
        "all that comes between two steps then: the evaluations themselves, the best model's save, "
        "a sample, norms; trackers are TensorBoard, wandb (offline) and MLflow (a local database)"
    )
    table.print()
    return table


def main(config: Config) -> None:
    """Measure, print and save."""
    command = shlex.join(["python", "-m", "benchmarks.callbacks", *sys.argv[1:]])
    source = {"command": command, "date": date.today().isoformat(), **provenance()}
    save("callbacks", [measure(config)], source, config.results)


if __name__ == "__main__":
    main(tyro.cli(Config))
