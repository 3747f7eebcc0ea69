"""Where the arrays of models, of optimizer states and of batches lie on a mesh.

They are made on their devices part by part, and their parts are brought to the hosts: no host holds
more than one part of an array at a time, beside what its own devices hold.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from zoo.sharding.axes import (
    ANNOTATION,
    DEFAULT,
    Named,
    check_model,
    is_parameter,
    keystr,
    map_named,
)
from zoo.sharding.rules import LOGICAL_AXES, Layout, is_stack, layout_of, mesh_axes, use
from zoo.sharding.specs import (
    is_sharding,
    left_whole,
    num_shards,
    parameter_spec,
    partition_spec,
)

Rows = tuple[int, int]  # of a global batch: the first, and the one behind the last

_SMALLEST = 2**12  # bytes that are exchanged; each power of two from here on is a program


def shardings(tree: PyTree, mesh: Mesh | Layout) -> Any:
    """The NamedSharding of each parameter; other leaves stay as they are.

    An array without an annotation has the names that a `Layout` gives it; Equinox's layers have
    names built in. In any other array `fsdp`, `expert` and `context` each shard the largest
    dimension that they divide, and vectors are replicated; a strict layout refuses that.

    Raises:
        ShardingError: as `logical_axes`; an axis that the rules do not know; a size that the mesh
            axis does not divide, where an annotation or `axes` asks for it; or a pattern that
            names nothing.
    """
    layout = layout_of(mesh)

    def place(path: tuple, named: Named, leaf: Any) -> NamedSharding:
        spec = parameter_spec(named, leaf.shape, layout.mesh, field=keystr(path))
        return NamedSharding(layout.mesh, spec)

    with use(layout.without_mesh):
        check_model(tree, layout)
        return map_named(place, tree)


def like_parameters(tree: PyTree, parameters: PyTree, mesh: Mesh | Layout) -> Any:
    """NamedShardings of optimizer state: an array whose path ends in a parameter's has that one's.

    An array of the parameter's shape, or of that shape less one axis (a factored second moment),
    is sharded alike. What belongs to no parameter is replicated: counters, placeholders.
    """
    placed, on = shardings(parameters, mesh), layout_of(mesh).mesh
    leaves = jtu.tree_leaves_with_path(parameters)
    table = {
        path: (leaf.shape, sharding.spec)
        for (path, leaf), sharding in zip(leaves, jax.tree.leaves(placed), strict=True)
        if is_parameter(leaf)
    }

    def place(path: tuple, leaf: Any) -> Any:
        if not is_parameter(leaf):
            return leaf
        suffixes = (path[start:] for start in range(len(path)))
        shape, spec = next((table[s] for s in suffixes if s in table), ((), PartitionSpec()))
        if leaf.shape == shape:
            return NamedSharding(on, spec)
        for axis in range(len(shape)):
            if leaf.shape == shape[:axis] + shape[axis + 1 :]:
                return NamedSharding(on, PartitionSpec(*spec[:axis], *spec[axis + 1 :]))
        return replicated(on)

    return jtu.tree_map_with_path(place, tree)


def with_whole_matrices(function: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
    """`function(tree)`, computed with whole matrices of few layers on each device.

    The mesh axes that split the matrices of a stack move to its longest axis that nothing splits,
    padded with zeros to a multiple, and the results go back. A parameter without such an axis, such
    as a single matrix, is left to XLA. `function` takes each matrix by itself.
    """
    if not is_sharding():
        return function(tree)
    routes = map_named(_route, tree)
    return jax.tree.map(_back, function(jax.tree.map(_there, tree, routes)), tree, routes)


# The axis of a stack to split, and the PartitionSpecs from the stored one to whole matrices.
_Route = tuple[int, list[PartitionSpec]]


def _route(path: tuple, named: Named, x: jax.Array) -> _Route:
    """Each PartitionSpec moves one mesh axis, by an all-to-all; without a stack there are none."""
    mesh = jax.sharding.get_abstract_mesh()
    entries = [mesh_axes([e]) for e in parameter_spec(named, x.shape, mesh, field=keystr(path))]
    stacks = [i for i, name in enumerate(named.names) if is_stack(name)]
    free = [i for i in stacks if x.shape[i] > 1 and not entries[i]]
    if not free:
        return 0, []
    longest = max(free, key=lambda i: x.shape[i])
    specs = [PartitionSpec(*(axes or None for axes in entries))]
    for i in range(x.ndim):
        while entries[i] and i not in stacks:
            *rest, moved = entries[i]
            entries[i], entries[longest] = tuple(rest), (*entries[longest], moved)
            specs.append(PartitionSpec(*(axes or None for axes in entries)))
    return longest, specs


def _there(x: jax.Array, route: _Route) -> jax.Array:
    axis, specs = route
    if specs:
        # For unequal parts XLA for TPU makes gathers and permutes of many times the bytes.
        parts = num_shards([specs[-1][axis]], jax.sharding.get_abstract_mesh())
        x = jnp.pad(x, [(0, -x.shape[axis] % parts if i == axis else 0) for i in range(x.ndim)])
    for spec in specs:
        x = jax.lax.with_sharding_constraint(x, spec)
    return x


def _back(x: jax.Array, like: jax.Array, route: _Route) -> jax.Array:
    axis, specs = route
    for spec in reversed(specs):
        x = jax.lax.with_sharding_constraint(x, spec)
    return jax.lax.slice_in_dim(x, 0, like.shape[axis], axis=axis)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of scalars and counters: whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh | Layout, ndim: int) -> NamedSharding:
    """The sharding of one array of a batch, of rank `ndim`: the first axis over the batch axes."""
    names = ("batch",) + (None,) * (ndim - 1) if ndim else ()
    return NamedSharding(layout_of(mesh).mesh, partition_spec(names, mesh))


def held_rows(batch_size: int, mesh: Mesh | Layout | None) -> list[Rows]:
    """The rows of a global batch that this process's devices hold."""
    layout = layout_of(mesh)
    if layout.mesh is None:
        return [(0, batch_size)]
    indices = batch_sharding(layout, 1).addressable_devices_indices_map((batch_size,)).values()
    return sorted({_bounds(index[0], batch_size) for index in indices if index is not None})


