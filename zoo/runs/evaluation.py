"""Evaluation on held-out data: a step over the batches of a plan, read one batch behind."""

import contextlib
import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, PyTree

from zoo.data.loader import batches
from zoo.data.plans import Plan, batch_shapes
from zoo.runs.config import Config
from zoo.runs.run import Run
from zoo.training.description import Evaluate
from zoo.training.loss_values import STEP_NAMES, LossFunction, only_scalars
from zoo.training.step import make_eval_step


class Evaluator:
    """A function `(model, whole) -> means` of a loss over a plan's first epoch, or part of it."""

    def __init__(self, run: Run[Config], loss_fn: LossFunction, plan: Plan):
        self._run, self._plan = run, plan
        self._step = make_eval_step(loss_fn, mesh=run.layout, precision=run.precision)

    def of(self, plan: Plan) -> "Evaluator":
        """The evaluator of another plan, which shares what is compiled."""
        other = copy.copy(self)
        other._plan = plan
        return other

    def __call__(self, model: PyTree, whole: bool) -> dict[str, float]:
        """The mean loss and the loss function's other means, by their names there."""
        totals: dict[str, Any] = {}
        for _, sums in self.results(model, whole):
            for name, value in jax.device_get(sums).items():
                value = np.asarray(value, np.float64)
                totals[name] = totals.get(name, 0.0) + value
        weight, totals = totals.pop("tokens"), {"loss": totals.pop("loss"), **totals}
        # A sum with a weight of its own is a pair.
        return {
            name: float(total[0] / total[1] if np.ndim(total) else total / weight)
            for name, total in totals.items()
        }

    def compile(self, model: PyTree) -> None:
        """Compile the step for each bucket, and so refuse a loss that is not one."""
        self._step.compile(model, *batch_shapes(self._plan, self._run.mesh).values())

    def results(
        self, model: PyTree, whole: bool, *, bounded: bool = True
    ) -> Iterator[tuple[int, dict[str, Array]]]:
        """(k, the metrics of batch k) over the plan's first epoch, or its first `eval_batches`.

        Whole, it ends with `final_eval_batches`, unless it is not to be `bounded`. A result comes
        when the next step is under way, and so is read while that one runs.

        Raises:
            Stopped: between two batches, where a signal asks the run to stop.
        """
        self.compile(model)
        run, plan = self._run, self._plan
        most = run.config.final_eval_batches if whole else run.config.eval_batches
        stop = plan.batches_per_epoch
        if bounded and most is not None:
            stop = min(stop, most)
        under_way: deque[tuple[int, dict[str, Array]]] = deque()
        accepted = self._step.accepted(model)
        with contextlib.closing(batches(plan, run.mesh, stop=stop, accepted=accepted)) as stream:
            for k, batch in stream:
                run.signals.check()
                under_way.append((k, self._step(model, batch)[1]))
                if len(under_way) > 1:
                    yield under_way.popleft()
            yield from under_way


def evaluator(run: Run[Config], loss_fn: LossFunction, plan: Plan) -> Evaluator:
    """A function `(model, whole) -> means` of the loss over a plan's first epoch, or part of it.

    The means have their names in the loss function; `zoo.fit` puts `eval_` before them.
    """
    return Evaluator(run, only_scalars(loss_fn), plan)


def as_evaluate(run: Run[Config], loss_fn: LossFunction, given: Evaluate | Plan) -> Evaluate:
    """The evaluation of a training: of a plan, that by the `loss_fn`."""
    if isinstance(given, Plan):
        return evaluator(run, loss_fn, given)
    if not callable(given):
        raise TypeError(
            f"evaluate={given!r:.80}: give a zoo.Plan, the result of zoo.evaluator, or a function "
            "(model, whole) -> metrics by name"
        )
    return given


def named(evaluate: Evaluate) -> Evaluate:
    """An evaluation with the names that its metrics have in the lines of a run.

    Those of an `Evaluator` get `eval_`; so do those of a function of one's own that every step has
    too, such as `loss`, which would be in one curve with the training's.
    """
    is_own = not isinstance(evaluate, Evaluator)

    def evaluate_named(model: PyTree, whole: bool) -> dict[str, float]:
        found = {}
        for name, value in evaluate(model, whole).items():
            if np.ndim(value) or isinstance(value, str):
                raise ValueError(
                    f"evaluate returned {name!r}={value!r:.80}: each metric is one number"
                )
            keeps_name = is_own and name not in STEP_NAMES
            found[name if keeps_name else f"eval_{name}"] = float(value)
        return found

    return evaluate_named
