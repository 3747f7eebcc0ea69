"""The best evaluation so far: the model of it, and the end of a run that finds no better one."""

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxtyping import PyTree

from zoo.common import checksums
from zoo.common.configuration import check_value, require
from zoo.publishing import PublishError
from zoo.publishing.formats import METRICS, README, WEIGHTS, replacing
from zoo.publishing.models import save as save_model
from zoo.publishing.tensors import write_tensors
from zoo.runs.callbacks.average import Average
from zoo.runs.callbacks.callback import Callback, Loop
from zoo.training.state import TrainState

Mode = Literal["min", "max"]
Save = Callable[[Path, PyTree, dict[str, Any]], object]


class EarlyStopping(Callback):
    """End the run once a metric has not improved in `patience` evaluations, one after another.

    An evaluation improves on the best one so far if it is better by more than
    `minimum_improvement`; nan never is. `mode` "max" is for metrics such as accuracies. A resumed
    run stays ended, unless it is given more patience.

    Raises:
        ValueError: no patience, a negative improvement, another mode; during the run, a metric
            that the evaluations do not have.
    """

    name = "early-stopping"

    def __init__(
        self,
        metric: str = "eval_loss",
        patience: int = 3,
        minimum_improvement: float = 0.0,
        mode: Mode = "min",
    ):
        check_value("mode", mode, Mode)
        require(patience >= 1, f"patience={patience}: must be at least 1")
        require(
            minimum_improvement >= 0,
            f"minimum_improvement={minimum_improvement}: must not be negative",
        )
        self.metric, self.patience, self.mode = metric, patience, mode
        self.minimum_improvement = minimum_improvement
        self.values = {"best": None, "step": 0, "since": 0}

    def on_evaluation(
        self, loop: Loop, step: int, state: TrainState, values: Mapping[str, float]
    ) -> None:
        """Count the evaluations since the best one."""
        value, best = _metric(self, self.metric, values), self.values["best"]
        if _is_better(value, best, self.mode, self.minimum_improvement):
            self.values = {"best": value, "step": step, "since": 0}
            return
        self.values["since"] += 1
        if self.values["since"] >= self.patience:
            since = f"step {self.values['step']} ({best:.6g})" if best is not None else "the start"
            loop.stop(
                f"{self.metric} has not improved since {since}, in {self.patience} evaluation(s)"
            )


class BestCheckpoint(Callback):
    """Keep the model of the best evaluation so far as `best/` in the run's folder.

    `zoo.load` opens it; `metrics.json` in it has the evaluation and its step. `save` writes it, as
    a function of a folder, a model and those metrics: by default `zoo.save` without a tokenizer,
    and for a model that cannot be published, such as one with adapters or of a class of your own,
    its arrays alone, with a README.md that says how to read them. `model` is from a state to the
    model to keep, as `lambda state: average.model` for a metric `average/eval_loss`.

    The last evaluation is of the whole held-out part, and so the others are too where
    `--eval-batches` is high enough: else they are compared although they differ in their data.

    Raises:
        ValueError: another mode; during the run, a metric that the evaluations do not have.
    """

    name = "best"

    def __init__(
        self,
        metric: str = "eval_loss",
        mode: Mode = "min",
        *,
        model: Callable[[TrainState], PyTree] = lambda state: state.model,
        save: Save | None = None,
    ):
        check_value("mode", mode, Mode)
        self.metric, self.mode = metric, mode
        self._model, self._save = model, save or save_somehow
        self.values = {"best": None, "step": 0}

    def on_evaluation(
        self, loop: Loop, step: int, state: TrainState, values: Mapping[str, float]
    ) -> None:
        """Save the model if it is the best."""
        value = _metric(self, self.metric, values)
        if not _is_better(value, self.values["best"], self.mode):
            return
        self._save(loop.run.folder / "best", self._model(state), {**values, "steps": step})
        self.values = {"best": value, "step": step}
        loop.say(f"step {step}: the best {self.metric} so far, {value:.6g}; the model is in best/")


def check_metrics(callbacks: Sequence[Callback], names: Collection[str]) -> None:
    """Refuse a metric that evaluations of these names will not have, as far as that is known."""
    known = dict.fromkeys(names, math.nan)
    for callback in callbacks:
        if isinstance(callback, EarlyStopping | BestCheckpoint):
            _metric(callback, callback.metric, known)
        elif isinstance(callback, Average):
            known |= {f"{callback.name}/{name}": math.nan for name in names}
        elif getattr(callback.on_evaluation, "__func__", None) is not Callback.on_evaluation:
            return  # it may add more


def save_somehow(folder: Path, model: PyTree, metrics: dict[str, Any]) -> None:
    """Save a model as `zoo.save` does or, where that can't, its arrays alone."""
    try:
        save_model(folder, model, metrics=metrics)
    except PublishError as error:
        reason = str(error)
    else:
        return
    with replacing(folder) as new:
        write_tensors(new and new / WEIGHTS, model)
        if new is not None:
            (new / METRICS).write_text(json.dumps(metrics, indent=1) + "\n")
            (new / README).write_text(_README.format(reason=reason), encoding="utf-8")
            checksums.write(new, skip=(README,))


_README = """The arrays of a model, by name. `zoo.load` does not open it: {reason}

    from zoo.publishing.tensors import read_tensors

    model = read_tensors(folder / "model.safetensors", like, mesh=None, dtype=None)

where `like` is a model of the same structure, such as that of `eqx.filter_eval_shape(make, key)`.
"""


def _metric(callback: Callback, metric: str, values: Mapping[str, float]) -> float:
    require(
        metric in values,
        f"the callback {callback.name!r}: metric={metric!r} is not among those of the evaluations, "
        f"{', '.join(values)}; what adds it comes before in the list of callbacks",
    )
    return float(values[metric])


def _is_better(value: float, best: float | None, mode: Mode, by: float = 0.0) -> bool:
    if math.isnan(value) or best is None:
        return not math.isnan(value)
    return best - value > by if mode == "min" else value - best > by
