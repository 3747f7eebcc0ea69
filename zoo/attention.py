"""Attention: one function in front of `jax.nn.dot_product_attention` and the zoo's own kernel.

Legend of suffixes: B batch, T queries, S keys, N query heads, K key-value heads, G query heads a
key-value head, H head size.
"""

import functools
import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Implementation = Literal["auto", "chunked", "xla", "cudnn"]

# Long enough for efficient products, short enough that a causal chunk skips most of the future.
_CHUNK = 512
_MASKED = -1e30  # finite: a masked row gives no NaN, forward or backward


def attention(
    q_BTNH: Float[Array, "batch queries heads head_dim"],
    k_BSKH: Float[Array, "batch keys kv_heads head_dim"],
    v_BSKH: Float[Array, "batch keys kv_heads head_dim"],
    *,
    causal: bool,
    segment_ids: Int[Array, "batch keys"] | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "batch queries heads head_dim"]:
    """Softmax attention with grouped queries over packed rows; the softmax is in fp32.

    Queries and keys are the same positions. A query sees the keys of its own segment, not later
    ones if `causal`, and no further than `window - 1` positions away. `soft_cap` bounds the
    logits by `soft_cap * tanh(logits / soft_cap)`; `scale` defaults to head_dim**-0.5.

    Implementations: "chunked" is the zoo's own, in plain XLA: memory grows with seq, not its
    square, and every product takes inputs of the compute dtype, forward and backward; "xla" and
    "cudnn" are `jax.nn.dot_product_attention`'s; "auto" takes cuDNN's flash kernel on a GPU where
    it applies, else "chunked".

    Raises:
        ValueError: an implementation that does not apply here, with the reason.
    """
    mask = _Mask(causal, window)
    refusal = _refusal(implementation, q_BTNH, soft_cap)
    if implementation == "auto":
        implementation = "chunked" if _refusal("cudnn", q_BTNH, soft_cap) else "cudnn"
    elif refusal:
        raise ValueError(f"attention={implementation!r} {refusal}; choose 'auto' or 'chunked'")
    scale = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
    if implementation == "chunked":
        return _chunked(q_BTNH, k_BSKH, v_BSKH, segment_ids, mask, scale, soft_cap)
    return jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        mask=None if segment_ids is None else _same_segment(segment_ids)[:, None],
        is_causal=causal,
        scale=scale,
        local_window_size=None if window is None else (window - 1, 0 if causal else window - 1),
        implementation=implementation,
    )


def _refusal(implementation: str, q_BTNH: Array, soft_cap: float | None) -> str | None:
    """Why a backend of `jax.nn.dot_product_attention` cannot serve, or None if it can."""
    if implementation in ("auto", "chunked"):
        return None
    if implementation not in ("xla", "cudnn"):
        return "is no implementation"
    if soft_cap is not None:
        return f"has no soft cap, and attention_soft_cap={soft_cap}"
    if implementation == "xla":
        return None
    if jax.default_backend() != "gpu":
        return f"needs an NVIDIA GPU, and this run is on {jax.default_backend()!r}"
    if q_BTNH.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bf16 or fp16, and the precision is {q_BTNH.dtype}"
    if q_BTNH.shape[-1] % 8 or q_BTNH.shape[-1] > 128:
        return f"needs a multiple of 8 up to 128, and head_dim={q_BTNH.shape[-1]}"
    return None


def _same_segment(segment_ids: Int[Array, "batch seq"]) -> Bool[Array, "batch seq seq"]:
    return segment_ids[:, :, None] == segment_ids[:, None, :]


class _Mask(NamedTuple):
    """What a query at one position sees of the keys at others, segments apart."""

    causal: bool
    window: int | None

    def keys_of(self, start: int, stop: int, num_keys: int) -> tuple[int, int]:
        """The range of keys that the queries start…stop can see."""
        reach = num_keys if self.window is None else self.window - 1
        return max(0, start - reach), min(num_keys, stop + (0 if self.causal else reach))

    def seen(self, chunk: "_Chunk", segment_ids: Array | None) -> Bool[Array, "b 1 1 t s"]:
        """Which of a chunk's keys each of its queries sees."""
        shape = (1, 1, 1, chunk.stop - chunk.start, chunk.last_key - chunk.first_key)
        query = jax.lax.broadcasted_iota(jnp.int32, shape, 3) + chunk.start
        distance = query - jax.lax.broadcasted_iota(jnp.int32, shape, 4) - chunk.first_key
        seen = jnp.ones(shape, bool)
        if self.causal:
            seen &= distance >= 0
        if self.window is not None:
            seen &= jnp.abs(distance) < self.window
        if segment_ids is not None:
            queries = segment_ids[:, None, None, chunk.start : chunk.stop, None]
            seen = seen & (
                queries == segment_ids[:, None, None, None, chunk.first_key : chunk.last_key]
            )
        return seen


class _Chunk(NamedTuple):
    """A range of queries and the range of keys that they can see."""

    start: int
    stop: int
    first_key: int
    last_key: int


def _chunks(num_queries: int, num_keys: int, mask: _Mask) -> Iterator[_Chunk]:
    # Two chunks at least, so that a short causal row skips a quarter of its products too.
    size = min(_CHUNK, max(64, math.ceil(num_queries / 2)))
    for start in range(0, num_queries, size):
        stop = min(start + size, num_queries)
        yield _Chunk(start, stop, *mask.keys_of(start, stop, num_keys))


