"""The arrays of a model in a safetensors file: a tensor a parameter, named by its dotted path."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax.experimental import multihost_utils
from jax.sharding import Mesh, SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import PyTree

from zoo import sharding
from zoo.axes import keystr


class PublishError(Exception):
    """A folder that can't be written as a model, or can't be opened as one."""


def read_tensors(path: Path, skeleton: PyTree, mesh: Mesh | None, dtype: DTypeLike | None) -> Any:
    """The skeleton with its arrays from a file; each device reads its own slices.

    Raises:
        PublishError: tensors that are missing, surplus or of another shape, by name.
    """
    if mesh is None:
        one = SingleDeviceSharding(jax.local_devices()[0])
        placed = jax.tree.map(lambda leaf: one, skeleton)
    else:
        placed = sharding.shardings(skeleton, mesh)
    with safetensors.safe_open(path, "numpy") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        check_tensors(f"{path}", stored, parameter_shapes(skeleton))

        def fill(path: tuple, leaf: Any, where: Any) -> Any:
            if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
                return leaf
            return _read(file, keystr(path), leaf.shape, where, dtype)

        return jax.tree_util.tree_map_with_path(fill, skeleton, placed)


def write_tensors(path: Path | None, model: PyTree) -> None:
    """Write the arrays of a model by name; all processes call it, one of them with a path."""
    tensors = {name: _on_host(leaf) for name, leaf in _named(model)}
    if path is not None:
        safetensors.numpy.save_file(tensors, path)


def _named(model: PyTree) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            yield keystr(path), leaf


def parameter_shapes(model: PyTree) -> dict[str, tuple[int, ...]]:
    """The shape of each array of a model, by its dotted path."""
    return {name: leaf.shape for name, leaf in _named(model)}


def check_tensors(
    where: str, stored: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]
) -> None:
    """Raise a PublishError that names what is missing, surplus or of another shape."""
    lines = differences(stored, wanted, "here", "by the configuration")
    if lines:
        raise PublishError(f"{where} does not fit its configuration:\n  " + "\n  ".join(lines))


def differences(
    stored: Mapping[str, Any], wanted: Mapping[str, Any], there: str, here: str
) -> list[str]:
    """A line for each name under which two descriptions of arrays differ."""
    return [
        f"{name}: {stored.get(name, 'none')} {there}, {wanted.get(name, 'none')} {here}"
        for name in sorted(stored.keys() | wanted.keys())
        if stored.get(name) != wanted.get(name)
    ]


def _on_host(leaf: jax.Array) -> np.ndarray:
    if not leaf.is_fully_addressable:
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    # safetensors writes the buffer as it lies, which is wrong for any other order than C.
    return np.asarray(leaf, order="C")


def _read(file: Any, name: str, shape: tuple, where: Any, dtype: DTypeLike | None) -> jax.Array:
    def read(index: Any) -> np.ndarray:
        # get_slice refuses an empty array.
        part = file.get_slice(name)[index] if 0 not in shape else file.get_tensor(name)
        floating = jnp.issubdtype(part.dtype, jnp.floating)
        return part.astype(dtype) if dtype is not None and floating else part

    return jax.make_array_from_callback(shape, where, read)
