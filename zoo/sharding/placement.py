"""Where the arrays of models, of optimizer states and of batches lie on a mesh."""

import math
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from zoo.sharding.axes import check_model, is_parameter, keystr, map_named
from zoo.sharding.foreign import ANNOTATION, DEFAULT, Named
from zoo.sharding.mesh import Layout, layout_of, use
from zoo.sharding.rules import LOGICAL_AXES, mesh_axes, rules_in_use
from zoo.sharding.specs import left_whole, num_shards, parameter_spec, partition_spec


def shardings(
    tree: PyTree,
    mesh: Mesh | Layout,
) -> Any:
    """The NamedSharding of each parameter; other leaves stay as they are.

    An array without an annotation has the names that a `Layout` gives it; Equinox's layers have
    names built in. Of any other array `fsdp`, `expert` and `context` each shard the largest
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


def like_parameters(
    tree: PyTree,
    parameters: PyTree,
    mesh: Mesh | Layout,
) -> Any:
    """The NamedSharding of optimizer state: each array as the parameter that its path ends in.

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


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of scalars and counters: whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh | Layout, ndim: int) -> NamedSharding:
    """The sharding of one array of a batch, of rank `ndim`: the first axis over the batch axes."""
    names = ("batch",) + (None,) * (ndim - 1) if ndim else ()
    return NamedSharding(layout_of(mesh).mesh, partition_spec(names, mesh))


def canonical(placed: jax.sharding.Sharding) -> Any:
    """A form of a sharding that is equal for equal placements, of a NamedSharding its mesh axes.

    XLA returns a spec that may name axes of size 1 or leave out trailing dimensions.
    """
    if not isinstance(placed, NamedSharding):
        return placed
    entries: list[tuple[str, ...]] = []
    for entry in placed.spec:
        axes = mesh_axes([entry])
        entries.append(tuple(axis for axis in axes if placed.mesh.shape[axis] > 1))
    while entries and not entries[-1]:
        entries.pop()
    return tuple(entries)


def mesh_of(tree: PyTree) -> Mesh | None:
    """The mesh that a model or state was placed on; None if on one device, without a mesh."""
    for leaf in jax.tree.leaves(tree):
        placed = getattr(leaf, "sharding", None)
        if isinstance(placed, NamedSharding) and isinstance(placed.mesh, Mesh):
            return placed.mesh
    return None


def num_batch_parts(mesh: Mesh | AbstractMesh | Layout | None) -> int:
    """Into how many parts the mesh cuts a batch; without one it is whole."""
    layout = layout_of(mesh)
    return 1 if layout.mesh is None else num_shards(partition_spec(["batch"], layout), layout.mesh)


def max_parameter_parts(mesh: Mesh | AbstractMesh) -> int:
    """Into how many parts the mesh can cut a parameter, by `RULES`."""
    axes = mesh_axes(axis.mesh for axis in LOGICAL_AXES.values() if axis.kind != "activation")
    return num_shards(set(axes), mesh)


def placement_table(
    tree: PyTree,
    mesh: Mesh | Layout,
) -> str:
    """A text table of the placement of each parameter: shape, dtype, axes, bytes per device.

    Where not all are annotated, it says who named the axes of each, which mesh axes leave it
    whole, and how to name the ones that are placed by default. Arguments and errors are those of
    `shardings`.
    """
    titles = ("parameter", "shape", "dtype", "logical axes", "mesh axes", "axes by")
    rows: list[tuple[str, ...]] = [(*titles, "bytes per device")]
    by_default: list[tuple[str, int]] = []
    layout, total = layout_of(mesh), 0
    on: Mesh = layout.mesh

    def add(path: tuple, named: Named, leaf: Any) -> None:
        nonlocal total
        spec = parameter_spec(named, leaf.shape, on, field=keystr(path))
        shard = NamedSharding(on, spec).shard_shape(leaf.shape)
        size = math.prod(shard) * leaf.dtype.itemsize
        total += size
        shape = "×".join(map(str, leaf.shape))
        names = " ".join(name or "·" for name in named.names)
        large = [[axis for axis in mesh_axes([entry]) if on.shape[axis] > 1] for entry in spec]
        placed = " ".join("+".join(found) or "·" for found in large)
        whole = [] if named.is_asked_for else left_whole(named, leaf.shape, spec, on)
        by = ", ".join([named.by, *whole])
        rows.append((keystr(path), shape, str(leaf.dtype), names, placed, by, f"{size:,}"))
        if named.by == DEFAULT:
            by_default.append((keystr(path), leaf.ndim))

    with use(layout.without_mesh):
        check_model(tree, layout)
        map_named(add, tree)
        legend = _legend(by_default, on)
    column = titles.index("axes by")
    if {row[column] for row in rows[1:]} <= {ANNOTATION}:
        rows = [row[:column] + row[column + 1 :] for row in rows]
    rows.append(("all", *[""] * (len(rows[0]) - 2), f"{total:,}"))
    return "\n".join([_table(rows), *legend])


def _legend(by_default: list[tuple[str, int]], mesh: Mesh) -> list[str]:
    """The meaning of "default", and the way to name the axes of such arrays: paths and ranks."""
    if not by_default:
        return []
    axes = mesh_axes([rules_in_use().get("unnamed", LOGICAL_AXES["unnamed"])])
    large = [axis for axis in axes if mesh.shape.get(axis, 1) > 1]
    each = f"{' and '.join(large)} {'shards' if len(large) == 1 else 'each shard'}"
    placed = f"{each} a matrix along the largest dimension that divides, and vectors are"
    path, rank = max(by_default, key=lambda found: found[1])
    names = " ".join(["_"] * (rank - 2) + ["embed", "mlp"][:rank])
    return [
        f"default: nothing names the axes, so {placed if large else 'the array is'} replicated.",
        f"Name them by axes={{{path!r}: {names!r}}}, patterns of paths to logical axes; "
        "strict=True refuses defaults.",
    ]


def _table(rows: list[tuple[str, ...]]) -> str:
    """Rows as text: columns of one width, the last one to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False))
        + "  "
        + row[-1].rjust(widths[-1])
        for row in rows
    )
