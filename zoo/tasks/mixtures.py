"""A run on a mixture: metrics of each source, and changes of weights, which are recorded."""

import json
from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, PyTree

from zoo.common import files
from zoo.data.mixed_text import MixedText
from zoo.data.mixtures import MixtureDataset
from zoo.runs import evaluation, processes
from zoo.runs.callbacks.callback import Callback, Loop
from zoo.runs.config import Config
from zoo.runs.processes import RunError
from zoo.runs.run import Run
from zoo.training.description import Evaluate
from zoo.training.loss_values import LossFunction
from zoo.training.state import TrainState

RECORD = "mixture.json"  # of the run folder: its stages, and the changed ones


class Epochs(Callback):
    """`code/epoch` and `code/tokens` of each source: how often it was read, and how many tokens.

    These are the tokens of one epoch times the epochs.
    """

    name = "sources"

    def __init__(self, dataset: MixtureDataset):
        self._dataset = dataset

    def on_step(
        self, loop: Loop, step: int, state: TrainState, metrics: Mapping[str, Array]
    ) -> dict[str, float]:
        """The sources' epochs and tokens after a step."""
        found = {}
        for name, epochs in self._dataset.epochs(step).items():
            found[f"{name}/epoch"] = epochs
            found[f"{name}/tokens"] = epochs * self._dataset.datasets[name].corpus.num_tokens
        return found


def evaluator(run: Run[Config], loss_fn: LossFunction, data: MixedText) -> Evaluate:
    """A function `(model, whole) -> means`: `loss`, over all held-out tokens, and `code/eval_loss`.

    Each source's mean counts by its held-out tokens, not by a stage's weights: so the losses of a
    run's stages, and its bits per byte, can be compared. A source has bits per byte too.
    """
    datasets = {name: source.held_out for name, source in data.sources.items()}
    first = evaluation.evaluator(run, loss_fn, next(iter(datasets.values())))
    means = {name: first.of(dataset) for name, dataset in datasets.items()}

    def evaluate(model: PyTree, whole: bool) -> dict[str, float]:
        result, total, targets = dict[str, float](), 0.0, 0
        for name, mean in means.items():
            loss, count = mean(model, whole)["loss"], datasets[name].corpus.num_positions
            total, targets = total + loss * count, targets + count
            result[f"{name}/eval_loss"] = loss
            result[f"{name}/bits_per_byte"] = data.sources[name].bits_per_byte(loss)
        return {"loss": total / targets, **result}

    return evaluate


def record(run: Run[Config], data: MixedText) -> None:
    """Write down the run's stages; say and keep a change of steps that are to come.

    Raises:
        RunError: a change of steps that are behind the run, or a record that is damaged or missing.
    """
    assert isinstance(data.train, MixtureDataset)
    if run.is_main:
        path, changes = run.folder / RECORD, list[Any]()
        stages = [stage._asdict() for stage in data.train.schedule.stages]
        new: dict[str, Any] = json.loads(json.dumps({"sources": [*data.sources], "stages": stages}))
        if step := max(run.checkpointer.good_steps(), default=0):
            try:
                old = json.loads(path.read_text())
            except (FileNotFoundError, ValueError) as error:
                raise RunError(
                    f"{path} is missing or damaged ({error}), and the run has {step} steps behind "
                    "it: put it back, as it has those steps' weights"
                ) from error
            changes, first = old["changes"], first_difference(old, new)
            if first is not None:
                both = f"they were {_weights(old, first)}, are {_weights(new, first)}"
                if first < step:
                    raise RunError(
                        f"{run.folder} has {step} steps behind it, and the weights of data.files="
                        f"{getattr(run.config, 'data').files!r} differ from step {first} on "  # noqa: B009
                        f"({both}): change them from step {step} on only, by a stage, or take "
                        f"another --run-dir. Stages that follow from other --steps or other text "
                        f"are in its {RECORD}"
                    )
                run.say(f"the weights of the sources change from step {first} on: {both}")
                changes = [*changes, {"step": step, "from": first, "stages_before": old["stages"]}]
        files.replace(path, json.dumps({**new, "changes": changes}, indent=2) + "\n")
    processes.barrier("mixture")


def first_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> int | None:
    """The first step at which the weights of two records differ; None: at no step."""
    if old["sources"] != new["sources"]:
        return 0
    starts = {stage["start"] for record in (old, new) for stage in record["stages"]}
    return next((x for x in sorted(starts) if _stage(old, x) != _stage(new, x)), None)


def _stage(record: Mapping[str, Any], step: int) -> dict[str, Any]:
    return [stage for stage in record["stages"] if stage["start"] <= step][-1]


def _weights(record: Mapping[str, Any], step: int) -> dict[str, float]:
    shares = _stage(record, step)["shares"]
    pairs = zip(record["sources"], shares, strict=True)
    return {name: round(share / sum(shares), 4) for name, share in pairs}


def describe(dataset: MixtureDataset, steps: int) -> str:
    """Lines on the stages, and on how often the run reads each source."""
    lines = [
        f"from step {stage.start}: "
        + ", ".join(
            f"{name} {share / sum(stage.shares):.4g}"
            for name, share in zip(dataset.datasets, stage.shares, strict=True)
        )
        for stage in dataset.schedule.stages
    ]
    epochs = ", ".join(f"{name} {value:.2f}" for name, value in dataset.epochs(steps).items())
    return "\n".join([*lines, f"epochs of each source in {steps} steps: {epochs}"])
