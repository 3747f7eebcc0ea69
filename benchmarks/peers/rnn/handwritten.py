"""The same maths in plain jax.numpy, without any model library, tuned as well as we can.

Legend of suffixes: T time, B batch, I inputs, H hidden, G the four gates of H each.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.peers import jax_step
from benchmarks.peers.common import Built, Precision
from benchmarks.peers.rnn import given
from benchmarks.peers.rnn.given import Shape


def _dot(x: Array, y: Array, x_axes: tuple[int, ...], y_axes: tuple[int, ...]) -> Array:
    """A product that returns fp32: those of bf16 are slow on CPU otherwise."""
    axes = ((x_axes, y_axes), ((), ()))
    return lax.dot_general(x, y, axes, preferred_element_type=jnp.float32)


def _flat(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _weight_gradient(x_TBI: Array, g_TBG: Array) -> Array:
    if x_TBI.dtype == jnp.float32:
        return _dot(_flat(x_TBI), _flat(g_TBG), (0,), (0,))
    return _dot(x_TBI, g_TBG, (0, 1), (0, 1))


@jax.custom_vjp
def lstm(x_TBI: Array, ih_IG: Array, hh_HG: Array, bias_G: Array) -> Array:
    """The hidden state of each step, in the dtype of x, from an initial state of zeros."""
    return _lstm_forward(x_TBI, ih_IG, hh_HG, bias_G)[0]


def _lstm_forward(x_TBI: Array, ih_IG: Array, hh_HG: Array, bias_G: Array) -> tuple[Array, tuple]:
    dtype = x_TBI.dtype
    ih, hh = ih_IG.astype(dtype), hh_HG.astype(dtype)
    batch = x_TBI.shape[1]
    inputs_TBG = (_dot(_flat(x_TBI), ih, (1,), (0,)) + bias_G).astype(dtype)

    def step(state: tuple[Array, Array], inputs_BG: Array) -> tuple[tuple, tuple]:
        h, c = state
        terms = inputs_BG.astype(jnp.float32) + _dot(h, hh, (1,), (0,))
        i, f, g, o = jnp.split(terms, 4, axis=-1)
        i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
        new_c = f * c + i * g
        new_h = (o * jnp.tanh(new_c)).astype(dtype)
        # The gates rather than their logits: the gradient needs only the gates.
        return (new_h, new_c), (new_h, jnp.concatenate([i, f, g, o], -1).astype(dtype), c)

    zeros = jnp.zeros((batch, hh.shape[0]), dtype)
    initial = (zeros, zeros.astype(jnp.float32))
    _, (h_TBH, gates_TBG, c_TBH) = lax.scan(
        step, initial, inputs_TBG.reshape(-1, batch, inputs_TBG.shape[-1])
    )
    return h_TBH, (x_TBI, ih, hh, h_TBH, gates_TBG, c_TBH)


def _lstm_backward(residuals: tuple, dh_TBH: Array) -> tuple[Array, ...]:
    x_TBI, ih, hh, h_TBH, gates_TBG, c_TBH = residuals
    dtype = x_TBI.dtype
    # Every step multiplies by it, which is worth a transpose in memory.
    hh_GH = lax.optimization_barrier(hh.T)

    def step(carry: tuple[Array, Array], inputs: tuple) -> tuple[tuple, Array]:
        dh, dc = carry
        dh_t, gates, c = inputs
        i, f, g, o = jnp.split(gates.astype(jnp.float32), 4, axis=-1)
        tanh_c = jnp.tanh(f * c + i * g)
        dh = dh + dh_t.astype(jnp.float32)
        dc = dc + dh * o * (1 - tanh_c * tanh_c)
        d_terms = jnp.concatenate(
            [
                dc * g * i * (1 - i),
                dc * c * f * (1 - f),
                dc * i * (1 - g * g),
                dh * tanh_c * o * (1 - o),
            ],
            -1,
        ).astype(dtype)
        return (_dot(d_terms, hh_GH, (1,), (0,)), dc * f), d_terms

    zeros = jnp.zeros(c_TBH.shape[1:], jnp.float32)
    _, g_TBG = lax.scan(step, (zeros, zeros), (dh_TBH, gates_TBG, c_TBH), reverse=True)
    before = jnp.concatenate([jnp.zeros_like(h_TBH[:1]), h_TBH[:-1]])
    dx = _dot(_flat(g_TBG), ih, (1,), (1,)).astype(dtype).reshape(x_TBI.shape)
    d_bias = g_TBG.astype(jnp.float32).sum((0, 1))
    return dx, _weight_gradient(x_TBI, g_TBG), _weight_gradient(before, g_TBG), d_bias


lstm.defvjp(_lstm_forward, _lstm_backward)


@jax.custom_vjp
def head(x_TBH: Array, w_HV: Array) -> Array:
    """Logits in fp32, without the bias."""
    return _head_forward(x_TBH, w_HV)[0]


def _head_forward(x_TBH: Array, w_HV: Array) -> tuple[Array, tuple[Array, Array]]:
    w = w_HV.astype(x_TBH.dtype)
    return _dot(_flat(x_TBH), w, (1,), (0,)).reshape(*x_TBH.shape[:2], -1), (x_TBH, w)


def _head_backward(residuals: tuple[Array, Array], g_TBV: Array) -> tuple[Array, Array]:
    x, w = residuals
    g = g_TBV.astype(x.dtype)
    dx = _dot(_flat(g), w, (1,), (1,)).astype(x.dtype).reshape(x.shape)
    return dx, _weight_gradient(x, g)


head.defvjp(_head_forward, _head_backward)


def forward(params: dict[str, Array], tokens_BT: Array, *, dtype: type) -> Array:
    x = params["embedding"][tokens_BT.T].astype(dtype)
    for i in range(params["ih"].shape[0]):
        x = lstm(x, params["ih"][i], params["hh"][i], params["bias"][i])
    return (head(x, params["head"]) + params["head_bias"]).swapaxes(0, 1)


def build(shape: Shape, precision: Precision) -> Built:
    params = {name: jnp.asarray(w) for name, w in given.weights(shape).items()}
    run = functools.partial(forward, dtype=jax_step.DTYPES[precision])
    return jax_step.handwritten(run, params, given.batch(shape), precision)
