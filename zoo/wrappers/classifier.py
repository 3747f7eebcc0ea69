"""A classification head on any model of sequences: an encoder, a decoder, or a recurrent network.

Legend of suffixes: B batch, T time, E the width of what the model's own head reads.
"""

from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from zoo.base import configuration
from zoo.nn.layers import Linear, add_bias
from zoo.nn.parameters import gather
from zoo.nn.precision import matmul
from zoo.sharding import constrain

Pooling = Literal["auto", "mean", "last", "first"]


class Classifier(eqx.Module):
    """A model without its own head, and a linear one over one vector a row.

    int32[batch, seq] to float32[batch, classes].
    """

    body: PyTree
    head: Linear
    pooling: str = eqx.field(static=True)

    def __init__(
        self, body: Any, num_classes: int, *, pooling: Pooling = "auto", key: Key[Array, ""]
    ):
        """`body` has a method `hidden`, which gives a vector a token.

        With "auto" a decoder's or a one-way network's last token is what its head reads, as it has
        seen the others, and of other models the mean.

        Raises:
            ValueError: a model that gives no vector a token, or another pooling.
        """
        configuration.check_value("pooling", pooling, Pooling)
        config = body.config
        if not hasattr(body, "hidden") or getattr(config, "pooling", "none") != "none":
            raise ValueError(
                f"a {type(body).__name__} with pooling={getattr(config, 'pooling', None)!r} gives "
                "no vector a token: take a transformer, a BERT, or an RNN with pooling='none'"
            )
        if pooling == "auto":
            both_ways = getattr(config, "bidirectional", not getattr(config, "causal", False))
            pooling = "mean" if both_ways else "last"
        width = config.width if hasattr(config, "width") else config.d_model
        self.body, self.pooling = _without_heads(body), pooling
        self.head = Linear(width, num_classes, in_axis="embed", out_axis="classes", key=key)

    @property
    def config(self) -> Any:
        """The configuration of the model below the head."""
        return self.body.config

    @property
    def num_classes(self) -> int:
        """Columns of the logits."""
        return self.head.weight.shape[-1]

    @property
    def casts_at_use(self) -> bool:
        """Whether the model below the head casts its parameters itself."""
        return getattr(self.body, "casts_at_use", False)

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        *,
        mask: Bool[Array, "batch seq"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "batch classes"]:
        """The logits of the classes; `mask` is False at padding, and a `key` turns dropout on."""
        x_BTE = self.body.hidden(tokens, mask=mask, key=key)
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
        head = gather(self.head)
        x_BE = constrain(pooled_BE.astype(head.weight.dtype), "batch", "embed")
        logits = add_bias(matmul(x_BE, head.weight, dtype=jnp.float32), head.bias)
        return constrain(logits, "batch", None)


def _without_heads(body: Any) -> Any:
    """The model without parameters that `hidden` does not use."""
    for name in ("head", "pooler"):
        if getattr(body, name, None) is not None:
            body = eqx.tree_at(lambda model: getattr(model, name), body, None)  # noqa: B023
    return body
