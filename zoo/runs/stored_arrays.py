"""The arrays of a checkpoint, in TensorStore's files: each chunk with a checksum.

A process writes the chunks of its own devices into a database of its own (OCDBT), the folder of its
number, and meets no other process there. The checkpoint's record says whose part holds which box of
an array. A chunk ends with its CRC-32C, and so do the nodes of the tree that leads to it: a reader
of a part of an array verifies that part alone, in parallel.
"""

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

# TensorStore is imported where it is used: it takes as long as JAX, and a program that shows its
# flags, or a plan, does not need it.

CHUNK_BYTES = 2**26  # what has to be read to verify one byte, and what one thread verifies
_AT_ONCE = 2**30  # bytes that are read or written
_HANDED_ON = 2**20  # bytes of an array that one process reads for others

Box = tuple[tuple[int, int], ...]
"""The first index of each axis, and the one behind the last."""
Boxes = Sequence[Any]
"""(process, box) of the boxes that make up an array; lists where they come from JSON."""
Held = dict[str, tuple[tuple[int, ...], dict[Box, np.ndarray]]]
"""The shape of each array, and the boxes of it that this process writes."""


class ArraysError(Exception):
    """Arrays that cannot be read: damaged or missing files."""


def part_of(name: str) -> int | None:
    """The process that wrote a checkpoint's file; None if it is of no part."""
    found = re.match(r"arrays/(\d+)/", name)
    return int(found[1]) if found else None


def boxes(array: jax.Array) -> Boxes:
    """The boxes of an array as its devices hold them; of copies the first device's."""
    return [(process, box) for box, (process, _) in _owners(array).items()]


def _owners(array: jax.Array) -> dict[Box, tuple[int, Any]]:
    """Box -> the process that writes it, and the device that it takes it from."""
    owners: dict[Box, tuple[int, Any]] = {}
    indices: Mapping[Any, tuple[slice, ...]] = array.sharding.devices_indices_map(array.shape)
    for device, index in indices.items():
        # An array that each process has alone is the same in all.
        process = 0 if array.is_fully_addressable else device.process_index
        owners.setdefault(_box(index, array.shape), (process, device))
    return owners


def held(arrays: Mapping[str, jax.Array]) -> Held:
    """The parts of arrays that this process writes, on the host: views where that is the device.

    While NumPy looks at a buffer, JAX does not donate it.
    """
    mine: dict[str, dict[Box, jax.Array]] = {}
    for name, array in arrays.items():
        owners, shards = _owners(array), {x.device: x.data for x in array.addressable_shards}
        here = {
            box: shards[device]
            for box, (process, device) in owners.items()
            if process == jax.process_index()
        }
        if here and array.size:
            mine[name] = here
            for shard in here.values():
                shard.copy_to_host_async()
    return {
        name: (arrays[name].shape, {box: np.asarray(x) for box, x in here.items()})
        for name, here in mine.items()
    }


def write(folder: Path, parts: Held) -> None:
    """Write this process's part of arrays into a folder."""
    sizes = {name: sum(x.nbytes for x in part.values()) for name, (_, part) in parts.items()}
    for names in _batches(sizes):
        stores = {}
        for name in names:
            shape, part = parts[name]
            one = next(iter(part.values()))
            grid = {"chunk_shape": _chunk(one.shape, one.dtype.itemsize)}
            metadata = {
                "shape": shape,
                "data_type": one.dtype.name,
                "chunk_grid": {"name": "regular", "configuration": grid},
                "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
            }
            # A chunk of zeros is stored, so that a missing one is an error.
            more = {"metadata": metadata, "store_data_equal_to_fill_value": True}
            stores[name] = _open(folder, name, create=True, **more)
        written = []
        for name in names:
            store = stores[name].result()
            for box, values in parts[name][1].items():
                future = store[_slices(box)].write(
                    values, can_reference_source_data_indefinitely=True
                )
                written.append(future)
        for future in written:
            future.result()


def _chunk(shape: tuple[int, ...], itemsize: int) -> list[int]:
    """The shape of chunks of at most `CHUNK_BYTES` that make up a box."""
    chunk = [*shape]
    for axis in range(len(chunk)):
        while chunk[axis] > 1 and itemsize * math.prod(chunk) > CHUNK_BYTES:
            size = chunk[axis]
            chunk[axis] = size // next(x for x in range(2, size + 1) if size % x == 0)
    return chunk


def problems(folder: Path, parts: Mapping[str, Boxes]) -> list[str]:
    """A line per array that is not what was written; reads all of them."""
    found = []
    for name, its in parts.items():
        try:
            for process, box in its:
                store = _result(folder, name, _open(folder / str(process), name))
                _result(folder, name, store[_slices(box)].read())
        except ArraysError as error:
            found.append(str(error))
    return found


def anywhere(value: bool) -> bool:
    """Whether the value is true in any process; all call it."""
    return bool(multihost_utils.process_allgather(np.int32(value)).any())


