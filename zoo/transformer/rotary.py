"""Rotary positions: their tables, and the rotation of queries and keys by them.

Legend of suffixes: as in `zoo.transformer.blocks`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.nn.layers import times
from zoo.transformer.config import RopeScaling

Rotary = tuple[Float[Array, "#batch seq rotating"], Float[Array, "#batch seq rotating"]]


def rotary_tables(
    positions: Int[Array, "batch seq"],
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None = None,
) -> tuple[Float[Array, "batch seq head_dim"], Float[Array, "batch seq head_dim"]]:
    """The cosines and signed sines of rotary positions (Su et al. 2021), for `rotate`, in fp32."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is not None:
        frequency = scaling.stretch(frequency, theta, positions)
    frequency = frequency[None, None, :] if frequency.ndim == 1 else frequency
    angles = positions.astype(jnp.float32)[:, :, None] * frequency
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if scaling is not None:
        cos, sin = times(cos, scaling.attention_factor), times(sin, scaling.attention_factor)
    return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)


def rotate(
    x_BTNH: Float[Array, "batch seq heads head_dim"],
    tables: Rotary,
) -> Float[Array, "batch seq heads head_dim"]:
    """Rotate each half-split pair of a head's features by its position's angle, in fp32.

    Tables of fewer features are for the first ones; the others stay.
    """
    size = tables[0].shape[-1]
    if size < x_BTNH.shape[-1]:
        return jnp.concatenate([rotate(x_BTNH[..., :size], tables), x_BTNH[..., size:]], axis=-1)
    cos, sin = (table[:, :, None, :] for table in tables)
    x32 = x_BTNH.astype(jnp.float32)
    # A roll, not a split and a concatenation: one pass over x.
    return (x32 * cos + jnp.roll(x32, x32.shape[-1] // 2, axis=-1) * sin).astype(x_BTNH.dtype)
