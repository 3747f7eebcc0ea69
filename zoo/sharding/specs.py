"""From logical axes to PartitionSpecs, by the rules, and activations constrained to them."""

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from zoo.sharding.axes import Named
from zoo.sharding.mesh import ShardingError
from zoo.sharding.rules import (
    EXPERT_AXES,
    LOGICAL_AXES,
    STORAGE_AXES,
    Layout,
    in_force,
    layout_of,
    mesh_axes,
    rules_in_use,
    unknown_axis,
    use,
    without_axes,
)

# Of a dimension: a logical axis, several that were merged into one, or none.
Name = str | tuple[str, ...] | None


def partition_spec(
    names: Sequence[Name],
    mesh: Mesh | AbstractMesh | Layout,
    *,
    without: frozenset[str] = frozenset(),
    field: str = "",
) -> PartitionSpec:
    """The PartitionSpec of logical axis names: each takes the mesh axes still free, left to right.

    None is an axis that is not sharded, and a tuple of names one that merges several. Mesh axes in
    `without`, and of size 1, are left out.

    Raises:
        ShardingError: a name that the rules do not know.
    """
    layout = layout_of(mesh)
    rules = rules_in_use() if layout.rules is None else layout.rules
    used = set(without)
    entries: list[str | tuple[str, ...] | None] = []
    for merged in names:
        parts = (merged,) if isinstance(merged, str) else merged or ()
        for name in parts:
            if name not in rules:
                raise unknown_axis(name, parts, field, rules)
        axes = mesh_axes(rules[name] for name in parts)
        free = tuple(
            axis for axis in axes if layout.mesh.shape.get(axis, 1) > 1 and axis not in used
        )
        used.update(free)
        entries.append(free[0] if len(free) == 1 else free or None)
    return PartitionSpec(*entries)


def parameter_spec(
    named: Named, shape: Sequence[int], mesh: Mesh | AbstractMesh, *, field: str
) -> PartitionSpec:
    """The PartitionSpec that a parameter is stored with.

    Where nobody asked for its names, a mesh axis goes to the largest dimension that has it in its
    rule and that it divides, or to none.

    Raises:
        ShardingError: as `partition_spec`; a size that the mesh does not divide where somebody
            asked for its name, and anywhere within `use(Layout(strict=True))`. `field` names the
            parameter.
    """
    if named.is_asked_for:
        spec = partition_spec(named.names, mesh, field=field)
        check_divides(field, shape, spec, mesh)
        return spec
    entries: list[tuple[str, ...]] = [() for _ in shape]
    for axis, dimensions in _wanted(named, mesh).items():
        parts = mesh.shape[axis]
        fits = [i for i in dimensions if shape[i] % (num_shards([entries[i]], mesh) * parts) == 0]
        if fits:
            largest = max(fits, key=lambda i: (shape[i], -i))
            entries[largest] += (axis,)
    spec = PartitionSpec(*(each[0] if len(each) == 1 else each or None for each in entries))
    if in_force.get().strict and (whole := left_whole(named, shape, spec, mesh)):
        raise ShardingError(
            f"{field} of shape {tuple(shape)}: {' and '.join(whole)} of the mesh, and strict=True "
            f"does not leave it whole; change the size or the mesh, or the names that it has by "
            f"{named.by}, as axes={{{field!r}: 'embed mlp'}}"
        )
    return spec


def left_whole(
    named: Named, shape: Sequence[int], spec: PartitionSpec, mesh: Mesh | AbstractMesh
) -> list[str]:
    """The mesh axes that the names of a parameter ask for, and that divide none of its sizes."""
    used = mesh_axes(spec)
    return [
        f"{axis}={mesh.shape[axis]} does not divide {' or '.join(str(shape[i]) for i in wanted)}"
        for axis, wanted in _wanted(named, mesh).items()
        if wanted and axis not in used
    ]


def _wanted(named: Named, mesh: Mesh | AbstractMesh) -> dict[str, list[int]]:
    """The dimensions of a parameter that each mesh axis may shard."""
    # A user's rules may leave these names out; the table then holds for them.
    table = {**LOGICAL_AXES, **rules_in_use()}
    mapped = [() if name is None else mesh_axes([table.get(name)]) for name in named.names]
    large = (axis for axis in mesh.axis_names if mesh.shape[axis] > 1)
    return {axis: [i for i, axes in enumerate(mapped) if axis in axes] for axis in large}


