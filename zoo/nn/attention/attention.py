"""Attention: one function in front of several kernels, the choice among them, and decoding's.

Where a mesh splits the tokens of a row, `context_parallel` sees to it, whatever the kernel.

Legend of suffixes: B batch, T queries, S keys or slots of a cache, N query heads, K key-value
heads, G query heads per key-value head, H head size.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zoo.nn.attention.chunked import Chunked, einsum32
from zoo.nn.attention.context_parallel import Transfer, on_each_device
from zoo.nn.attention.masks import MASKED, Kernel, Mask, run
from zoo.nn.attention.splash import Splash
from zoo.nn.products import compute_capability, in_forward_mode, low_on_cpu, platform
from zoo.sharding import num_parts, split_by

Implementation = Literal[
    "auto", "chunked", "xla", "cudnn", "triton", "splash", "splash_fused", "ring", "exchange"
]

# Within `overridden_kernel(name)`, it replaces the ones that models ask for, as `remat`'s does.
overridden_kernel = jax.make_user_context(default_value=None)


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
    sinks: Float[Array, "heads"] | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "batch queries heads head_dim"]:
    """Softmax attention with grouped queries over packed rows; the softmax is in fp32.

    Queries and keys are the same positions. A query sees the keys of its own segment, not later
    ones if `causal`, and no further than `window - 1` positions away. `soft_cap` bounds the
    logits by `soft_cap * tanh(logits / soft_cap)`; `scale` defaults to head_dim**-0.5. `sinks`
    are logits beside those of all keys, one per head (`zoo.nn.attention.masks.run`).

    Implementations:

    - "splash" is JAX's flash kernel for TPUs, `jax.experimental.pallas.ops.tpu.splash_attention`;
      "splash_fused" computes the logits once in the backward pass, not twice, and keeps a gradient
      of the queries per block of keys: memory grows with the square of seq.
    - "triton" is the zoo's flash kernel for GPUs, `zoo.nn.attention.triton`, which takes no time
      for pairs of documents.
    - "cudnn" is cuDNN's flash kernel, by `jax.nn.dot_product_attention`, the faster one for rows
      that are not packed: to that function segments are a mask of [seq, seq].
    - "chunked" is the zoo's own, in plain XLA: memory grows with seq, not its square, the program
      with neither, and every product takes inputs of the compute dtype, forward and backward.
    - "xla" is `jax.nn.dot_product_attention`'s, which keeps all logits.
    - "auto" takes the platform's kernel where it applies, else "chunked".
    - "ring" and "exchange" are "auto", and say how queries meet keys where the mesh splits the
      tokens of a row: keys and values go around the devices (but for what a window sees of the
      neighbours), or devices exchange heads for tokens. The others take what sends less: see
      `zoo.nn.attention.context_parallel`.

    Raises:
        ValueError: an implementation that does not apply here, with the reason.
    """
    transfer: Transfer = "auto"
    implementation = overridden_kernel.value or implementation
    if implementation in ("ring", "exchange"):
        transfer, implementation = implementation, "auto"
    mask = Mask(causal, window)
    packed, has_sinks = segment_ids is not None, sinks is not None
    refuses = functools.partial(_refusal, q_BTNH, mask, soft_cap, packed, has_sinks)
    refusal = refuses(implementation)
    if implementation == "auto":
        implementation = next((x for x in _KERNELS if not refuses(x)), "chunked")
    elif refusal:
        raise ValueError(
            f"attention.kernel={implementation!r} {refusal}; choose 'auto' or 'chunked'"
        )
    scale = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
    if implementation not in ("xla", "cudnn"):
        kernel: Kernel = Chunked(mask, scale, soft_cap)
        if implementation == "triton":
            from zoo.nn.attention.triton import Triton  # which takes a second to import

            kernel = Triton(mask, scale, soft_cap)
        elif implementation != "chunked":
            kernel = Splash(mask, scale, soft_cap, fused=implementation == "splash_fused")
        # XLA splits its own products by rows and heads, but not by tokens, and no kernel.
        if implementation != "chunked" or num_parts("inner_seq") > 1:
            return on_each_device(kernel, q_BTNH, k_BSKH, v_BSKH, segment_ids, transfer, sinks)
        segments = None if segment_ids is None else (segment_ids, segment_ids)
        return run(kernel, q_BTNH, k_BSKH, v_BSKH, segments, sinks)
    same = None
    if segment_ids is not None:
        same = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        mask=same,
        is_causal=causal,
        scale=scale,
        local_window_size=None if window is None else window - 1,  # both ways; causality is above
        implementation="cudnn" if implementation == "cudnn" else "xla",
    )


_KERNELS: tuple[Implementation, ...] = ("splash", "cudnn", "triton")


def _refusal(
    q_BTNH: Array,
    mask: Mask,
    soft_cap: float | None,
    packed: bool,
    has_sinks: bool,
    implementation: str,
) -> str | None:
    """Why an implementation cannot serve, or None if it can."""
    length, size, dtype = q_BTNH.shape[1], q_BTNH.shape[-1], q_BTNH.dtype
    if implementation in ("auto", "chunked"):
        return None
    if implementation not in ("xla", "splash_fused", *_KERNELS):
        return "is no implementation"
    is_splash = implementation.startswith("splash")
    if soft_cap is not None and not is_splash and implementation != "triton":
        return f"has no soft cap, and attention.soft_cap={soft_cap}"
    if has_sinks and implementation in ("xla", "cudnn"):
        return "has no sinks, and attention.sinks=True"
    if implementation == "xla":
        return None
    if in_forward_mode():
        return "has no rule for forward mode"
    if is_splash:
        length //= num_parts("inner_seq")
        if platform() != "tpu":
            return f"needs a TPU, and this run is on {platform()!r}"
        if dtype not in (jnp.bfloat16, jnp.float32):
            return f"needs bf16 or fp32, and the precision is {dtype}"
        if length < 128:
            return f"needs rows of 128 positions or more per device, and this one has {length}"
        return None
    if platform() != "gpu":
        return f"needs an NVIDIA GPU, and this run is on {platform()!r}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bf16 or fp16, and the precision is {dtype}"
    most = 256 if implementation == "triton" else 128
    if size % 8 or size > most:
        return f"needs a multiple of 8 up to {most}, and head_dim={size}"
    if (capability := compute_capability()) is not None and capability < 8:
        return f"needs a GPU from Ampere on, of compute capability 8.0, and this is {capability}"
    if implementation == "triton":
        return None
    if packed:
        return "takes no packed rows, but by a mask of [seq, seq]"
    if length % 2:
        return f"has gradients of an even number of positions alone, and rows have {length}"
    if split := split_by("inner_seq"):
        return f"takes whole rows, and {split} of the mesh splits them"
    if (split := split_by("heads")) != (of_keys := split_by("kv_heads")):
        return f"splits keys as queries, and heads are split by {split!r}, kv_heads by {of_keys!r}"
    if mask.window is not None and not mask.causal:
        return f"needs causal attention for a window, and window={mask.window} is without it"
    return None


def attend_to_slots(
    q_BTNH: Float[Array, "batch new heads head_dim"],
    k_BKSH: Float[Array, "batch kv_heads slots head_dim"],
    v_BKSH: Float[Array, "batch kv_heads slots head_dim"],
    seen_BTS: Bool[Array, "batch new slots"],
    *,
    soft_cap: float | None = None,
    scale: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
) -> Float[Array, "batch new heads head_dim"]:
    """Softmax attention of a few queries per row over the slots they see, as decoding needs it.

    `soft_cap`, `scale` and `sinks` are as in `attention`; the softmax is in fp32.
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
    logits = einsum32("bkgh,bksh->bkgs", q_BKGH, k_BKSH) * (size**-0.5 if scale is None else scale)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits = jnp.where(seen_B1GS, logits, MASKED)
    if sinks is None:
        weights = jax.nn.softmax(logits, axis=-1)
    else:
        sinks_KG1 = jnp.tile(sinks.astype(jnp.float32).reshape(kv_heads, -1), (1, new))[..., None]
        total = jnp.logaddexp(jax.nn.logsumexp(logits, -1, keepdims=True), sinks_KG1[None])
        weights = jnp.exp(logits - total)
    out = einsum32("bkgs,bksh->bkgh", weights.astype(v_BKSH.dtype), v_BKSH)
    out = out[:, :, :num_queries].astype(q_BTNH.dtype)
    return out.reshape(batch, kv_heads, new, -1, size).swapaxes(1, 2).reshape(q_BTNH.shape)
