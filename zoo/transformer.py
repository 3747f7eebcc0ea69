"""The transformer family: a pre-norm decoder, or with `causal=False` an encoder.

Legend of suffixes: B batch, T time, E embed, N query heads, K key-value heads, H head size, V
vocabulary. The axis names in the annotations of parameters are also how they are sharded.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from zoo import attention as attention_module
from zoo.attention import attention
from zoo.decoder import Attend, AttentionDecoder
from zoo.layers import (
    Embedding,
    LayerNorm,
    Linear,
    RMSNorm,
    add_bias,
    dropout,
    gelu,
    normal,
    rotary_tables,
    rotate,
)
from zoo.precision import matmul
from zoo.remat import POLICIES, Policy, scan_layers
from zoo.sharding import constrain, gather

Rotary = tuple[Float[Array, "#batch seq head_dim"], Float[Array, "#batch seq head_dim"]]


@dataclass(frozen=True)
class Config:
    """Hyperparameters of a transformer."""

    vocab_size: int
    """Number of token ids; logits have as many columns."""
    d_model: int = 512
    """Width of the residual stream."""
    num_layers: int = 8
    """Number of blocks."""
    num_heads: int = 8
    """Query heads a layer."""
    num_kv_heads: int | None = None
    """Key and value heads a layer, for grouped queries; as many as query heads if not given."""
    head_dim: int | None = None
    """Size of a head; d_model / num_heads if not given."""
    d_ff: int | None = None
    """Hidden width of the MLP; 4 d_model if not given, and 8/3 of it (rounded up) when gated."""
    mlp: Literal["swiglu", "geglu", "gelu"] = "swiglu"
    """Kind of MLP: gated by SiLU, gated by GELU, or plain GELU."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm, before each part and at the end."""
    norm_eps: float = 1e-6
    """What the norms add to the variance."""
    positions: Literal["rotary", "learned"] = "rotary"
    """Rotary positions in each attention, or learned ones added to the embedding."""
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths."""
    max_seq_len: int = 2048
    """Longest sequence; learned positions have a table of that many rows."""
    causal: bool = True
    """A decoder; False gives an encoder, whose positions see each other both ways."""
    bias: bool = False
    """Biases in the projections (and in LayerNorm)."""
    qk_norm: bool = False
    """RMSNorm over each head's queries and keys (Henry et al. 2020)."""
    tie_embeddings: bool = False
    """Use the embedding as the output head: one leaf."""
    window: int | None = None
    """Sliding window: a token sees that many positions, its own included."""
    attention_soft_cap: float | None = None
    """Bounds the attention logits by cap · tanh(logits / cap)."""
    logit_soft_cap: float | None = None
    """Bounds the output logits likewise (Gemma 2)."""
    dropout: float = 0.0
    """Rate of dropout on the embedding and on what each part adds to the residual stream."""
    attention: attention_module.Implementation = "auto"
    """Attention kernel: auto, chunked, xla, or cudnn (its flash kernel, NVIDIA GPUs)."""
    remat: Policy = "none"
    """What the backward pass recomputes: none, dots, dots_no_batch, full."""
    scan_layers: bool = True
    """Run the layers by lax.scan (quick to compile), or unrolled (faster when they are small)."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "num_layers", "num_heads", "max_seq_len"):
            _require(getattr(self, name) > 0, f"{name}={getattr(self, name)}: must be positive")
        _require(
            self.head_dim is not None or self.d_model % self.num_heads == 0,
            f"num_heads={self.num_heads} does not divide d_model={self.d_model}: change either, "
            "or set head_dim",
        )
        _require(
            self.num_kv_heads is None or self.num_heads % self.num_kv_heads == 0,
            f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}",
        )
        _require(
            self.positions != "rotary" or self.head_size % 2 == 0,
            f"head_dim={self.head_size} is odd: rotary positions rotate pairs",
        )
        _require(0 <= self.dropout < 1, f"dropout={self.dropout}: must be in [0, 1)")
        _require(self.window is None or self.window > 0, f"window={self.window}: must be positive")
        _require(self.remat in POLICIES, f"remat={self.remat!r}: choose one of {[*POLICIES]}")

    @property
    def head_size(self) -> int:
        """Size of a head, given or derived."""
        return self.head_dim or self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads, given or derived."""
        return self.num_kv_heads or self.num_heads

    @property
    def hidden_size(self) -> int:
        """Hidden width of the MLP, given or derived."""
        if self.d_ff is not None:
            return self.d_ff
        return 4 * self.d_model if self.mlp == "gelu" else 64 * math.ceil(self.d_model / 24)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _make_norm(config: Config) -> RMSNorm | LayerNorm:
    if config.norm == "rms":
        return RMSNorm(config.d_model, eps=config.norm_eps)
    return LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)


