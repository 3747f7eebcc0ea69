"""A bias that evens out the load of a mixture's experts (Wang et al. 2024, DeepSeek-V3)."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree


class LoadBias(eqx.Module):
    """A router's bias for each expert: added to its scores as it chooses, not to their weights.

    No optimizer moves it. Each step takes `rate` off those of experts with more than the mean load,
    and adds it to the others'. It stays in fp32, as small steps ask for.
    """

    value: Float[Array, "routes"]
    rate: float = eqx.field(static=True)


class Balance(NamedTuple):
    """The terms of a loss that routers give, float32[batch] each: weighted sums over each row."""

    load: Float[Array, "batch"]
    """`moe.load_balance`."""
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
        # A load that is even but for rounding, as of other microbatches, moves nothing.
        is_off = jnp.abs(error.value) > 1e-6 * jnp.abs(error.value).max()
        change = jnp.where(is_off, jnp.sign(error.value), 0.0) * node.rate
        return eqx.tree_at(lambda bias: bias.value, node, node.value - change)

    return jax.tree.map(visit, model, errors, is_leaf=is_load_bias)
