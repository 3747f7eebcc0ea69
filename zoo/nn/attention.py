"""Attention: one function in front of `jax.nn.dot_product_attention` and the zoo's own kernel.

Legend of suffixes: B batch, T queries, S keys, N query heads, K key-value heads, G query heads per
key-value head, H head size.
"""

import functools
import math
import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zoo.nn.derivatives import custom_vjp, in_forward_mode
from zoo.nn.precision import low_on_cpu, platform

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
    refuses = functools.partial(_refusal, q_BTNH, mask, soft_cap, segment_ids is not None)
    refusal = refuses(implementation)
    if implementation == "auto":
        implementation = "chunked" if refuses("cudnn") else "cudnn"
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


def attend_to_slots(
    q_BTNH: Float[Array, "batch new heads head_dim"],
    k_BKSH: Float[Array, "batch kv_heads slots head_dim"],
    v_BKSH: Float[Array, "batch kv_heads slots head_dim"],
    seen_BTS: Bool[Array, "batch new slots"],
    *,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> Float[Array, "batch new heads head_dim"]:
    """Softmax attention of a few queries per row over the slots they see, as decoding needs it.

    `soft_cap` and `scale` are those of `attention`; the softmax is in fp32.
    """
    batch, kv_heads, _, size = k_BKSH.shape
    new, heads = q_BTNH.shape[1:3]
    # The queries that share keys, G, are the heads of a group at each of the new tokens.
    q_BKGH = q_BTNH.reshape(batch, new, kv_heads, -1, size).swapaxes(1, 2)
    q_BKGH = q_BKGH.reshape(batch, kv_heads, -1, size)
    seen_B1GS = seen_BTS if new == 1 else jnp.repeat(seen_BTS, heads // kv_heads, axis=1)
    seen_B1GS = seen_B1GS[:, None]
    num_queries = q_BKGH.shape[2]
    if num_queries == 1 and low_on_cpu(q_BKGH):
        # XLA for CPU converts all keys and values to fp32 for one query, not for two.
        q_BKGH = jnp.repeat(q_BKGH, 2, axis=2)
    logits = _einsum32("bkgh,bksh->bkgs", q_BKGH, k_BKSH) * (size**-0.5 if scale is None else scale)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    weights = jax.nn.softmax(jnp.where(seen_B1GS, logits, _MASKED), axis=-1)
    out = _einsum32("bkgs,bksh->bkgh", weights.astype(v_BKSH.dtype), v_BKSH)
    out = out[:, :, :num_queries].astype(q_BTNH.dtype)
    return out.reshape(batch, kv_heads, new, -1, size).swapaxes(1, 2).reshape(q_BTNH.shape)


def _refusal(
    q_BTNH: Array, mask: "_Mask", soft_cap: float | None, packed: bool, implementation: str
) -> str | None:
    """Why a backend of `jax.nn.dot_product_attention` cannot serve, or None if it can."""
    if implementation in ("auto", "chunked"):
        return None
    if implementation not in ("xla", "cudnn"):
        return "is no implementation"
    if soft_cap is not None:
        return f"has no soft cap, and attention_soft_cap={soft_cap}"
    if implementation == "xla":
        return None
    if in_forward_mode():
        return "has no rule for forward mode"
    if platform() != "gpu":
        return f"needs an NVIDIA GPU, and this run is on {platform()!r}"
    if q_BTNH.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bf16 or fp16, and the precision is {q_BTNH.dtype}"
    if q_BTNH.shape[-1] % 8 or q_BTNH.shape[-1] > 128:
        return f"needs a multiple of 8 up to 128, and head_dim={q_BTNH.shape[-1]}"
    if mask.window is not None and not mask.causal:
        return f"needs causal attention for a window, and window={mask.window} is without it"
    if packed and q_BTNH.shape[1] % 2:
        return f"needs an even length for packed rows, and this one is {q_BTNH.shape[1]}"
    return None


def _same_segment(segment_ids: Int[Array, "batch seq"]) -> Bool[Array, "batch seq seq"]:
    return segment_ids[:, :, None] == segment_ids[:, None, :]


class _Mask(NamedTuple):
    """The positions that a query sees: causality and a sliding window."""

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


class _Layout(NamedTuple):
    """The order of axes inside, as einsum letters: b batch, k, g heads, t, s time, h head size."""

    queries: str
    keys: str

    def of_queries(self, x_BTNH: Array, num_kv_heads: int) -> Array:
        batch, time, heads, size = x_BTNH.shape
        x = x_BTNH.reshape(batch, time, num_kv_heads, heads // num_kv_heads, size)
        return jnp.einsum(f"btkgh->{self.queries}", x)

    def to_heads(self, x: Array, like_BTNH: Array) -> Array:
        return jnp.einsum(f"{self.queries}->btkgh", x).reshape(like_BTNH.shape)

    def slice_queries(self, x: Array, chunk: _Chunk) -> Array:
        return jax.lax.slice_in_dim(x, chunk.start, chunk.stop, axis=self.queries.index("t"))

    def slice_keys(self, x: Array, chunk: _Chunk) -> Array:
        return jax.lax.slice_in_dim(x, chunk.first_key, chunk.last_key, axis=self.keys.index("s"))

    def pad_keys(self, x: Array, chunk: _Chunk, num_keys: int) -> Array:
        unseen = [(0, 0)] * 4
        unseen[self.keys.index("s")] = (chunk.first_key, num_keys - chunk.last_key)
        return jnp.pad(x, unseen)


def _layout(dtype: Any) -> _Layout:
    """The faster layout: on CPU in fp32 heads before time, as batched products want them."""
    if dtype == jnp.float32 and platform() == "cpu":
        return _Layout("bkgth", "bksh")
    return _Layout("btkgh", "bskh")


def _einsum32(formula: str, x: Array, y: Array) -> Float[Array, "..."]:
    return jnp.einsum(formula, x, y, preferred_element_type=jnp.float32)


def _product(formula: str, x: Array, y: Array) -> Float[Array, "..."]:
    """`_einsum32`, with the axes g and t as one where they are neighbours in every operand.

    For two axes XLA for CPU transposes an operand in memory.
    """
    of_x, of_y, of_out = re.split(",|->", formula)
    if formula.count("gt") != formula.count("g"):
        return _einsum32(formula, x, y)
    sizes = dict(zip(of_x + of_y, x.shape + y.shape, strict=True))
    x, y = _fold(of_x, x), _fold(of_y, y)
    return _einsum32(formula.replace("gt", "t"), x, y).reshape([sizes[axis] for axis in of_out])


def _fold(axes: str, x: Array) -> Array:
    g = axes.find("g")
    return x if g < 0 else x.reshape(*x.shape[:g], -1, *x.shape[g + 2 :])


def _logits(q, k, segment_ids, chunk, layout, mask, scale, soft_cap):
    """Masked logits of one chunk's queries and keys, fp32[B, K, G, T, S], and before the mask."""
    raw = _product(f"{layout.queries},{layout.keys}->bkgts", q, k) * scale
    if soft_cap is not None:
        raw = soft_cap * jnp.tanh(raw / soft_cap)
    seen = jnp.broadcast_to(mask.seen(chunk, segment_ids), raw.shape)
    return jnp.where(seen, raw, _MASKED), raw


# The gradient is written out so that the backward pass keeps no [seq, seq] array, and so that its
# products take inputs of the compute dtype: autodiff of fp32 logits would multiply fp32 by bf16.
@functools.partial(custom_vjp, nondiff_argnums=(4, 5, 6))
def _chunked(q_BTNH, k_BSKH, v_BSKH, segment_ids, mask, scale, soft_cap):
    return _chunked_forward(q_BTNH, k_BSKH, v_BSKH, segment_ids, mask, scale, soft_cap)[0]


def _chunked_forward(q_BTNH, k_BSKH, v_BSKH, segment_ids, mask, scale, soft_cap):
    layout = _layout(q_BTNH.dtype)
    q = layout.of_queries(q_BTNH, k_BSKH.shape[2])
    k, v = (jnp.einsum(f"bskh->{layout.keys}", x) for x in (k_BSKH, v_BSKH))
    outputs, log_sums = [], []
    for chunk in _chunks(q_BTNH.shape[1], k_BSKH.shape[1], mask):
        q_chunk, k_chunk = layout.slice_queries(q, chunk), layout.slice_keys(k, chunk)
        logits, _ = _logits(q_chunk, k_chunk, segment_ids, chunk, layout, mask, scale, soft_cap)
        # A softmax does not depend on what is subtracted: as a constant, it leaves gradients exact.
        top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        exponentials = jnp.exp(logits - top)
        total = exponentials.sum(-1, keepdims=True)
        weights = (exponentials / total).astype(v.dtype)
        formula = f"bkgts,{layout.keys}->{layout.queries}"
        outputs.append(_product(formula, weights, layout.slice_keys(v, chunk)).astype(q.dtype))
        log_sums.append(top + jnp.log(total))
    out = jnp.concatenate(outputs, axis=layout.queries.index("t"))
    return layout.to_heads(out, q_BTNH), (q, k, v, segment_ids, out, log_sums)


def _chunked_backward(mask, scale, soft_cap, residuals, g_BTNH):
    q, k, v, segment_ids, out, log_sums = residuals
    layout = _layout(q.dtype)
    queries, keys = layout
    num_queries, num_keys = q.shape[queries.index("t")], k.shape[keys.index("s")]
    g = layout.of_queries(g_BTNH, k.shape[keys.index("k")])
    delta = jnp.einsum(f"{queries}->bkgth", g.astype(jnp.float32) * out.astype(jnp.float32))
    delta = delta.sum(-1, keepdims=True)
    dq, dk, dv = [], [], []
    for chunk, log_sum in zip(_chunks(num_queries, num_keys, mask), log_sums, strict=True):
        q_chunk, g_chunk = layout.slice_queries(q, chunk), layout.slice_queries(g, chunk)
        k_chunk, v_chunk = layout.slice_keys(k, chunk), layout.slice_keys(v, chunk)
        logits, raw = _logits(q_chunk, k_chunk, segment_ids, chunk, layout, mask, scale, soft_cap)
        weights = jnp.exp(logits - log_sum)
        dweights = _product(f"{queries},{keys}->bkgts", g_chunk, v_chunk)
        dlogits = weights * (dweights - delta[:, :, :, chunk.start : chunk.stop]) * scale
        if soft_cap is not None:
            dlogits = dlogits * (1 - jnp.square(raw / soft_cap))
        dlogits, weights = dlogits.astype(q.dtype), weights.astype(q.dtype)
        dq.append(_product(f"bkgts,{keys}->{queries}", dlogits, k_chunk).astype(q.dtype))
        of_keys = f"bkgts,{queries}->{keys}"
        dk.append(layout.pad_keys(_product(of_keys, dlogits, q_chunk), chunk, num_keys))
        dv.append(layout.pad_keys(_product(of_keys, weights, g_chunk), chunk, num_keys))
    dq_BTNH = layout.to_heads(jnp.concatenate(dq, axis=queries.index("t")), g_BTNH)
    dk_BSKH, dv_BSKH = (
        jnp.einsum(f"{keys}->bskh", functools.reduce(jnp.add, x)).astype(q.dtype) for x in (dk, dv)
    )
    return dq_BTNH, dk_BSKH, dv_BSKH, None


_chunked.defvjp(_chunked_forward, _chunked_backward)
