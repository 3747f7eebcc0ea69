"""A model's arrays in a safetensors file: one tensor per parameter, named by its dotted path."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding
from jax.tree_util import GetAttrKey
from jax.typing import DTypeLike
from jaxtyping import PyTree

from zoo import sharding
from zoo.common import configuration, plugins
from zoo.common.checksums import Digest
from zoo.nn.precision import DTYPES
from zoo.nn.products import Kind, Quantized, is_quantized
from zoo.nn.stateful import kept_dtypes
from zoo.publishing.errors import PublishError
from zoo.publishing.slices import CODES, blocks, open_file, slice_reader
from zoo.sharding.axes import is_parameter, keystr, named_alone
from zoo.sharding.parts import gathered, place

Read = Callable[[str, tuple[slice, ...]], np.ndarray]

_KINDS = "zoo.quantizations"
_MOST = 4096  # layers or experts: a damaged file can name any number, and all would be made


def check_counts(config: Any) -> None:
    """Raise a ValueError for implausible numbers of layers or experts."""
    for name, count in configuration.flat(config).items():
        if name.split(".")[-1] in ("num_layers", "num_experts") and (count or 0) > _MOST:
            raise ValueError(f"{name}={count}: must be at most {_MOST}")


def parse_dtype(dtype: DTypeLike | None) -> np.dtype | None:
    """A floating point dtype, also by the zoo's names: "bf16", "fp16" and "fp32".

    Raises:
        PublishError: `dtype` is no floating point dtype; the message names the choices.
    """
    if dtype is None:
        return None
    try:
        found = jnp.dtype(DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise PublishError(
            f"dtype={dtype!r}: parameters can be cast to floating point types only; choose one of "
            f"{[*DTYPES]}, or a dtype such as 'bfloat16' or jnp.float32"
        )
    return found


def check_kind(kind: Any) -> None:
    """Raise a PublishError for an unknown kind of quantised matrices."""
    if kind is not None and kind not in (names := plugins.names(_KINDS)):
        raise PublishError(f"quantize={kind!r}: choose one of {', '.join(names)}, or None")


def quantized_skeleton(skeleton: PyTree, kind: Kind | str | None) -> PyTree:
    """The skeleton with quantised matrices of `kind`; as it is for None."""
    if kind is None:
        return skeleton
    return plugins.find(_KINDS, kind).quantized_skeleton(skeleton, kind)


def read_tensors(
    path: Path,
    skeleton: PyTree,
    mesh: Mesh | sharding.Layout | None,
    dtype: DTypeLike | None,
    quantize: Kind | str | None = None,
) -> Any:
    """The skeleton with its arrays from a file, checked; each device reads its own slices.

    With a kind to `quantize` in, matrices are quantised as they are read.
    """
    skeleton, kept = read_dtypes(path, skeleton, dtype, quantize), kept_dtypes(skeleton)
    with slice_reader() as read_slice:

        def read(name: str, index: Any) -> np.ndarray:
            return read_slice(path, name, index, kept.get(name, dtype))

        def make(name: str, shape: tuple[int, ...], where: jax.sharding.Sharding) -> jax.Array:
            return place(shape, where, partial(read, name))

        return fill(skeleton, mesh, make, read)


def read_dtypes(
    path: Path, skeleton: PyTree, dtype: DTypeLike | None, quantize: Kind | str | None = None
) -> PyTree:
    """The skeleton of what `read_tensors` returns: with the dtypes of the file, or `dtype`."""
    kept, found = kept_dtypes(skeleton), outline(path)
    stored_shapes = {name: x.shape for name, x in found.items()}
    check_tensors(f"{path}", stored_shapes, parameter_shapes(skeleton))

    def make(name: str, shape: tuple[int, ...], where: Any) -> jax.ShapeDtypeStruct:
        stored = found[name].dtype
        wanted = kept.get(name, dtype) if jnp.issubdtype(stored, jnp.floating) else None
        return jax.ShapeDtypeStruct(shape, wanted or stored)

    return quantized_skeleton(fill(skeleton, None, make), quantize)


def outline(path: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and dtypes of the tensors in a safetensors file, by name."""
    dtypes = {code: jnp.dtype(name) for name, code in CODES.items()}
    with open_file(path) as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {
            name: jax.ShapeDtypeStruct(part.get_shape(), dtypes[part.get_dtype()])
            for name, part in parts.items()
        }


