"""Callbacks of evaluations: an average of the weights, the best so far, further ones, samples."""

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from zoo.common import checksums
from zoo.common.configuration import check_value, require
from zoo.data.datasets import Dataset
from zoo.publishing import PublishError
from zoo.publishing.formats import METRICS, README, WEIGHTS
from zoo.publishing.models import save as save_model
from zoo.publishing.replacing import replacing
from zoo.publishing.tensors import write_tensors
from zoo.runs import evaluation
from zoo.runs.callbacks.callback import Callback, Loop, Numbers, Scalars
from zoo.runs.metrics import MetricsLog
from zoo.training.description import Evaluate
from zoo.training.state import TrainState, trained_leaves

Mode = Literal["min", "max"]
Save = Callable[[Path, PyTree, dict[str, Any]], object]


class Average(Callback):
    """An exponential moving average of the trained weights: sharded as they are, saved, evaluated.

    It begins as the initial weights. Update n moves it to `d average + (1 - d) weights`, where d is
    `decay` or, with `warmup`, the smaller of that and (1 + n) / (10 + n), so that the average of a
    short run forgets its initial weights too (as `tf.train.ExponentialMovingAverage` does). A
    skipped step does not move it. Each evaluation is also of the averaged model, as
    `average/eval_loss` beside `eval_loss`; `model` is that model, for `zoo.save`.

    It takes the memory of the trained weights once more, in their dtype, float32.

    Raises:
        ValueError: a decay that is not in [0, 1).
    """

    name = "average"

    def __init__(self, decay: float = 0.999, *, warmup: bool = True):
        require(0 <= decay < 1, f"decay={decay}: must be in [0, 1), such as 0.999")
        self.decay, self.warmup = decay, warmup
        self._trained: PyTree = None
        self._rest: PyTree = None
        self._move: Any = None

    @property
    def model(self) -> PyTree:
        """The averaged model, with the untrained parts of the model itself."""
        return eqx.combine(self.arrays["model"], self._rest)

    def initial_arrays(self, loop: Loop, state: TrainState) -> PyTree:
        """A copy of the trained weights, and the number of updates that they have behind them."""
        self._trained = trained_leaves(state.model, loop.training.trainable)
        weights = self._trained_part(state)
        placed = jax.tree.map(lambda x: x.sharding, weights)
        copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=placed)
        return {"model": copy(weights), "updates": state.step - state.skipped}

    def on_start(self, loop: Loop, state: TrainState) -> None:
        """Compile the update, which is dispatched after each step."""
        weights = self._trained_part(state)
        placed = jax.tree.map(lambda x: x.sharding, self.arrays)
        move = jax.jit(self._moved, donate_argnums=0, out_shardings=placed)
        self._move = move.lower(self.arrays, weights, state.step, state.skipped).compile()

    def on_step(self, loop: Loop, step: int, state: TrainState, metrics: Scalars) -> None:
        """Move the average towards the weights."""
        weights = self._trained_part(state)
        self.arrays = self._move(self.arrays, weights, state.step, state.skipped)

    def on_evaluation(self, loop: Loop, step: int, state: TrainState, values: Numbers) -> Numbers:
        """The evaluation of the averaged model."""
        averaged = loop.evaluate(self.model)
        return {f"{self.name}/{name}": value for name, value in averaged.items()}

    def _trained_part(self, state: TrainState) -> PyTree:
        weights, self._rest = eqx.partition(state.model, self._trained)
        return weights

    def _moved(self, arrays: PyTree, weights: PyTree, step: Array, skipped: Array) -> PyTree:
        updates = step - skipped
        share = jnp.float32(1 - self.decay)
        if self.warmup:
            share = jnp.maximum(share, 9.0 / (10.0 + updates.astype(jnp.float32)))
        changed = updates > arrays["updates"]

        def move(average: Array, weight: Array) -> Array:
            return jnp.where(changed, average + share * (weight - average), average)

        return {"model": jax.tree.map(move, arrays["model"], weights), "updates": updates}


