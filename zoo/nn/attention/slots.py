"""Attention of a few new queries over the slots of a cache.

Legend of suffixes: B batch, T queries, S slots, N query heads, K key-value heads, G query heads per
key-value head, H head size.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from zoo.nn.attention.layout import einsum32
from zoo.nn.attention.masks import MASKED
from zoo.nn.precision import low_on_cpu


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
    logits = einsum32("bkgh,bksh->bkgs", q_BKGH, k_BKSH) * (size**-0.5 if scale is None else scale)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    weights = jax.nn.softmax(jnp.where(seen_B1GS, logits, MASKED), axis=-1)
    out = einsum32("bkgs,bksh->bkgh", weights.astype(v_BKSH.dtype), v_BKSH)
    out = out[:, :, :num_queries].astype(q_BTNH.dtype)
    return out.reshape(batch, kv_heads, new, -1, size).swapaxes(1, 2).reshape(q_BTNH.shape)
