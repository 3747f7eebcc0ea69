"""A loss over large logits, one chunk of time after another, with its gradient computed forward.

The gradient of a sum is known up to a factor as soon as the logits are; keeping it in place of the
logits takes a matrix, and no product is run twice (as in the Liger Kernel, Hsu et al. 2024). In
fp16 that factor holds the loss scale, without which a gradient may be too large or too small to
keep: there the backward pass computes it, for one more product.

Legend of suffixes: C chunks, P parts that the mesh cuts a batch and its rows into, R rows of a
part, T time of a chunk, E embed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from zoo import sharding
from zoo.nn.products import custom_vjp
from zoo.sharding.axes import map_parameters

# From a readout, its inputs, targets and weights to a total, and further sums, without gradients.
Loss = Callable[[PyTree, Array, PyTree, Array], tuple[Array, PyTree]]


def chunked(
    loss: Loss,
    count: int,
    readout: PyTree,
    x_BTE: Float[Array, "batch seq embed"],
    targets: PyTree[Array],
    weights_BT: Float[Array, "batch seq"],
) -> tuple[Float[Array, ""], PyTree]:
    """The total and the sums of `loss(readout, x, targets, weights)` over equal chunks of time.

    There are `count` chunks. The arrays of `targets`, [batch, seq, …], have no gradient.
    """
    targets = jax.tree.map(lambda x: cut(x, count), targets)
    total, sums = _total(loss, readout, cut(x_BTE, count), targets, cut(weights_BT, count))
    return total, jax.lax.stop_gradient(sums)


# A chunk has an equal stretch of each part, which its device cuts for itself.
PARTS = ("batch", "inner_seq")


def cut(x: Array, count: int) -> Array:
    """From [batch, seq, …] to [chunks, parts, rows, time, …]."""
    of_batch, of_time = map(sharding.num_parts, PARTS)
    rows, time = x.shape[0] // of_batch, x.shape[1] // (of_time * count)
    x = x.reshape(of_batch, rows, of_time, count, time, *x.shape[2:])
    x = jnp.moveaxis(x, (3, 2), (0, 2))
    return x.reshape(count, of_batch * of_time, rows, time, *x.shape[5:])


def chunked_values(
    function: Callable[[Array, Array], PyTree[Array]],
    count: int,
    readout: PyTree,
    x_BTE: Float[Array, "batch seq embed"],
    targets_BT: Int[Array, "batch seq"],
) -> PyTree[Array]:
    """`function(readout(x), targets)`, [batch, seq], over `count` equal chunks of time."""
    one = each_part(lambda readout, x, targets: function(readout(x), targets))
    chunks = cut(x_BTE, count), cut(targets_BT, count)
    values = jax.lax.map(lambda chunk: one(readout, *chunk), chunks)
    return jax.tree.map(joined, values)


def joined(x_CPRT: Array) -> Array:
    """From [chunks, parts, rows, time], as `cut` made them, to [batch, seq]."""
    of_batch, of_time = map(sharding.num_parts, PARTS)
    count, _, rows, time = x_CPRT.shape
    x = jnp.moveaxis(x_CPRT.reshape(count, of_batch, of_time, rows, time), (0, 2), (3, 2))
    return x.reshape(of_batch * rows, of_time * count * time)


@partial(custom_vjp, nondiff_argnums=(0,))
def _total(
    loss: Loss, readout: PyTree, x_CPRTE: Array, targets: PyTree, weights: Array
) -> tuple[Array, PyTree]:
    def add(total: Array, chunk: tuple) -> tuple[Array, PyTree]:
        totals, sums = each_part(loss)(readout, *chunk)
        return total + totals.sum(), sums

    total, sums = jax.lax.scan(add, jnp.float32(0), (x_CPRTE, targets, weights))
    return total, _added(sums)


def _added(sums: PyTree) -> PyTree:
    """The sums over all chunks and parts, given each one's, [chunks, parts, …]."""
    return jax.tree.map(lambda x: x.sum((0, 1)), sums)


