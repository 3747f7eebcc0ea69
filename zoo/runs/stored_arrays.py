"""The arrays of a checkpoint, in TensorStore: each chunk with a checksum.

A chunk ends with its CRC-32C, and so do the nodes of the B-tree (OCDBT) that leads to it: who reads
a part of an array verifies as much as that, in parallel, as the hardware can, and no one else's.
Each process writes the chunks of its own devices, into a database of its own; the first joins them.
"""

import functools
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

# TensorStore is imported where it is used: a program that shows its flags, or a plan, needs none.

CHUNK_BYTES = 2**26  # what has to be read to verify one byte, and what one thread verifies
_PROCESS = "process_"  # and its number: the folder of a process's database
_TIMEOUT = 1800  # seconds in which all processes have to write their arrays
_READ_AT_ONCE = 2**30  # bytes


class ArraysError(Exception):
    """Arrays that cannot be read: damaged or missing files."""


def begin(folder: Path, arrays: Mapping[str, jax.Array]) -> Callable[[], None]:
    """Copy arrays by name to the host, and return a function that writes them to a folder.

    It returns once they are safe from donation. Each process calls the function, in the background,
    and writes the part of its own devices; on process 0 it ends when all have written theirs.
    """
    parts = [
        (name, array, shard)
        for name, array in arrays.items()
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]
    for *_, shard in parts:
        shard.data.copy_to_host_async()
    process = jax.process_index()
    partial = folder / f"{_PROCESS}{process}.tmp"
    # On CPU they are views of the devices' buffers; JAX then copies what is donated instead.
    jobs = [
        (_spec(partial, name, array), shard.index, np.asarray(shard.data))
        for name, array, shard in parts
    ]

    def write() -> None:
        import tensorstore as ts

        context = ts.Context()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            stores = [ts.open(spec, context=context, create=True, open=True) for spec, *_ in jobs]
            written = [
                store.result()[index].write(values, can_reference_source_data_indefinitely=True)
                for store, (_, index, values) in zip(stores, jobs, strict=True)
            ]
            jobs.clear()
            for each in written:
                each.result()
            partial.mkdir(exist_ok=True)  # of a process without a part
            partial.rename(partial.with_suffix(""))
        except Exception as error:
            partial.with_suffix(".failed").write_text(str(error))
            raise
        if process == 0:
            _join(folder)

    return write


def _join(folder: Path) -> None:
    """Wait for the databases of all processes, and join them in one B-tree, with their files."""
    import tensorstore as ts

    waiting, deadline = [*range(jax.process_count())], time.monotonic() + _TIMEOUT
    while waiting := [i for i in waiting if not (folder / f"{_PROCESS}{i}").exists()]:
        failed = [path for i in waiting if (path := folder / f"{_PROCESS}{i}.failed").exists()]
        if failed or time.monotonic() > deadline:
            reason = failed[0].read_text() if failed else f"it took over {_TIMEOUT} s"
            raise ArraysError(f"process {waiting[0]} has not written its arrays: {reason}")
        time.sleep(0.05)
    target = ts.KvStore.open(_database(folder), context=_context()).result()
    with ts.Transaction() as whole:
        for i in range(jax.process_count()):
            part = ts.KvStore.open(_database(folder / f"{_PROCESS}{i}"), context=_context())
            part.result().experimental_copy_range_to(target.with_transaction(whole)).result()


def _spec(folder: Path, name: str, array: jax.Array) -> dict[str, Any]:
    """The store of an array in a process's database."""
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    chunk_grid = {"name": "regular", "configuration": {"chunk_shape": _chunk_shape(array)}}
    return {
        "driver": "zarr3",
        "kvstore": _database(folder, f"{name}/"),
        "metadata": {
            "shape": list(array.shape),
            "data_type": str(array.dtype),
            "chunk_grid": chunk_grid,
            "codecs": codecs,
        },
        "store_data_equal_to_fill_value": True,  # zeros too: a missing chunk is an error
    }


def _chunk_shape(array: jax.Array | jax.ShapeDtypeStruct) -> list[int]:
    """A shape of at most `CHUNK_BYTES` where it can be, which divides each device's part."""
    part = array.sharding.shard_shape(array.shape)
    chunk = list(part)
    is_cut = [size != whole for size, whole in zip(part, array.shape, strict=True)]
    for axis in sorted(range(len(part)), key=is_cut.__getitem__):
        size = part[axis]
        wanted = -(-math.prod(chunk) * array.dtype.itemsize // CHUNK_BYTES)
        if wanted > 1 and not is_cut[axis]:  # the last chunk may be shorter
            chunk[axis] = -(-size // min(wanted, size))
        elif wanted > 1:
            counts = range(min(wanted, size), size + 1)
            chunk[axis] = size // next(count for count in counts if size % count == 0)
    return [max(size, 1) for size in chunk]


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
    import tensorstore as ts

    try:
        keys = ts.KvStore.open(_database(folder)).result().list().result()
    except ValueError as error:
        raise ArraysError(f"{folder} cannot be read: {error}") from error
    end = b"/zarr.json"
    return sorted(key.removesuffix(end).decode() for key in keys if key.endswith(end))


def _database(folder: Path, path: str = "") -> dict[str, Any]:
    return {"driver": "ocdbt", "base": f"file://{folder}/", "path": path}


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
        "kvstore": _database(folder, f"{name}/"),
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
