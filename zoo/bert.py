"""The BERT family (Devlin et al. 2018): encoders with their norms on the residual stream itself.

The output is a vector per token, and by `embed` one per text, as sentence encoders such as MiniLM
are used. Legend of suffixes: B batch, T time, E embed.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from zoo.common import configuration
from zoo.common.configuration import may_differ, of_training, require
from zoo.nn.attention.attention import Implementation
from zoo.nn.layers import Activation, Embedding, LayerNorm, Linear
from zoo.nn.parameters import CastsAtUse, unshard
from zoo.nn.remat import Policy
from zoo.sharding import constrain
from zoo.transformer import config as transformer_config
from zoo.transformer.blocks import Block
from zoo.transformer.model import through_blocks
from zoo.transformer.rotary import PositionsConfig


@dataclass(frozen=True)
class Config:
    """Hyperparameters of a BERT."""

    vocab_size: int
    """Number of token ids."""
    d_model: int = 384
    """Width of the residual stream."""
    num_layers: int = 6
    """Number of blocks."""
    num_heads: int = 12
    """Heads per layer, each of d_model / num_heads."""
    d_ff: int | None = None
    """Hidden width of the MLP; 4 d_model if not given."""
    mlp: Activation = "gelu_erf"
    """Activation of the MLP; gelu is the tanh approximation of gelu_erf."""
    norm_eps: float = 1e-12
    """Constant that the norms add to the variance."""
    max_seq_len: int = 512
    """Longest sequence: rows of the table of positions."""
    num_token_types: int = 2
    """Kinds of tokens, such as first and second sentence."""
    pooler: bool = True
    """A dense layer with tanh over the first position: `pooled`."""
    dropout: float = of_training(0.0)
    """Rate of dropout on the embedding and on each residual update."""
    kernel: Implementation = may_differ("auto")
    """Attention kernel: auto, chunked, xla, cudnn or triton (GPUs), splash or splash_fused (TPUs);
    or auto with ring or exchange, where a mesh splits rows: keys go around the devices, or these
    exchange heads."""
    remat: Policy = may_differ("none")
    """Rematerialisation in the backward pass, as a transformer's: none, dots, dots_no_batch, full,
    or of names."""
    scan_layers: bool = may_differ(True)
    """Run the layers by lax.scan (quick to compile), or unrolled (faster when they are small)."""

    def __post_init__(self) -> None:
        configuration.check(self)
        configuration.check_positive(self, "", "norm_eps", "num_token_types")
        self.parts  # noqa: B018 - its checks are ours

    @property
    def parts(self) -> transformer_config.Config:
        """The configuration of the blocks."""
        return transformer_config.Config(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            d_ff=self.d_ff,
            mlp=self.mlp,
            residual=transformer_config.ResidualConfig(
                norm="layer", norm_placement="stream", norm_eps=self.norm_eps
            ),
            positions=PositionsConfig(kind="learned"),
            max_seq_len=self.max_seq_len,
            causal=False,
            bias=True,
            dropout=self.dropout,
            attention=transformer_config.AttentionConfig(kernel=self.kernel),
            remat=self.remat,
            scan_layers=self.scan_layers,
        )


class BERT(CastsAtUse):
    """An encoder of token ids: int32[batch, seq] to [batch, seq, d_model]."""

    embedding: Embedding
    position_embedding: Embedding
    type_embedding: Embedding
    embedding_norm: LayerNorm
    blocks: Block
    pooler: Linear | None
    config: Config = eqx.field(static=True)
    is_causal: ClassVar[bool] = False
    is_pooled: ClassVar[bool] = False

    def __init__(self, config: Config, *, key: Key[Array, ""]):
        keys = jax.random.split(key, 5)
        size = config.d_model
        self.config = config
        self.embedding = Embedding(config.vocab_size, size, key=keys[0])
        self.position_embedding = Embedding(config.max_seq_len, size, axis="positions", key=keys[1])
        # A table that is added, as the one of positions is.
        self.type_embedding = Embedding(config.num_token_types, size, axis="positions", key=keys[2])
        self.embedding_norm = LayerNorm(size, eps=config.norm_eps)
        self.blocks = Block.stacked(config.parts, key=keys[3])
        self.pooler = None
        if config.pooler:
            self.pooler = Linear(size, size, in_axis="embed", out_axis="features", key=keys[4])

    @property
    def width(self) -> int:
        """Size of the vectors that `hidden` gives."""
        return self.config.d_model

    def hidden(
        self, tokens: Int[Array, "batch seq"], **options: Any
    ) -> Float[Array, "batch seq embed"]:
        """The output of the model, [batch, seq, d_model]: an encoder has no output head."""
        return self(tokens, **options)

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        *,
        token_types: Int[Array, "batch seq"] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
        positions: Int[Array, "batch seq"] | None = None,
        mask: Bool[Array, "batch seq"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "batch seq embed"]:
        """The vector of each token, [batch, seq, d_model].

        `token_types` are 0 if not given, `segment_ids` tells the packed texts of a row apart,
        `positions` restart in each of them, `mask` is False at padding, and a `key` turns dropout
        on.

        Raises:
            ValueError: a sequence longer than the table of positions.
        """
        config, (_, length) = self.config, tokens.shape
        require(
            length <= config.max_seq_len,
            f"a sequence of {length} is longer than max_seq_len={config.max_seq_len}",
        )
        if positions is None:
            positions = jnp.arange(length, dtype=jnp.int32)[None]
        if mask is not None:
            segment_ids = mask.astype(jnp.int32) * (1 if segment_ids is None else segment_ids)
        token_types = jnp.zeros_like(tokens) if token_types is None else token_types
        x_BTE = self.embedding(constrain(tokens, "batch", "inner_seq"))
        x_BTE = x_BTE + self.type_embedding(token_types)
        x_BTE = x_BTE + self.position_embedding(positions)
        x_BTE = constrain(unshard(self.embedding_norm)(x_BTE), "batch", "seq", "embed")
        x_BTE, _ = through_blocks(
            config.parts, self.blocks, x_BTE, segment_ids, {"global": None}, key
        )
        return constrain(x_BTE, "batch", "inner_seq", "embed")

    def pooled(self, x_BTE: Float[Array, "batch seq embed"]) -> Float[Array, "batch embed"]:
        """A vector per row, made from its first token's, as classifiers are trained on.

        Raises:
            ValueError: a model without a pooler.
        """
        if self.pooler is None:
            raise ValueError("pooler=False: this model has none; take a token's vector, or `embed`")
        return jnp.tanh(unshard(self.pooler)(x_BTE[:, 0]))

    def without_head(self) -> "BERT":
        """The model without the parameters that `hidden` does not use."""
        return self if self.pooler is None else eqx.tree_at(lambda model: model.pooler, self, None)


def embed(
    model: BERT, tokens: Int[Array, "batch seq"], mask: Bool[Array, "batch seq"]
) -> Float[Array, "batch embed"]:
    """A vector of length one per text, float32[batch, d_model]: the mean over its tokens, normed.

    `mask` is False at padding. The dot product of two is their cosine similarity (Reimers &
    Gurevych 2019).
    """
    x_BTE = model(tokens, mask=mask).astype(jnp.float32)
    counted_BT1 = mask.astype(jnp.float32)[:, :, None]
    mean_BE = (x_BTE * counted_BT1).sum(1) / jnp.maximum(counted_BT1.sum(1), 1.0)
    return mean_BE / jnp.maximum(jnp.linalg.norm(mean_BE, axis=-1, keepdims=True), 1e-12)
