"""Evaluation on held-out data: a step over the batches of a dataset, read one batch behind."""

import contextlib
import copy
import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, PyTree

from zoo.common import files
from zoo.data import datasets
from zoo.data.datasets import Dataset, batch_shapes
from zoo.data.loader import batches
from zoo.runs import identity
from zoo.runs.config import Config
from zoo.runs.processes import from_first
from zoo.runs.run import Run, versions
from zoo.sharding.axes import is_parameter
from zoo.training.description import Evaluate
from zoo.training.loss_values import LossFunction, only_scalars
from zoo.training.step import STEP_NAMES, make_eval_step

RECORD = "evaluations.json"  # of the run folder: whole evaluations by a checksum of each
_LONG = 10.0  # seconds; an evaluation that takes longer is announced


class Evaluator:
    """A function `(model, whole) -> means` of a loss over a dataset's first epoch, or part of it.

    Whole evaluations are kept in the run's folder: one of the same model, data and loss function is
    not computed again.
    """

    def __init__(self, run: Run[Config], loss_fn: LossFunction, dataset: Dataset):
        self._run, self._dataset, self._loss_fn = run, dataset, loss_fn
        batch_shapes(dataset, run.mesh)  # refuses now what the first evaluation would
        self._step = make_eval_step(loss_fn, mesh=run.layout, precision=run.precision)

    def of(self, dataset: Dataset) -> "Evaluator":
        """The evaluator of another dataset, which shares what is compiled."""
        other = copy.copy(self)
        other._dataset = dataset
        return other

    def __call__(self, model: PyTree, whole: bool) -> dict[str, float]:
        """The mean loss and the loss function's other means, by their names there."""
        if not whole:
            return self._means(model, whole)
        return self.once(model, lambda: self._means(model, whole))

    def once(
        self, model: PyTree, make: Callable[[], dict[str, Any]], pictures: Collection[str] = ()
    ) -> dict[str, Any]:
        """The result of `make()`, a whole evaluation: kept, as JSON, and not made again.

        It is made again if one of the `pictures` that `make` draws in the run's folder is missing.
        """
        run, key = self._run, self._checksum(model)
        path, known = run.folder / RECORD, {}
        if run.is_main:
            with contextlib.suppress(OSError, ValueError):
                known = json.loads(path.read_text())
            if not all((run.folder / name).exists() for name in pictures):
                known.pop(key, None)
        if found := from_first({key: known[key]} if key in known else {}):
            return found[key]
        result = make()
        if run.is_main:
            files.replace(path, json.dumps({**known, key: result}, indent=1) + "\n")
        return result

    def _means(self, model: PyTree, whole: bool) -> dict[str, float]:
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
        self._step.compile(model, *batch_shapes(self._dataset, self._run.mesh).values())

    def results(
        self, model: PyTree, whole: bool, *, bounded: bool = True
    ) -> Iterator[tuple[int, dict[str, Array]]]:
        """(k, the metrics of batch k) over the dataset's first epoch, or its first `eval_batches`.

        A whole one that is `bounded` ends with `final_eval_batches`. A result comes when the next
        step is under way, and so is read while that one runs.

        Raises:
            Stopped: between two batches, where a signal asks the run to stop.
        """
        self.compile(model)
        run, dataset = self._run, self._dataset
        stop = self._num_batches(whole) if bounded else dataset.batches_per_epoch
        under_way: deque[tuple[int, dict[str, Array]]] = deque()
        accepted = self._step.accepted(model)
        with contextlib.closing(batches(dataset, run.mesh, stop=stop, accepted=accepted)) as stream:
            for k, batch in stream:
                run.signals.check()
                under_way.append((k, self._step(model, batch)[1]))
                if len(under_way) > 1:
                    yield under_way.popleft()
                if k == 1:  # the first one has been waited for
                    began = time.monotonic()
                if whole and k == 4:
                    self._announce(stop, (time.monotonic() - began) / 3, bounded)
            yield from under_way

    def _num_batches(self, whole: bool) -> int:
        config, count = self._run.config, self._dataset.batches_per_epoch
        most = config.final_eval_batches if whole else config.eval_batches
        return count if most is None else min(count, most)

    def _announce(self, count: int, seconds: float, bounded: bool) -> None:
        if count * seconds >= _LONG:
            bound = "; --final-eval-batches bounds it" if bounded else ""
            shown = timedelta(seconds=round(count * seconds))
            self._run.say(f"evaluating {count:,} batches takes about {shown}{bound}")

    def _checksum(self, model: PyTree) -> str:
        """The checksum of all that a whole evaluation depends on, the same on all processes."""
        loss = identity.described(identity.LOSS, self._loss_fn)
        told = [self._num_batches(True), datasets.fingerprint(self._dataset), loss, versions()]
        digest = hashlib.sha256(json.dumps([*told, str(self._run.precision)]).encode())
        for shapes in batch_shapes(self._dataset, self._run.mesh).values():  # code, static fields
            digest.update(self._step.trace(model, shapes).lower().as_text().encode())
        for leaf in filter(is_parameter, jax.tree.leaves(model)):
            is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            for shard in (jax.random.key_data(leaf) if is_key else leaf).addressable_shards:
                if shard.replica_id == 0:
                    digest.update(f"{shard.index} ".encode())
                    digest.update(np.asarray(shard.data).ravel().view(np.uint8).data)
        mine = np.frombuffer(digest.digest(), np.uint8)
        return hashlib.sha256(multihost_utils.process_allgather(mine).tobytes()).hexdigest()


def evaluator(run: Run[Config], loss_fn: LossFunction, dataset: Dataset) -> Evaluator:
    """A function `(model, whole) -> means` of the loss over a dataset's first epoch, or part of it.

    The means have their names in the loss function; `zoo.fit` puts `eval_` before them. Whole
    evaluations are kept in the run's folder: the same one is not computed again.
    """
    return Evaluator(run, only_scalars(loss_fn), dataset)


def as_evaluate(run: Run[Config], loss_fn: LossFunction, given: Evaluate | Dataset) -> Evaluate:
    """The evaluation of a training; for a dataset, the one by `loss_fn`."""
    if isinstance(given, Dataset):
        return evaluator(run, loss_fn, given)
    if not callable(given):
        raise TypeError(
            f"evaluate={given!r:.80}: give a zoo.Dataset, the result of zoo.evaluator, or a "
            "function (model, whole) -> metrics by name"
        )
    return given


def named(evaluate: Evaluate) -> Evaluate:
    """An evaluation with the names that its metrics have in the lines of a run.

    An `Evaluator`'s get `eval_`; so do names from a function of one's own that every step has too,
    such as `loss`, which would be in one curve with the training's.
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
