"""One layer of a transformer: its mixer, its MLP or mixture of experts, and the norms around them.

Legend of suffixes: B batch, T time, E embed, N query heads, K key-value heads, H head size.
"""

import dataclasses
import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo.nn.attention.attention import attention
from zoo.nn.layers import (
    ACTIVATIONS,
    Norm,
    RMSNorm,
    add_bias,
    dropout,
    gated,
    make_norm,
    normal,
    times,
)
from zoo.nn.products import Operand, matmul
from zoo.nn.recurrences.chunks import Mixer
from zoo.nn.recurrences.marks import Marks
from zoo.nn.recurrences.mixers import MIXERS
from zoo.nn.remat import named
from zoo.nn.stateful import Balance
from zoo.sharding import constrain
from zoo.transformer.config import Config
from zoo.transformer.latent import LatentAttention
from zoo.transformer.moe import MoE
from zoo.transformer.part_configs import AttentionConfig
from zoo.transformer.rotary import Rotary, rotate, rotate_queries

# `attention`, or a function in its place where keys and values are kept.
Attend = Callable[..., Float[Array, "batch seq heads head_dim"]]
# `from_zeros`, or a function in its place where states are kept.
Recur = Callable[[Mixer, Array, Marks], Float[Array, "batch seq embed"]]


def residual_norm(config: Config) -> Norm:
    """A norm over the residual stream."""
    residual = config.residual
    bias = config.bias or residual.norm_bias
    norm = make_norm(residual.norm, config.d_model, eps=residual.norm_eps, bias=bias)
    assert norm is not None
    return norm


class Attention(eqx.Module):
    """Multi-head self-attention with grouped queries."""

    wq: Float[Array, "embed heads head_dim"] | Operand
    wk: Float[Array, "embed kv_heads head_dim"] | Operand
    wv: Float[Array, "embed kv_heads head_dim"] | Operand
    wg: Float[Array, "embed heads head_dim"] | Operand | None
    wo: Float[Array, "heads head_dim embed"] | Operand
    bq: Float[Array, "heads head_dim"] | None
    bk: Float[Array, "kv_heads head_dim"] | None
    bv: Float[Array, "kv_heads head_dim"] | None
    bo: Float[Array, "embed"] | None
    sinks: Float[Array, "heads"] | None
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    causal: bool = eqx.field(static=True)
    config: AttentionConfig = eqx.field(static=True)

    def __init__(self, config: Config, *, key: Key[Array, ""]):
        embed, size = config.d_model, config.head_size
        heads, kv_heads = config.num_heads, config.kv_heads
        q_key, k_key, v_key, o_key, g_key = jax.random.split(key, 5)
        self.wq = normal(q_key, (embed, heads, size), embed)
        self.wk = normal(k_key, (embed, kv_heads, size), embed)
        self.wv = normal(v_key, (embed, kv_heads, size), embed)
        self.wg = None
        if config.attention.output_gate:
            self.wg = normal(g_key, (embed, heads, size), embed)
        # Divided by the number of parts that add to the residual stream (Radford et al. 2019).
        self.wo = normal(o_key, (heads, size, embed), heads * size * config.num_parts)
        qkv_bias = config.bias or config.attention.qkv_bias
        self.bq = jnp.zeros((heads, size)) if qkv_bias else None
        has_key_bias = qkv_bias and config.attention.key_bias
        self.bk = jnp.zeros((kv_heads, size)) if has_key_bias else None
        self.bv = jnp.zeros((kv_heads, size)) if qkv_bias else None
        self.bo = jnp.zeros(embed) if config.bias or config.attention.out_bias else None
        self.sinks = jnp.zeros(heads) if config.attention.sinks else None
        self.q_norm = self.k_norm = None
        rms_norm = partial(
            RMSNorm,
            eps=config.residual.norm_eps,
            offset=1.0 if config.residual.norm == "rms_offset" else 0.0,
        )
        if config.attention.qk_norm == "per_head":
            self.q_norm = rms_norm(size, axis="head_dim")
            self.k_norm = rms_norm(size, axis="head_dim")
        elif config.attention.qk_norm == "across_heads":
            self.q_norm = rms_norm(heads * size, axis="heads")
            self.k_norm = rms_norm(kv_heads * size, axis="kv_heads")
        self.causal, self.config = config.causal, config.attention

    def __call__(
        self,
        x_BTE: Float[Array, "batch seq embed"],
        segment_ids: Int[Array, "batch seq"] | None,
        rotary: Rotary | None,
        window: int | None,
        attend: Attend = attention,
    ) -> Float[Array, "batch seq embed"]:
        """Attend within each row's segments; `rotary` are the tables of its positions.

        `attend` takes the place of `attention` where a cache keeps keys and values.
        """
        q_BTNH = add_bias(matmul(x_BTE, self.wq), self.bq)
        k_BTKH = add_bias(matmul(x_BTE, self.wk), self.bk)
        v_BTKH = add_bias(matmul(x_BTE, self.wv), self.bv)
        if (clip := self.config.clip) is not None:
            q_BTNH, k_BTKH, v_BTKH = (jnp.clip(x, -clip, clip) for x in (q_BTNH, k_BTKH, v_BTKH))
        if self.q_norm is not None and self.k_norm is not None:
            q_BTNH, k_BTKH = _norm_heads(self.q_norm, q_BTNH), _norm_heads(self.k_norm, k_BTKH)
        if rotary is not None:
            q_BTNH, k_BTKH = rotate_queries(q_BTNH, rotary), rotate(k_BTKH, rotary)
        out_BTNH = attend(
            named(constrain(q_BTNH, "batch", "inner_seq", "heads", "head_dim"), "query"),
            named(constrain(k_BTKH, "batch", "inner_seq", "kv_heads", "head_dim"), "key"),
            named(constrain(v_BTKH, "batch", "inner_seq", "kv_heads", "head_dim"), "value"),
            causal=self.causal,
            segment_ids=segment_ids,
            window=window,
            soft_cap=self.config.soft_cap,
            scale=self.config.scale,
            sinks=self.sinks,
            implementation=self.config.kernel,
        )
        out_BTNH = constrain(out_BTNH, "batch", "inner_seq", "heads", "head_dim")
        out_BTNH = named(out_BTNH, "attention")
        if self.wg is not None:
            gate_BTNH = jax.nn.sigmoid(matmul(x_BTE, self.wg, dtype=jnp.float32))
            gate_BTNH = constrain(gate_BTNH, "batch", "inner_seq", "heads", "head_dim")
            out_BTNH = (out_BTNH.astype(jnp.float32) * gate_BTNH).astype(out_BTNH.dtype)
        return add_bias(matmul(out_BTNH, self.wo, contract=2), self.bo)