def spec_in_use(names: Sequence[str | None], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The PartitionSpec of a parameter where it is used, which `unshard` brings about."""
    kept = EXPERT_AXES if "experts" in names else frozenset()
    kept &= frozenset(mesh_axes(partition_spec(["experts"], mesh))) if kept else kept
    return partition_spec(names, mesh, without=_gathered(mesh) - kept)


def in_use(stored: PartitionSpec, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The PartitionSpec, where it is used, of a parameter that is stored with `stored`."""
    kept = (tuple(a for a in mesh_axes([each]) if a not in _gathered(mesh)) for each in stored)
    return PartitionSpec(*(axes or None for axes in kept))


def between(stored: PartitionSpec, used: PartitionSpec) -> list[PartitionSpec]:
    """The PartitionSpecs between two, each without one more axis; none if no dimension loses two.

    TPUs gather over several axes of a slice at once by an all-reduce, of twice the bytes.
    """
    entries, kept = ([mesh_axes([each]) for each in spec] for spec in (stored, used))
    steps: list[PartitionSpec] = []
    while any(len(axes) > len(rest) + 1 for axes, rest in zip(entries, kept, strict=True)):
        entries = [
            axes[:-1] if len(axes) > len(rest) + 1 else axes
            for axes, rest in zip(entries, kept, strict=True)
        ]
        steps.append(PartitionSpec(*(axes or None for axes in entries)))
    return steps


def _gathered(mesh: Mesh | AbstractMesh) -> frozenset[str]:
    """The mesh axes that a parameter is gathered over: axes that only store it, or split rows."""
    return STORAGE_AXES.union(mesh_axes(partition_spec(["batch"], mesh)))


def check_divides(
    field: str, shape: Sequence[int], spec: PartitionSpec, mesh: Mesh | AbstractMesh
) -> None:
    """Refuse a size that the mesh axes of its spec do not divide; `field` names the array."""
    for size, entry in zip(shape, spec, strict=True):
        parts = num_shards([entry], mesh)
        if size % parts:
            axes = "*".join(mesh_axes([entry]))
            raise ShardingError(
                f"{field} of shape {tuple(shape)}: the size {size} is not divisible by "
                f"{axes}={parts} of the mesh; change the size, the mesh or the rules"
            )


def num_shards(spec: Iterable[str | tuple[str, ...] | None], mesh: Mesh | AbstractMesh) -> int:
    """Into how many parts a spec, or some entries of one, cuts an array."""
    return math.prod(mesh.shape[axis] for axis in mesh_axes(spec))


def canonical(placed: jax.sharding.Sharding) -> Any:
    """A form of a sharding that is equal for equal placements: for a NamedSharding, its mesh axes.

    XLA returns a spec that may name axes of size 1 or leave out trailing dimensions.
    """
    if not isinstance(placed, NamedSharding):
        return placed
    entries = [
        tuple(axis for axis in mesh_axes([entry]) if placed.mesh.shape[axis] > 1)
        for entry in placed.spec
    ]
    while entries and not entries[-1]:
        entries.pop()
    return tuple(entries)


def is_sharding() -> bool:
    """Whether a mesh of several devices is set."""
    mesh = jax.sharding.get_abstract_mesh()
    return not (mesh.empty or mesh.size == 1)


def num_parts(*names: str | None) -> int:
    """Into how many parts the mesh that is set cuts an activation of these logical axes."""
    if not is_sharding():
        return 1
    mesh = jax.sharding.get_abstract_mesh()
    return num_shards(partition_spec(names, mesh), mesh)


def num_copies() -> int:
    """Into how many parts the outermost axes cut a batch, if parameters are alike over them.

    Several slices are such parts. 1 where no other axis cuts the batch, or none at all.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = mesh_axes(partition_spec(["batch"], mesh)) if is_sharding() else ()
    alike = tuple(itertools.takewhile(lambda axis: axis not in STORAGE_AXES | EXPERT_AXES, axes))
    return num_shards([alike], mesh) if len(alike) < len(axes) else 1


def split_by(name: str) -> str:
    """The mesh axes that split a logical axis, such as "context=2"; "" if none does."""
    parts = num_parts(name)
    axes = mesh_axes(partition_spec([name], jax.sharding.get_abstract_mesh()))
    return f"{'*'.join(axes)}={parts}" if parts > 1 else ""


def constrain(x: Array, *names: Name) -> Array:
    """Shard an activation by logical axis names, one per dimension; without a mesh, the identity.

    A dimension that merges several has a tuple of their names.

    Raises:
        ShardingError: a number of names that is not the rank, an unknown name, or a size that
            the mesh axis does not divide.
    """
    if not is_sharding():
        return x
    mesh = jax.sharding.get_abstract_mesh()
    if len(names) != x.ndim:
        raise ShardingError(f"an activation of shape {x.shape} is named {names}")
    spec = partition_spec(names, mesh)
    check_divides(f"the activation {names}", x.shape, spec, mesh)
    return jax.lax.with_sharding_constraint(x, spec)


@contextlib.contextmanager
def mapped(*names: str) -> Iterator[tuple[str, ...] | None]:
    """Within, `jax.vmap` over a logical axis, or some merged, has their mesh axes to itself.

    Yields them for `spmd_axis_name`; None where nothing shards it.
    """
    if not is_sharding():
        yield None
        return
    mesh = jax.sharding.get_abstract_mesh()
    [entry] = partition_spec([names], mesh)
    taken = mesh_axes([entry])
    with use(Layout(rules=without_axes(taken))):
        yield taken or None
