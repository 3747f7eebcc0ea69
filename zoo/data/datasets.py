"""Datasets: batch k as a pure function of the data, the dataset's arguments and k.

So all processes of a run agree on it without communication, any number of processes makes the same
batches, and the integer k is all that a run needs to resume.
"""

import abc
import functools
import hashlib
import math
import os
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, overload, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int64

from zoo.common import checksums
from zoo.sharding import Layout, batch_sharding, layout_of, num_batch_parts, partition_spec
from zoo.sharding.specs import num_shards

HostBatch = dict[str, np.ndarray]
Row = dict[str, tuple[tuple[int, ...], type]]  # name -> (shape, dtype)


def check_batch_size(batch_size: int, mesh: Mesh | Layout | None, accumulate: int = 1) -> None:
    """Raise a ValueError where the mesh and the microbatches do not divide the batch size."""
    parts = accumulate * num_batch_parts(mesh)
    if batch_size % parts:
        raise ValueError(
            f"batch_size={batch_size} is not divisible by {parts}, the number of its parts on "
            f"{_described(mesh)} with accumulate={accumulate}: make it a multiple of {parts}"
        )


def check_row_lengths(lengths: Mapping[str, tuple[int, ...]], mesh: Mesh) -> None:
    """Raise a ValueError where the mesh splits rows, and does not divide their length; by field."""
    parts = num_shards(partition_spec(["inner_seq"], mesh), mesh)
    for name, several in lengths.items():
        if wrong := [length for length in several if length % parts]:
            raise ValueError(
                f"{name}: a row of {wrong[0]} tokens is not divisible by {parts}, the number of "
                f"its parts on {_described(mesh)}: make it a multiple of {parts}"
            )


def check_memory(dataset: "Dataset") -> None:
    """Raise a ValueError where this process' rows of a batch do not fit the machine's memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for bucket in dataset.buckets:
        row = dataset.row(bucket).values()
        bytes_per_row = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in row)
        size = dataset.batch_size * bytes_per_row // jax.process_count()
        if size > memory:
            raise ValueError(
                f"batch_size={dataset.batch_size}: a batch of these rows ({bytes_per_row:,} bytes "
                f"each) has {size / 2**30:,.1f} GiB, and this machine {memory / 2**30:,.1f}: take "
                "fewer rows, or shorter ones (data.seq_len, data.buckets)"
            )


def _described(mesh: Mesh | Layout | None) -> str:
    sizes = getattr(layout_of(mesh).mesh, "shape", {})
    return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"


@runtime_checkable
class Dataset(Protocol):
    """The data of `zoo.fit` and `zoo.evaluator`: a pure function from k to batch k.

    Any object with these members is one; it subclasses nothing. Threads call `batch`, and each
    process for the rows of its own devices only. A run that resumes at step k starts with batch k.
    It may also have a `fingerprint`, a text that differs where batches do: see `fingerprint`.
    """

    @property
    def unit(self) -> str:
        """The unit of a batch's weights, for logs: "tokens", "examples"."""

    @property
    def batch_size(self) -> int:
        """Rows of each batch, on all devices together."""

    @property
    def buckets(self) -> tuple[int, ...]:
        """The keys of its batches' shapes, ascending: for tokens, the sequence lengths.

        The step is compiled once for each. A dataset of one shape has one key, any number.
        """

    @property
    def batches_per_epoch(self) -> int:
        """Batches that have every row once, which an evaluation of all held-out data reads.

        A stream without end says how many of its batches that is to be.
        """

    def row(self, bucket: int) -> Row:
        """The arrays of one row of a bucket: name -> (shape without the batch, dtype)."""

    def batch(self, k: int, rows: slice | None = None) -> HostBatch:
        """Batch k as numpy arrays [batch, …] by name, or some of its rows (None: all).

        The same k gives the same rows, in any process and at any time.
        """


def check_dataset(dataset: Any) -> None:
    """Raise a TypeError that names the members that a dataset lacks."""
    names = ("unit", "batch_size", "buckets", "batches_per_epoch", "row", "batch")
    if missing := [name for name in names if not hasattr(dataset, name)]:
        raise TypeError(
            f"{type(dataset).__name__} has no {', '.join(missing)}: "
            f"a zoo.Dataset has {', '.join(names)}"
        )