def _norm_heads(
    norm: RMSNorm, x_BTNH: Float[Array, "batch seq heads head_dim"]
) -> Float[Array, "batch seq heads head_dim"]:
    """Norm each head by itself, or all of them as one, by the size of the norm."""
    if norm.scale.shape[-1] == x_BTNH.shape[-1]:
        return norm(x_BTNH)
    return norm(x_BTNH.reshape(*x_BTNH.shape[:2], -1)).reshape(x_BTNH.shape)


class XIELU(eqx.Module):
    """An activation with two learned factors (Huang & Schlag 2024, xIELU).

    The slope at zero and the bound of the exponential are as stored, and have no gradient.
    """

    positive: Float[Array, ""]
    negative: Float[Array, ""]
    slope: Float[Array, ""]
    bound: Float[Array, ""]

    def __init__(self) -> None:
        self.slope, self.bound = jnp.float32(0.5), jnp.float32(-1e-6)
        self.positive, self.negative = (jnp.log(jnp.expm1(jnp.float32(x))) for x in (0.8, 0.3))

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """A parabola above zero, and an exponential with its tangent below; in fp32 inside."""
        x32, positive, negative = (y.astype(jnp.float32) for y in (x, self.positive, self.negative))
        slope, bound = jax.lax.stop_gradient((self.slope, self.bound))
        above = jax.nn.softplus(positive) * jnp.square(x32)
        below = jnp.expm1(jnp.minimum(x32, bound.astype(jnp.float32))) - x32
        below = below * (slope.astype(jnp.float32) + jax.nn.softplus(negative))
        return (jnp.where(x32 > 0, above, below) + slope.astype(jnp.float32) * x32).astype(x.dtype)


