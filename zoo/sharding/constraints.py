"""Constraints on activations, named by logical axes; without a mesh they do nothing."""

import contextlib
from collections.abc import Iterator

import jax
from jaxtyping import Array

from zoo.sharding.mesh import Layout, use
from zoo.sharding.rules import ShardingError, mesh_axes, without_axes
from zoo.sharding.specs import Name, check_divides, num_shards, partition_spec


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


def split_by(name: str) -> str:
    """The mesh axes that split a logical axis, such as "context=2"; "" if none does."""
    if (parts := num_parts(name)) == 1:
        return ""
    axes = mesh_axes(partition_spec([name], jax.sharding.get_abstract_mesh()))
    return f"{'*'.join(axes)}={parts}"


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