def _logits(q_BKGTH, k_BKSH, segment_ids, chunk, mask, scale, soft_cap):
    """Masked logits of one chunk, fp32[B, K, G, T, S], and those before the mask."""
    q = q_BKGTH[:, :, :, chunk.start : chunk.stop]
    k = k_BKSH[:, :, chunk.first_key : chunk.last_key]
    raw = _einsum32("bkgth,bksh->bkgts", q, k) * scale
    if soft_cap is not None:
        raw = soft_cap * jnp.tanh(raw / soft_cap)
    seen = jnp.broadcast_to(mask.seen(chunk, segment_ids), raw.shape)
    logits = jnp.where(seen, raw, _MASKED)
    return logits, raw


def _einsum32(formula: str, x: Array, y: Array) -> Float[Array, "..."]:
    return jnp.einsum(formula, x, y, preferred_element_type=jnp.float32)


def _contract_queries(
    x_BKGTS: Array, y_BKGTH: Array
) -> Float[Array, "batch kv_heads keys head_dim"]:
    """The sum over G and T, with T as two axes where it is even.

    For that XLA for CPU transposes x in memory, which its bf16 product needs.
    """
    halves = 2 if x_BKGTS.shape[3] % 2 == 0 else 1
    x, y = (a.reshape(*a.shape[:3], halves, -1, a.shape[4]) for a in (x_BKGTS, y_BKGTH))
    return _einsum32("bkgxts,bkgxth->bksh", x, y)


# The gradient is written out so that the backward pass keeps no [seq, seq] array, and so that its
# products take inputs of the compute dtype: autodiff of fp32 logits would multiply fp32 by bf16.
# Heads come before time inside, the layout of the batched products.
@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _chunked(q_BTNH, k_BSKH, v_BSKH, segment_ids, mask, scale, soft_cap):
    return _chunked_forward(q_BTNH, k_BSKH, v_BSKH, segment_ids, mask, scale, soft_cap)[0]


def _group(x_BTNH: Array, num_kv_heads: int) -> Float[Array, "b k g t h"]:
    batch, queries, heads, size = x_BTNH.shape
    x_BTKGH = x_BTNH.reshape(batch, queries, num_kv_heads, heads // num_kv_heads, size)
    return x_BTKGH.transpose(0, 2, 3, 1, 4)


def _ungroup(x_BKGTH: Array) -> Float[Array, "b t n h"]:
    batch, kv_heads, groups, queries, size = x_BKGTH.shape
    return x_BKGTH.transpose(0, 3, 1, 2, 4).reshape(batch, queries, kv_heads * groups, size)


def _chunked_forward(q_BTNH, k_BSKH, v_BSKH, segment_ids, mask, scale, soft_cap):
    q_BKGTH = _group(q_BTNH, k_BSKH.shape[2])
    k_BKSH, v_BKSH = (x.transpose(0, 2, 1, 3) for x in (k_BSKH, v_BSKH))
    outputs, log_sums = [], []
    for chunk in _chunks(q_BTNH.shape[1], k_BSKH.shape[1], mask):
        logits, _ = _logits(q_BKGTH, k_BKSH, segment_ids, chunk, mask, scale, soft_cap)
        top = logits.max(-1, keepdims=True)
        exponentials = jnp.exp(logits - top)
        total = exponentials.sum(-1, keepdims=True)
        weights = (exponentials / total).astype(v_BSKH.dtype)
        v = v_BKSH[:, :, chunk.first_key : chunk.last_key]
        outputs.append(_einsum32("bkgts,bksh->bkgth", weights, v).astype(q_BTNH.dtype))
        log_sums.append(top + jnp.log(total))
    out_BKGTH = jnp.concatenate(outputs, axis=3)
    residuals = (q_BKGTH, k_BKSH, v_BKSH, segment_ids, out_BKGTH, log_sums)
    return _ungroup(out_BKGTH), residuals


def _chunked_backward(mask, scale, soft_cap, residuals, g_BTNH):
    q_BKGTH, k_BKSH, v_BKSH, segment_ids, out_BKGTH, log_sums = residuals
    dtype, num_keys = q_BKGTH.dtype, k_BKSH.shape[2]
    g_BKGTH = _group(g_BTNH, k_BKSH.shape[1])
    delta = (g_BKGTH.astype(jnp.float32) * out_BKGTH.astype(jnp.float32)).sum(-1, keepdims=True)
    dq, dk, dv = [], [], []
    chunks = _chunks(g_BTNH.shape[1], num_keys, mask)
    for chunk, log_sum in zip(chunks, log_sums, strict=True):
        queries = slice(chunk.start, chunk.stop)
        keys = slice(chunk.first_key, chunk.last_key)
        q, g = q_BKGTH[:, :, :, queries], g_BKGTH[:, :, :, queries]
        logits, raw = _logits(q_BKGTH, k_BKSH, segment_ids, chunk, mask, scale, soft_cap)
        weights = jnp.exp(logits - log_sum)
        dweights = _einsum32("bkgth,bksh->bkgts", g, v_BKSH[:, :, keys])
        dlogits = weights * (dweights - delta[:, :, :, queries]) * scale
        if soft_cap is not None:
            dlogits = dlogits * (1 - jnp.square(raw / soft_cap))
        dlogits = dlogits.astype(dtype)
        dq.append(_einsum32("bkgts,bksh->bkgth", dlogits, k_BKSH[:, :, keys]).astype(dtype))
        unseen = ((0, 0), (0, 0), (chunk.first_key, num_keys - chunk.last_key), (0, 0))
        dk.append(jnp.pad(_contract_queries(dlogits, q), unseen))
        dv.append(jnp.pad(_contract_queries(weights.astype(dtype), g), unseen))
    dk_BSKH, dv_BSKH = (
        functools.reduce(jnp.add, x).transpose(0, 2, 1, 3).astype(dtype) for x in (dk, dv)
    )
    return _ungroup(jnp.concatenate(dq, axis=3)), dk_BSKH, dv_BSKH, None


_chunked.defvjp(_chunked_forward, _chunked_backward)