def read(
    folder: Path, targets: Mapping[str, jax.ShapeDtypeStruct], parts: Mapping[str, Boxes]
) -> dict[str, jax.Array]:
    """The arrays of these names, with the shapes, dtypes and shardings of the targets.

    All processes call it. Each reads what its devices hold, every byte once; of copies in several
    processes, one process reads, and hands on what it has read.

    Raises:
        ArraysError: an array is not what was written; the message names it.
    """
    together = any(map(_axes_of_copies, targets.values()))
    found: dict[str, jax.Array] = {}
    for names in _batches({name: x.size * x.dtype.itemsize for name, x in targets.items()}):
        batch, failure, values = {name: targets[name] for name in names}, None, {}
        try:
            values = _read(folder, batch, parts)
        except (ArraysError, OSError) as error:
            failure = error
        if together and anywhere(failure is not None) and failure is None:
            failure = ArraysError("another process cannot read its part")
        if failure is not None:
            raise failure
        found |= {name: _placed(target, values.pop(name)) for name, target in batch.items()}
    return found


def _batches(sizes: Mapping[str, int]) -> list[list[str]]:
    """The names of arrays that are read or written at once."""
    batches: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        batches[-1].append(name)
        total += size
        if total >= _AT_ONCE:
            batches.append([])
            total = 0
    return batches


def processes_of(
    targets: Mapping[str, jax.ShapeDtypeStruct], parts: Mapping[str, Boxes]
) -> set[int]:
    """The processes whose parts `read` reads here."""
    return {
        process
        for name, target in targets.items()
        for box in _boxes_to_read(target)
        for process, _ in _overlaps(box, parts[name])
    }


def _boxes_to_read(target: jax.ShapeDtypeStruct) -> set[Box]:
    readers = _readers(target)
    local = _local_indices(target).items()
    return {_box(index, target.shape) for device, index in local if device in readers}


def _overlaps(box: Box, stored: Boxes) -> Iterator[tuple[int, Box]]:
    """The process of each stored box that overlaps a box, and what the two have in common."""
    for process, other in stored:
        common = tuple(
            (max(pair[0] for pair in both), min(pair[1] for pair in both))
            for both in zip(box, other, strict=True)
        )
        if all(start < stop for start, stop in common):
            yield process, common


def _read(
    folder: Path, targets: Mapping[str, jax.ShapeDtypeStruct], parts: Mapping[str, Boxes]
) -> dict[str, dict[Box, np.ndarray]]:
    """The boxes of each array that this process reads."""
    import tensorstore as ts

    wanted = {
        name: {box: [*_overlaps(box, parts[name])] for box in _boxes_to_read(target)}
        for name, target in targets.items()
    }
    stores = {
        (name, process): _open(folder / str(process), name)
        for name, its in wanted.items()
        for pieces in its.values()
        for process, _ in pieces
    }
    for (name, _), future in stores.items():
        _result(folder, name, future)
    futures: dict[tuple, Any] = {}
    with ts.Batch() as batch:  # parts of one chunk are read together, once
        for name, its in wanted.items():
            for box, pieces in its.items():
                for process, piece in pieces:
                    store = stores[name, process].result()
                    futures[name, box, piece] = store[_slices(piece)].read(batch=batch)
    found: dict[str, dict[Box, np.ndarray]] = {}
    for name, its in wanted.items():
        found[name] = {box: _new(box, targets[name].dtype) for box in its}
        for box, pieces in its.items():
            for _, piece in pieces:
                values = np.asarray(_result(folder, name, futures.pop((name, box, piece))))
                if piece == box:
                    found[name][box] = values
                else:
                    pairs = zip(piece, box, strict=True)
                    at = tuple(slice(a - start, b - start) for (a, b), (start, _) in pairs)
                    found[name][box][at] = values
    return found


def _new(box: Box, dtype: np.dtype) -> np.ndarray:
    """Zeros, which take no memory before they are written."""
    return np.zeros([stop - start for start, stop in box], dtype)


def _placed(target: jax.ShapeDtypeStruct, parts: Mapping[Box, np.ndarray]) -> jax.Array:
    """The array of a target from the parts that its processes have read."""
    axes, readers = _axes_of_copies(target), _readers(target)
    places = {d: _box(index, target.shape) for d, index in _local_indices(target).items()}
    if not axes:
        # A copy: a donated array must own its memory.
        shards = [jax.device_put(parts[at], d, may_alias=False) for d, at in places.items()]
        return jax.make_array_from_single_device_arrays(target.shape, target.sharding, shards)
    # The copies as one array, of which all but one are zeros: their sum, of bits, is that one.
    bits = np.dtype(f"uint{8 * target.dtype.itemsize}")
    mesh, spec = target.sharding.mesh, target.sharding.spec
    shards = []
    for device, place in places.items():
        part = parts[place] if device in readers else _new(place, target.dtype)
        shards.append(jax.device_put(part.view(bits)[None], device))
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


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    pairs = zip(index, shape, strict=True)
    return tuple((start, stop) for start, stop, _ in (part.indices(size) for part, size in pairs))


def _slices(box: Iterable[Iterable[int]]) -> tuple[slice, ...]:
    return tuple(slice(*pair) for pair in box)


def _open(folder: Path, name: str, **more: Any) -> Any:
    import tensorstore as ts

    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"},
        "fill_missing_data_reads": False,  # a missing chunk is an error
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
    }
    return ts.open({**spec, **more}, open=not more, context=_context())


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
