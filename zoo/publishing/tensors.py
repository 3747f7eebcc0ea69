"""A model's arrays in safetensors files: one tensor per parameter, named by its dotted path.

They are read slice by slice with bounded memory, verified as they are read, and written piece by
piece.
"""

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jax.sharding import Mesh, SingleDeviceSharding
from jax.tree_util import GetAttrKey, tree_leaves_with_path
from jax.typing import DTypeLike
from jaxtyping import PyTree

from zoo import sharding
from zoo.common import checksums, plugins
from zoo.common.checksums import Digest
from zoo.nn.products import Kind, is_quantized
from zoo.nn.stateful import kept_dtypes
from zoo.publishing import PublishError
from zoo.publishing.formats import QUANTIZATIONS, damaged
from zoo.sharding.axes import is_parameter, keystr, named_alone
from zoo.sharding.placement import gathered, place

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
    try:
        with safetensors.safe_open(path, "numpy") as opened:
            yield opened
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
    """A safetensors file, of which at most a block stays mapped into memory: what is mapped counts
    as the process's.
    """

    def __init__(self, path: Path):
        with open_file(path):
            pass  # its table is as it should be
        self._path = path
        self._file = path.open("rb")
        length = int.from_bytes(self._file.read(8), "little")
        self._table = json.loads(self._file.read(length))
        self._begin = 8 + length
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
        begin = self._begin + self._table[name]["data_offsets"][0]
        ends = [np.ravel_multi_index([x.start for x in block], shape) if block else 0]
        ends += [np.ravel_multi_index([x.stop - 1 for x in block], shape) if block else 0]
        first, last = (begin + int(end) * dtype.itemsize for end in ends)
        self._verify(first, last + dtype.itemsize)
        whole: Any = np.memmap(self._file, dtype, "r", begin, shape)
        return whole[(*block, ...)]

    def _verify(self, begin: int, end: int) -> None:
        """Compare the parts from byte `begin` to byte `end` with their checksums, once each."""
        size, wanted = self._parts
        for number in range(begin // size, -(-end // size)) if wanted else ():
            if number not in self._verified:
                self._file.seek(number * size)
                if checksums.sha256(self._file.read(size)) != wanted[number]:
                    problem = f"{self._path.name} is damaged behind byte {number * size:,}"
                    raise damaged(self._path.parent, [problem])
                self._verified.add(number)


Read = Callable[[str, tuple[slice, ...], Any], np.ndarray]
"""A slice of an array by its path, in a dtype."""


def read_tensors(
    path: Path, skeleton: PyTree, mesh: Mesh | None = None, dtype: DTypeLike | None = None
) -> Any:
    """The skeleton with its arrays from a file, checked; each device reads its own slices."""
    return read_arrays(path, read_dtypes(path, skeleton, dtype), mesh)


def read_arrays(
    path: Path, skeleton: PyTree, mesh: Mesh | sharding.Layout | None, *, quantize: bool = False
) -> Any:
    """The arrays of a skeleton that `read_dtypes` returned; `quantize` is as for `fill`."""
    with slice_reader() as read:
        part = lambda name, index, dtype: read(path, name, index, dtype)  # noqa: E731
        return fill(skeleton, mesh, part, quantize=quantize)


def read_dtypes(
    path: Path, skeleton: PyTree, dtype: DTypeLike | None, quantize: Kind | str | None = None
) -> PyTree:
    """The skeleton with the dtypes of the file, or `dtype`, and quantised matrices of a kind."""
    kept, found = kept_dtypes(skeleton), outline(path)
    stored_shapes = {name: x.shape for name, x in found.items()}
    check_tensors(f"{path}", stored_shapes, parameter_shapes(skeleton))

    def choose(name: str) -> Any:
        stored = found[name].dtype
        wanted = kept.get(name, dtype) if jnp.issubdtype(stored, jnp.floating) else None
        return wanted or stored

    return quantized_skeleton(typed(skeleton, choose), quantize)


def outline(path: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and dtypes of the tensors in a safetensors file, by name."""
    found = {}
    with open_file(path) as file:
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            if (code := part.get_dtype()) not in _DTYPES:
                raise PublishError(f"{path}: {name} is of type {code}, which is not read")
            found[name] = jax.ShapeDtypeStruct(part.get_shape(), jnp.dtype(_DTYPES[code]))
    return found


def typed(skeleton: PyTree, dtype: Callable[[str], Any]) -> PyTree:
    """The skeleton with other dtypes of its arrays, by their paths."""

    def visit(path: tuple, leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, dtype(keystr(path))) if is_parameter(leaf) else leaf

    return jax.tree_util.tree_map_with_path(visit, skeleton)


def quantized_skeleton(skeleton: PyTree, kind: Kind | str | None) -> PyTree:
    """The skeleton with quantised matrices of `kind`; as it is for None."""
    if kind is None:
        return skeleton
    return plugins.find(QUANTIZATIONS, kind).quantized_skeleton(skeleton, kind)


def fill(
    skeleton: PyTree, mesh: Mesh | sharding.Layout | None, read: Read, *, quantize: bool
) -> Any:
    """The skeleton with its arrays, part by part as devices hold them; on one device if no mesh.

    With `quantize`, quantised matrices are made from parts of whole ones, else from stored arrays.
    """
    one, layout = SingleDeviceSharding(jax.local_devices()[0]), sharding.layout_of(mesh)
    placed = skeleton if layout.mesh is None else sharding.shardings(skeleton, layout)

    def put(shape: tuple[int, ...], where: Any, part: Callable[[Any], np.ndarray]) -> jax.Array:
        return place(shape, one if layout.mesh is None else where, part)

    def make(path: tuple, leaf: Any, where: Any) -> Any:
        part = lambda index: read(keystr(path), index, leaf.dtype)  # noqa: E731
        if is_parameter(leaf):
            return put(leaf.shape, where, part)
        if not quantize or not is_quantized(leaf):
            return leaf
        names = named_alone(skeleton, (*path, GetAttrKey("codes")), leaf.codes).names
        made = plugins.find(QUANTIZATIONS, leaf.kind).quantize_parts(leaf, names, part)
        return jax.tree.map(lambda x, where: put(x.shape, where, x.__getitem__), made, where)

    with sharding.use(layout.without_mesh):
        return jax.tree_util.tree_map_with_path(
            make, skeleton, placed, is_leaf=is_quantized if quantize else None
        )


class Tensor(NamedTuple):
    """A tensor to write: `pieces` yields its parts in order."""

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: Callable[[], Iterator[np.ndarray]]


def stored_dtypes(model: PyTree, like: Mapping[str, np.dtype], default: Any) -> dict[str, Any]:
    """The dtype to store each array in, by its dotted path.

    It is the array's own; but for floating point the one `like` has for its path, or else `default`
    if that is given. What `zoo.nn.stateful.is_kept` keeps in a dtype is stored in it.
    """
    found, kept = {}, kept_dtypes(model)
    for name, leaf in parameters(model).items():
        taken = jnp.issubdtype(leaf.dtype, jnp.floating) and name not in kept
        found[name] = like.get(name, default or leaf.dtype) if taken else leaf.dtype
    return found


def write_tensors(
    path: Path | None, model: PyTree, dtypes: Mapping[str, np.dtype] | None = None
) -> Digest:
    """Write the arrays of a model by name; all processes call it, one of them with a path.

    `dtypes` are by name, the arrays' own if not given. Returns the checksums of the file.
    """

    def tensor(name: str, leaf: Any) -> Tensor:
        dtype = leaf.dtype if dtypes is None else dtypes[name]

        def pieces() -> Iterator[np.ndarray]:
            for index in blocks(leaf.shape, leaf.dtype.itemsize):
                yield gathered(leaf, index).astype(dtype, copy=False)

        return Tensor(leaf.shape, dtype, pieces)

    return write_file(path, {name: tensor(name, leaf) for name, leaf in parameters(model).items()})


def write_file(
    path: Path | None, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Digest:
    """Write a safetensors file piece by piece, with the same bytes as the library writes.

    All processes call it, because pieces may be gathered from all; one of them has a path.
    Returns the checksums of what it wrote.

    Raises:
        PublishError: safetensors does not have a tensor's dtype.
    """
    for name, tensor in tensors.items():
        if str(tensor.dtype) not in CODES:
            raise PublishError(f"{name} is of type {tensor.dtype}, which safetensors does not have")
    order = [*CODES]
    names = sorted(tensors, key=lambda name: (order.index(str(tensors[name].dtype)), name))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        shape, dtype, _ = tensors[name]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        code = CODES[str(dtype)]
        header[name] = {"dtype": code, "shape": [*shape], "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = Digest()
    with contextlib.nullcontext() if path is None else path.open("wb") as file:

        def write(content: Any) -> None:
            if file is not None:
                file.write(content)
                digest.update(content)

        write(len(text).to_bytes(8, "little") + text)
        for name in names:
            for piece in tensors[name].pieces():
                # The file is in C order, whatever the order of the array in memory.
                write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    return digest


def parameters(model: PyTree) -> dict[str, Any]:
    """The arrays of a model, or of its skeleton, by their dotted paths."""
    return {keystr(path): x for path, x in tree_leaves_with_path(model) if is_parameter(x)}


def parameter_shapes(model: PyTree) -> dict[str, tuple[int, ...]]:
    """The shape of each array of a model, by its dotted path."""
    return {name: leaf.shape for name, leaf in parameters(model).items()}


def num_parameters(model: PyTree) -> int:
    """The number of elements in all arrays of a model, and in its quantised matrices."""
    leaves = jax.tree.leaves(model, is_leaf=is_quantized)
    return sum(math.prod(x.shape) for x in leaves if is_quantized(x) or is_parameter(x))


def check_tensors(
    where: str, stored: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]
) -> None:
    """Raise a PublishError that names the tensors that are missing, surplus or of another shape."""
    if lines := differences(stored, wanted, "here", "by the configuration"):
        raise PublishError(f"{where} does not fit its configuration:\n  " + "\n  ".join(lines))


def differences(
    stored: Mapping[str, Any], wanted: Mapping[str, Any], there: str, here: str
) -> list[str]:
    """One line per name for which two descriptions of arrays differ."""
    return [
        f"{name}: {stored.get(name, 'none')} {there}, {wanted.get(name, 'none')} {here}"
        for name in sorted(stored.keys() | wanted.keys())
        if stored.get(name) != wanted.get(name)
    ]
