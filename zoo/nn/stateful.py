"""Values that a step moves without an optimizer: States, and biases that even out experts.

They keep their dtypes where a model is cast. An `eqx.nn.State`, such as the statistics of a batch
norm, is spent by its `set`, so this module hands on copies.
"""

import dataclasses
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, PyTree

from zoo.nn.products import cast_array, is_operand
from zoo.sharding.axes import keystr

Tree = TypeVar("Tree")


class InFloat32(eqx.Module):
    """Parameters that stay in float32 in a model of any dtype: small differences count in them."""


class LoadBias(InFloat32):
    """A router's bias for each expert: added to the scores that choose experts, not to weights.

    It evens out their load (Wang et al. 2024, DeepSeek-V3).
    No optimizer moves it. Each step takes `rate` off those of experts with more than the mean load,
    and adds it to the others'. It stays in fp32, as small steps ask for.
    """

    value: Float[Array, "routes"]
    rate: float = eqx.field(static=True)


class Balance(NamedTuple):
    """The terms of a loss that routers give, float32[batch] each: weighted sums over each row."""

    load: Float[Array, "batch"]
    """The load of experts, as `zoo.transformer.moe.balance` says."""
    z: Float[Array, "batch"]
    """The squares of the logarithms of the routers' partition functions (Zoph et al. 2022)."""
    error: Float[Array, "batch"]
    """Zero, with the experts' loads above the mean as gradients for their `LoadBias`."""


def is_load_bias(x: Any) -> bool:
    """Whether a node of a model is a `LoadBias`."""
    return isinstance(x, LoadBias)


def moved(model: PyTree, errors: PyTree) -> Any:
    """A model, or a part, with each `LoadBias` a step on, by the gradient in its place."""

    def visit(node: Any, error: Any) -> Any:
        if not is_load_bias(node) or error.value is None:
            return node
        # A load that is even but for rounding, which differs by microbatches, moves nothing.
        is_off = jnp.abs(error.value) > 1e-6 * jnp.abs(error.value).max()
        change = jnp.where(is_off, jnp.sign(error.value), 0.0) * node.rate
        return eqx.tree_at(lambda bias: bias.value, node, node.value - change)

    return jax.tree.map(visit, model, errors, is_leaf=is_load_bias)


def is_kept(x: Any) -> bool:
    """Whether a node of a model has dtypes of its own, whatever the parameters' are.

    An `InFloat32` and an `eqx.nn.State` have: small steps of theirs would be lost otherwise.
    """
    return isinstance(x, InFloat32 | eqx.nn.State)


def kept_dtypes(model: Any) -> dict[str, Any]:
    """The dtype of each array of the nodes that are kept, by dotted path; None: as it is stored."""
    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_kept)
    return {
        keystr((*path, *inner)): jnp.dtype(jnp.float32) if isinstance(node, InFloat32) else None
        for path, node in nodes
        if is_kept(node)
        for inner, _ in jax.tree_util.tree_leaves_with_path(node)
    }


def cast(tree: Tree, dtype: DTypeLike) -> Tree:
    """Cast the floating-point arrays of a tree, and leave the rest, complex ones too, as it is.

    Nodes for which `is_kept` holds are left too.
    """

    def visit(x: Any) -> Any:
        return x if is_kept(x) else cast_array(x, dtype)

    return jax.tree.map(visit, tree, is_leaf=lambda x: is_operand(x) or is_kept(x))


def is_state(x: Any) -> bool:
    """Whether a node of a model is an `eqx.nn.State`."""
    return isinstance(x, eqx.nn.State)


def states(model: PyTree) -> list[eqx.nn.State]:
    """The States of a model, in its order."""
    nodes = jax.tree.leaves(model, is_leaf=is_state)
    return [_copied(x) for x in nodes if is_state(x)]


def with_states(model: Tree, new: list[eqx.nn.State]) -> Tree:
    """The model with other States in the places of its own."""
    remaining = iter(new)
    return jax.tree.map(
        lambda x: _copied(next(remaining)) if is_state(x) else x, model, is_leaf=is_state
    )


def _copied(state: eqx.nn.State) -> eqx.nn.State:
    """The same arrays, none weakly typed: a restored one is not, and Equinox tells them apart."""
    is_weak = lambda x: eqx.is_array(x) and getattr(x, "weak_type", False)  # noqa: E731
    return jax.tree.map(lambda x: x.astype(x.dtype) if is_weak(x) else x, state)


class _BatchNorm(eqx.nn.BatchNorm):
    """A batch norm in fp32 between activations of another dtype."""

    def __call__(self, x: Array, state: eqx.nn.State, **options: Any) -> tuple[Array, eqx.nn.State]:
        y, state = super().__call__(x.astype(jnp.float32), state, **options)
        return y.astype(x.dtype), state


def cast_around(model: Tree, dtype: DTypeLike) -> Tree:
    """A model cast to a dtype, but for its States, and for batch norms.

    Those compute in fp32: a running mean in bf16 would not move by 1%.

    Raises:
        ValueError: a spectral norm, whose power iteration is in fp32, in another dtype.
    """

    def is_node(x: Any) -> bool:
        return is_kept(x) or is_operand(x) or isinstance(x, eqx.nn.BatchNorm | eqx.nn.SpectralNorm)

    def visit(x: Any) -> Any:
        if is_state(x):
            return _copied(x)
        if isinstance(x, eqx.nn.SpectralNorm) and jnp.dtype(dtype) != jnp.float32:
            raise ValueError(
                f"eqx.nn.SpectralNorm in {jnp.dtype(dtype)}: its iteration is in float32; take "
                "precision='fp32'"
            )
        if type(x) is not eqx.nn.BatchNorm:
            return cast(x, dtype)
        new: Any = object.__new__(_BatchNorm)  # which adds no field
        for field in dataclasses.fields(x):
            object.__setattr__(new, field.name, getattr(x, field.name))
        return new

    return jax.tree.map(visit, model, is_leaf=is_node)
