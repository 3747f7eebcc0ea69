"""Slices of tensors in safetensors files, read with bounded memory, and verified as they are."""

import contextlib
import itertools
import json
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
from jax.typing import DTypeLike

from zoo.common import checksums
from zoo.publishing.errors import PublishError
from zoo.publishing.folder import damaged

# In the order in which safetensors lays them out.
CODES = {
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "float32": "F32",
    "uint32": "U32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "uint16": "U16",
    "int16": "I16",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_DTYPES = {code: name for name, code in CODES.items()}
BLOCK_BYTES = checksums.PART_BYTES
"""Bytes in memory at a time of a file that is read, or of an array that is written."""


def blocks(
    shape: Sequence[int], itemsize: int, index: Sequence[slice] | None = None
) -> Iterator[tuple[slice, ...]]:
    """Slices that make up an array in C order, or its part `index`, block after block.

    A block's first and last element are at most `BLOCK_BYTES` apart, or it is one row.
    """
    wanted = [slice(0, size) for size in shape] if index is None else index
    ranges = [one.indices(size)[:2] for one, size in zip(wanted, shape, strict=True)]
    pitches = [itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    cut = next((axis for axis, pitch in enumerate(pitches) if pitch <= BLOCK_BYTES), len(shape))
    steps = [1] * cut + [max(1, BLOCK_BYTES // max(pitch, 1)) for pitch in pitches[cut : cut + 1]]
    starts = (range(start, stop, step) for (start, stop), step in zip(ranges, steps, strict=False))
    inner = tuple(slice(*pair) for pair in ranges[len(steps) :])
    for first in itertools.product(*starts):
        outer = zip(first, steps, ranges, strict=False)
        yield (*(slice(i, min(i + step, stop)) for i, step, (_, stop) in outer), *inner)


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[Any]:
    """A safetensors file, open for reading; a PublishError if it is missing or damaged."""
    if path.exists() and not path.is_file():  # a pipe would be read for ever
        raise PublishError(f"{path} is no regular file: get it again from its source")
    with _explained(path), safetensors.safe_open(path, "numpy") as opened:
        yield opened


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise PublishError(f"{path} is missing") from None
    except (OSError, safetensors.SafetensorError) as error:
        raise PublishError(
            f"{path} is damaged, or no safetensors file: {error}. Get it again from its source"
        ) from error


@contextlib.contextmanager
def slice_reader() -> Iterator[Callable[..., np.ndarray]]:
    """A context with `read(path, name, slices, dtype=None)`: a copy of a slice of a tensor.

    Floating point tensors are cast to `dtype`. What the folder's checksums list by parts is
    verified as it is read, each part once; a PublishError names the file of a damaged one.
    """
    with contextlib.ExitStack() as stack:
        files: dict[Path, _File] = {}

        def read(
            path: Path, name: str, slices: Sequence[slice], dtype: DTypeLike | None = None
        ) -> np.ndarray:
            if path not in files:
                files[path] = stack.enter_context(contextlib.closing(_File(path)))
            return files[path].read(name, slices, dtype)

        yield read


class _File:
    """A safetensors file. Of what is mapped into memory, which counts as the process's while it
    is, no more than a block stays so.
    """

    def __init__(self, path: Path):
        with open_file(path):
            pass  # its table is as it should be
        self._path = path
        self._file = path.open("rb")
        length = int.from_bytes(self._file.read(8), "little")
        self._table = json.loads(self._file.read(length))
        self._begin = 8 + length
        self._end = path.stat().st_size
        self._parts = checksums.parts(path)
        self._verified: set[int] = set()
        self._verify(0, self._begin)

    def close(self) -> None:
        self._file.close()

    def read(self, name: str, slices: Sequence[slice], dtype: DTypeLike | None) -> np.ndarray:
        shape = tuple(self._table[name]["shape"])
        stored = jnp.dtype(_DTYPES[self._table[name]["dtype"]])
        slices = (*slices, *(slice(None),) * (len(shape) - len(slices)))
        sizes = [len(range(*one.indices(size))) for one, size in zip(slices, shape, strict=True)]
        cast = dtype is not None and jnp.issubdtype(stored, jnp.floating)
        out = np.empty(sizes, dtype if cast else stored)
        if not out.size:
            return out
        origins = [one.indices(size)[0] for one, size in zip(slices, shape, strict=True)]
        plain = f"u{stored.itemsize}"  # which numpy copies from wherever it lies
        for block in blocks(shape, stored.itemsize, slices):
            at = tuple(
                slice(one.start - origin, one.stop - origin)
                for one, origin in zip(block, origins, strict=True)
            )
            found = self._block(name, shape, np.dtype(plain), block)
            if cast:
                out[at] = np.array(found).view(stored)
            else:
                out.view(plain)[at] = found
        return out

    def _block(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype, block: tuple[slice, ...]
    ) -> np.ndarray:
        """A block of a tensor, mapped into memory."""
        strides = [dtype.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        sizes = [one.stop - one.start for one in block]
        begin = self._begin + self._table[name]["data_offsets"][0]
        begin += sum(one.start * stride for one, stride in zip(block, strides, strict=True))
        last = sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
        end = begin + last + dtype.itemsize
        self._verify(begin, end)
        return np.ndarray(sizes, dtype, self._mapped(begin, end), strides=strides)

    def _mapped(self, begin: int, end: int) -> memoryview:
        """The bytes of the file from `begin` to `end`, in memory as long as someone has them."""
        aligned = begin - begin % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(
            self._file.fileno(), end - aligned, offset=aligned, access=mmap.ACCESS_READ
        )
        return memoryview(mapped)[begin - aligned :]

    def _verify(self, begin: int, end: int) -> None:
        """Compare the parts from byte `begin` to byte `end` with their checksums, once each."""
        size, wanted = self._parts
        for number in range(begin // size, -(-end // size)) if wanted else ():
            if number not in self._verified:
                content = self._mapped(number * size, min((number + 1) * size, self._end))
                if checksums.sha256(content) != wanted[number]:
                    problem = f"{self._path.name} is damaged behind byte {number * size:,}"
                    raise damaged(self._path.parent, [problem])
                self._verified.add(number)
