"""Arrays made on their devices part by part, and parts of arrays brought to the hosts.

No host holds more than one part of an array at a time, beside what its own devices hold.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_SMALLEST = 2**12  # bytes that are exchanged; each power of two from here on is a program


def place(
    shape: tuple[int, ...],
    where: jax.sharding.Sharding,
    part: Callable[[tuple[slice, ...]], np.ndarray],
) -> jax.Array:
    """An array of `part(index)`, made once for the devices of this process that hold it."""
    holders: dict[tuple, list[jax.Device]] = {}
    indices: dict[tuple, tuple[slice, ...]] = {}
    found: dict[jax.Device, jax.Array] = {}
    places = where.addressable_devices_indices_map(shape)
    for device, index in places.items():
        assert index is not None  # it is for scalars of some shardings, in the types alone
        key = tuple(one.indices(size) for one, size in zip(index, shape, strict=True))
        holders.setdefault(key, []).append(device)
        indices[key] = index
    for key, devices in holders.items():
        made = part(indices[key])
        for device in devices:
            found[device] = jax.device_put(made, device)
            found[device].block_until_ready()
    arrays = [found[device] for device in places]
    return jax.make_array_from_single_device_arrays(shape, where, arrays)


def gathered(array: Any, index: Sequence[int | slice] | None = None) -> np.ndarray:
    """`array[index]` in the memory of this host; all processes call it, each for its own copy.

    Without an index it is the whole array.
    An array that lies on this host's CPU alone is not copied.
    """
    if not isinstance(array, jax.Array):
        return np.asarray(array)[... if index is None else tuple(index)]
    index = (slice(None),) * array.ndim if index is None else index
    wanted = [
        (one, one + 1) if isinstance(one, int) else one.indices(size)[:2]
        for one, size in zip(index, array.shape, strict=True)
    ]
    numbers = tuple(0 if isinstance(one, int) else slice(None) for one in index)
    if array.is_fully_replicated:
        whole = array.addressable_shards[0].data
        return np.asarray(_on_host(whole, tuple(slice(*pair) for pair in wanted))[numbers])
    out = np.zeros([stop - start for start, stop in wanted], array.dtype)
    for shard in array.addressable_shards:
        if shard.replica_id:
            continue
        held = [one.indices(size)[:2] for one, size in zip(shard.index, array.shape, strict=True)]
        common = [(max(a, b), min(c, d)) for (a, c), (b, d) in zip(wanted, held, strict=True)]
        if all(start < stop for start, stop in common):
            out[_relative(common, wanted)] = _on_host(shard.data, _relative(common, held))
    return np.asarray((out if array.is_fully_addressable else _summed(out))[numbers])


def _relative(ranges: Any, origins: Any) -> tuple[slice, ...]:
    return tuple(
        slice(start - origin, stop - origin)
        for (start, stop), (origin, _) in zip(ranges, origins, strict=True)
    )


def _on_host(data: jax.Array, index: tuple[slice, ...]) -> np.ndarray:
    """A part of one device's array."""
    if next(iter(data.devices())).platform == "cpu":
        return np.asarray(np.asarray(data)[index])
    # JAX keeps the copy of an array that a host has asked for as long as the array.
    starts = [one.start for one in index]
    sizes = [one.stop - one.start for one in index]
    return np.asarray(jax.lax.dynamic_slice(data, starts, sizes))


def _summed(part: np.ndarray) -> np.ndarray:
    """The sum over all processes, of which one alone has each value and the others zero bits."""
    size = max(_SMALLEST, 1 << (part.nbytes - 1).bit_length())
    own = np.zeros((1, size // 4), np.uint32)
    own.view(np.uint8).reshape(-1)[: part.nbytes] = part.reshape(-1).view(np.uint8)
    mesh = _one_device_per_process()
    [device] = [one for one in mesh.devices.flat if one.process_index == jax.process_index()]
    stacked = jax.make_array_from_single_device_arrays(
        (mesh.size, size // 4),
        NamedSharding(mesh, PartitionSpec("process")),
        [jax.device_put(own, device)],
    )
    whole = np.asarray(_sum(mesh)(stacked).addressable_data(0))
    return whole.view(np.uint8)[: part.nbytes].view(part.dtype).reshape(part.shape)


@functools.cache
def _one_device_per_process() -> Mesh:
    first = {device.process_index: device for device in reversed(jax.devices())}
    devices = [first[process] for process in sorted(first)]
    return Mesh(np.array(devices), ("process",), axis_types=(jax.sharding.AxisType.Auto,))


@functools.cache
def _sum(mesh: Mesh) -> Any:
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda x: jnp.sum(x, axis=0), out_shardings=everywhere)
