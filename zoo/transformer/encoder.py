"""The parts of encoders around their layers: BERT's family (Devlin et al. 2018), ESM-2, ModernBERT.

Legend of suffixes: B batch, T time, E embed.
"""

from dataclasses import dataclass
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from zoo.common import configuration
from zoo.common.configuration import require
from zoo.nn.layers import ACTIVATIONS, Linear, Norm

TRAINED_MASKS = 0.15 * 0.8  # share of tokens behind masks that ESM-2 saw in training


@dataclass(frozen=True)
class EncoderConfig:
    """Parts before and after the layers, of checkpoints of encoders."""

    embedding_norm: bool = False
    """A norm of the embedding, of the residual stream's kind."""
    num_token_types: int = 0
    """Kinds of tokens, such as first and second sentence, each with a vector that is added."""
    position_offset: int = 0
    """Rows of the table of positions before the first position's (RoBERTa)."""
    mask_id: int | None = None
    """Id of a mask whose embedding is zero; those of other tokens are scaled up for it (ESM-2)."""
    first_norm: bool = True
    """A norm before the first layer's attention, as before the others' (not in ModernBERT)."""
    head: Literal["linear", "transformed", "none"] = "linear"
    """The output head: a matrix, or one behind a layer with the MLP's activation and a norm (BERT),
    or none: the model then gives the vectors of its tokens."""
    transform_bias: bool = True
    """A bias in the layer of a transformed head."""
    pooler: bool = False
    """A dense layer with tanh over the first position: `pooled`."""

    def __post_init__(self) -> None:
        configuration.check(self, "encoder.")
        for name in ("num_token_types", "position_offset"):
            value = getattr(self, name)
            require(value >= 0, f"encoder.{name}={value}: must be 0 at least")


class Transform(eqx.Module):
    """A layer and a norm before the output head."""

    dense: Linear
    norm: Norm
    activation: str = eqx.field(static=True)

    def __init__(self, size: int, norm: Norm, activation: str, *, bias: bool, key: Key[Array, ""]):
        self.dense = Linear(size, size, in_axis="embed", out_axis="features", bias=bias, key=key)
        self.norm, self.activation = norm, activation

    def __call__(self, x_BTE: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        """Map each position on its own."""
        return self.norm(ACTIVATIONS[self.activation](self.dense(x_BTE)))


def without_masked(
    x_BTE: Float[Array, "batch seq embed"],
    is_mask_BT: Bool[Array, "batch seq"],
    segment_ids: Int[Array, "batch seq"] | None,
) -> Float[Array, "batch seq embed"]:
    """The embedding with zeros in the places of masks, the rest scaled up for them, per text.

    The factor is the share kept in ESM-2's training over the share kept here, as for dropout.
    """
    length = x_BTE.shape[1]
    if segment_ids is None:
        segment_ids = jnp.zeros((1, length), jnp.int32)
    segment_ids = jnp.broadcast_to(segment_ids, is_mask_BT.shape)

    def kept(of_row: tuple[Array, Array]) -> Array:
        segments, is_mask = of_row
        counted = jnp.stack([~is_mask, is_mask | True], 1).astype(jnp.float32)
        sums = jnp.zeros((length + 1, 2)).at[segments].add(counted)
        return (sums[:, 0] / jnp.maximum(sums[:, 1], 1.0))[segments]

    scale_BT = (1 - TRAINED_MASKS) / jnp.maximum(jax.vmap(kept)((segment_ids, is_mask_BT)), 1e-6)
    scale_BT = jnp.where(is_mask_BT, 0.0, scale_BT)
    return x_BTE * scale_BT[:, :, None].astype(x_BTE.dtype)


def embed(
    model: Any, tokens: Int[Array, "batch seq"], mask: Bool[Array, "batch seq"]
) -> Float[Array, "batch embed"]:
    """A vector of length one per text, float32[batch, d_model]: the mean over its tokens, normed.

    `mask` is False at padding. The dot product of two is their cosine similarity (Reimers &
    Gurevych 2019), as for MiniLM.
    """
    x_BTE = model.without_head().hidden(tokens, mask=mask).astype(jnp.float32)
    sum_BE = x_BTE.sum(1, where=mask[:, :, None])  # of the mean's direction
    return sum_BE / jnp.maximum(jnp.linalg.norm(sum_BE, axis=-1, keepdims=True), 1e-12)
