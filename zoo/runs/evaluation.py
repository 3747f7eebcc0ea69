"""Evaluation on held-out data: a step over the batches of a plan, read one batch behind."""

import contextlib
import functools
from collections import deque
from collections.abc import Iterator, Mapping

import jax
from jaxtyping import Array, PyTree

from zoo.data.loader import batches
from zoo.data.plans import Plan, batch_shapes
from zoo.runs.config import Config
from zoo.runs.run import Run
from zoo.training.compiled import CompiledStep
from zoo.training.description import Evaluate
from zoo.training.loss_values import LossFunction
from zoo.training.step import make_eval_step


def evaluator(run: Run[Config], loss_fn: LossFunction, plan: Plan) -> Evaluate:
    """A function `(model, whole) -> means` of the loss over a plan's first epoch, or part of it."""
    return evaluators(run, loss_fn, {"": plan})[""]


def evaluators(
    run: Run[Config], loss_fn: LossFunction, plans: Mapping[str, Plan]
) -> dict[str, Evaluate]:
    """The `evaluator` of each plan; they share what is compiled."""
    step_fn = make_eval_step(loss_fn, mesh=run.mesh, rules=run.rules, precision=run.precision)

    def evaluate(plan: Plan, model: PyTree, whole: bool) -> dict[str, float]:
        totals: dict[str, float] = {}
        for _, sums in results(run, step_fn, model, plan, whole):
            for name, value in jax.device_get(sums).items():
                totals[name] = totals.get(name, 0.0) + float(value)
        weight = totals.pop("tokens")
        return {name: total / weight for name, total in totals.items()}

    return {name: functools.partial(evaluate, plan) for name, plan in plans.items()}


def results(
    run: Run[Config], step_fn: CompiledStep, model: PyTree, plan: Plan, whole: bool
) -> Iterator[tuple[int, dict[str, Array]]]:
    """(k, the metrics of batch k) over a plan's first epoch, or its first `eval_batches`.

    A result comes when the next step is under way, and so is read while that one runs.

    Raises:
        Stopped: between two batches, where a signal asks the run to stop.
    """
    step_fn.compile(model, *batch_shapes(plan, run.mesh).values())
    stop = plan.batches_per_epoch
    if not whole:
        stop = min(stop, run.config.eval_batches)
    accepted = step_fn.accepted(model)
    under_way: deque[tuple[int, dict[str, Array]]] = deque()
    with contextlib.closing(batches(plan, run.mesh, stop=stop, accepted=accepted)) as stream:
        for k, batch in stream:
            run.signals.check()
            under_way.append((k, step_fn(model, batch)[1]))
            if len(under_way) > 1:
                yield under_way.popleft()
        yield from under_way