def fill(
    skeleton: PyTree,
    mesh: Mesh | sharding.Layout | None,
    make: Callable[[str, tuple[int, ...], jax.sharding.Sharding], Any],
    read: Read | None = None,
) -> Any:
    """The skeleton with `make(name, shape, sharding)` for each array; on one device if no mesh.

    With `read` quantised matrices are made of parts of whole ones, `read(name, slices)`.
    """
    one, layout = SingleDeviceSharding(jax.local_devices()[0]), sharding.layout_of(mesh)
    placed = skeleton if layout.mesh is None else sharding.shardings(skeleton, layout)

    def array(path: tuple, leaf: Any, where: Any) -> Any:
        if is_quantized(leaf) and read is not None:
            return matrix(path, leaf, where, read)
        if not is_parameter(leaf):
            return leaf
        return make(keystr(path), leaf.shape, one if layout.mesh is None else where)

    def matrix(path: tuple, leaf: Quantized, where: Any, read: Read) -> Quantized:
        names = named_alone(skeleton, (*path, GetAttrKey("codes")), leaf.codes).names
        part = partial(read, keystr(path))
        made = plugins.find(_KINDS, leaf.kind).quantize_parts(leaf, names, part)

        def place(array: np.ndarray, where: Any) -> jax.Array:
            place_at = one if layout.mesh is None else where
            return jax.make_array_from_callback(array.shape, place_at, lambda index: array[index])

        return jax.tree.map(place, made, where)

    def is_made(x: Any) -> bool:  # not so of the base of adapters, which are read alone
        return read is not None and is_quantized(x) and is_parameter(x.codes)

    with sharding.use(layout.without_mesh):
        return jax.tree_util.tree_map_with_path(array, skeleton, placed, is_leaf=is_made)


class Tensor(NamedTuple):
    """A tensor to write: `pieces` yields its parts in order."""

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: Callable[[], Iterator[np.ndarray]]


def stored_dtypes(model: PyTree, like: Mapping[str, np.dtype], default: Any) -> dict[str, Any]:
    """The dtype to store each array in, by its dotted path.

    It is the array's own; but for floating point the one `like` has for its path, or else `default`
    if that is given. What is kept in a dtype by `zoo.nn.stateful.is_kept` is so stored.
    """
    found, kept = {}, kept_dtypes(model)
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        if is_parameter(leaf):
            name = keystr(path)
            taken = jnp.issubdtype(leaf.dtype, jnp.floating) and name not in kept
            found[name] = like.get(name, default or leaf.dtype) if taken else leaf.dtype
    return found


def write_tensors(
    path: Path | None, model: PyTree, dtypes: Mapping[str, np.dtype] | None = None
) -> Digest:
    """Write the arrays of a model by name; all processes call it, one of them with a path.

    `dtypes` are by name, the arrays' own if not given. Returns the checksums of the file.
    """
    tensors: dict[str, Tensor] = {}

    def add(path: tuple, leaf: Any) -> None:
        dtype = leaf.dtype if dtypes is None else dtypes[keystr(path)]

        def pieces() -> Iterator[np.ndarray]:
            for index in blocks(leaf.shape, leaf.dtype.itemsize):
                yield gathered(leaf, index).astype(dtype, copy=False)

        tensors[keystr(path)] = Tensor(leaf.shape, dtype, pieces)

    for at, leaf in jax.tree_util.tree_leaves_with_path(model):
        if is_parameter(leaf):
            add(at, leaf)
    return write_file(path, tensors)


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


def parameter_shapes(model: PyTree) -> dict[str, tuple[int, ...]]:
    """The shape of each array of a model, by its dotted path."""
    leaves = jax.tree_util.tree_leaves_with_path(model)
    return {keystr(path): leaf.shape for path, leaf in leaves if is_parameter(leaf)}


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


def check_finite(model: PyTree, folder: Path) -> None:
    """Raise a ValueError that names the first parameter with a NaN or an infinity."""
    floats, mesh = eqx.filter(model, eqx.is_inexact_array), sharding.mesh_of(model)
    check = jax.jit(
        lambda tree: jax.tree.map(lambda x: jnp.isfinite(x).all(), tree),
        out_shardings=None if mesh is None else sharding.replicated(mesh),
    )
    for path, is_finite in jax.tree_util.tree_leaves_with_path(jax.device_get(check(floats))):
        if not is_finite:
            raise ValueError(
                f"{folder}: {keystr(path)} has a NaN or an infinity: the model is damaged, or its "
                "training diverged; get it again, or take another --model"
            )
