"""Meshes of devices, made from texts such as "fsdp=4,tensor=2"."""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")


class ShardingError(ValueError):
    """A mesh, a rules table and an array that do not fit together."""


def make_mesh(
    spec: str | Mapping[str, int] = "", devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Make a mesh from a text such as "fsdp=4,tensor=2".

    Its axes are data, fsdp, expert, context and tensor, the outermost first. One that is not named
    has size 1, one may be -1 (whatever is left), and "" is one device. A mesh smaller than
    `devices` (default: all of this run's) takes the first of them. Several slices of TPUs lie side
    by side along `data`. Axes are Auto: XLA places what the annotations leave open.

    Raises:
        ShardingError: an unknown axis, a size that is no integer, too many or too few devices, or
            slices that `data` does not divide into.
    """
    hint = "; on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count={} makes as many"
    hint = hint if devices is None else ""
    devices = jax.devices() if devices is None else list(devices)
    sizes = abstract_mesh(spec, len(devices)).shape
    total = math.prod(sizes.values())
    if total > len(devices):
        raise ShardingError(
            f"mesh {spec!r} needs {total} devices, and there are {len(devices)}{hint.format(total)}"
        )
    if jax.process_count() > 1 and total < len(devices):
        raise ShardingError(
            f"mesh {spec!r} has {total} of the {len(devices)} devices of {jax.process_count()} "
            "processes, and needs all of them, as 'data=-1' takes"
        )
    try:
        placed = _over_slices(sizes, devices[:total], spec)
    except AssertionError:  # by a slice of TPUs
        raise ShardingError(
            f"mesh {spec!r} has {total} of the {len(devices)} devices, which are no block of the "
            "slice; take all of them, or a half or a quarter"
        ) from None
    return Mesh(placed, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _over_slices(
    sizes: Mapping[str, int], devices: Sequence[jax.Device], spec: str | Mapping[str, int]
) -> np.ndarray:
    """The devices in the order of a mesh: slices side by side along `data`, the outermost axis.

    So only the reduction of gradients crosses the slow network between slices. GPUs of several
    machines lie in that order where it fits, and otherwise in their own.
    """
    data, *inner = sizes.values()
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        slices.setdefault(slice_index(device), []).append(device)
    count = len(slices)
    if count > 1 and (data % count or len({len(x) for x in slices.values()}) > 1):
        if devices[0].platform != "tpu":
            count, slices = 1, {0: list(devices)}
        else:
            found = ", ".join(f"{len(x)}" for x in slices.values())
            raise ShardingError(
                f"mesh {spec!r} has data={data}, over {count} slices of {found} TPUs: whole slices "
                f"lie side by side along data; give a multiple of {count}, as in "
                f"'data={count},fsdp=-1'"
            )
    # Not `jax.make_mesh`: an axis of 2 fits a slice of 8×8 TPUs too, if the slice's own axis is
    # split.
    meshes = [
        mesh_utils.create_device_mesh(
            (data // count, *inner), slices[index], allow_split_physical_axes=True
        )
        for index in sorted(slices)
    ]
    return np.concatenate(meshes)


def slice_index(device: jax.Device) -> int:
    """The slice of TPUs, the machine of GPUs, or the process of CPUs that a device belongs to."""
    if device.platform == "cpu":
        return device.process_index
    return getattr(device, "slice_index", 0)


def abstract_mesh(spec: str | Mapping[str, int], num_devices: int) -> AbstractMesh:
    """The mesh of a text such as "fsdp=4,tensor=2" without devices: the size of each axis.

    Raises:
        ShardingError: an unknown axis, a size that is no integer, or sizes that do not divide
            `num_devices` where one is -1.
    """
    sizes = dict.fromkeys(MESH_AXES, 1) | _parse_mesh(spec)
    unknown = [axis for axis, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    if len(unknown) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise ShardingError(f"mesh {spec!r}: sizes are positive, and one at most is -1")
    if unknown:
        if num_devices % known:
            raise ShardingError(f"mesh {spec!r}: {known} does not divide the {num_devices} devices")
        sizes[unknown[0]] = num_devices // known
    return AbstractMesh(
        tuple(sizes.values()), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES)
    )


def storage_mesh(num_devices: int, split: int = 1, num_slices: int = 1) -> str:
    """The text of a mesh that stores parameters in as many parts as a slice has devices (-1: all).

    `split` of the devices compute each layer together.
    """
    slices = f"data={num_slices}," if num_slices > 1 else ""
    size = num_devices if num_devices == -1 else num_devices // num_slices // split
    return f"{slices}fsdp={size}" + (f",tensor={split}" if split > 1 else "")


def _parse_mesh(spec: str | Mapping[str, int]) -> dict[str, int]:
    if not isinstance(spec, str | Mapping):
        raise ShardingError(f"mesh {spec!r}: name the axes, as in 'data=8' or {{'fsdp': 4}}")
    if isinstance(spec, str):
        items = [item.partition("=") for item in spec.split(",") if item.strip()]
    else:
        items = [(axis, "=", str(size)) for axis, size in spec.items()]
    sizes: dict[str, int] = {}
    for name, _, size in items:
        axis = str(name).strip()
        if axis not in MESH_AXES:
            raise ShardingError(f"mesh {spec!r}: no axis {axis!r}; the axes are {MESH_AXES}")
        if axis in sizes:
            raise ShardingError(f"mesh {spec!r}: each axis is named once at most")
        try:
            sizes[axis] = int(size)
        except ValueError:
            raise ShardingError(
                f"mesh {spec!r}: the size of {axis} is no integer, as in 'fsdp=4,tensor=2'"
            ) from None
    return sizes