class EarlyStopping(Callback):
    """End the run once a metric has not improved in `patience` evaluations, one after another.

    An evaluation that is nan never improves. `mode` "max" is for metrics such as accuracies. A
    resumed run stays ended, unless it is given more patience.

    Raises:
        ValueError: no patience, another mode; during the run, a metric that the evaluations do
            not have.
    """

    name = "early-stopping"

    def __init__(self, metric: str = "eval_loss", patience: int = 3, mode: Mode = "min"):
        check_value("mode", mode, Mode)
        require(patience >= 1, f"patience={patience}: must be at least 1")
        self.metric, self.patience, self.mode = metric, patience, mode
        self.values = {"best": None, "step": 0, "since": 0}

    def on_evaluation(self, loop: Loop, step: int, state: TrainState, values: Numbers) -> None:
        """Count the evaluations since the best one."""
        value, best = _metric(self, self.metric, values), self.values["best"]
        if _is_better(value, best, self.mode):
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
    its arrays alone, with a README.md that says how to read them. `model` makes the model to keep
    from a state, as `lambda state: average.model` does for a metric `average/eval_loss`.

    The last evaluation covers the whole held-out part. The others do where `--eval-batches` is high
    enough: else evaluations of different data are compared.

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
        self._begin()

    def _begin(self) -> None:
        self.values = {"best": None, "step": 0, "of": [self.metric, self.mode]}

    def on_start(self, loop: Loop, state: TrainState) -> None:
        """Begin anew where the best so far is one of another metric, before a resume."""
        now = [self.metric, self.mode]
        if (before := self.values.get("of", now)) != now:
            loop.say(f"the best model so far was that of {before}; best/ begins anew with {now}")
            self._begin()

    def on_evaluation(self, loop: Loop, step: int, state: TrainState, values: Numbers) -> None:
        """Save the model if it is the best."""
        value = _metric(self, self.metric, values)
        if not _is_better(value, self.values["best"], self.mode):
            return
        self._save(loop.run.folder / "best", self._model(state), {**values, "steps": step})
        self.values |= {"best": value, "step": step}
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
        f"the callback {callback.name!r}: metric={metric!r} is not among the metrics of the "
        f"evaluations, {', '.join(values)}; the callback that adds it comes before in the list",
    )
    return float(values[metric])


def _is_better(value: float, best: float | None, mode: Mode) -> bool:
    if math.isnan(value) or best is None:
        return not math.isnan(value)
    return value < best if mode == "min" else value > best


class Evaluations(Callback):
    """Several evaluations by name: `{"name": evaluate}` adds `name/eval_loss` to the lines.

    As in a `Training`, an `evaluate` is a dataset, the result of `zoo.evaluator`, or a function.
    They run with the run's own evaluation.
    """

    name = "evaluations"

    def __init__(self, evaluations: Mapping[str, Evaluate | Dataset]):
        self._given = dict(evaluations)
        self._evaluations: dict[str, Evaluate] = {}

    def on_start(self, loop: Loop, state: TrainState) -> None:
        """Make the evaluations."""
        for name, given in self._given.items():
            evaluate = evaluation.as_evaluate(loop.run, loop.training.loss_fn, given)
            self._evaluations[name] = evaluation.named(evaluate)

    def on_evaluation(self, loop: Loop, step: int, state: TrainState, values: Numbers) -> Numbers:
        """The metrics of all of them."""
        return {
            f"{name}/{metric}": value
            for name, evaluate in self._evaluations.items()
            for metric, value in evaluate(state.model, loop.whole).items()
        }


class Samples(Callback):
    """Show a sample of the model every `every` steps, and keep it in `samples.jsonl`.

    `make_text` makes a text from the model. All processes call it; process 0 prints and writes.

    Raises:
        ValueError: an `every` below 1.
    """

    name = "samples"

    def __init__(self, make_text: Callable[[PyTree], str], *, every: int):
        require(every >= 1, f"every={every}: must be at least 1")
        self._make_text, self._every = make_text, every
        self._log: MetricsLog | None = None

    def on_start(self, loop: Loop, state: TrainState) -> None:
        """Open the file; what a killed run wrote after its checkpoint is dropped."""
        if loop.run.is_main:
            path = loop.run.folder / "samples.jsonl"
            self._log = MetricsLog(path, resume_step=loop.start)

    def on_step(self, loop: Loop, step: int, state: TrainState, metrics: Scalars) -> None:
        """Sample where it is time to."""
        if step % self._every:
            return
        jax.block_until_ready(metrics)  # the time of the step itself counts
        with loop.pause():
            text = self._make_text(state.model)
        loop.say(f"--- a sample of step {step} ---\n{text}\n---")
        if self._log is not None:
            self._log.write(step, text=text)

    def on_end(self, loop: Loop, step: int, state: Any) -> None:
        """Close the file."""
        if self._log is not None:
            self._log.close()
