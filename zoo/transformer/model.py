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
from zoo.transformer.rotary import RopeScaling, Rotary, rotary_tables


class Transformer(CastsAtUse):
    """A transformer over token ids: int32[batch, seq] to float32[batch, seq, vocab] logits."""

    embedding: Embedding
    position_embedding: Embedding | None
    blocks: Block
    final_norm: Norm
    head: Linear | None
    config: Config = eqx.field(static=True)
    is_pooled: ClassVar[bool] = False

    def __init__(self, config: Config, *, key: Key[Array, ""]):
        embedding_key, position_key, blocks_key, head_key = jax.random.split(key, 4)
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.d_model, key=embedding_key)
        self.position_embedding = None
        if config.positions.kind == "learned":
            self.position_embedding = Embedding(
                config.max_seq_len, config.d_model, axis="positions", key=position_key
            )
        self.blocks = Block.stacked(config, key=blocks_key)
        self.final_norm = residual_norm(config)
        self.head = None
        if not config.tie_embeddings:
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
        self, tokens: Int[Array, "batch seq"], **options: Unpack[SequenceOptions]
    ) -> Float[Array, "batch seq vocab"]:
        """The logits, float32[batch, seq, vocab]; it takes the options of `hidden_and_balance`.

        Raises:
            ValueError: a sequence longer than a table of learned positions.
        """
        return self.readout()(self.hidden(tokens, **options))

    def hidden(
        self, tokens: Int[Array, "batch seq"], **options: Unpack[SequenceOptions]
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
        x_BTE, rotaries = self.embed(tokens, positions)
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
        self, tokens: Int[Array, "batch seq"], positions: Int[Array, "#batch seq"]
    ) -> tuple[Float[Array, "batch seq embed"], dict[LayerKind, Rotary | None]]:
        """The input of the first layer, and each kind's tables of rotary positions."""
        x_BTE = self.embedding(constrain(tokens, "batch", "inner_seq"))
        residual = self.config.residual
        if residual.scale_embedding:
            x_BTE = times(x_BTE, self.config.d_model**0.5)
        x_BTE = times(x_BTE, residual.embedding_multiplier)
        if self.position_embedding is not None:
            x_BTE = x_BTE + self.position_embedding(positions)
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
        x_BTE = times(unshard(self.final_norm)(x_BTE), self.config.logit_multiplier)
        return constrain(x_BTE, "batch", "inner_seq", "embed")

    def readout(self) -> Readout:
        """The output head: from `hidden` to logits in fp32."""
        if self.head is None:
            weight, bias = transposed(unshard(self.embedding).weight), None
        else:
            weight, bias = (head := unshard(self.head)).weight, head.bias
        return Readout(weight, bias, soft_cap=self.config.logit_soft_cap)

    def without_head(self) -> "Transformer":
        """The model without the parameters that `hidden` does not use."""
        return self if self.head is None else eqx.tree_at(lambda model: model.head, self, None)


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
        first=config.experts.first_dense,
        policy=config.remat,
        scan=config.scan_layers,
    )
    return x_BTE, jax.tree.map(lambda sum_B: sum_B / config.has_experts.count(True), balance)
