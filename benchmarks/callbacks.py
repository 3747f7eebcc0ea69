"""Steps per second of the default recipe without callbacks, and with all that the zoo has.

python -m benchmarks.callbacks

The trackers are extras: pip install -e '.[tensorboard,wandb,mlflow]'.
"""

import contextlib
import dataclasses
import io
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import PyTree

import zoo
from benchmarks.harness import Table, in_turn, main, median_ratio
from recipes import lm
from zoo import callbacks as built_ins
from zoo import language, losses, transformer
from zoo.data.text import Text
from zoo.training.compiled import CompiledStep
from zoo.training.description import Training

WARM_UP = 5  # steps
Make = Callable[[zoo.Run, Text], list[built_ins.Callback]]


def built_in(run: zoo.Run, data: Text) -> list[built_ins.Callback]:
    """All of them, but trackio; patience that never ends, and a sample at each evaluation."""
    again = zoo.evaluator(run, losses.next_token, data.held_out)

    def sample(model: PyTree) -> str:
        return language.sample(model, data.tokenizer, num_tokens=16, seed=0)

    return [
        built_ins.Average(),
        built_ins.EarlyStopping(patience=10**6),
        built_ins.BestCheckpoint(),
        built_ins.Evaluations({"again": again}),
        built_ins.Samples(sample, every=run.config.eval_every),
        built_ins.Norms(every=run.config.eval_every),
        built_ins.TensorBoard(),
        built_ins.Wandb(),
        built_ins.MLflow(),
    ]


KINDS: dict[str, Make] = {
    "no callbacks": lambda run, data: [],
    "no callbacks, again": lambda run, data: [],  # the difference that is noise
    "average": lambda run, data: [built_ins.Average()],
    "all": built_in,
}


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


def callbacks(
    recipe: lm.Config = lm.Config(steps=60, eval_every=30, checkpoint_every=1000, eval_batches=4),
    rounds: int = 4,
) -> list[Table]:
    """Time whole runs without callbacks and with them, of each kind in turn.

    Args:
        recipe: the run that is timed: its flags are those of recipes.lm.
        rounds: rounds; every kind has one run per round.
    """
    at = set(range(recipe.eval_every, recipe.steps, recipe.eval_every))

    def measure(make: Make) -> tuple[float, float]:
        """Seconds per step between evaluations, and at one."""
        gaps = [b - a for a, b in itertools.pairwise(run_once(recipe, make))]
        # Gap k - 1 is from the dispatch of step k to the next one's.
        plain = [g for k, g in enumerate(gaps, 1) if k > WARM_UP and not {k, k - 1} & at]
        return statistics.mean(plain), statistics.mean(gaps[k - 1] for k in at)

    calls = {name: lambda make=make: measure(make) for name, make in KINDS.items()}
    found = in_turn(calls, rounds + 1)  # the first one fills the caches
    turns = {name: [*zip(*each[1:], strict=True)] for name, each in found.items()}
    table = Table("python -m recipes.lm, with callbacks")
    for name, (steps, evaluations) in turns.items():
        table.rows.append(
            {
                "callbacks": name,
                "steps/s": 1 / statistics.median(steps),
                "time / none": median_ratio(steps, turns["no callbacks"][0]),
                "at an evaluation, s": statistics.median(evaluations),
            }
        )
    table.notes.append(
        f"steps/s: {recipe.steps} steps without those of an evaluation, the median of {rounds} "
        "rounds; time / none: the median of the rounds' ratios; at an evaluation: all that comes "
        "between two steps then: the evaluations themselves, the best model's save, a sample, "
        "norms; trackers are TensorBoard, wandb (offline) and MLflow (a local database)"
    )
    return [table]


if __name__ == "__main__":
    main(callbacks)