def each_part(function: Callable) -> Callable:
    """The function, for each part of a batch on the devices that have it."""

    def mapped(readout: PyTree, *chunk: PyTree) -> Any:
        with sharding.mapped(*PARTS) as axes:
            in_axes = (None, *(0 for _ in chunk))
            over = jax.vmap(function, in_axes=in_axes, spmd_axis_name=axes)
            return over(readout, *chunk)

    return mapped


def _gradients(
    loss: Loss, inputs: tuple[PyTree, PyTree, Array, PyTree, Array], factor: Float[Array, ""]
) -> tuple[tuple[Array, PyTree], tuple]:
    """The total and the sums, and the gradients of `factor` times the total.

    The readout's are for each part by itself. `inputs` begin with the readout's trained parameters
    and its frozen ones, which have none.
    """
    trained, frozen, x_CPRTE, targets, weights = inputs

    def one(readout: tuple[PyTree, PyTree], x: Array, targets: PyTree, weights: Array) -> tuple:
        trained, frozen = readout

        def total_of(trained: PyTree, x: Array, weights: Array) -> tuple[Array, PyTree]:
            return loss(eqx.combine(trained, frozen), x, targets, weights)

        total, gradient, sums = jax.vjp(total_of, trained, x, weights, has_aux=True)
        return total, sums, *gradient(factor.astype(total.dtype))

    def add(carry: tuple, chunk: tuple) -> tuple[tuple, tuple]:
        total, of_readout = carry
        totals, sums, new, *rest = each_part(one)((trained, frozen), *chunk)
        # Each part's own, or every chunk would reduce a matrix over the network.
        of_readout = jax.tree.map(lambda old, new: old + new.astype(old.dtype), of_readout, new)
        return (total + totals.sum(), of_readout), (sums, *rest)

    def zeros(path: tuple, names: tuple, x: Array) -> Array:
        empty = jnp.zeros((x_CPRTE.shape[1], *x.shape), jnp.float32)
        return sharding.constrain(empty, PARTS, *names)

    start = (jnp.float32(0), map_parameters(zeros, trained))
    (total, of_readout), (sums, *rest) = jax.lax.scan(add, start, (x_CPRTE, targets, weights))
    of_readout = jax.tree.map(lambda d, x: d.astype(x.dtype), of_readout, trained)
    return (total, _added(sums)), (of_readout, *rest)


def _forward(loss: Loss, readout: PyTree, *others: Any, needed: Any) -> tuple[tuple, tuple]:
    """The total and sums, and those of the inputs and their gradients that `_backward` takes."""
    inputs = (*eqx.partition(readout, needed[0]), *others)
    if others[0].dtype == jnp.float16:
        return _total(loss, readout, *others), (inputs, None)
    found, gradients = _gradients(loss, inputs, jnp.float32(1))
    return found, (None, gradients)


def _backward(loss: Loss, residuals: tuple, gs: tuple[Array, PyTree]) -> tuple:
    (inputs, gradients), (g, _) = residuals, gs
    if gradients is None:
        _, gradients = _gradients(loss, inputs, g)
        g = jnp.float32(1)
    of_readout, of_x, of_weights = gradients

    def scaled(x: Array) -> Array:
        return (x.astype(jnp.float32) * g).astype(x.dtype)

    of_readout = added_over_parts(of_readout, scaled)
    return of_readout, scaled(of_x), None, scaled(of_weights)


def added_over_parts(of_readout: PyTree, scaled: Callable = lambda x: x) -> PyTree:
    """The gradient of a readout, given each part's, [parts, …]."""

    def reduced(path: tuple, names: tuple, d: Array) -> Array:
        # Every device gets from each part what it keeps, and adds that up; XLA would reduce the
        # whole to every device, and cut it then, for twice the bytes.
        parts_last = sharding.constrain(jnp.moveaxis(d, 0, -1), *names[1:], PARTS)
        return scaled(parts_last.sum(-1, dtype=jnp.float32)).astype(d.dtype)

    return map_parameters(reduced, of_readout)


_total.defvjp(_forward, _backward, by_need=True)
