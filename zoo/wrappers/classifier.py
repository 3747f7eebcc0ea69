"""Classification heads on any model of sequences: an encoder, a decoder, or a recurrent network.

Legend of suffixes: B batch, T time, E the width of the model's hidden states.
"""

from typing import Any, Literal, cast

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from zoo.common import configuration
from zoo.nn.layers import Linear, add_bias
from zoo.nn.parameters import CastsAtUse, casts_at_use, casts_inputs, unshard
from zoo.nn.products import matmul
from zoo.nn.protocols import SequenceModel
from zoo.sharding import constrain

Pooling = Literal["auto", "mean", "last", "first", "pooler"]


class Classifier(CastsAtUse):
    """A model without its own head, and a linear head over one vector per row.

    int32[batch, seq] to float32[batch, classes].
    """

    body: SequenceModel
    head: Linear
    pooling: str = eqx.field(static=True)

    def __init__(
        self,
        body: Any,
        num_classes: int,
        *,
        pooling: Pooling = "auto",
        bias: bool = True,
        key: Key[Array, ""],
    ):
        """`body` is a `SequenceModel`, from which its own head is taken.

        With "auto" the head reads the last token of a causal model, as it has seen the others, and
        the mean over the tokens of other models; with "pooler" what the model's own pooler makes of
        the first token.

        Raises:
            ValueError: a model that gives no vector per token, or another pooling.
        """
        configuration.check_value("pooling", pooling, Pooling)
        if not isinstance(body, SequenceModel) or body.is_pooled:
            raise ValueError(
                f"a {type(body).__name__} of this configuration gives no vector per token: take a "
                "transformer, or an RNN with pooling='none'"
            )
        if pooling == "auto":
            pooling = "last" if body.is_causal else "mean"
        self.body, self.pooling = body.without_head(), pooling
        if pooling == "pooler":
            pooler = getattr(body, "pooler", None)
            configuration.require(
                pooler is not None, "pooling='pooler': the model has none; take 'first' or 'mean'"
            )
            self.body = eqx.tree_at(
                lambda body: body.pooler, self.body, pooler, is_leaf=lambda x: x is None
            )
        self.head = Linear(
            body.width, num_classes, in_axis="embed", out_axis="classes", bias=bias, key=key
        )

    @property
    def config(self) -> Any:
        """The configuration of the model under the head."""
        return self.body.config

    @property
    def num_classes(self) -> int:
        """Columns of the logits."""
        return self.head.weight.shape[-1]

    @property
    def casts_at_use(self) -> bool:
        """Whether the model under the head casts its parameters itself."""
        return casts_at_use(self.body)

    @property
    def casts_inputs(self) -> bool:
        """Whether the model under the head casts its inputs itself."""
        return casts_inputs(self.body)

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        *,
        mask: Bool[Array, "batch seq"] | None = None,
        key: Key[Array, ""] | None = None,
        **options: Any,
    ) -> Float[Array, "batch classes"]:
        """The logits of the classes; `mask` is False at padding, and a `key` turns dropout on.

        The model under the head gets the other `options` too, such as `token_types`.
        """
        x_BTE = self.body.hidden(tokens, mask=mask, key=key, **options)
        if self.pooling == "pooler":
            pooled_BE = constrain(cast("Any", self.body).pooled(x_BTE), "batch", "embed")
            return constrain(self.logits(pooled_BE), "batch", None)
        valid_BT = jnp.ones(tokens.shape, bool) if mask is None else mask
        if self.pooling == "mean":
            weights_BT = valid_BT.astype(jnp.float32)
        else:
            index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            place = jnp.where(valid_BT, index, -1 if self.pooling == "last" else tokens.shape[1])
            chosen = place.max(1) if self.pooling == "last" else place.min(1)
            weights_BT = (index == chosen[:, None]).astype(jnp.float32)
        total = jnp.maximum(weights_BT.sum(1), 1.0)
        pooled_BE = (x_BTE.astype(jnp.float32) * weights_BT[:, :, None]).sum(1) / total[:, None]
        return constrain(self.logits(constrain(pooled_BE, "batch", "embed")), "batch", None)

    def logits(self, x: Float[Array, "batch *seq embed"]) -> Float[Array, "batch *seq classes"]:
        """The logits of the classes, float32, of a vector per row, or one per token."""
        head = unshard(self.head)
        return add_bias(
            matmul(x.astype(head.weight.dtype), head.weight, dtype=jnp.float32), head.bias
        )


class TokenClassifier(Classifier):
    """A model without its own head, and a linear head over the vector of each token.

    int32[batch, seq] to float32[batch, seq, classes].
    """

    def __init__(self, body: Any, num_classes: int, *, bias: bool = True, key: Key[Array, ""]):
        """`body` is a `SequenceModel`, from which its own head is taken.

        Raises:
            ValueError: a model that gives no vector per token.
        """
        super().__init__(body, num_classes, bias=bias, key=key)
        self.pooling = "none"

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        *,
        mask: Bool[Array, "batch seq"] | None = None,
        key: Key[Array, ""] | None = None,
        **options: Any,
    ) -> Float[Array, "batch seq classes"]:
        """The logits of the classes of each token; see `Classifier`."""
        logits = self.logits(self.body.hidden(tokens, mask=mask, key=key, **options))
        return constrain(logits, "batch", "inner_seq", None)