class Attention(eqx.Module):
    """Multi-head self-attention with grouped queries."""

    wq: Float[Array, "embed heads head_dim"]
    wk: Float[Array, "embed kv_heads head_dim"]
    wv: Float[Array, "embed kv_heads head_dim"]
    wo: Float[Array, "heads head_dim embed"]
    bq: Float[Array, "heads head_dim"] | None
    bk: Float[Array, "kv_heads head_dim"] | None
    bv: Float[Array, "kv_heads head_dim"] | None
    bo: Float[Array, "embed"] | None
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: Key[Array, ""]):
        embed, size = config.d_model, config.head_size
        heads, kv_heads = config.num_heads, config.kv_heads
        q_key, k_key, v_key, o_key = jax.random.split(key, 4)
        self.wq = normal(q_key, (embed, heads, size), embed)
        self.wk = normal(k_key, (embed, kv_heads, size), embed)
        self.wv = normal(v_key, (embed, kv_heads, size), embed)
        # Divided by the number of parts that add to the residual stream (Radford et al. 2019).
        self.wo = normal(o_key, (heads, size, embed), heads * size * 2 * config.num_layers)
        self.bq = jnp.zeros((heads, size)) if config.bias else None
        self.bk = jnp.zeros((kv_heads, size)) if config.bias else None
        self.bv = jnp.zeros((kv_heads, size)) if config.bias else None
        self.bo = jnp.zeros(embed) if config.bias else None
        norms = [RMSNorm(size, axis="head_dim", eps=config.norm_eps) for _ in range(2)]
        self.q_norm, self.k_norm = norms if config.qk_norm else (None, None)
        self.config = config

    def __call__(
        self,
        x_BTE: Float[Array, "batch seq embed"],
        segment_ids: Int[Array, "batch seq"] | None,
        rotary: Rotary | None,
        attend: Attend = attention,
    ) -> Float[Array, "batch seq embed"]:
        """Attend within each row's segments; `rotary` are the tables of its positions.

        `attend` takes the place of `attention` where keys and values are kept, or were.
        """
        q_BTNH = add_bias(matmul(x_BTE, self.wq), self.bq)
        k_BTKH = add_bias(matmul(x_BTE, self.wk), self.bk)
        v_BTKH = add_bias(matmul(x_BTE, self.wv), self.bv)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        if rotary is not None:
            q_BTNH, k_BTKH = rotate(q_BTNH, rotary), rotate(k_BTKH, rotary)
        out_BTNH = attend(
            constrain(q_BTNH, "batch", None, "heads", "head_dim"),
            constrain(k_BTKH, "batch", None, "kv_heads", "head_dim"),
            constrain(v_BTKH, "batch", None, "kv_heads", "head_dim"),
            causal=self.config.causal,
            segment_ids=segment_ids,
            window=self.config.window,
            soft_cap=self.config.attention_soft_cap,
            implementation=self.config.attention,
        )
        out_BTNH = constrain(out_BTNH, "batch", None, "heads", "head_dim")
        return add_bias(matmul(out_BTNH, self.wo, contract=2), self.bo)


