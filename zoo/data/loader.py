"""Batches of a dataset, checked on the host and put on devices; Grain's threads prefetch them."""

import contextlib
import sys
import weakref
from collections.abc import Generator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from zoo.data.datasets import Dataset, HostBatch, check_batch_size, check_dataset
from zoo.sharding import Layout
from zoo.sharding.placement import Rows, held_rows, place_batch

Batch = dict[str, Array]


class Ids(NamedTuple):
    """The numbers that an integer entry of a batch may hold."""

    values: range
    source: str
    """Their origin, such as "vocab_size=512"."""
    is_target: bool
    """Whether only numbers count whose weight, if the batch has `weights`, is not 0."""


Accepted = Mapping[str, Ids | None]  # by entry; None: any value


def batches(
    dataset: Dataset,
    mesh: Mesh | Layout | None = None,
    *,
    start: int = 0,
    stop: int | None = None,
    accepted: Accepted = MappingProxyType({}),
) -> Generator[tuple[int, Batch], None, None]:
    """(k, batch k) from `start` to `stop` (None: without end), put on the devices ahead of use.

    Arrays are global, their first axis sharded over the mesh's batch axes, and each process builds
    only the rows of its own devices. Without a mesh they are on the default device. Closing or
    dropping the iterator ends its threads.

    Raises:
        ValueError: the mesh's batch axes do not divide the batch size; at a batch, a value that
            `check_values` refuses, in place of that batch.
    """
    stop = sys.maxsize if stop is None else stop
    if not 0 <= start <= stop:
        raise ValueError(f"start={start} and stop={stop} must be 0 <= start <= stop")
    ahead = iter(_dataset(dataset, mesh, range(start, stop), accepted))

    def iterate() -> Generator[tuple[int, Batch], None, None]:
        with contextlib.closing(ahead):
            for item in ahead:
                if isinstance(item, Exception):
                    raise item
                yield item

    iterator = iterate()
    reference = weakref.ref(iterator)

    def close() -> None:
        if (alive := reference()) is not None:
            alive.close()

    # Also at exit: an open iterator must close before Grain's modules are torn down.
    weakref.finalize(iterator, close)
    return iterator


def _dataset(
    dataset: Dataset, mesh: Mesh | Layout | None, indices: range, accepted: Accepted
) -> Any:
    """Batches, or what was raised in their place: as values, so that Grain adds nothing to it."""
    check_dataset(dataset)
    check_batch_size(dataset.batch_size, mesh)
    held = held_rows(dataset.batch_size, mesh)

    def read(k: int) -> tuple[int, dict[Rows, HostBatch]] | Exception:
        try:
            parts = {rows: dataset.batch(k, slice(*rows)) for rows in held}
            for (first, _), part in parts.items():
                check_values(part, accepted, where=f"batch {k}", first_row=first)
        except Exception as error:
            return error
        return k, parts

    def put(item: tuple[int, dict[Rows, HostBatch]] | Exception) -> tuple[int, Batch] | Exception:
        if isinstance(item, Exception):
            return item
        k, parts = item
        try:
            return k, place_batch(parts, dataset.batch_size, mesh)
        except Exception as error:
            return error

    import grain  # here: it takes as long as JAX to import, and not all who import this load data

    # Threads, because worker processes take seconds to start, and are slower on few cores.
    read_options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    read_ahead = grain.MapDataset.source(indices).map(read).to_iter_dataset(read_options)
    # `grain.experimental.device_put` would need the whole batch in every process.
    return grain.experimental.ThreadPrefetchIterDataset(read_ahead.map(put), prefetch_buffer_size=2)


def check_values(
    batch: Any, accepted: Accepted, *, where: str = "the batch", first_row: int = 0
) -> None:
    """Raise a ValueError that names an entry, a row and a value that a step can do nothing with.

    These are nan and infinity, numbers that do not fit the dtype that JAX has for them (int64
    becomes int32), and integers that are not `accepted`. Only arrays of numpy are checked: what is
    on a device was one. `first_row` is the number of the first row in its batch.
    """
    entries = [(_name(path), x) for path, x in jtu.tree_leaves_with_path(batch)]
    for name, x in entries:
        if not isinstance(x, np.ndarray) or not x.ndim or not x.size:
            continue
        dtype, ids = jax.dtypes.canonicalize_dtype(x.dtype), accepted.get(name)
        wrong: Any = np.zeros(x.shape, bool)
        if jnp.issubdtype(x.dtype, jnp.integer):
            if dtype != x.dtype:
                wrong = (x < np.iinfo(dtype).min) | (x > np.iinfo(dtype).max)
            why = f"which {dtype} does not hold: JAX has no {x.dtype}; give smaller numbers"
            if ids is not None and not wrong.any():
                wrong = (x < ids.values.start) | (x >= ids.values.stop)
                if ids.is_target:
                    wrong &= _counted(dict(entries).get("weights"), x)
                why = (
                    f"and {ids.source}: the numbers there are {ids.values.start} to "
                    f"{ids.values.stop - 1}; mend the data, or take a model that has more"
                )
        elif jnp.issubdtype(x.dtype, jnp.inexact) and (ids is not None or name not in accepted):
            wrong = ~np.isfinite(x)
            if dtype != x.dtype:
                wrong |= np.abs(x) > np.finfo(dtype).max
            why = (
                f"which is no finite {dtype}: mend the row or leave it out; a loss that takes any "
                "value says so by zoo.losses.accepts(NAME=None)"
            )
        if wrong.any():
            place = [int(i) for i in np.unravel_index(int(np.argmax(wrong)), x.shape)]
            value, place[0] = x[tuple(place)], place[0] + first_row
            raise ValueError(f"{where}: {name}{place} is {value}, {why}")


def _name(path: tuple) -> str:
    entry = path[-1] if path else ""
    return str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", entry))))


def _counted(weights: Any, x: np.ndarray) -> Any:
    """Whether each number counts: by its own weight, by its row's, or as all do."""
    if not isinstance(weights, np.ndarray) or weights.shape != x.shape[: weights.ndim]:
        return np.True_
    return (weights != 0).reshape(*weights.shape, *[1] * (x.ndim - weights.ndim))
