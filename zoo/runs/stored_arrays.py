"""The arrays of a checkpoint: written by Orbax, each chunk with a checksum; read by TensorStore.

A chunk ends with its CRC-32C, and so do the nodes of the B-tree (OCDBT) that leads to it: a reader
of a part of an array verifies that part alone, in parallel. Each process writes the chunks of its
own devices.
"""

import functools
import importlib.metadata
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

# Orbax and TensorStore are imported where they are used: they take as long as JAX, and a program
# that shows its flags, or a plan, needs neither.

CHUNK_BYTES = 2**26  # what has to be read to verify one byte, and what one thread verifies
OLDEST_ORBAX = (0, 12, 8)
_METADATA = "_METADATA"  # of Orbax: which arrays there are
_READ_AT_ONCE = 2**30  # bytes
_HANDED_ON = 2**20  # bytes of an array that one process reads for others


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


def anywhere(value: bool) -> bool:
    """Whether it is so in any process; all call it."""
    return bool(multihost_utils.process_allgather(np.int32(value)).any())


def read(folder: Path, targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays of these names, with the shapes, dtypes and shardings of the targets.

    All processes call it. Each reads what its devices hold, every byte once; of copies in several
    processes one reads, and hands on what it has read.

    Raises:
        ArraysError: something of it is not what was written; the message names the array.
    """
    together = any(map(_axes_of_copies, targets.values()))
    found: dict[str, jax.Array] = {}
    for names in _batches(targets):
        batch, failure, parts = {name: targets[name] for name in names}, None, {}
        try:
            parts = _read(folder, batch)
        except (ArraysError, OSError) as error:
            failure = error
        if together and anywhere(failure is not None) and failure is None:
            failure = ArraysError("another process cannot read its part")
        if failure is not None:
            raise failure
        found |= {name: _placed(target, parts.pop(name)) for name, target in batch.items()}
    return found


def _batches(targets: Mapping[str, jax.ShapeDtypeStruct]) -> list[list[str]]:
    """The names of arrays that are read at once."""
    batches: list[list[str]] = [[]]
    size = 0
    for name, target in targets.items():
        batches[-1].append(name)
        size += target.size * target.dtype.itemsize
        if size >= _READ_AT_ONCE:
            batches.append([])
            size = 0
    return batches


def _read(
    folder: Path, targets: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, dict[tuple, np.ndarray]]:
    """The parts of each array that this process reads, by their places in it."""
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
            readers = _readers(target)
            parts[name] = {
                _key(index, target.shape): store[index].read(batch=batch)
                for device, index in _local_indices(target).items()
                if device in readers
            }
    return {
        name: {key: np.asarray(_result(folder, name, part)) for key, part in found.items()}
        for name, found in parts.items()
    }


def _placed(target: jax.ShapeDtypeStruct, parts: Mapping[tuple, np.ndarray]) -> jax.Array:
    """The array of a target from the parts that its processes have read."""
    axes, readers = _axes_of_copies(target), _readers(target)
    places = {d: _key(index, target.shape) for d, index in _local_indices(target).items()}
    if not axes:
        # A copy: a donated array must own its memory.
        shards = [jax.device_put(parts[at], d, may_alias=False) for d, at in places.items()]
        return jax.make_array_from_single_device_arrays(target.shape, target.sharding, shards)
    # The copies as one array, of which all but one are zeros: their sum, of bits, is that one.
    bits = np.dtype(f"uint{8 * target.dtype.itemsize}")
    mesh, spec = target.sharding.mesh, target.sharding.spec
    shards = []
    for device, place in places.items():
        shape = [1, *(len(range(*part)) for part in place)]
        part = parts[place].view(bits) if device in readers else np.zeros(shape, bits)
        shards.append(jax.device_put(part.reshape(shape), device))
    copies = jax.make_array_from_single_device_arrays(
        (math.prod(mesh.shape[axis] for axis in axes), *target.shape),
        NamedSharding(mesh, PartitionSpec(axes, *spec)),
        shards,
    )
    return _sum_of_bits(copies, target.dtype, target.sharding)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _sum_of_bits(copies: jax.Array, dtype: np.dtype, sharding: NamedSharding) -> jax.Array:
    total = jax.lax.with_sharding_constraint(copies.sum(0, dtype=copies.dtype), sharding)
    return jax.lax.bitcast_convert_type(total, dtype)


def _axes_of_copies(target: jax.ShapeDtypeStruct) -> tuple[str, ...]:
    """The mesh axes along which other processes hold copies of what one process holds."""
    sharding, size = target.sharding, target.size * target.dtype.itemsize
    if not isinstance(sharding, NamedSharding) or size < _HANDED_ON:
        return ()
    if target.dtype == bool or jax.dtypes.itemsize_bits(target.dtype) < 8:
        return ()
    mesh = sharding.mesh
    used = {axis for entry in sharding.spec for axis in np.atleast_1d(entry)}
    processes = np.vectorize(lambda device: device.process_index)(mesh.devices)
    return tuple(
        axis
        for number, axis in enumerate(mesh.axis_names)
        if axis not in used and (processes != processes.take([0], number)).any()
    )


def _readers(target: jax.ShapeDtypeStruct) -> set[jax.Device]:
    """The devices whose parts are read: the first one of each row of copies."""
    if not (axes := _axes_of_copies(target)):
        return target.sharding.device_set
    mesh = target.sharding.mesh
    first = tuple(0 if axis in axes else slice(None) for axis in mesh.axis_names)
    return {*np.ravel(mesh.devices[first])}


def _local_indices(target: jax.ShapeDtypeStruct) -> dict[jax.Device, tuple[slice, ...]]:
    return target.sharding.addressable_devices_indices_map(target.shape)


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