class MLP(eqx.Module):
    """The feed-forward part, gated (Shazeer 2020) or plain."""

    w_gate: Float[Array, "embed mlp"] | Operand | None
    w_up: Float[Array, "embed mlp"] | Operand
    w_down: Float[Array, "mlp embed"] | Operand
    b_up: Float[Array, "mlp"] | None
    b_down: Float[Array, "embed"] | None
    activation: XIELU | None
    kind: str = eqx.field(static=True)

    def __init__(self, config: Config, *, key: Key[Array, ""]):
        embed, hidden = config.d_model, config.hidden_size
        gate_key, up_key, down_key = jax.random.split(key, 3)
        self.w_gate = normal(gate_key, (embed, hidden), embed) if config.gated else None
        self.w_up = normal(up_key, (embed, hidden), embed)
        self.w_down = normal(down_key, (hidden, embed), hidden * config.num_parts)
        bias = config.bias or config.mlp_bias
        self.b_up = jnp.zeros(hidden) if bias else None
        self.b_down = jnp.zeros(embed) if bias else None
        self.activation = XIELU() if config.mlp == "xielu" else None
        self.kind = config.mlp

    def __call__(self, x_BTE: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        """Map each position on its own."""
        hidden = named(add_bias(matmul(x_BTE, self.w_up), self.b_up), "mlp_hidden")
        if self.w_gate is None:
            hidden = (self.activation or ACTIVATIONS[self.kind])(hidden)
        else:
            hidden = gated(self.kind, named(matmul(x_BTE, self.w_gate), "mlp_hidden"), hidden)
        hidden = constrain(hidden, "batch", "inner_seq", "mlp")
        return add_bias(matmul(hidden, self.w_down), self.b_down)


def make_recurrence(config: Config, *, key: Key[Array, ""]) -> Mixer:
    """The recurrence of a layer, with its output matrix divided as attention's is."""
    kind, width = config.mixer.kind, config.d_model
    assert kind is not None
    settings = config.mixer.recurrence
    eps = settings.norm_eps or config.residual.norm_eps
    made: Any = MIXERS[kind].layer(settings, width, width, "embed", key=key, eps=eps)
    return eqx.tree_at(lambda mixer: mixer.wo, made, made.wo / math.sqrt(config.num_parts))


def _dense(config: Config, *, key: Key[Array, ""]) -> MLP:
    """The MLP of a layer without experts."""
    return MLP(dataclasses.replace(config, d_ff=config.dense_size), key=key)


def _shared(config: Config, *, key: Key[Array, ""]) -> MLP:
    """The shared experts of a layer as one MLP."""
    width = config.experts.num_shared * config.hidden_size
    return MLP(dataclasses.replace(config, d_ff=width), key=jax.random.fold_in(key, 1))


def _shared_gate(config: Config, *, key: Key[Array, ""]) -> Float[Array, "embed routes"]:
    """The matrix of the gate of a layer's shared experts."""
    # 0 to 3 would be the keys that the experts split theirs into.
    return normal(jax.random.fold_in(key, 4), (config.d_model, 1), config.d_model)


def _layer_scale(config: Config, *, key: Key[Array, ""]) -> Float[Array, "embed"]:
    """The initial factors of what a part adds."""
    assert config.residual.layer_scale is not None
    return jnp.full(config.d_model, config.residual.layer_scale)


def from_zeros(
    recurrence: Mixer, x_BTE: Float[Array, "batch seq embed"], marks: Marks
) -> Float[Array, "batch seq embed"]:
    """The output of a recurrence that begins with a state of zeros."""
    return recurrence(x_BTE, recurrence.initial_state(x_BTE.shape[0]), marks)[1]


class Block(eqx.Module):
    """One layer: attention or a recurrence, then an MLP, each added to the residual stream."""

    attention_norm: Norm | None
    attention: Attention | LatentAttention | None
    recurrence: Mixer | None
    attention_out_norm: Norm | None
    mlp_norm: Norm | None
    mlp: MLP | MoE | None
    dense_mlp: MLP | None
    shared_mlp: MLP | None
    shared_gate: Float[Array, "embed routes"] | Operand | None
    mlp_out_norm: Norm | None
    attention_scale: Float[Array, "embed"] | None
    mlp_scale: Float[Array, "embed"] | None
    norms_stream: bool = eqx.field(static=True)
    parallel: bool = eqx.field(static=True)
    multiplier: float = eqx.field(static=True)
    dropout: float = eqx.field(static=True)

    def __init__(self, config: Config):
        """A layer without parts; `Config.parts` says which layers have which."""
        self.attention = self.recurrence = None
        self.mlp = self.dense_mlp = self.shared_mlp = self.shared_gate = None
        self.attention_norm = self.attention_out_norm = self.mlp_norm = self.mlp_out_norm = None
        self.parallel, self.dropout = config.residual.parallel != "none", config.dropout
        self.attention_scale = self.mlp_scale = None
        self.norms_stream = config.residual.norm_placement == "stream"
        self.multiplier = config.residual.multiplier

    @staticmethod
    def stacked(config: Config, *, key: Key[Array, ""]) -> "Block":
        """All layers as one, stacked along axis 0; a part's arrays are those of its layers."""
        mixer_keys, mlp_keys = jax.vmap(jax.random.split, out_axes=1)(
            jax.random.split(key, config.num_layers)
        )
        blocks = Block(config)
        norms = "attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"
        makers: dict[str, Any] = dict.fromkeys(norms, lambda config, key: residual_norm(config))
        makers |= dict.fromkeys(("attention_scale", "mlp_scale"), _layer_scale)
        makers |= {"attention": Attention, "recurrence": make_recurrence}
        if config.attention.latent.kv_rank is not None:
            makers["attention"] = LatentAttention
        makers["mlp"] = MLP if config.experts.num_experts is None else MoE
        makers |= {"dense_mlp": _dense, "shared_mlp": _shared, "shared_gate": _shared_gate}
        for name, layers in config.parts.items():
            keys = mixer_keys if name in ("attention", "recurrence") else mlp_keys
            make = partial(makers[name], config)
            stack = eqx.filter_vmap(lambda key: make(key=key))(keys[jnp.asarray(layers)])  # noqa: B023
            blocks = eqx.tree_at(
                operator.attrgetter(name), blocks, stack, is_leaf=lambda x: x is None
            )
        return blocks

    def __call__(
        self,
        x_BTE: Float[Array, "batch seq embed"],
        segment_ids: Int[Array, "batch seq"] | None,
        rotary: Rotary | None,
        window: int | None,
        key: Key[Array, ""] | None,
        attend: Attend | None = None,
        weights_BT: Float[Array, "batch seq"] | None = None,
        marks: Marks | None = None,
        recur: Recur = from_zeros,
    ) -> tuple[Float[Array, "batch seq embed"], Balance | None]:
        """Apply the layer to the residual stream; also the `Balance` of its experts.

        `weights_BT` weight the positions in the balance; padding never counts. `marks` are what
        `segment_ids` say to a recurrence.
        """
        keys = (None, None) if key is None else jax.random.split(key)
        normed_BTE = _enter(self.attention_norm, x_BTE)
        if self.recurrence is not None:
            added_BTE = recur(self.recurrence, normed_BTE, marks or Marks())
        else:
            assert self.attention is not None
            attend = attention if attend is None else attend
            added_BTE = self.attention(normed_BTE, segment_ids, rotary, window, attend)
        if self.parallel and self.mlp_norm is not None:
            normed_BTE = _enter(self.mlp_norm, x_BTE)
        x_BTE = self._add(x_BTE, added_BTE, self.attention_out_norm, self.attention_scale, keys[0])
        mlp = self.mlp or self.dense_mlp
        if mlp is None:
            return x_BTE, None
        x_BTE = named(x_BTE, "mlp_input")
        balance = None
        if not self.parallel:
            normed_BTE = _enter(self.mlp_norm, x_BTE)
        if isinstance(mlp, MoE):
            counted_BT = jnp.ones((1, x_BTE.shape[1]))
            if segment_ids is not None:
                counted_BT = (segment_ids > 0).astype(jnp.float32)
            if weights_BT is not None:
                counted_BT = jnp.where(counted_BT > 0, weights_BT, 0.0)
            added_BTE, balance = mlp(normed_BTE, counted_BT)
            if self.shared_mlp is not None:
                added_BTE = added_BTE + self._shared(self.shared_mlp, normed_BTE)
        else:
            added_BTE = mlp(normed_BTE)
        norm, scale = self.mlp_out_norm, self.mlp_scale
        return self._add(x_BTE, added_BTE, norm, scale, keys[1]), balance

    def _shared(self, shared_mlp: MLP, x_BTE: Array) -> Float[Array, "batch seq embed"]:
        """The output of the shared experts, behind their gate if there is one."""
        y_BTE = shared_mlp(x_BTE)
        if self.shared_gate is None:
            return y_BTE
        gate_BT1 = jax.nn.sigmoid(matmul(x_BTE, self.shared_gate, dtype=jnp.float32))
        return (y_BTE.astype(jnp.float32) * gate_BT1).astype(y_BTE.dtype)

    def _add(
        self,
        x_BTE: Array,
        added_BTE: Array,
        norm: Norm | None,
        scale: Array | None,
        key: Key[Array, ""] | None,
    ) -> Float[Array, "batch seq embed"]:
        """The residual stream with the output of a part added, and the norm of either."""
        added_BTE = constrain(added_BTE, "batch", "seq", "embed")
        if norm is not None and not self.norms_stream:
            added_BTE = norm(added_BTE)
        if scale is not None:
            added_BTE = added_BTE * scale[None, None].astype(added_BTE.dtype)
        added_BTE = times(added_BTE, self.multiplier)
        x_BTE = x_BTE + dropout(added_BTE, self.dropout, key)
        return norm(x_BTE) if norm is not None and self.norms_stream else x_BTE


# From here on to `_add` a part has whole rows: with "seq" sharded, only the stream is split.
def _enter(norm: Norm | None, x_BTE: Array) -> Float[Array, "batch seq embed"]:
    """The input of a part, from the residual stream."""
    return constrain(x_BTE if norm is None else norm(x_BTE), "batch", "inner_seq", "embed")
