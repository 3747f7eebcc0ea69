"""From logical axes to PartitionSpecs, by the rules."""

import math
from collections.abc import Iterable, Sequence

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from zoo.sharding.rules import (
    STORAGE_AXES,
    Rules,
    ShardingError,
    check_rules,
    mesh_axes,
    rules_in_use,
    unknown_axis,
)


def partition_spec(
    names: Sequence[str | None],
    mesh: Mesh | AbstractMesh,
    rules: Rules | None = None,
    *,
    without: frozenset[str] = frozenset(),
    field: str = "",
) -> PartitionSpec:
    """The PartitionSpec of logical axis names: each takes the mesh axes still free, left to right.

    None names an axis that is not sharded; mesh axes in `without` are left out.

    Raises:
        ShardingError: a name that the rules do not know, or rules for an axis that no mesh has.
    """
    check_rules(rules)
    rules = rules_in_use() if rules is None else rules
    used = set(without)
    entries: list[str | tuple[str, ...] | None] = []
    for name in names:
        if name is not None and name not in rules:
            raise unknown_axis(name, names, field, rules)
        axes = () if name is None else mesh_axes([rules[name]])
        free = tuple(axis for axis in axes if axis in mesh.axis_names and axis not in used)
        used.update(free)
        entries.append(free[0] if len(free) == 1 else free or None)
    return PartitionSpec(*entries)


def spec_in_use(names: Sequence[str | None], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The PartitionSpec of a parameter where it is used, which `gather` brings about."""
    split_the_batch = mesh_axes(partition_spec(["batch"], mesh))
    return partition_spec(names, mesh, without=STORAGE_AXES.union(split_the_batch))


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
