"""Latent attention: keys and values of all heads from one small vector per position (DeepSeek-V2).

Legend of suffixes: B batch, T time, E embed, N heads, H head size, R its rotary features, C the
latent vector.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo.nn.attention.attention import attention
from zoo.nn.attention.chunked import einsum32
from zoo.nn.layers import RMSNorm, normal
from zoo.nn.products import Operand, matmul
from zoo.nn.remat import named
from zoo.sharding import constrain
from zoo.transformer.config import Config
from zoo.transformer.part_configs import AttentionConfig
from zoo.transformer.rotary import Rotary, rotate, rotate_queries

_EPS = 1e-6  # of the norms of latent vectors in DeepSeek's models, whatever that of the others is


class LatentAttention(eqx.Module):
    """Self-attention whose keys and values come from a latent vector (DeepSeek-AI 2024).

    The first features of a head's query rotate, and meet one key that all heads share; the others
    meet the head's own key. A cache keeps the latent vector and the shared key alone: when
    `absorbed`, queries are multiplied by the matrix of keys and outputs by that of values, rather
    than what is kept.
    """

    wq: Float[Array, "embed heads head_dim"] | Operand | None
    wq_down: Float[Array, "embed latent"] | Operand | None
    wq_up: Float[Array, "latent heads head_dim"] | Operand | None
    w_down: Float[Array, "embed latent"] | Operand
    w_rotary: Float[Array, "embed latent"] | Operand
    wk: Float[Array, "latent heads head_dim"] | Operand
    wv: Float[Array, "latent heads head_dim"] | Operand
    wo: Float[Array, "heads head_dim embed"] | Operand
    q_norm: RMSNorm | None
    kv_norm: RMSNorm
    absorbs: bool = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    config: AttentionConfig = eqx.field(static=True)

    def __init__(self, config: Config, *, key: Key[Array, ""]):
        embed, heads, size = config.d_model, config.num_heads, config.head_size
        latent, keys = config.attention.latent, jax.random.split(key, 7)
        rank, q_rank, values = latent.kv_rank, latent.q_rank, config.value_size
        assert rank is not None
        self.wq = self.wq_down = self.wq_up = self.q_norm = None
        if q_rank is None:
            self.wq = normal(keys[0], (embed, heads, size), embed)
        else:
            self.wq_down = normal(keys[0], (embed, q_rank), embed)
            self.wq_up = normal(keys[1], (q_rank, heads, size), q_rank)
            self.q_norm = RMSNorm(q_rank, axis="latent", eps=_EPS)
        self.w_down = normal(keys[2], (embed, rank), embed)
        self.w_rotary = normal(keys[3], (embed, latent.rotary_dim), embed)
        self.kv_norm = RMSNorm(rank, axis="latent", eps=_EPS)
        self.wk = normal(keys[4], (rank, heads, size - latent.rotary_dim), rank)
        self.wv = normal(keys[5], (rank, heads, values), rank)
        # Divided as in `Attention`.
        self.wo = normal(keys[6], (heads, values, embed), heads * values * config.num_parts)
        scale = config.attention.scale
        self.scale = size**-0.5 if scale is None else scale
        self.absorbs, self.config = False, config.attention

    def absorbed(self) -> "LatentAttention":
        """The same for decoding, where `attend` has the latent vectors of the tokens so far."""
        made: Any = object.__new__(type(self))
        for name in self.__dataclass_fields__:
            object.__setattr__(made, name, name == "absorbs" or getattr(self, name))
        return made

    def __call__(
        self,
        x_BTE: Float[Array, "batch seq embed"],
        segment_ids: Int[Array, "batch seq"] | None,
        rotary: Rotary | None,
        window: int | None,
        attend: Callable[..., Array] = attention,
    ) -> Float[Array, "batch seq embed"]:
        """As `Attention`; another `attend` is also given what a cache is to keep."""
        if self.wq_down is None or self.wq_up is None or self.q_norm is None:
            assert self.wq is not None
            q_BTNH = matmul(x_BTE, self.wq)
        else:
            q_BTNH = matmul(self.q_norm(matmul(x_BTE, self.wq_down)), self.wq_up)
        c_BTC = self.kv_norm(matmul(x_BTE, self.w_down))
        r_BT1R = matmul(x_BTE, self.w_rotary)[:, :, None]
        if rotary is not None:
            q_BTNH, r_BT1R = rotate_queries(q_BTNH, rotary), rotate(r_BT1R, rotary)
        q_BTNH = named(constrain(q_BTNH, "batch", "inner_seq", "heads", "head_dim"), "query")
        options: dict[str, Any] = {"segment_ids": segment_ids, "window": window}
        options |= {"soft_cap": self.config.soft_cap, "scale": self.scale, "sinks": None}
        options |= {"causal": True, "implementation": self.config.kernel}
        if attend is not attention:
            options["kept"] = (jnp.concatenate([r_BT1R, c_BTC[:, :, None]], -1), None)
        of_head = self._absorbed if self.absorbs else self._expanded
        out_BTNH = of_head(q_BTNH, c_BTC, r_BT1R, attend, options)
        out_BTNH = constrain(out_BTNH, "batch", "inner_seq", "heads", "head_dim")
        return matmul(named(out_BTNH, "attention"), self.wo, contract=2)

    def _expanded(
        self, q_BTNH: Array, c_BTC: Array, r_BT1R: Array, attend: Callable[..., Array], options: Any
    ) -> Float[Array, "batch seq heads values"]:
        """Attention to the keys and values of each head."""
        k_BTNH, v_BTNH = matmul(c_BTC, self.wk), matmul(c_BTC, self.wv)
        r_BTNR = jnp.broadcast_to(r_BT1R, (*k_BTNH.shape[:3], r_BT1R.shape[-1]))
        k_BTNH = jnp.concatenate([r_BTNR, k_BTNH], -1)
        size = v_BTNH.shape[-1]
        # Kernels take keys and values of one size.
        v_BTNH = jnp.pad(v_BTNH, [(0, 0)] * 3 + [(0, q_BTNH.shape[-1] - size)])
        k_BTNH = named(constrain(k_BTNH, "batch", "inner_seq", "heads", "head_dim"), "key")
        v_BTNH = named(constrain(v_BTNH, "batch", "inner_seq", "heads", "head_dim"), "value")
        return attend(q_BTNH, k_BTNH, v_BTNH, **options)[..., :size]

    def _absorbed(
        self, q_BTNH: Array, c_BTC: Array, r_BT1R: Array, attend: Callable[..., Array], options: Any
    ) -> Float[Array, "batch seq heads values"]:
        """Attention to the latent vectors, which are keys and values of all heads."""
        wk, wv = (w.value() if isinstance(w, Operand) else w for w in (self.wk, self.wv))
        size, dtype = r_BT1R.shape[-1], q_BTNH.dtype
        of_keys = einsum32("btnh,cnh->btnc", q_BTNH[..., size:], wk).astype(dtype)
        q_BTNH = jnp.concatenate([q_BTNH[..., :size], of_keys], -1)
        out_BTNC = attend(q_BTNH, *options["kept"], **options)[..., size:]
        return einsum32("btnc,cnh->btnh", out_BTNC, wv).astype(dtype)
