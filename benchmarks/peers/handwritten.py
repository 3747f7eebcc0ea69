"""The same maths in plain jax.numpy, without any model library, tuned as well as we can.

What makes it fast on CPU, each measured alone (README.md has the numbers):
layers unrolled, products of 2-D operands in fp32, products in bf16 that return fp32, custom
gradients for attention, norm and GELU, attention in two chunks of queries with its probabilities
recomputed, rotary positions by a roll, donation. On GPU: cuDNN's attention, plain bf16 products.

Suffixes: B batch, T queries or time, S keys, N heads, H head or hidden size, D features, I inputs,
G the four gates of an LSTM.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.peers import given, jax_step
from benchmarks.peers.given import MLP, RNN, Built, Precision, Remat, Transformer

NUM_CHUNKS = 2
Tables = tuple[Array, Array]


def _einsum32(formula: str, x: Array, y: Array) -> Array:
    return jnp.einsum(formula, x, y, preferred_element_type=jnp.float32)


def product(x_BTD: Array, w: Array) -> Array:
    """x @ w over fp32 master weights, in x's dtype."""
    if x_BTD.dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
        return _cpu_bf16_product(x_BTD, w)
    # Without the reshape, autodiff's weight gradient comes out transposed: 1.35 times the step.
    y = x_BTD.reshape(-1, x_BTD.shape[-1]) @ w.astype(x_BTD.dtype)
    return y.reshape(*x_BTD.shape[:-1], -1)


# XLA for CPU uses the bf16 instructions only in products of bf16 that return fp32, and in a
# weight gradient only where two contracted axes force a transpose in memory.
@jax.custom_vjp
def _cpu_bf16_product(x: Array, w: Array) -> Array:
    return _cpu_bf16_product_forward(x, w)[0]


def _cpu_bf16_product_forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    w16 = w.astype(x.dtype)
    return _einsum32("btk,km->btm", x, w16).astype(x.dtype), (x, w16)


def _cpu_bf16_product_backward(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, w16 = residuals
    dx = _einsum32("btm,km->btk", g, w16).astype(x.dtype)
    return dx, _einsum32("btk,btm->km", x, g)


_cpu_bf16_product.defvjp(_cpu_bf16_product_forward, _cpu_bf16_product_backward)


@jax.custom_vjp
def norm(x: Array, scale: Array) -> Array:
    """RMSNorm, reduced in fp32."""
    return _norm_forward(x, scale)[0]


def _norm_forward(x: Array, scale: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + given.NORM_EPS)
    return (x32 * inverse * scale).astype(x.dtype), (x, scale, inverse)


def _norm_backward(residuals: tuple[Array, Array, Array], g: Array) -> tuple[Array, Array]:
    x, scale, inverse = residuals
    g32, normed = g.astype(jnp.float32), x.astype(jnp.float32) * inverse
    scaled = g32 * scale
    dx = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdims=True))
    return dx.astype(x.dtype), (g32 * normed).sum((0, 1))


norm.defvjp(_norm_forward, _norm_backward)


@jax.custom_vjp
def gelu(x: Array) -> Array:
    """GELU by the tanh approximation."""
    return _gelu_forward(x)[0]


def _gelu_tanh(x32: Array) -> Array:
    return jnp.tanh(math.sqrt(2 / math.pi) * (x32 + 0.044715 * x32 * x32 * x32))


def _gelu_forward(x: Array) -> tuple[Array, Array]:
    x32 = x.astype(jnp.float32)
    return (0.5 * x32 * (1 + _gelu_tanh(x32))).astype(x.dtype), x


def _gelu_backward(x: Array, g: Array) -> tuple[Array]:
    x32 = x.astype(jnp.float32)
    tanh = _gelu_tanh(x32)
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x32 * x32)
    derivative = 0.5 * (1 + tanh) + 0.5 * x32 * (1 - tanh * tanh) * slope
    return ((g.astype(jnp.float32) * derivative).astype(x.dtype),)


gelu.defvjp(_gelu_forward, _gelu_backward)


def rotary_tables(shape: Transformer) -> Tables:
    """Cosines and signed sines, fp32[seq, 1, head_dim], for `rotate`."""
    frequency = given.ROPE_THETA ** (-jnp.arange(0, shape.head_dim, 2) / shape.head_dim)
    angles = jnp.arange(shape.seq_len)[:, None, None] * frequency
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)


