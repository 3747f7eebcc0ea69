"""Attention in plain XLA as a scan over the pairs of chunks of which one sees the other.

The softmax is online (Milakov and Gimelshein 2018): outputs are rescaled as larger logits come.
Legend of suffixes: as in `zoo.nn.attention.choice`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from zoo.nn.attention import masks
from zoo.nn.attention.layout import Layout, layout_for, product
from zoo.nn.attention.logits import logit_gradients, masked_logits
from zoo.nn.attention.masks import MASKED, Mask
from zoo.nn.derivatives import custom_vjp


@functools.partial(custom_vjp, nondiff_argnums=(4, 5, 6))
def scanned(q_BTNH, k_BSKH, v_BSKH, segment_ids, mask, scale, soft_cap):
    """As `zoo.nn.attention.chunked.chunked`: the program does not grow with the row."""
    return _forward(q_BTNH, k_BSKH, v_BSKH, segment_ids, mask, scale, soft_cap)[0]


def _forward(q_BTNH, k_BSKH, v_BSKH, segment_ids, mask, scale, soft_cap):
    layout = layout_for(q_BTNH.dtype)
    length, kv_heads = q_BTNH.shape[1], k_BSKH.shape[2]
    q = layout.of_queries(_pad(q_BTNH), kv_heads)
    k, v = (jnp.einsum(f"bskh->{layout.keys}", _pad(x)) for x in (k_BSKH, v_BSKH))

    def body(carry: Any, pair: Int[Array, "2"]) -> tuple[Any, None]:
        out, top, total = carry
        of_queries, of_keys = _slicers(layout, pair)
        at, rows = pair[0] * masks.CHUNK, functools.partial(_slice, axis=3, chunk=pair[0])
        seen = _seen(mask, pair, segment_ids, length)
        logits, _ = masked_logits(of_queries(q), of_keys(k), seen, layout, scale, soft_cap)
        # A softmax does not depend on what is subtracted: as a constant, it leaves gradients exact.
        new_top = jnp.maximum(rows(top), logits.max(-1, keepdims=True))
        new_top = jax.lax.stop_gradient(new_top)
        kept, exponentials = jnp.exp(rows(top) - new_top), jnp.exp(logits - new_top)
        new_total = kept * rows(total) + exponentials.sum(-1, keepdims=True)
        formula = f"bkgts,{layout.keys}->{layout.queries}"
        added = product(formula, exponentials.astype(v.dtype), of_keys(v))
        new_out = _by_query(layout, kept) * of_queries(out) + added
        update = jax.lax.dynamic_update_slice_in_dim
        out = update(out, new_out, at, layout.queries.index("t"))
        return (out, update(top, new_top, at, 3), update(total, new_total, at, 3)), None

    per_query = jax.eval_shape(functools.partial(layout.sum_of_products, q), q).shape
    empty: Any = (jnp.zeros(q.shape), jnp.full(per_query, MASKED), jnp.zeros(per_query))
    (out, top, total), _ = jax.lax.scan(body, empty, _pairs(length, mask))
    out = (out / _by_query(layout, total)).astype(q.dtype)
    residuals = (q_BTNH, k_BSKH, v_BSKH, segment_ids, out, top + jnp.log(total))
    return layout.to_heads(out, q_BTNH.shape), residuals


def _backward(mask, scale, soft_cap, residuals, g_BTNH):
    q_BTNH, k_BSKH, v_BSKH, segment_ids, out, log_sum = residuals
    layout = layout_for(q_BTNH.dtype)
    queries, keys = layout
    length, kv_heads = q_BTNH.shape[1], k_BSKH.shape[2]
    q, g = (layout.of_queries(_pad(x), kv_heads) for x in (q_BTNH, g_BTNH))
    k, v = (jnp.einsum(f"bskh->{keys}", _pad(x)) for x in (k_BSKH, v_BSKH))
    delta = layout.sum_of_products(g, out)

    def body(carry: Any, pair: Int[Array, "2"]) -> tuple[Any, None]:
        of_queries, of_keys = _slicers(layout, pair)
        rows = functools.partial(_slice, axis=3, chunk=pair[0])
        inputs = (of_queries(q), of_keys(k), of_keys(v), of_queries(g))
        seen = _seen(mask, pair, segment_ids, length)
        dlogits, weights = logit_gradients(
            inputs, rows(log_sum), rows(delta), seen, layout, scale, soft_cap
        )
        added = (
            product(f"bkgts,{keys}->{queries}", dlogits, inputs[1]),
            product(f"bkgts,{queries}->{keys}", dlogits, inputs[0]),
            product(f"bkgts,{queries}->{keys}", weights, inputs[3]),
        )
        axes = (queries.index("t"), keys.index("s"), keys.index("s"))
        where = (pair[0], pair[1], pair[1])
        return tuple(map(_add, carry, added, where, axes)), None

    zeros: Any = tuple(jnp.zeros(x.shape) for x in (q, k, v))
    (dq, dk, dv), _ = jax.lax.scan(body, zeros, _pairs(length, mask))
    dq_BTNH = layout.to_heads(dq.astype(q.dtype), q_BTNH.shape)
    dk_BSKH, dv_BSKH = (
        jnp.einsum(f"{keys}->bskh", x)[:, :length].astype(q.dtype) for x in (dk, dv)
    )
    return dq_BTNH, dk_BSKH, dv_BSKH, None


scanned.defvjp(_forward, _backward)


def _pairs(length: int, mask: Mask) -> Int[Array, "pairs 2"]:
    return jnp.array([*masks.pairs(length, mask, masks.CHUNK, masks.CHUNK)], jnp.int32)


def _pad(x: Array) -> Array:
    """Whole chunks along axis 1."""
    missing = -x.shape[1] % masks.CHUNK
    return jnp.pad(x, [(0, missing if axis == 1 else 0) for axis in range(x.ndim)])


def _slice(x: Array, *, axis: int, chunk: Array) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, chunk * masks.CHUNK, masks.CHUNK, axis)


def _add(x: Array, added: Array, chunk: Array, axis: int) -> Array:
    changed = _slice(x, axis=axis, chunk=chunk) + added
    return jax.lax.dynamic_update_slice_in_dim(x, changed, chunk * masks.CHUNK, axis)


def _slicers(layout: Layout, pair: Array) -> tuple[Any, Any]:
    """Functions to the chunk of queries and to the chunk of keys."""
    of_queries = functools.partial(_slice, axis=layout.queries.index("t"), chunk=pair[0])
    return of_queries, functools.partial(_slice, axis=layout.keys.index("s"), chunk=pair[1])


def _by_query(layout: Layout, x: Array) -> Array:
    return jnp.einsum(f"bkgth->{layout.queries}", x)


def _seen(
    mask: Mask, pair: Array, segment_ids: Array | None, length: int
) -> Bool[Array, "b 1 1 t s"]:
    size, segments = masks.CHUNK, None
    if segment_ids is not None:
        padded = _pad(segment_ids)
        segments = _slice(padded, axis=1, chunk=pair[0]), _slice(padded, axis=1, chunk=pair[1])
    seen = mask.seen(pair[0] * size, pair[1] * size, (size, size), segments)
    if length % size:
        keys = jax.lax.broadcasted_iota(jnp.int32, seen.shape, 4) + pair[1] * size
        seen &= keys < length
    return seen
