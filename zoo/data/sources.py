"""Datasets of rows that a program has: arrays, tables, and whatever gives row i for i."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from zoo.common import checksums
from zoo.common.configuration import require
from zoo.data.datasets import HostBatch, Row, SeededDataset
from zoo.data.iterated import IteratedRows

Transform = Callable[[Any, np.random.Generator], Any]
SAMPLES = 64  # rows of a fingerprint


def batches(
    source: Any,
    batch_size: int,
    *,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
    transform: Transform | None = None,
    lengths: Callable[[Any], int] | Sequence[int] | None = None,
    buckets: Sequence[int] = (),
    padded: Sequence[str] = (),
    threads: int = 1,
    num_rows: int | None = None,
    states: str | Path | None = None,
) -> "RowDataset":
    """A `zoo.Dataset` of the rows of a dict of arrays, a data frame, or any random-access sequence.

    A sequence is what has a length and gives row i for i: a list, a `torch.utils.data.Dataset`, a
    `datasets.Dataset`, a source or a `MapDataset` of Grain. Its rows are dicts from names to
    numbers and arrays; a pair becomes `inputs` and `labels`, and anything else `inputs`. Rows are
    read, and `transform(row, rng)` is called, ahead of the step, in so many `threads` for each of
    two batches at a time; `rng` is NumPy's, from the seed, the epoch and the number of the row, so
    that batch k stays a function of k. Each row comes once per epoch. Rows that fill up an epoch's
    last batch have the weight 0 in `weights`, float32[batch]; `drop_last` leaves that batch out.

    Rows of several lengths need `buckets`: each row is in a batch of the smallest one that holds
    it, by `lengths`, which are given or found by a function of a source's row. The arrays `padded`
    get zeros behind their first axis, and a batch has `mask`, bool[batch, bucket], for them.

    An iterator that saves and restores its state, such as that of Grain's `IterDataset`, is taken
    with `shuffle=False`, the `num_rows` after which it begins again, and a file for its `states`,
    by which a run resumes. Each process reads all of its rows, and transforms its own.

    `fingerprint`, by which a run refuses other data at a resume, is a hash of the arrays and
    arguments, or of 64 evenly spaced rows (an iterator's first ones), as the transform makes them.

    Raises:
        TypeError: a source without a length or without row i, as an iterator without a state.
        ValueError: no row, a row of other arrays or shapes than the first, or longer than the
            largest bucket.
    """
    options: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "drop_last": drop_last}
    if hasattr(source, "columns") and hasattr(source, "to_numpy"):  # of pandas or polars
        source = {str(name): source[name].to_numpy() for name in source.columns}
    is_sequence = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    require(
        not is_sequence or num_rows is states is None,
        f"num_rows={num_rows}, states={states!r}: are for iterators, and a {type(source).__name__} "
        "has row i",
    )
    if isinstance(source, Mapping):
        arrays = ArrayDataset(source, batch_size, **options)
        if transform is None and not buckets:
            return arrays
        source = _Zipped(arrays.arrays)
    elif not is_sequence:
        source = IteratedRows(source, num_rows, states, window=8 * batch_size)
        require(
            not shuffle and lengths is None,
            f"shuffle={shuffle}, lengths={lengths}: an iterator's rows keep its order; give "
            "shuffle=False and no lengths, and shuffle by the iterator",
        )
    options |= {"lengths": lengths, "buckets": buckets, "padded": padded, "threads": threads}
    return SourceDataset(source, batch_size, transform=transform, **options)


class RowDataset(SeededDataset):
    """Rows by their numbers, in batches of a bucket each.

    In each epoch the rows of a bucket are permuted and grouped into batches, and the batches of
    several buckets are permuted. The rows that fill up a bucket's last batch are its first ones
    once more: a loss does not count them, and statistics of a batch, such as a batch norm's, are of
    different rows of the data.
    """

    unit = "examples"

    def __init__(
        self,
        numbers: Mapping[int, range | np.ndarray],
        batch_size: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
    ):
        super().__init__(batch_size, seed, shuffle)
        self.drop_last = drop_last
        count = {bucket: len(rows) / batch_size for bucket, rows in numbers.items()}
        whole = {b: math.floor(n) if drop_last else math.ceil(n) for b, n in count.items()}
        require(
            any(whole.values()),
            f"batch_size={batch_size}, drop_last={drop_last}: no batch of "
            f"{ {b: len(rows) for b, rows in numbers.items()} } rows by bucket; give more rows, or "
            "smaller batches",
        )
        self._numbers = {bucket: numbers[bucket] for bucket in sorted(whole) if whole[bucket]}
        self.buckets = tuple(self._numbers)
        self._ends = np.cumsum([whole[bucket] for bucket in self.buckets])
        self.batches_per_epoch = int(self._ends[-1])
        used = sum(min(len(numbers[b]), whole[b] * batch_size) for b in self.buckets)
        self.padding_waste = 1 - used / (self.batches_per_epoch * batch_size)

    def bucket(self, k: int) -> int:
        """The bucket of batch k."""
        return self._batch(*divmod(k, self.batches_per_epoch))[0]

    def _batch(self, epoch: int, batch: int) -> tuple[int, int]:
        """The bucket of a batch, and its number among the bucket's batches."""
        if len(self.buckets) > 1:
            batch = int(self._place(self.batches_per_epoch, epoch, "batches", batch))
        index = int(np.searchsorted(self._ends, batch, side="right"))
        return self.buckets[index], batch - (int(self._ends[index - 1]) if index else 0)

    def _chosen(self, k: int, rows: range) -> tuple[int, np.ndarray, np.ndarray]:
        """The epoch of batch k, and the numbers and the weights of some of its rows."""
        epoch, batch = divmod(k, self.batches_per_epoch)
        bucket, number = self._batch(epoch, batch)
        numbers = self._numbers[bucket]
        places = number * self.batch_size + np.asarray(rows)
        what = "rows" if len(self.buckets) == 1 else f"rows of {bucket}"
        chosen = self._place(len(numbers), epoch, what, places % len(numbers))
        weights = (places < len(numbers)).astype(np.float32)
        return epoch, chosen if isinstance(numbers, range) else numbers[chosen], weights


class ArrayDataset(RowDataset):
    """Rows of arrays [rows, …], such as features and labels, permuted in each epoch.

    A batch has the arrays by name, and `weights`, float32[batch]: 1, or 0 for the rows that fill up
    the last batch of an epoch, unless `drop_last` leaves it out. Those are the epoch's first rows
    once more. Lists become arrays. `fingerprint` is a hash of the arrays and of the other
    arguments; of an array larger than 1 GiB, such as a memory map, it takes 1,024 evenly spaced
    blocks of 64 KiB.

    Raises:
        ValueError: arrays of different numbers of rows, or of none; one of something other than
            numbers and booleans; lists of different lengths.
    """

    def __init__(
        self,
        arrays: Mapping[str, Any],
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = False,
    ):
        arrays = {name: _as_array(name, array) for name, array in arrays.items()}
        sizes = {name: len(array) for name, array in arrays.items()}
        if "weights" in arrays or len(set(sizes.values())) != 1 or not max(sizes.values()):
            raise ValueError(
                f"arrays of {sizes} rows: all need the same number of rows, at least one, and "
                "the name 'weights' is taken"
            )
        self.arrays, num_rows = arrays, max(sizes.values())
        super().__init__({batch_size: range(num_rows)}, batch_size, seed, shuffle, drop_last)

    @property
    def fingerprint(self) -> str:
        """A hash of the arrays and of the other arguments: equal ones mean equal batches."""
        arguments = self.batch_size, self.seed, self.shuffle, self.drop_last
        return checksums.of_values(
            [*arguments, *(x for named in self.arrays.items() for x in named)]
        )

    def row(self, bucket: int) -> Row:
        """The arrays of one row of a bucket."""
        rows = {name: (array.shape[1:], array.dtype.type) for name, array in self.arrays.items()}
        return {**rows, "weights": ((), np.float32)}

    def _build(self, k: int, rows: range) -> HostBatch:
        _, chosen, weights = self._chosen(k, rows)
        return {**{name: array[chosen] for name, array in self.arrays.items()}, "weights": weights}


class SourceDataset(RowDataset):
    """The rows of a sequence, each made by a function; see `batches`."""

    def __init__(
        self,
        source: Any,
        batch_size: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        transform: Transform | None,
        lengths: Callable[[Any], int] | Sequence[int] | None,
        buckets: Sequence[int],
        padded: Sequence[str],
        threads: int,
    ):
        require(threads > 0, f"threads={threads}: must be positive")
        require(len(source) > 0, f"{type(source).__name__} has no rows: give one at least")
        require(
            bool(buckets) == (lengths is not None) == bool(padded),
            f"buckets={tuple(buckets)}, padded={tuple(padded)} and lengths go together: give all "
            "of them, or none",
        )
        self._source, self._transform, self._padded = source, transform, tuple(padded)
        self._threads = threads
        sizes = np.zeros(0, int)
        numbers: Mapping[int, range | np.ndarray] = {batch_size: range(len(source))}
        if lengths is not None:
            if callable(lengths):
                lengths = [lengths(self._read(i)) for i in range(len(source))]
            sizes = np.asarray(lengths)
            numbers = _by_bucket(sizes, sorted(buckets))
        super().__init__(numbers, batch_size, seed, shuffle, drop_last)
        if buckets:
            places = batch_size * int(np.diff(self._ends, prepend=0) @ self.buckets)
            filled = sum(int(sizes[rows].sum()) for rows in self._numbers.values())
            self.padding_waste = max(0.0, 1 - filled / places)
        first = {bucket: int(rows[0]) for bucket, rows in self._numbers.items()}
        self._rows = {bucket: self._layout(bucket, row) for bucket, row in first.items()}

    def _read(self, i: int) -> Any:
        try:
            return self._source[i]
        except Exception as error:
            raise ValueError(f"row {i} of the source: {type(error).__name__}: {error}") from error

    def _made(self, epoch: int, i: int, found: Any) -> dict[str, np.ndarray]:
        """The arrays of a row of the source in an epoch, before they are padded."""
        if self._transform is not None:
            rng = np.random.default_rng([self.seed, epoch, i])
            try:
                found = self._transform(found, rng)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                raise ValueError(f"transform of row {i} of the source: {reason}") from error
        if isinstance(found, tuple) and len(found) == 2:
            found = dict(zip(("inputs", "labels"), found, strict=True))
        elif not isinstance(found, Mapping):
            found = {"inputs": found}
        return {name: _of_row(name, i, x) for name, x in found.items()}

    def _layout(self, bucket: int, row: int) -> Row:
        made = self._made(0, row, self._read(row))
        if taken := {"weights", "mask"} & made.keys():
            raise ValueError(f"row {row} of the source has {sorted(taken)}: name them otherwise")
        if missing := [name for name in self._padded if name not in made]:
            raise ValueError(f"padded={missing}: row {row} of the source has {sorted(made)} alone")
        spec = {name: (x.shape, x.dtype.type) for name, x in self._padded_to(bucket, made).items()}
        return {**spec, "weights": ((), np.float32)}

    def _padded_to(self, bucket: int, made: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A row in its bucket, with the mask; what does not fit stays as it is."""
        for name in self._padded:
            x = made.get(name, np.zeros(()))
            if x.ndim and len(x) <= bucket:
                made["mask"] = np.arange(bucket) < len(x)
                made[name] = np.pad(x, [(0, bucket - len(x)), *[(0, 0)] * (x.ndim - 1)])
        return made

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the arguments and of 64 rows: another one means other batches."""
        last = SAMPLES if isinstance(self._source, IteratedRows) else len(self._source)
        places = np.linspace(0, min(last, len(self._source)) - 1, SAMPLES).astype(int)
        rows = [self._made(0, int(i), self._read(int(i))) for i in dict.fromkeys(places)]
        arguments = self.batch_size, self.seed, self.shuffle, self.drop_last, self.buckets
        arrays = (y for row in rows for name, x in sorted(row.items()) for y in (name, x[None]))
        return checksums.of_values([*arguments, len(self._source), *arrays])

    def row(self, bucket: int) -> Row:
        """The arrays of one row of a bucket."""
        return self._rows[bucket]

    def _build(self, k: int, rows: range) -> HostBatch:
        epoch, chosen, weights = self._chosen(k, rows)
        bucket = self.bucket(k)
        of_iterator = isinstance(self._source, IteratedRows)
        read = self._source.at_once(chosen.tolist()).get if of_iterator else self._read
        make = lambda i: self._alike(bucket, i, self._made(epoch, i, read(i)))  # noqa: E731
        with ThreadPoolExecutor(self._threads) as pool:  # a part each: a call per row costs more
            parts = np.array_split(chosen, self._threads)
            made = [x for part in pool.map(lambda p: [*map(make, p.tolist())], parts) for x in part]
        return {
            **{name: np.stack([row[name] for row in made]) for name in made[0]},
            "weights": weights,
        }

    def _alike(self, bucket: int, i: int, made: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A row in its bucket; refused if it has other arrays than the bucket's first one."""
        made = self._padded_to(bucket, made)
        found = {name: (x.shape, x.dtype.type) for name, x in made.items()}
        wanted = {name: spec for name, spec in self._rows[bucket].items() if name != "weights"}
        if found != wanted:
            name = next(n for n in {**wanted, **found} if found.get(n) != wanted.get(n))
            show = lambda x: "nothing" if x is None else f"{np.dtype(x[1])}{list(x[0])}"  # noqa: E731
            raise ValueError(
                f"row {i} of the source: {name} is {show(found.get(name))}, and the first row's "
                f"{show(wanted.get(name))}: make all alike by a transform, or give buckets"
            )
        return made


class _Zipped(Sequence):
    """Rows of arrays, as dicts."""

    def __init__(self, arrays: Mapping[str, Any]):
        self._arrays = arrays

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __getitem__(self, i: Any) -> Any:
        return {name: array[i] for name, array in self._arrays.items()}


def _by_bucket(sizes: np.ndarray, buckets: Sequence[int]) -> dict[int, np.ndarray]:
    """The numbers of the rows of each bucket, the smallest that holds them."""
    if (longest := int(sizes.max())) > buckets[-1]:
        raise ValueError(
            f"buckets={tuple(buckets)}: row {int(sizes.argmax())} of the source has the length "
            f"{longest}; add a larger bucket, or cut such rows"
        )
    places = np.searchsorted(buckets, sizes)
    return {bucket: np.flatnonzero(places == i) for i, bucket in enumerate(buckets)}


def _of_row(name: str, i: int, given: Any) -> np.ndarray:
    """A number or an array of a row; Python's floats become float32."""
    array = np.asarray(given)
    if array.dtype.kind in "OSUMm":
        raise ValueError(
            f"row {i} of the source: {name}={given!r:.80} is {array.dtype} as an array: make "
            "numbers or booleans of it by a transform"
        )
    of_python = isinstance(given, float | list | tuple) and array.dtype == np.float64
    return array.astype(np.float32) if of_python else array


def _as_array(name: str, given: Any) -> np.ndarray:
    """An array [rows, …] of numbers or booleans, from arrays and from lists."""
    try:
        # An array on disk or on a device stays as it is.
        array = given if isinstance(getattr(given, "dtype", 0), np.dtype) else np.asarray(given)
    except ValueError as error:
        raise ValueError(f"arrays[{name!r}] is no array: {error}") from error
    if not array.shape or array.dtype.kind in "OSUMm":
        raise ValueError(
            f"arrays[{name!r}]={given!r:.80} is {array.dtype}{list(array.shape)} as an array: give "
            "rows of numbers or booleans"
        )
    return array
