"""The arrays of a checkpoint: written by Orbax, each chunk with a checksum; read by TensorStore.

A chunk ends with its CRC-32C, and so do the nodes of the B-tree (OCDBT) that leads to it: a reader
of a part of an array verifies that part alone, in parallel. Each process writes the chunks of its
own devices.
"""

import functools
import importlib.metadata
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

# Orbax and TensorStore are imported where they are used: they take as long as JAX, and a program
# that shows its flags, or a plan, needs neither.

CHUNK_BYTES = 2**26  # what has to be read to verify one byte, and what one thread verifies
OLDEST_ORBAX = (0, 12, 8)
_METADATA = "_METADATA"  # of Orbax: which arrays there are
_READ_AT_ONCE = 2**30  # bytes


class ArraysError(Exception):
    """Arrays that cannot be read: damaged or missing files."""


def make_checkpointer() -> Any:
    """An `orbax.checkpoint.AsyncCheckpointer` that writes arrays for `read`."""
    import orbax.checkpoint as ocp

    _give_chunks_checksums()
    # Replica-parallel writing slices every replicated array, at 2 to 6 compiles each.
    handler = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, handler))
    return ocp.AsyncCheckpointer(
        ocp.PyTreeCheckpointHandler(
            type_handler_registry=registry,
            use_zarr3=True,
            use_compression=False,  # weights do not get smaller, and saving takes longer
        )
    )


def older_orbax() -> str:
    """Which Orbax is installed, and which one to install; empty if it is that or a later one."""
    version = importlib.metadata.version("orbax-checkpoint")
    if tuple(map(int, re.findall(r"\d+", version)[:3])) >= OLDEST_ORBAX:
        return ""
    oldest = ".".join(map(str, OLDEST_ORBAX))
    return f"orbax-checkpoint {version} is installed: install {oldest} or later"


def save_args(arrays: Mapping[str, jax.Array]) -> Any:
    """The arguments with which a checkpointer of `make_checkpointer` saves arrays by name."""
    import orbax.checkpoint as ocp

    args = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in arrays}
    return ocp.args.PyTreeSave(dict(arrays), save_args=args)


@functools.cache
def _give_chunks_checksums() -> None:
    """Have Orbax ask for a checksum behind each chunk, as it has no option for that.

    Readers find the parts of a chunk in the metadata of its array. `check_written` finds out
    whether Orbax has listened. This could end with an option for the codecs of a chunk beside
    `use_compression`, of `PyTreeCheckpointHandler` and of `ArrayOptions.Saving`; version 0.12.8
    chooses between zstd and nothing, and we know of no request for more at google/orbax.
    """
    from orbax.checkpoint._src.serialization import tensorstore_utils

    build = getattr(tensorstore_utils, "_build_zarr3_metadata", None)
    if build is None:
        raise _other_orbax()

    def with_checksums(*args: Any, **named: Any) -> Any:
        metadata = build(*args, **named)
        inner = metadata["codecs"][0]["configuration"]["codecs"]
        if not any(codec["name"] == "crc32c" for codec in inner):
            inner.append({"name": "crc32c"})
        return metadata

    tensorstore_utils._build_zarr3_metadata = with_checksums


def _other_orbax() -> ArraysError:
    return ArraysError(
        f"orbax-checkpoint {importlib.metadata.version('orbax-checkpoint')} writes chunks without "
        "checksums: install the version that pyproject.toml names, and report it"
    )


def check_written(folder: Path) -> None:
    """Raise an ArraysError where the chunks in a folder carry no checksums."""
    for name in _names(folder)[:1]:  # all are written alike
        metadata = _open(folder, name).result().spec().to_json()["metadata"]
        if "crc32c" not in json.dumps(metadata["codecs"][0]["configuration"]["codecs"]):
            raise _other_orbax()


def problems(folder: Path) -> list[str]:
    """A line per array that is not what was written; reads all of them."""
    found = []
    for name in _names(folder):
        try:
            _result(folder, name, _result(folder, name, _open(folder, name)).read())
        except ArraysError as error:
            found.append(str(error))
    return found


def _names(folder: Path) -> list[str]:
    """The names of the arrays in a folder."""
    tree = json.loads((folder / _METADATA).read_text())["tree_metadata"]
    return [array["key_metadata"][0]["key"] for array in tree.values()]


def read(folder: Path, targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays of these names, with the shapes, dtypes and shardings of the targets.

    Each process reads what its devices hold, every byte once.

    Raises:
        ArraysError: something of it is not what was written; the message names the array.
    """
    found: dict[str, jax.Array] = {}
    batch: list[str] = []
    size = 0
    for name, target in targets.items():
        batch.append(name)
        size += target.size * target.dtype.itemsize
        if size >= _READ_AT_ONCE:
            found |= _read(folder, {name: targets[name] for name in batch})
            batch, size = [], 0
    return found | _read(folder, {name: targets[name] for name in batch})


def _read(folder: Path, targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    import tensorstore as ts

    stores = {name: _open(folder, name) for name in targets}
    parts: dict[str, dict[tuple, Any]] = {}
    with ts.Batch() as batch:  # parts of one chunk are read together, once
        for name, target in targets.items():
            store = _result(folder, name, stores[name])
            if tuple(store.shape) != target.shape or store.dtype.numpy_dtype != target.dtype:
                raise ArraysError(
                    f"{name} is {store.dtype.name}{list(store.shape)} in {folder}, and not "
                    f"{target.dtype}{list(target.shape)}"
                )
            indices = _indices(target).items()
            parts[name] = {key: store[index].read(batch=batch) for key, index in indices}
    return {name: _placed(folder, name, targets[name], parts.pop(name)) for name in targets}


def _placed(
    folder: Path, name: str, target: jax.ShapeDtypeStruct, parts: Mapping[tuple, Any]
) -> jax.Array:
    """The array of a target from its parts, which are being read."""
    read = {key: np.asarray(_result(folder, name, part)) for key, part in parts.items()}
    devices = target.sharding.addressable_devices_indices_map(target.shape)
    # A copy: a donated array must own its memory.
    shards = [
        jax.device_put(read[_key(index, target.shape)], device, may_alias=False)
        for device, index in devices.items()
    ]
    return jax.make_array_from_single_device_arrays(target.shape, target.sharding, shards)


def _indices(target: jax.ShapeDtypeStruct) -> dict[tuple, tuple[slice, ...]]:
    """The different parts of an array that this process's devices hold."""
    indices = target.sharding.addressable_devices_indices_map(target.shape).values()
    return {_key(index, target.shape): index for index in indices}


def _key(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple:
    return tuple(part.indices(size) for part, size in zip(index, shape, strict=True))


def _open(folder: Path, name: str) -> Any:
    import tensorstore as ts

    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"},
        "fill_missing_data_reads": False,  # a missing chunk is an error
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
    }
    return ts.open(spec, read=True, open=True, context=_context())


@functools.cache
def _context() -> Any:
    import tensorstore as ts

    return ts.Context({"file_io_concurrency": {"limit": 64}})


def _result(folder: Path, name: str, future: Any) -> Any:
    try:
        return future.result()
    except Exception as error:  # TensorStore's errors are ValueErrors of many lines
        reason = str(error).split(" [tensorstore_spec")[0].split(" [source locations")[0]
        message = f"{name} cannot be read from {folder}: {reason}"
        if reason.startswith(("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE")):
            raise OSError(message) from error  # the files may be as they should
        raise ArraysError(message) from error
