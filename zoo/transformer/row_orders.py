"""Orders of rows by their experts: rows taken in one, and each token's rows added up again.

Legend of suffixes: E embed, N tokens, C a token's choices, R routed rows.
"""

import functools
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from zoo.nn.products import custom_vjp
from zoo.nn.remat import KEPT

T = TypeVar("T")


class Order(NamedTuple):
    """A permutation of rows: where each comes from, and where each goes to."""

    from_R: Int[Array, "rows"]
    to_R: Int[Array, "rows"]

    @property
    def inverse(self) -> "Order":
        """From the new order back to the old one."""
        return Order(self.to_R, self.from_R)


def in_order(key_R: Int[Array, "rows"], num_keys: int) -> tuple[Order, Int[Array, "keys"]]:
    """The order of rows by their keys, and how many have each key below `num_keys`."""
    index_R = jnp.arange(len(key_R), dtype=jnp.int32)
    sorted_R, from_R = jax.lax.sort((key_R, index_R), num_keys=1)
    _, to_R = jax.lax.sort((from_R, index_R), num_keys=1)
    ends = jnp.searchsorted(sorted_R, jnp.arange(num_keys + 1, dtype=key_R.dtype))
    return _kept((Order(from_R, to_R), jnp.diff(ends).astype(jnp.int32)))


def by_expert_first(sizes_SX: Int[Array, "sources experts"], room: int) -> Order:
    """From blocks of rows by source and then by expert to those by expert and then by source."""

    def to(sizes_AB: Array) -> Array:
        begins_AB, begins_BA = _begins(sizes_AB), _begins(sizes_AB.T)
        # The rows behind all blocks stay where they are.
        distance = jnp.append((begins_BA.T - begins_AB).reshape(-1), jnp.int32(0))
        sizes = jnp.append(sizes_AB.reshape(-1), room - sizes_AB.sum())
        return jnp.arange(room, dtype=jnp.int32) + jnp.repeat(
            distance, sizes, total_repeat_length=room
        )

    return _kept(Order(to(sizes_SX.T), to(sizes_SX)))


def _begins(sizes_AB: Int[Array, "outer inner"]) -> Int[Array, "outer inner"]:
    """Where each block begins in the order of the sizes."""
    sizes = sizes_AB.reshape(-1)
    return (jnp.cumsum(sizes) - sizes).reshape(sizes_AB.shape)


def _kept(orders: T) -> T:
    """The same under the name of what remat always keeps: sorting again takes longer."""
    return jax.tree.map(lambda x: checkpoint_name(x, KEPT), orders)


@functools.partial(custom_vjp, nondiff_argnums=(2,))
def taken(x_NE: Array, order: Order, choices: int) -> Float[Array, "rows embed"]:
    """Rows in that order, each token's once per choice.

    The gradient is a gather too, and a sum over the choices, where JAX's own would be a scatter.
    """
    return x_NE.at[order.from_R // choices].get(mode="promise_in_bounds")


def _taken_forward(x_NE: Array, order: Order, choices: int) -> tuple[Array, Order]:
    return taken(x_NE, order, choices), order


def _taken_backward(choices: int, order: Order, g_RE: Array) -> tuple[Array, None]:
    g_RE = g_RE.at[order.to_R].get(mode="promise_in_bounds")
    g_NCE = g_RE.reshape(-1, choices, g_RE.shape[-1])
    return g_NCE.astype(jnp.float32).sum(1).astype(g_RE.dtype), None


taken.defvjp(_taken_forward, _taken_backward)


@custom_vjp
def summed(y_RE: Array, weights_NC: Array, order: Order) -> Float[Array, "tokens embed"]:
    """Each token's rows, weighted and added up. The gradient keeps to the order of the rows."""
    y_NCE = taken(y_RE, order.inverse, 1).reshape(*weights_NC.shape, y_RE.shape[-1])
    weights_NC1 = weights_NC[..., None].astype(jnp.float32)
    return (y_NCE.astype(jnp.float32) * weights_NC1).sum(1).astype(y_RE.dtype)


def _summed_forward(
    y_RE: Array, weights_NC: Array, order: Order
) -> tuple[Array, tuple[Array, Array, Order]]:
    return summed(y_RE, weights_NC, order), (y_RE, weights_NC, order)


def _summed_backward(
    residuals: tuple[Array, Array, Order], g_NE: Array
) -> tuple[Array, Array, None]:
    y_RE, weights_NC, order = residuals
    g_RE = taken(g_NE, order, weights_NC.shape[1]).astype(jnp.float32)
    weights_R1 = weights_NC.reshape(-1)[order.from_R, None].astype(jnp.float32)
    dweights_R = (g_RE * y_RE.astype(jnp.float32)).sum(1)[order.to_R]
    dweights_NC = dweights_R.reshape(weights_NC.shape).astype(weights_NC.dtype)
    return (g_RE * weights_R1).astype(y_RE.dtype), dweights_NC, None


summed.defvjp(_summed_forward, _summed_backward)