def fingerprint(dataset: Dataset) -> str:
    """A hash by which a run refuses other data at a resume.

    It is the dataset's own `fingerprint`, or one of its shape and of 8 batches, evenly spaced over
    an epoch.
    """
    if (own := getattr(dataset, "fingerprint", None)) is not None:
        return str(own)
    rows, count = slice(0, dataset.batch_size), dataset.batches_per_epoch
    batches = [dataset.batch(k, rows) for k in sorted({i * count // 8 for i in range(8)})]
    arrays = (x for batch in batches for named in sorted(batch.items()) for x in named)
    return checksums.of_values([dataset.batch_size, dataset.buckets, count, *arrays])


def batch_shapes(
    dataset: Dataset, mesh: Mesh | Layout | None = None
) -> dict[int, dict[str, jax.ShapeDtypeStruct]]:
    """The batch of each bucket as shapes, dtypes and shardings, to compile for in advance.

    Raises:
        TypeError: a dataset that lacks a member.
        ValueError: the mesh does not divide the batch size.
    """
    check_dataset(dataset)
    check_batch_size(dataset.batch_size, mesh)
    layout = layout_of(mesh)

    def struct(shape: tuple[int, ...], dtype: type) -> jax.ShapeDtypeStruct:
        placed = None if layout.mesh is None else batch_sharding(layout, 1 + len(shape))
        return jax.ShapeDtypeStruct((dataset.batch_size, *shape), dtype, sharding=placed)

    return {
        bucket: {name: struct(*row) for name, row in dataset.row(bucket).items()}
        for bucket in dataset.buckets
    }


LARGEST = 2**62
Key = tuple[int | str, ...]

_ROUNDS, _ROUNDS_OF_FEW = 6, 24  # few elements have few hashes to be mixed with
_FEW = 2**12
_CHUNK = 2**13  # indices at a time, so that the rounds stay in the cache of a core
_MASK = 2**64 - 1
_ODD = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93  # multipliers that spread a difference of any bit


class Permutation:
    """A pseudo-random permutation of range(size), which a key chooses: `p[i]` is where i goes.

    `i` is an integer or an array of int64, and so is the result. Only integer arithmetic: equal
    on every machine. Memory does not depend on the size, nor does the time per index.

    It is a Feistel network over pairs (i // b, i % b) with a * b a little above `size`, each half
    shifted in turn by a hash of the other, modulo a or b; an image outside of range(size) is
    mapped again until it is inside (J. Black and P. Rogaway, "Ciphers with Arbitrary Finite
    Domains", 2002). It shuffles; it is no cipher to keep a secret with.

    Raises:
        ValueError: the size is not in 1, 2, …, 2^62.
        IndexError: an index is outside of range(size).
    """

    def __init__(self, size: int, key: Key):
        if not 1 <= size <= LARGEST:
            raise ValueError(f"size={size}: a permutation has 1 to 2^62 = {LARGEST} elements")
        self.size = size
        self._left = math.isqrt(size - 1) + 1
        self._right = -(-size // self._left)
        rounds = _ROUNDS_OF_FEW if size <= _FEW else _ROUNDS
        self._keys = np.frombuffer(_hashed(key, 8 * rounds), "<u8").tolist()

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, i: int | np.integer) -> int: ...

    @overload
    def __getitem__(self, i: Int64[np.ndarray, "..."]) -> Int64[np.ndarray, "..."]: ...

    def __getitem__(self, i):
        if isinstance(i, np.ndarray):
            return self._of_array(i)
        if not 0 <= i < self.size:
            raise IndexError(f"index {i} of a permutation of {self.size}")
        image = self._rounds(int(i))
        while image >= self.size:
            image = self._rounds(image)
        return image

    def _of_array(self, indices: Int64[np.ndarray, "..."]) -> Int64[np.ndarray, "..."]:
        if indices.size and not 0 <= indices.min() <= indices.max() < self.size:
            raise IndexError(
                f"indices from {indices.min()} to {indices.max()} of a permutation of {self.size}"
            )
        flat = indices.ravel().astype(np.uint64)
        for begin in range(0, len(flat), _CHUNK):
            chunk = flat[begin : begin + _CHUNK]
            chunk[:] = self._rounds(chunk)
            while len(outside := np.flatnonzero(chunk >= self.size)):
                chunk[outside] = self._rounds(chunk[outside])
        return flat.astype(np.int64).reshape(indices.shape)

    def _rounds(self, x):  # an integer, or an array of uint64; alike for both
        left, right = x // self._right, x % self._right
        for number, key in enumerate(self._keys):
            if number % 2:
                right = _shifted(right, _mixed(left, key), self._right)
            else:
                left = _shifted(left, _mixed(right, key), self._left)
        return left * self._right + right


def hashed_integer(below: int, key: Key) -> int:
    """An integer in range(below), at most 2^64, that a key chooses, equal on every machine."""
    return int.from_bytes(_hashed(key, 16), "big") * below >> 128


def _hashed(key: Key, num_bytes: int) -> bytes:
    return hashlib.shake_128("\0".join(map(str, key)).encode()).digest(num_bytes)


def _mixed(half, key: int):
    """32 bits that depend on every bit of half and key."""
    mixed = (half + key & _MASK) * _ODD[0] & _MASK
    return ((mixed ^ mixed >> 32) * _ODD[1] & _MASK) >> 32


def _shifted(half, by, modulus: int):
    """(half + by * modulus / 2^32) modulo `modulus`, which is at most 2^31."""
    return (half + (by * modulus >> 32)) % modulus


class SeededDataset(abc.ABC):
    """A `Dataset` of data with an end, which it shuffles anew in each epoch.

    Orders are computed place by place, and not stored: they take no memory and no time at a start.
    `padding_waste` is the fraction of an epoch's positions that are padding.
    """

    unit: ClassVar[str] = "tokens"
    buckets: tuple[int, ...]
    batches_per_epoch: int
    padding_waste: float

    def __init__(self, batch_size: int, seed: int, shuffle: bool):
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        if seed < 0:
            raise ValueError(f"the data's seed={seed} must not be negative")
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self._permutation = functools.lru_cache(maxsize=64)(
            lambda size, epoch, what: Permutation(size, (seed, epoch, what))
        )

    @abc.abstractmethod
    def _build(self, k: int, rows: range) -> HostBatch:
        """The given rows of batch k."""

    @abc.abstractmethod
    def row(self, bucket: int) -> Row:
        """The arrays of one row of a bucket."""

    def bucket(self, k: int) -> int:
        """The bucket of batch k."""
        return self.buckets[0]

    def epoch(self, k: int) -> int:
        """The epoch of batch k, from 0."""
        return k // self.batches_per_epoch

    def batch(self, k: int, rows: slice | None = None) -> HostBatch:
        """Batch k as numpy arrays [batch, …], or only some of its rows."""
        if k < 0:
            raise IndexError(f"batch {k}: batches count from 0")
        return self._build(k, range(self.batch_size)[rows or slice(None)])

    def _place(self, size: int, epoch: int, what: str, i: Any) -> Any:
        """Place i, or the places of an array, in an epoch's order of `size` things named `what`."""
        return self._permutation(size, epoch, what)[i] if self.shuffle else i
