"""Attention in plain XLA by chunks of queries: a few of them one after another, more in a scan.

Legend of suffixes: as in `zoo.nn.attention.choice`.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zoo.nn.attention import masks
from zoo.nn.attention.heads import Transfer
from zoo.nn.attention.layout import layout_for, product
from zoo.nn.attention.logits import logit_gradients, masked_logits
from zoo.nn.attention.masks import Chunk, Mask
from zoo.nn.attention.parts import is_split, on_each_device
from zoo.nn.attention.scanned import scanned, scanned_pieces
from zoo.nn.derivatives import custom_vjp

# Each chunk's program is larger than the one before it, and so is the time to compile it.
MOST_UNROLLED = 4


def chunked(
    q_BTNH: Float[Array, "batch queries heads head_dim"],
    k_BSKH: Float[Array, "batch keys kv_heads head_dim"],
    v_BSKH: Float[Array, "batch keys kv_heads head_dim"],
    segment_ids: Int[Array, "batch keys"] | None,
    mask: Mask,
    scale: float,
    soft_cap: float | None,
    transfer: Transfer = "auto",
) -> Float[Array, "batch queries heads head_dim"]:
    """Attention in plain XLA; beyond a few chunks, a program of a size without regard to theirs."""
    if is_split():
        attend = functools.partial(scanned_pieces, mask=mask, scale=scale, soft_cap=soft_cap)
        return on_each_device(attend, q_BTNH, k_BSKH, v_BSKH, segment_ids, mask, transfer)
    few = math.ceil(q_BTNH.shape[1] / masks.CHUNK) <= MOST_UNROLLED
    return (_unrolled if few else scanned)(
        q_BTNH, k_BSKH, v_BSKH, segment_ids, mask, scale, soft_cap
    )


# The gradient is written out so that the backward pass keeps no [seq, seq] array, and so that its
# products take inputs of the compute dtype: autodiff of fp32 logits would multiply fp32 by bf16.
@functools.partial(custom_vjp, nondiff_argnums=(4, 5, 6))
def _unrolled(q_BTNH, k_BSKH, v_BSKH, segment_ids, mask, scale, soft_cap):
    return _forward(q_BTNH, k_BSKH, v_BSKH, segment_ids, mask, scale, soft_cap)[0]


def _forward(q_BTNH, k_BSKH, v_BSKH, segment_ids, mask, scale, soft_cap):
    layout = layout_for(q_BTNH.dtype)
    q = layout.of_queries(q_BTNH, k_BSKH.shape[2])
    k, v = (jnp.einsum(f"bskh->{layout.keys}", x) for x in (k_BSKH, v_BSKH))
    outputs, log_sums = [], []
    for chunk in masks.chunks(q_BTNH.shape[1], k_BSKH.shape[1], mask):
        q_chunk, k_chunk = layout.slice_queries(q, chunk), layout.slice_keys(k, chunk)
        seen = _seen(mask, chunk, segment_ids)
        logits, _ = masked_logits(q_chunk, k_chunk, seen, layout, scale, soft_cap)
        # A softmax does not depend on what is subtracted: as a constant, it leaves gradients exact.
        top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        exponentials = jnp.exp(logits - top)
        total = exponentials.sum(-1, keepdims=True)
        weights = (exponentials / total).astype(v.dtype)
        formula = f"bkgts,{layout.keys}->{layout.queries}"
        outputs.append(product(formula, weights, layout.slice_keys(v, chunk)).astype(q.dtype))
        log_sums.append(top + jnp.log(total))
    out = jnp.concatenate(outputs, axis=layout.queries.index("t"))
    return layout.to_heads(out, q_BTNH.shape), (q, k, v, segment_ids, out, log_sums)


def _backward(mask, scale, soft_cap, residuals, g_BTNH):
    q, k, v, segment_ids, out, log_sums = residuals
    layout = layout_for(q.dtype)
    queries, keys = layout
    num_queries, num_keys = q.shape[queries.index("t")], k.shape[keys.index("s")]
    g = layout.of_queries(g_BTNH, k.shape[keys.index("k")])
    delta = layout.sum_of_products(g, out)
    dq, dk, dv = [], [], []
    for chunk, log_sum in zip(masks.chunks(num_queries, num_keys, mask), log_sums, strict=True):
        q_chunk, g_chunk = layout.slice_queries(q, chunk), layout.slice_queries(g, chunk)
        k_chunk, v_chunk = layout.slice_keys(k, chunk), layout.slice_keys(v, chunk)
        dlogits, weights = logit_gradients(
            (q_chunk, k_chunk, v_chunk, g_chunk),
            log_sum,
            delta[:, :, :, chunk.start : chunk.stop],
            _seen(mask, chunk, segment_ids),
            layout,
            scale,
            soft_cap,
        )
        dq.append(product(f"bkgts,{keys}->{queries}", dlogits, k_chunk).astype(q.dtype))
        of_keys = f"bkgts,{queries}->{keys}"
        dk.append(layout.pad_keys(product(of_keys, dlogits, q_chunk), chunk, num_keys))
        dv.append(layout.pad_keys(product(of_keys, weights, g_chunk), chunk, num_keys))
    dq_BTNH = layout.to_heads(jnp.concatenate(dq, axis=queries.index("t")), g_BTNH.shape)
    dk_BSKH, dv_BSKH = (
        jnp.einsum(f"{keys}->bskh", functools.reduce(jnp.add, x)).astype(q.dtype) for x in (dk, dv)
    )
    return dq_BTNH, dk_BSKH, dv_BSKH, None


def _seen(mask: Mask, chunk: Chunk, segment_ids: Array | None) -> Bool[Array, "b 1 1 t s"]:
    segments = None
    if segment_ids is not None:
        of_queries = segment_ids[:, chunk.start : chunk.stop]
        segments = of_queries, segment_ids[:, chunk.first_key : chunk.last_key]
    return mask.seen(chunk.start, chunk.first_key, chunk.size, segments)


_unrolled.defvjp(_forward, _backward)
