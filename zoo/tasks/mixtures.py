"""A run on a mixture: metrics of each source, and changes of weights that are recorded."""

import bisect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtyping import Array, PyTree

from zoo.common import files
from zoo.data.mixtures.plan import MixturePlan
from zoo.data.mixtures.text import MixedText, stages_as_json
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
    """`code/epoch` and `code/tokens` of each source: how often it was read, and tokens of it.

    Tokens are those of an epoch times the epochs.
    """

    name = "sources"

    def __init__(self, plan: MixturePlan):
        self._plan = plan

    def on_step(
        self, loop: Loop, step: int, state: TrainState, metrics: Mapping[str, Array]
    ) -> dict[str, float]:
        """The sources' epochs and tokens after a step."""
        epochs = self._plan.epochs(step)
        tokens = {
            f"{name}/tokens": epochs[name] * plan.corpus.num_tokens
            for name, plan in self._plan.plans.items()
        }
        return {**{f"{name}/epoch": value for name, value in epochs.items()}, **tokens}


def evaluator(run: Run[Config], loss_fn: LossFunction, data: MixedText) -> Evaluate:
    """A function `(model, whole) -> means`: `loss`, over all held-out tokens, and `code/eval_loss`.

    Each source's mean counts by its held-out tokens, not by a stage's weights: so the losses of a
    run's stages, and its bits per byte, can be compared. A source has bits per byte too.
    """
    plans = {name: source.held_out for name, source in data.sources.items()}
    first = evaluation.evaluator(run, loss_fn, next(iter(plans.values())))
    means = {name: first.of(plan) for name, plan in plans.items()}

    def evaluate(model: PyTree, whole: bool) -> dict[str, float]:
        found = {name: mean(model, whole)["loss"] for name, mean in means.items()}
        total = sum(data.targets.values())
        result = {"loss": sum(found[name] * n for name, n in data.targets.items()) / total}
        for name, loss in found.items():
            result[f"{name}/eval_loss"] = loss
            result[f"{name}/bits_per_byte"] = data.sources[name].bits_per_byte(loss)
        return result

    return evaluate


def record(run: Run[Config], data: MixedText) -> None:
    """Write down the run's stages; say and keep a change of steps that are to come.

    Raises:
        RunError: a change of steps that are behind the run.
    """
    assert isinstance(data.train, MixturePlan)
    if run.is_main:
        path = run.folder / RECORD
        new = {"sources": list(data.sources), "stages": stages_as_json(data.train.schedule.stages)}
        old = _read_record(path)
        good = run.checkpointer.good_steps()
        step = good[-1] if good else 0
        changes: list[Any] = []
        if step and old is None:
            raise RunError(
                f"{path} is missing, and the run has {step} steps behind it: put it back, as it "
                "has the weights of those steps; or give the --data that they had"
            )
        if old is not None and step:
            changes = old["changes"]
            first = first_difference(old, new)
            if first is not None and first < step:
                raise RunError(
                    f"{run.folder} has {step} steps behind it, and the weights of data.files="
                    f"{getattr(run.config, 'data').files!r} differ from step {first} on "  # noqa: B009
                    f"(they were {_at(old, first)}, are {_at(new, first)}): change them from step "
                    f"{step} on only, by a stage, or take another --run-dir. Stages that were "
                    "resolved from other --steps or other text are in its " + RECORD
                )
            if first is not None:
                run.say(
                    f"the weights of the sources change from step {first} on: they were "
                    f"{_at(old, first)}, are {_at(new, first)}; batches before stay the same"
                )
                changes = [*changes, {"step": step, "from": first, "stages_before": old["stages"]}]
        new["changes"] = changes
        text = json.dumps(new, indent=2) + "\n"
        files.replace(path, text)
    processes.barrier("mixture")


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RunError(f"{path} is damaged ({error}); put it back from a copy") from error


def describe(plan: MixturePlan, steps: int) -> str:
    """Lines on the stages, and on how often the run reads each source."""
    lines = [
        f"from step {stage.start}: "
        + ", ".join(
            f"{name} {share / sum(stage.shares):.4g}"
            for name, share in zip(plan.plans, stage.shares, strict=True)
        )
        for stage in plan.schedule.stages
    ]
    epochs = ", ".join(f"{name} {value:.2f}" for name, value in plan.epochs(steps).items())
    return "\n".join([*lines, f"epochs of each source in {steps} steps: {epochs}"])


def first_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> int | None:
    """The first step at which two records differ; None: they do not."""
    if old["sources"] != new["sources"]:
        return 0
    a, b = old["stages"], new["stages"]
    for one, other in zip(a, b, strict=False):
        if one != other:
            return min(one["start"], other["start"])
    rest = (a if len(a) > len(b) else b)[min(len(a), len(b)) :]
    return rest[0]["start"] if rest else None


def _at(found: Mapping[str, Any], step: int) -> dict[str, float]:
    """The weights of a step."""
    starts = [stage["start"] for stage in found["stages"]]
    shares = found["stages"][bisect.bisect_right(starts, step) - 1]["shares"]
    pairs = zip(found["sources"], shares, strict=True)
    return {name: round(share / sum(shares), 4) for name, share in pairs}
