"""A loss over large logits, one chunk of time after another, with its gradient computed forward.

The gradient of a sum is known up to a factor as soon as the logits are; keeping it in their place
takes a matrix and no logits, and no product is run twice. (Liger Kernel, Hsu et al. 2024, does so.)
In fp16 that factor holds the loss scale, without which a gradient may be too large or too small to
keep: there the backward pass computes it, for one more product.

Legend of suffixes: C chunks, P parts that the mesh cuts a batch into, R rows of a part, T time of a
chunk, E embed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from zoo import sharding
from zoo.nn.derivatives import custom_vjp
from zoo.sharding.axes import map_parameters

Loss = Callable[[Array, Array, Array], tuple[Array, Array]]


def chunked(
    loss: Loss,
    count: int,
    readout: PyTree,
    x_BTE: Float[Array, "batch seq embed"],
    targets_BT: Int[Array, "batch seq"],
    weights_BT: Float[Array, "batch seq *sources"],
) -> Float[Array, "*sources"]:
    """The total of `loss(readout(x), targets, weights)` over `count` equal chunks of time.

    With weights [batch, seq, sources] it is one per source, of which only the sum has a gradient.
    """
    parts = sharding.num_parts("batch")

    def cut(x: Array) -> Array:
        rows, time = x.shape[0] // parts, x.shape[1] // count
        x = x.reshape(parts, rows, count, time, *x.shape[2:])
        return jnp.moveaxis(x, 2, 0)

    return _total(loss, readout, cut(x_BTE), cut(targets_BT), cut(weights_BT))


@partial(custom_vjp, nondiff_argnums=(0,))
def _total(loss: Loss, readout: PyTree, x_CPRTE: Array, targets: Array, weights: Array) -> Array:
    def one(readout: PyTree, x: Array, targets: Array, weights: Array) -> Array:
        return loss(readout(x), targets, weights)[0]

    def add(total: Array, chunk: tuple) -> tuple[Array, None]:
        return total + _each_part(one)(readout, *chunk).sum(0), None

    return jax.lax.scan(add, _nothing(weights), (x_CPRTE, targets, weights))[0]


def _nothing(weights: Array) -> Array:
    """The total of no chunk, for weights [C, P, R, T] or [C, P, R, T, sources]."""
    return jnp.float32(0) if weights.ndim == 4 else jnp.zeros(weights.shape[4:])


def _each_part(function: Callable) -> Callable:
    """The function, for each part of a batch where that part is."""

    def mapped(readout: PyTree, *chunk: Array) -> Any:
        with sharding.mapped("batch") as axes:
            over = jax.vmap(function, in_axes=(None, 0, 0, 0), spmd_axis_name=axes)
            return over(readout, *chunk)

    return mapped


def _gradients(
    loss: Loss, inputs: tuple[PyTree, PyTree, Array, Array, Array], factor: Float[Array, ""]
) -> tuple[Array, tuple]:
    """The total, and the gradients of `factor` times it; the readout's for each part by itself.

    `inputs` begin with the readout's trained parameters and its frozen ones, which have none.
    """
    trained, frozen, x_CPRTE, targets, weights = inputs

    def one(readout: tuple[PyTree, PyTree], x: Array, targets: Array, weights: Array) -> tuple:
        trained, frozen = readout

        def total_of(trained: PyTree, x: Array, weights: Array) -> Array:
            return loss(eqx.combine(trained, frozen)(x), targets, weights)[0]

        total, gradient = jax.vjp(total_of, trained, x, weights)
        return total, *gradient(jnp.broadcast_to(factor.astype(total.dtype), total.shape))

    def add(carry: tuple, chunk: tuple) -> tuple[tuple, tuple]:
        total, of_readout = carry
        totals, new, *rest = _each_part(one)((trained, frozen), *chunk)
        # Each part's own, or every chunk would reduce a matrix over the network.
        of_readout = jax.tree.map(lambda old, new: old + new.astype(old.dtype), of_readout, new)
        return (total + totals.sum(0), of_readout), tuple(rest)

    def zeros(path: tuple, names: tuple, x: Array) -> Array:
        empty = jnp.zeros((x_CPRTE.shape[1], *x.shape), jnp.float32)
        return sharding.constrain(empty, "batch", *names)

    start = (_nothing(weights), map_parameters(zeros, trained))
    (total, of_readout), (of_x, of_weights) = jax.lax.scan(add, start, (x_CPRTE, targets, weights))
    of_readout = jax.tree.map(lambda d, x: d.astype(x.dtype), of_readout, trained)
    return total, (of_readout, of_x, of_weights)


def _forward(loss: Loss, readout: PyTree, *others: Array, needed: Any) -> tuple[Array, tuple]:
    """The total, and those of the inputs and their gradients that the backward pass takes."""
    inputs = (*eqx.partition(readout, needed[0]), *others)
    if others[0].dtype == jnp.float16:
        return _total(loss, readout, *others), (inputs, None)
    total, gradients = _gradients(loss, inputs, jnp.float32(1))
    return total, (None, gradients)


def _backward(loss: Loss, residuals: tuple, g: Array) -> tuple:
    inputs, gradients = residuals
    if g.ndim:  # of sources, each of which has that of their sum
        g = g[0]
    if gradients is None:
        _, gradients = _gradients(loss, inputs, g)
        g = jnp.float32(1)
    of_readout, of_x, of_weights = gradients

    def scaled(x: Array) -> Array:
        return (x.astype(jnp.float32) * g).astype(x.dtype)

    def reduced(path: tuple, names: tuple, d: Array) -> Array:
        # Every device gets from each part what it keeps, and adds that up; XLA would reduce the
        # whole to every device, and cut it then, for twice the bytes.
        parts_last = sharding.constrain(jnp.moveaxis(d, 0, -1), *names[1:], "batch")
        return scaled(parts_last.sum(-1, dtype=jnp.float32)).astype(d.dtype)

    of_readout = map_parameters(reduced, of_readout)
    return of_readout, scaled(of_x), None, scaled(of_weights)


_total.defvjp(_forward, _backward, by_need=True)
