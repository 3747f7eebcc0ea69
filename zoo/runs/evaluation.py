"""Evaluation on held-out data: a step over the batches of a plan, read one batch behind."""

import contextlib
import functools
import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, PyTree

from zoo.base import files
from zoo.data.loader import batches, held_rows
from zoo.data.plans import Plan, batch_shapes
from zoo.runs.config import Config
from zoo.runs.journal import from_first
from zoo.runs.run import Run, versions
from zoo.sharding.axes import is_parameter
from zoo.training.description import Evaluate
from zoo.training.loss_values import LossFunction
from zoo.training.step import make_eval_step

RECORD = "evaluations.json"  # of the run folder: the whole evaluations, by a digest of each
_LONG = 10.0  # seconds; what takes longer is announced


def evaluator(run: Run[Config], loss_fn: LossFunction, plan: Plan) -> Evaluate:
    """A function `(model, whole) -> means` of the loss over a plan's first epoch, or part of it.

    Whole evaluations are kept in the run's folder: that of the same numbers is not computed again.
    """
    return evaluators(run, loss_fn, {"": plan})[""]


def evaluators(
    run: Run[Config], loss_fn: LossFunction, plans: Mapping[str, Plan]
) -> dict[str, Evaluate]:
    """The `evaluator` of each plan; they share what is compiled."""
    steps = Evaluation(run, loss_fn)

    def means(plan: Plan, model: PyTree, whole: bool) -> dict[str, float]:
        totals: dict[str, float] = {}
        for _, sums in steps.results(model, plan, whole):
            for name, value in jax.device_get(sums).items():
                totals[name] = totals.get(name, 0.0) + float(value)
        weight = totals.pop("tokens")
        return {name: total / weight for name, total in totals.items()}

    def evaluate(plan: Plan, model: PyTree, whole: bool) -> dict[str, float]:
        compute = functools.partial(means, plan, model, whole)
        return steps.once(model, plan, compute) if whole else compute()

    return {name: functools.partial(evaluate, plan) for name, plan in plans.items()}


class Evaluation:
    """The step of an evaluation, over the batches of any plan."""

    def __init__(self, run: Run[Config], loss_fn: LossFunction):
        self._run = run
        self._step = make_eval_step(
            loss_fn, mesh=run.mesh, rules=run.rules, precision=run.precision
        )
        self._seconds: float | None = None  # per batch, as measured last

    def results(
        self, model: PyTree, plan: Plan, whole: bool, *, bounded: bool = True
    ) -> Iterator[tuple[int, dict[str, Array]]]:
        """(k, the metrics of batch k) over a plan's first epoch, or its first `eval_batches`.

        Whole, it ends with `final_eval_batches`, unless it is not to be `bounded`, and the time
        that it will take is printed if that is long. A result comes when the next step is under
        way, and so is read while that one runs.

        Raises:
            Stopped: between two batches, where a signal asks the run to stop.
        """
        self._step.compile(model, *batch_shapes(plan, self._run.mesh).values())
        stop = self._num_batches(plan, whole) if bounded else plan.batches_per_epoch
        under_way: deque[tuple[int, dict[str, Array]]] = deque()
        seconds, began = self._seconds, 0.0
        with contextlib.closing(batches(plan, self._run.mesh, stop=stop)) as stream:
            for k, batch in stream:
                self._run.signals.check()
                under_way.append((k, self._step(model, batch)[1]))
                if whole and k == (3 if seconds is None else 0):
                    self._announce(stop, bounded)
                if len(under_way) > 1:
                    yield under_way.popleft()
                    began = began or time.monotonic()
                    if k > 1:
                        self._seconds = (time.monotonic() - began) / (k - 1)
            yield from under_way

    def once(self, model: PyTree, plan: Plan, compute: Callable[[], Any]) -> Any:
        """`compute()` of a whole evaluation, in JSON, or what the run's folder has of the same one.

        The same are the compiled programs, the model's numbers and those of the batches.
        """
        run, key = self._run, self._digest(model, plan)
        path, known = run.folder / RECORD, {}
        if run.is_main:
            with contextlib.suppress(OSError, ValueError):
                known = json.loads(path.read_text())
        if found := from_first({key: known[key]} if key in known else {}):
            return found[key]
        values = compute()
        if run.is_main:
            text = json.dumps({**known, key: values}, indent=1) + "\n"
            files.replace(path, lambda temporary: temporary.write_text(text))
        return values

    def _num_batches(self, plan: Plan, whole: bool) -> int:
        config = self._run.config
        most = config.final_eval_batches if whole else config.eval_batches
        return min(plan.batches_per_epoch, plan.batches_per_epoch if most is None else most)

    def _announce(self, count: int, bounded: bool) -> None:
        seconds = count * (self._seconds or 0.0)
        if seconds >= _LONG:
            bound = "; --final-eval-batches bounds it" if bounded else ""
            shown = timedelta(seconds=round(seconds))
            self._run.say(f"evaluating {count:,} batches takes about {shown}{bound}")

    def _digest(self, model: PyTree, plan: Plan) -> str:
        """One checksum of all that a whole evaluation depends on."""
        run, stop = self._run, self._num_batches(plan, True)
        digest = hashlib.sha256(json.dumps([stop, versions()]).encode())
        for shapes in batch_shapes(plan, run.mesh).values():
            digest.update(self._step.text(model, shapes).encode())
        for leaf in filter(is_parameter, jax.tree.leaves(model)):
            is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            for shard in (jax.random.key_data(leaf) if is_key else leaf).addressable_shards:
                if shard.replica_id == 0:
                    digest.update(f"{shard.index} ".encode())
                    digest.update(np.asarray(shard.data).ravel().view(np.uint8))
        for k in range(stop):
            for rows in held_rows(plan.batch_size, run.mesh):
                for name, x in sorted(plan.batch(k, slice(*rows)).items()):
                    digest.update(f"{name} {x.dtype}{x.shape} ".encode() + x.tobytes())
        mine = np.frombuffer(digest.digest(), np.uint8)
        return hashlib.sha256(multihost_utils.process_allgather(mine).tobytes()).hexdigest()