def place_batch(
    parts: Mapping[Rows, Mapping[str, np.ndarray]], batch_size: int, mesh: Mesh | Layout | None
) -> dict[str, jax.Array]:
    """A batch on the devices, from this process's parts of it, whose keys are its `held_rows`.

    Its arrays are global, their first axis sharded over the mesh's batch axes. Without a mesh they
    are on the default device.
    """
    first, layout = next(iter(parts.values())), layout_of(mesh)
    if layout.mesh is None:
        return jax.device_put(dict(first))

    def placed(name: str) -> jax.Array:
        shape = (batch_size, *first[name].shape[1:])

        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # it is None only on devices of other processes
            return parts[_bounds(index[0], batch_size)][name]

        return jax.make_array_from_callback(shape, batch_sharding(layout, len(shape)), shard)

    return {name: placed(name) for name in first}


def _bounds(rows: slice, batch_size: int) -> Rows:
    start, stop, _ = rows.indices(batch_size)
    return start, stop


def mesh_of(tree: PyTree) -> Mesh | None:
    """The mesh that a model or state was placed on; None if on one device, without a mesh."""
    for leaf in jax.tree.leaves(tree):
        placed = getattr(leaf, "sharding", None)
        if isinstance(placed, NamedSharding) and isinstance(placed.mesh, Mesh):
            return placed.mesh
    return None


def max_parameter_parts(mesh: Mesh | AbstractMesh) -> int:
    """Into how many parts the mesh can cut a parameter, by `RULES`."""
    axes = mesh_axes(axis.mesh for axis in LOGICAL_AXES.values() if axis.kind != "activation")
    return num_shards(set(axes), mesh)


def place(
    shape: tuple[int, ...],
    where: jax.sharding.Sharding,
    part: Callable[[tuple[slice, ...]], np.ndarray],
) -> jax.Array:
    """An array of the parts `part(index)`, each made once for all devices of this process."""
    holders: dict[tuple, list[jax.Device]] = {}
    found: dict[jax.Device, jax.Array] = {}
    places = where.addressable_devices_indices_map(shape)
    for device, index in places.items():
        assert index is not None  # it is for scalars of some shardings, in the types alone
        key = tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))
        holders.setdefault(key, []).append(device)
    for key, devices in holders.items():
        made = part(tuple(slice(*ends) for ends in key))
        for device in devices:
            found[device] = jax.device_put(made, device)
            found[device].block_until_ready()
    arrays = [found[device] for device in places]
    return jax.make_array_from_single_device_arrays(shape, where, arrays)


