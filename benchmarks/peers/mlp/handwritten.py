"""The same maths in plain jax.numpy, without any model library, tuned as well as we can."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.peers import jax_step
from benchmarks.peers.common import Built, Precision
from benchmarks.peers.mlp import given
from benchmarks.peers.mlp.given import Shape


def _dot(x: Array, y: Array, x_axis: int, y_axis: int) -> Array:
    """A product that returns fp32: those of bf16 are slow on CPU otherwise."""
    axes = (((x_axis,), (y_axis,)), ((), ()))
    return lax.dot_general(x, y, axes, preferred_element_type=jnp.float32)


@jax.custom_vjp
def linear(x: Array, w: Array, b: Array) -> Array:
    """x @ w + b of fp32 weights, computed in x's dtype and returned in fp32."""
    return _linear_forward(x, w, b)[0]


def _linear_forward(x: Array, w: Array, b: Array) -> tuple[Array, tuple[Array, Array]]:
    w = w.astype(x.dtype)
    return _dot(x, w, 1, 0) + b, (x, w)


def _linear_backward(residuals: tuple[Array, Array], g32: Array) -> tuple[Array, ...]:
    x, w = residuals
    g = g32.astype(x.dtype)
    if x.dtype == jnp.float32:
        dw = _dot(x, g, 0, 0)
    else:  # transposed in memory, which the bf16 instructions need
        dw = _dot(lax.optimization_barrier(x.T), g, 1, 0)
    return _dot(g, w, 1, 1).astype(x.dtype), dw, g32.sum(0)


linear.defvjp(_linear_forward, _linear_backward)


def forward(params: list[tuple[Array, Array]], points: Array, *, dtype: type) -> Array:
    *hidden, head = params
    x = points.astype(dtype)
    for w, b in hidden:
        x = jax.nn.relu(linear(x, w, b).astype(dtype))
    return linear(x, *head)


def build(shape: Shape, precision: Precision) -> Built:
    params = jax.tree.map(jnp.asarray, given.weights(shape))
    run = functools.partial(forward, dtype=jax_step.DTYPES[precision])
    return jax_step.handwritten(run, params, given.batch(shape), precision)
