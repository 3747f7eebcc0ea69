"""The transformer family: a decoder, or with `causal=False` an encoder.

Legend of suffixes: B batch, T time, E embed, V vocabulary. The axis names in the annotations of
parameters are also how they are sharded.
"""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from zoo.nn.layers import Embedding, Linear, Norm, Readout, dropout, times
from zoo.nn.parameters import CastsAtUse, unshard
from zoo.nn.products import transposed
from zoo.nn.protocols import SequenceOptions
from zoo.nn.recurrences.marks import Marks, make_marks
from zoo.nn.remat import scan_layers
from zoo.nn.stateful import Balance
from zoo.sharding import constrain
from zoo.transformer.blocks import Block, residual_norm
from zoo.transformer.config import Config, LayerKind
from zoo.transformer.encoder import Transform, without_masked
from zoo.transformer.rotary import RopeScaling, Rotary, rotary_tables


class Options(SequenceOptions, total=False):
    """The optional inputs of a transformer."""

    token_types: Int[Array, "batch seq"] | None
    """Kinds of tokens, for a model that has them; 0 if not given."""


class Transformer(CastsAtUse):
    """A transformer over token ids: int32[batch, seq] to float32[batch, seq, vocab] logits."""

    embedding: Embedding
    position_embedding: Embedding | None
    type_embedding: Embedding | None
    embedding_norm: Norm | None
    blocks: Block
    final_norm: Norm | None
    pooler: Linear | None
    transform: Transform | None
    head: Linear | None
    tied_bias: Float[Array, "vocab"] | None
    config: Config = eqx.field(static=True)
    is_pooled: ClassVar[bool] = False

    def __init__(self, config: Config, *, key: Key[Array, ""]):
        embedding_key, position_key, blocks_key, head_key = jax.random.split(key, 4)
        encoder, size = config.encoder, config.d_model
        self.config = config
        self.embedding = Embedding(config.vocab_size, size, key=embedding_key)
        self.position_embedding = None
        if config.positions.kind == "learned":
            rows = config.max_seq_len + encoder.position_offset
            self.position_embedding = Embedding(rows, size, axis="positions", key=position_key)
        self.type_embedding = self.pooler = self.transform = self.head = self.tied_bias = None
        if encoder.num_token_types:
            # A table that is added, as the one of positions is.
            self.type_embedding = Embedding(
                encoder.num_token_types,
                size,
                axis="positions",
                key=jax.random.fold_in(position_key, 1),
            )
        self.embedding_norm = residual_norm(config) if encoder.embedding_norm else None
        self.blocks = Block.stacked(config, key=blocks_key)
        self.final_norm = residual_norm(config) if config.residual.final_norm else None
        if encoder.pooler:
            pooler_key = jax.random.fold_in(head_key, 1)
            self.pooler = Linear(size, size, in_axis="embed", out_axis="features", key=pooler_key)
        if encoder.head == "transformed":
            self.transform = Transform(
                size,
                residual_norm(config),
                config.activation,
                bias=encoder.transform_bias,
                key=jax.random.fold_in(head_key, 2),
            )
        if config.tie_embeddings:
            self.tied_bias = jnp.zeros(config.vocab_size) if config.head_bias else None
        elif encoder.head != "none":
            self.head = Linear(
                config.d_model,
                config.vocab_size,
                in_axis="embed",
                out_axis="vocab",
                bias=config.head_bias,
                key=head_key,
            )

    @property
    def width(self) -> int:
        """Size of the vectors that `hidden` gives."""
        return self.config.d_model

    @property
    def is_causal(self) -> bool:
        """Whether a token sees only itself and the tokens before it: a decoder."""
        return self.config.causal

    def __call__(
        self, tokens: Int[Array, "batch seq"], **options: Unpack[Options]
    ) -> Float[Array, "batch seq vocab"]:
        """The logits, float32[batch, seq, vocab]; it takes the options of `hidden_and_balance`.

        A model without an output head gives the vectors of its tokens, [batch, seq, d_model].

        Raises:
            ValueError: a sequence longer than a table of learned positions.
        """
        x_BTE = self.hidden(tokens, **options)
        return x_BTE if self.config.encoder.head == "none" else self.readout()(x_BTE)

    def hidden(
        self, tokens: Int[Array, "batch seq"], **options: Unpack[Options]
    ) -> Float[Array, "batch seq embed"]:
        """The input of the output head: the normed residual stream, [batch, seq, d_model]."""
        return self.hidden_and_balance(tokens, **options)[0]

    def hidden_and_balance(
        self,
        tokens: Int[Array, "batch seq"],
        *,
        segment_ids: Int[Array, "batch seq"] | None = None,
        positions: Int[Array, "batch seq"] | None = None,
        mask: Bool[Array, "batch seq"] | None = None,
        key: Key[Array, ""] | None = None,
        weights: Float[Array, "batch seq"] | None = None,
        token_types: Int[Array, "batch seq"] | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], Balance | None]:
        """`hidden`, and each row's `Balance` as the layers' mean; None without experts.

        `segment_ids` tells the packed documents of a row apart (0 is padding), `positions` restart
        in each of them, `mask` is False at padding, and a `key` turns dropout on. `weights`
        weight the positions in the balance, 1 if not given; padding never counts.
        """
        config = self.config
        if positions is None:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        if mask is not None:
            segment_ids = mask.astype(jnp.int32) * (1 if segment_ids is None else segment_ids)
        self.check_length(tokens.shape[1])
        x_BTE, rotaries = self.embed(tokens, positions, segment_ids, token_types)
        x_BTE, balance = through_blocks(
            config, self.blocks, x_BTE, segment_ids, rotaries, key, weights
        )
        return self.finish(x_BTE), balance

    def check_length(self, length: int) -> None:
        """Refuse a sequence longer than a table of learned positions."""
        if self.position_embedding is not None and length > self.config.max_seq_len:
            raise ValueError(
                f"a sequence of {length} is longer than max_seq_len={self.config.max_seq_len}"
            )

    def embed(
        self,
        tokens: Int[Array, "batch seq"],
        positions: Int[Array, "#batch seq"],
        segment_ids: Int[Array, "batch seq"] | None = None,
        token_types: Int[Array, "batch seq"] | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], dict[LayerKind, Rotary | None]]:
        """The input of the first layer, and each kind's tables of rotary positions."""
        x_BTE = self.embedding(constrain(tokens, "batch", "inner_seq"))
        residual = self.config.residual
        if residual.scale_embedding:
            x_BTE = times(x_BTE, self.config.d_model**0.5)
        x_BTE = times(x_BTE, residual.embedding_multiplier)
        encoder = self.config.encoder
        if encoder.mask_id is not None:
            x_BTE = without_masked(x_BTE, tokens == encoder.mask_id, segment_ids)
        if self.type_embedding is not None:
            types = jnp.zeros_like(tokens) if token_types is None else token_types
            x_BTE = x_BTE + self.type_embedding(types)
        if self.position_embedding is not None:
            x_BTE = x_BTE + self.position_embedding(positions + encoder.position_offset)
        if self.embedding_norm is not None:
            x_BTE = unshard(self.embedding_norm)(x_BTE)
        config, rotaries = self.config.positions, {}
        for kind in dict.fromkeys(self.config.layer_kinds):  # in an order that processes share
            theta, scaling = config.theta, config.scaling
            if kind.startswith("local") and config.local_theta is not None:
                theta, scaling = config.local_theta, RopeScaling()
            rotaries[kind] = (
                rotary_tables(positions, self.config.rotary_size, theta, scaling)
                if config.kind == "rotary" and kind in ("local", "global")
                else None
            )
        return constrain(x_BTE, "batch", "seq", "embed"), rotaries

    def finish(self, x_BTE: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        """The input of the output head, times the logits' factor: from the last layer's output."""
        if self.final_norm is not None:
            x_BTE = unshard(self.final_norm)(x_BTE)
        if self.transform is not None:
            x_BTE = unshard(self.transform)(x_BTE)
        x_BTE = times(x_BTE, self.config.logit_multiplier)
        return constrain(x_BTE, "batch", "inner_seq", "embed")

    def readout(self) -> Readout:
        """The output head: from `hidden` to logits in fp32.

        Raises:
            ValueError: a model without an output head.
        """
        if self.config.encoder.head == "none":
            raise ValueError(
                "encoder.head='none': this model has no output head, and gives the vectors of its "
                "tokens; take zoo.Classifier, or a checkpoint with a head"
            )
        if self.head is None:
            weight, bias = transposed(unshard(self.embedding).weight), unshard(self.tied_bias)
        else:
            weight, bias = (head := unshard(self.head)).weight, head.bias
        return Readout(weight, bias, soft_cap=self.config.logit_soft_cap)

    def without_head(self) -> "Transformer":
        """The model without the parameters that `hidden` does not use."""
        of_head = lambda model: (model.pooler, model.transform, model.head, model.tied_bias)  # noqa: E731
        return eqx.tree_at(of_head, self, (None,) * 4, is_leaf=lambda x: x is None)

    def pooled(self, x_BTE: Float[Array, "batch seq embed"]) -> Float[Array, "batch embed"]:
        """A vector per row, made from its first token's, as BERT's classifiers are trained on.

        Raises:
            ValueError: a model without a pooler.
        """
        if self.pooler is None:
            raise ValueError(
                "encoder.pooler=False: this model has none; take a token's vector, or "
                "zoo.transformer.embed"
            )
        return jnp.tanh(unshard(self.pooler)(x_BTE[:, 0]))


def marks_of(config: Config, segment_ids: Int[Array, "batch seq"] | None, batch_size: int) -> Marks:
    """The marks of the documents of rows: the steps that count, and where a document begins."""
    if segment_ids is None or "recurrence" not in config.mixers:
        return Marks()
    (marks, _), _ = make_marks(segment_ids, None, jnp.zeros(batch_size, jnp.int32))
    return marks


def through_blocks(
    config: Config,
    blocks: Block,
    x_BTE: Float[Array, "batch seq embed"],
    segment_ids: Int[Array, "batch seq"] | None,
    rotaries: Mapping[LayerKind, Rotary | None],
    key: Key[Array, ""] | None,
    weights: Float[Array, "batch seq"] | None = None,
) -> tuple[Float[Array, "batch seq embed"], Balance | None]:
    """The output of the last of a stack of blocks, and the mean `Balance` of their experts.

    A `key` turns dropout on, on the input too.
    """
    layers_key = None
    if key is not None:
        layers_key, embedding_key = jax.random.split(key)
        x_BTE = dropout(x_BTE, config.dropout, embedding_key)
    marks = marks_of(config, segment_ids, x_BTE.shape[0])
    zeros = [jnp.zeros(x_BTE.shape[0]) for _ in Balance._fields]
    balance = None if config.experts.num_experts is None else Balance(*zeros)

    def layer(kind: LayerKind, block: Block, carry: tuple, index: Array) -> tuple:
        x_BTE, so_far = carry
        layer_key = None if layers_key is None else jax.random.fold_in(layers_key, index)
        rotary, window = rotaries[kind], config.window_of(kind)
        x_BTE, balance = block(
            x_BTE, segment_ids, rotary, window, layer_key, weights_BT=weights, marks=marks
        )
        return x_BTE, so_far if balance is None else jax.tree.map(jnp.add, so_far, balance)

    x_BTE, balance = scan_layers(
        [partial(layer, kind) for kind in config.layer_kinds],
        blocks,
        (x_BTE, balance),
        own=config.own,
        first=config.num_first,
        policy=config.remat,
        scan=config.scan_layers,
    )
    return x_BTE, jax.tree.map(lambda sum_B: sum_B / config.has_experts.count(True), balance)