def gathered(array: Any, index: Sequence[int | slice] | None = None) -> np.ndarray:
    """`array[index]` in the memory of this host; all processes call it, each for its own copy.

    Without an index it is the whole array. An array on this host's CPU alone is not copied.
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
    # JAX keeps a copy that a host asked for as long as its array: here that of a part alone.
    starts = [one.start for one in index]
    sizes = [one.stop - one.start for one in index]
    return np.asarray(jax.lax.dynamic_slice(data, starts, sizes))


def _summed(part: np.ndarray) -> np.ndarray:
    """The sum over all processes, of which one alone has each value and the others zero bits."""
    size = max(_SMALLEST, 1 << (part.nbytes - 1).bit_length())
    own = np.zeros((1, size // 4), np.uint32)
    own.view(np.uint8).reshape(-1)[: part.nbytes] = part.reshape(-1).view(np.uint8)
    mesh, add_up = _sum_over_processes()
    [device] = [one for one in mesh.devices.flat if one.process_index == jax.process_index()]
    stacked = jax.make_array_from_single_device_arrays(
        (mesh.size, size // 4),
        NamedSharding(mesh, PartitionSpec("process")),
        [jax.device_put(own, device)],
    )
    whole = np.asarray(add_up(stacked).addressable_data(0))
    return whole.view(np.uint8)[: part.nbytes].view(part.dtype).reshape(part.shape)


@functools.cache
def _sum_over_processes() -> tuple[Mesh, Any]:
    """A mesh of one device per process, and the sum over it."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    devices = [first[process] for process in sorted(first)]
    mesh = Mesh(np.array(devices), ("process",), axis_types=(jax.sharding.AxisType.Auto,))
    return mesh, jax.jit(lambda x: jnp.sum(x, axis=0), out_shardings=replicated(mesh))


def placement_table(tree: PyTree, mesh: Mesh | Layout) -> str:
    """A text table of the placement of each parameter: shape, dtype, axes, bytes per device.

    Where not all are annotated, it says who named the axes of each, which mesh axes leave it
    whole, and how to name the largest array that is placed by default. Arguments and errors: as
    `shardings`.
    """
    titles = ("parameter", "shape", "dtype", "logical axes", "mesh axes", "axes by")
    rows: list[tuple[str, ...]] = [(*titles, "bytes per device")]
    defaults: list[tuple[int, str, int]] = []  # bytes, path and rank
    layout, total = layout_of(mesh), 0
    on: Mesh = layout.mesh

    def add(path: tuple, named: Named, leaf: Any) -> None:
        nonlocal total
        spec = parameter_spec(named, leaf.shape, on, field=keystr(path))
        size = math.prod(NamedSharding(on, spec).shard_shape(leaf.shape)) * leaf.dtype.itemsize
        total += size
        shape = "×".join(map(str, leaf.shape))
        names = " ".join(name or "·" for name in named.names)
        large = [[axis for axis in mesh_axes([entry]) if on.shape[axis] > 1] for entry in spec]
        placed = " ".join("+".join(found) or "·" for found in large)
        whole = [] if named.is_asked_for else left_whole(named, leaf.shape, spec, on)
        by = ", ".join([named.by, *whole])
        rows.append((keystr(path), shape, str(leaf.dtype), names, placed, by, f"{size:,}"))
        if named.by == DEFAULT:
            defaults.append((leaf.size * leaf.dtype.itemsize, keystr(path), leaf.ndim))

    with use(layout.without_mesh):
        check_model(tree, layout)
        map_named(add, tree)
    column = titles.index("axes by")
    if {row[column] for row in rows[1:]} <= {ANNOTATION}:
        rows = [row[:column] + row[column + 1 :] for row in rows]
    rows.append(("all", *[""] * (len(rows[0]) - 2), f"{total:,}"))
    *widths, last = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for *cells, size in rows:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join([*padded, size.rjust(last)]))
    if defaults:
        _, largest, ndim = max(defaults, key=lambda found: found[0])
        own = " ".join(["_"] * (ndim - 2) + ["embed", "mlp"][:ndim])
        lines.append(
            f"default: nothing names the axes; name them by axes={{{largest!r}: {own!r}}}, "
            "patterns of paths to logical axes; strict=True refuses defaults."
        )
    return "\n".join(lines)
