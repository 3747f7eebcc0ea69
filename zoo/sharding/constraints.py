"""Constraints on activations, named by logical axes; without a mesh they do nothing."""

import contextlib
from collections.abc import Iterator

import jax
from jaxtyping import Array

from zoo.sharding.rules import Axis, Rule, ShardingError, kind_of, mesh_axes, rules_in_use, use
from zoo.sharding.specs import check_divides, num_shards, partition_spec


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


def constrain(x: Array, *names: str | None) -> Array:
    """Shard an activation by logical axis names, one per dimension; without a mesh, the identity.

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
def mapped(name: str) -> Iterator[tuple[str, ...] | None]:
    """Within, `jax.vmap` over a logical axis has the mesh axes of that axis to itself.

    Yields them for `spmd_axis_name`; None where nothing shards it.
    """
    if not is_sharding():
        yield None
        return
    mesh = jax.sharding.get_abstract_mesh()
    [entry] = partition_spec([name], mesh)
    taken = mesh_axes([entry])

    def rest(name: str, rule: Rule) -> Axis:
        free = tuple(axis for axis in mesh_axes([rule]) if axis not in taken)
        return Axis(free, kind_of(name) or "dimension")

    with use(None, {name: rest(name, rule) for name, rule in rules_in_use().items()}):
        yield taken or None