def rotate(x_BTNH: Array, tables: Tables) -> Array:
    cos, sin = tables
    x32 = x_BTNH.astype(jnp.float32)
    return (x32 * cos + jnp.roll(x32, x32.shape[-1] // 2, -1) * sin).astype(x_BTNH.dtype)


def _logits(q: Array, k: Array, start: int, heads: str) -> Array:
    """Masked logits of the queries from `start`, fp32[B, N, T, S]."""
    logits = _einsum32(f"{heads},{_keys(heads)}->bnts", q, k) * q.shape[-1] ** -0.5
    queries, keys = (jax.lax.broadcasted_iota(jnp.int32, logits.shape[2:], axis) for axis in (0, 1))
    return jnp.where(queries + start >= keys, logits, -1e30)


def _keys(heads: str) -> str:
    return heads.replace("t", "s")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attend(q: Array, k: Array, v: Array, start: int, heads: str) -> Array:
    """Causal attention of the queries from `start`; `heads` is the axes' order, bnth or btnh."""
    return _attend_forward(q, k, v, start, heads)[0]


def _attend_forward(q: Array, k: Array, v: Array, start: int, heads: str) -> tuple[Array, tuple]:
    logits = _logits(q, k, start, heads)
    top = logits.max(-1, keepdims=True)
    exponentials = jnp.exp(logits - top)
    total = exponentials.sum(-1, keepdims=True)
    weights = (exponentials / total).astype(v.dtype)
    out = _einsum32(f"bnts,{_keys(heads)}->{heads}", weights, v).astype(q.dtype)
    return out, (q, k, v, out, top + jnp.log(total))


def _attend_backward(start: int, heads: str, residuals: tuple, g: Array) -> tuple:
    q, k, v, out, log_total = residuals
    weights = jnp.exp(_logits(q, k, start, heads) - log_total)
    dweights = _einsum32(f"{heads},{_keys(heads)}->bnts", g, v)
    # The sum over keys of weights times their gradients, from the smaller arrays.
    mean = jnp.einsum(f"{heads},{heads}->bnt", g.astype(jnp.float32), out.astype(jnp.float32))
    dlogits = (weights * (dweights - mean[..., None]) * q.shape[-1] ** -0.5).astype(q.dtype)
    dq = _einsum32(f"bnts,{_keys(heads)}->{heads}", dlogits, k)
    dk = _einsum32(f"bnts,{heads}->{_keys(heads)}", dlogits, q)
    dv = _einsum32(f"bnts,{heads}->{_keys(heads)}", weights.astype(q.dtype), g)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


_attend.defvjp(_attend_forward, _attend_backward)


def attention(
    q_BTD: Array, k_BTD: Array, v_BTD: Array, tables: Tables, shape: Transformer
) -> Array:
    """Causal self-attention with rotary positions, [batch, seq, d_model]."""
    split = (*q_BTD.shape[:2], shape.num_heads, shape.head_dim)
    q, k, v = (x.reshape(split) for x in (q_BTD, k_BTD, v_BTD))
    q, k = rotate(q, tables), rotate(k, tables)
    if jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16:
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    elif q.dtype == jnp.float32:  # its products are faster with the heads outside
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
        out = _chunked(q, k, v, "bnth").transpose(0, 2, 1, 3)
    else:
        out = _chunked(q, k, v, "btnh")
    return out.reshape(q_BTD.shape)


def _chunked(q: Array, k: Array, v: Array, heads: str) -> Array:
    """A chunk of queries sees only the keys up to its end; the chunks run side by side."""
    axis = heads.index("t")
    size = q.shape[axis] // NUM_CHUNKS
    outs = []
    for start in range(0, q.shape[axis], size):
        queries = jax.lax.slice_in_dim(q, start, start + size, axis=axis)
        seen = (jax.lax.slice_in_dim(x, 0, start + size, axis=axis) for x in (k, v))
        outs.append(_attend(queries, *seen, start, heads))
    return jnp.concatenate(outs, axis)


def block(x: Array, layer: dict[str, Array], tables: Tables, shape: Transformer) -> Array:
    normed = norm(x, layer["attention_norm"])
    q, k, v = (product(normed, layer[name]) for name in ("wq", "wk", "wv"))
    x = x + product(attention(q, k, v, tables, shape), layer["wo"])
    hidden = gelu(product(norm(x, layer["mlp_norm"]), layer["w_up"]))
    return x + product(hidden, layer["w_down"])


def _decode(params: dict, tokens: Array, *, shape: Transformer, dtype: type) -> Array:
    x = params["embedding"][tokens].astype(dtype)
    tables = rotary_tables(shape)
    run = functools.partial(block, tables=tables, shape=shape)
    if isinstance(params["layers"], dict):  # stacked, for remat: unrolled, XLA undoes it
        body = jax.checkpoint(run, prevent_cse=False)
        x, _ = jax.lax.scan(lambda x, layer: (body(x, layer), None), x, params["layers"])
    else:
        for layer in params["layers"]:
            x = run(x, layer)
    return product(norm(x, params["final_norm"]), params["head"])


def _init(shape: Transformer, remat: Remat) -> dict:
    arrays = {name: jnp.asarray(w) for name, w in shape.weights().items()}
    outer = {name: arrays.pop(name) for name in ("embedding", "head")}
    ones = jnp.ones((shape.num_layers, shape.d_model))
    stacked = {**arrays, "attention_norm": ones, "mlp_norm": ones.copy()}
    unstacked = [jax.tree.map(lambda w, i=i: w[i], stacked) for i in range(shape.num_layers)]
    layers = stacked if remat == "full" else unstacked
    return {**outer, "layers": layers, "final_norm": jnp.ones(shape.d_model)}


def transformer(shape: Transformer, precision: Precision, *, remat: Remat) -> Built:
    dtype = jax_step.DTYPES[precision]
    run = functools.partial(_decode, shape=shape, dtype=dtype)
    return jax_step.handwritten(run, _init(shape, remat), shape.batch(), precision)


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


def _predict(params: dict[str, Array], tokens_BT: Array, *, dtype: type) -> Array:
    x = params["embedding"][tokens_BT.T].astype(dtype)
    for i in range(params["ih"].shape[0]):
        x = lstm(x, params["ih"][i], params["hh"][i], params["bias"][i])
    return (head(x, params["head"]) + params["head_bias"]).swapaxes(0, 1)


def rnn(shape: RNN, precision: Precision) -> Built:
    params = {name: jnp.asarray(w) for name, w in shape.weights().items()}
    run = functools.partial(_predict, dtype=jax_step.DTYPES[precision])
    return jax_step.handwritten(run, params, shape.batch(), precision)


@jax.custom_vjp
def linear(x: Array, w: Array, b: Array) -> Array:
    """x @ w + b of fp32 weights, computed in x's dtype and returned in fp32."""
    return _linear_forward(x, w, b)[0]


def _linear_forward(x: Array, w: Array, b: Array) -> tuple[Array, tuple[Array, Array]]:
    w = w.astype(x.dtype)
    return _dot(x, w, (1,), (0,)) + b, (x, w)


def _linear_backward(residuals: tuple[Array, Array], g32: Array) -> tuple[Array, ...]:
    x, w = residuals
    g = g32.astype(x.dtype)
    if x.dtype == jnp.float32:
        dw = _dot(x, g, (0,), (0,))
    else:  # transposed in memory, which the bf16 instructions need
        dw = _dot(lax.optimization_barrier(x.T), g, (1,), (0,))
    return _dot(g, w, (1,), (1,)).astype(x.dtype), dw, g32.sum(0)


linear.defvjp(_linear_forward, _linear_backward)


def _classify(params: list[tuple[Array, Array]], points: Array, *, dtype: type) -> Array:
    *hidden, head = params
    x = points.astype(dtype)
    for w, b in hidden:
        x = jax.nn.relu(linear(x, w, b).astype(dtype))
    return linear(x, *head)


def mlp(shape: MLP, precision: Precision) -> Built:
    params = jax.tree.map(jnp.asarray, shape.weights())
    run = functools.partial(_classify, dtype=jax_step.DTYPES[precision])
    return jax_step.handwritten(run, params, shape.batch(), precision)