class MLP(eqx.Module):
    """The feed-forward part: SwiGLU or GEGLU (Shazeer 2020), or plain GELU."""

    w_gate: Float[Array, "embed mlp"] | None
    w_up: Float[Array, "embed mlp"]
    w_down: Float[Array, "mlp embed"]
    b_up: Float[Array, "mlp"] | None
    b_down: Float[Array, "embed"] | None
    kind: str = eqx.field(static=True)

    def __init__(self, config: Config, *, key: Key[Array, ""]):
        embed, hidden = config.d_model, config.hidden_size
        gate_key, up_key, down_key = jax.random.split(key, 3)
        gated = config.mlp != "gelu"
        self.w_gate = normal(gate_key, (embed, hidden), embed) if gated else None
        self.w_up = normal(up_key, (embed, hidden), embed)
        self.w_down = normal(down_key, (hidden, embed), hidden * 2 * config.num_layers)
        self.b_up = jnp.zeros(hidden) if config.bias else None
        self.b_down = jnp.zeros(embed) if config.bias else None
        self.kind = config.mlp

    def __call__(self, x_BTE: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        """Map each position on its own."""
        hidden = add_bias(matmul(x_BTE, self.w_up), self.b_up)
        if self.w_gate is None:
            hidden = gelu(hidden)
        else:
            activation = jax.nn.silu if self.kind == "swiglu" else gelu
            hidden = activation(matmul(x_BTE, self.w_gate)) * hidden
        hidden = constrain(hidden, "batch", None, "mlp")
        return add_bias(matmul(hidden, self.w_down), self.b_down)


class Block(eqx.Module):
    """One pre-norm layer: attention, then MLP, each added to the residual stream."""

    attention_norm: RMSNorm | LayerNorm
    attention: Attention
    mlp_norm: RMSNorm | LayerNorm
    mlp: MLP
    dropout: float = eqx.field(static=True)

    def __init__(self, config: Config, *, key: Key[Array, ""]):
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm = _make_norm(config)
        self.attention = Attention(config, key=attention_key)
        self.mlp_norm = _make_norm(config)
        self.mlp = MLP(config, key=mlp_key)
        self.dropout = config.dropout

    def __call__(
        self,
        x_BTE: Float[Array, "batch seq embed"],
        segment_ids: Int[Array, "batch seq"] | None,
        rotary: Rotary | None,
        key: Key[Array, ""] | None,
        attend: Attend = attention,
    ) -> Float[Array, "batch seq embed"]:
        """Apply the layer to the residual stream."""
        keys = (None, None) if key is None else jax.random.split(key)
        attention_part = lambda x: self.attention(x, segment_ids, rotary, attend)  # noqa: E731
        parts = (
            (self.attention_norm, attention_part, keys[0]),
            (self.mlp_norm, self.mlp, keys[1]),
        )
        for norm, part, part_key in parts:
            # Whole rows between the constraints: with "seq" sharded, only what is outside is split.
            normed = constrain(norm(x_BTE), "batch", None, "embed")
            added = constrain(part(normed), "batch", "seq", "embed")
            x_BTE = x_BTE + dropout(added, self.dropout, part_key)
        return x_BTE


class Transformer(AttentionDecoder):
    """A transformer over token ids: int32[batch, seq] to float32[batch, seq, vocab] logits."""

    embedding: Embedding
    position_embedding: Embedding | None
    blocks: Block
    final_norm: RMSNorm | LayerNorm
    head: Linear | None
    config: Config = eqx.field(static=True)
    casts_at_use: ClassVar[bool] = True

    def __init__(self, config: Config, *, key: Key[Array, ""]):
        embedding_key, position_key, blocks_key, head_key = jax.random.split(key, 4)
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.d_model, key=embedding_key)
        self.position_embedding = (
            Embedding(config.max_seq_len, config.d_model, axis="positions", key=position_key)
            if config.positions == "learned"
            else None
        )
        self.blocks = eqx.filter_vmap(lambda key: Block(config, key=key))(
            jax.random.split(blocks_key, config.num_layers)
        )
        self.final_norm = _make_norm(config)
        self.head = (
            None
            if config.tie_embeddings
            else Linear(
                config.d_model,
                config.vocab_size,
                in_axis="embed",
                out_axis="vocab",
                bias=False,
                key=head_key,
            )
        )

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        *,
        segment_ids: Int[Array, "batch seq"] | None = None,
        positions: Int[Array, "batch seq"] | None = None,
        mask: Bool[Array, "batch seq"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "batch seq vocab"]:
        """The logits, float32[batch, seq, vocab].

        `segment_ids` tells the packed documents of a row apart (0 is padding), `positions` restart
        in each of them, `mask` is False at padding, and a `key` turns dropout on.

        Raises:
            ValueError: a sequence longer than a table of learned positions.
        """
        x_BTE = self.hidden(
            tokens, segment_ids=segment_ids, positions=positions, mask=mask, key=key
        )
        return self.logits(x_BTE)

    def hidden(
        self,
        tokens: Int[Array, "batch seq"],
        *,
        segment_ids: Int[Array, "batch seq"] | None = None,
        positions: Int[Array, "batch seq"] | None = None,
        mask: Bool[Array, "batch seq"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "batch seq embed"]:
        """What the output head reads: the normed residual stream, [batch, seq, d_model]."""
        config = self.config
        if positions is None:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        if mask is not None:
            segment_ids = mask.astype(jnp.int32) * (1 if segment_ids is None else segment_ids)
        self.check_length(tokens.shape[1])
        x_BTE, rotary = self.embed(tokens, positions)
        layers_key = None
        if key is not None:
            layers_key, embedding_key = jax.random.split(key)
            x_BTE = dropout(x_BTE, config.dropout, embedding_key)

        def block(block: Block, x_BTE: Array, index: Array) -> Array:
            layer_key = None if layers_key is None else jax.random.fold_in(layers_key, index)
            return block(x_BTE, segment_ids, rotary, layer_key)

        x_BTE = scan_layers(block, self.blocks, x_BTE, policy=config.remat, scan=config.scan_layers)
        return self.finish(x_BTE)

    def check_length(self, length: int) -> None:
        """Refuse a sequence longer than a table of learned positions."""
        _require(
            self.position_embedding is None or length <= self.config.max_seq_len,
            f"a sequence of {length} is longer than max_seq_len={self.config.max_seq_len}",
        )

    def embed(
        self, tokens: Int[Array, "batch seq"], positions: Int[Array, "#batch seq"]
    ) -> tuple[Float[Array, "batch seq embed"], Rotary | None]:
        """The residual stream that the layers begin with, and the tables of its positions."""
        rotary = None
        x_BTE = gather(self.embedding)(constrain(tokens, "batch", None))
        if self.position_embedding is None:
            rotary = rotary_tables(positions, self.config.head_size, self.config.rope_theta)
        else:
            x_BTE = x_BTE + gather(self.position_embedding)(positions)
        return constrain(x_BTE, "batch", "seq", "embed"), rotary

    def finish(self, x_BTE: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        """What the output head reads, from what the last layer gives."""
        return constrain(gather(self.final_norm)(x_BTE), "batch", None, "embed")

    def logits(self, x_BTE: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq vocab"]:
        """The output head's logits in fp32, with the embedding as the head where it is tied."""
        weight = gather(self.embedding).weight.T if self.head is None else gather(self.head).weight
        logits = constrain(matmul(x_BTE, weight, dtype=jnp.float32), "batch", None, "vocab")
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def num_flops_per_token(config: Config, seq_len: int) -> float:
    """Floating-point operations of a training step a token: forward and backward, no recomputation.

    Six a weight in a product, and twelve a layer, head feature and visible key for attention,
    halved where it is causal (Chowdhery et al. 2022, appendix B, counts the whole square).
    """
    heads, kv_heads, size = config.num_heads, config.kv_heads, config.head_size
    attention_weights = config.d_model * size * (2 * heads + 2 * kv_heads)
    mlp_weights = config.d_model * config.hidden_size * (2 if config.mlp == "gelu" else 3)
    weights = config.num_layers * (attention_weights + mlp_weights)
    weights += config.d_model * config.vocab_size
    keys = min(seq_len, config.window or seq_len)
    visible = keys / 2 if config.causal and keys == seq_len else keys
    return 6.0 * weights + 12.0 * config.num_layers * heads * size * visible
