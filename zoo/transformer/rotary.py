"""Positions: how they are configured, rotary tables, and the rotation of queries and keys by them.

Legend of suffixes: as in `zoo.transformer.blocks`.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.common import configuration
from zoo.common.configuration import require
from zoo.nn.layers import times


class Rotary(NamedTuple):
    """The cosines and signed sines of positions, and a factor of their queries, in fp32."""

    cos: Float[Array, "#batch seq rotating"]
    sin: Float[Array, "#batch seq rotating"]
    growth: Float[Array, "#batch seq"] | None = None


@dataclass(frozen=True)
class RopeScaling:
    """How the wavelengths of rotary positions are stretched, for longer sequences than before."""

    factor: float = 1.0
    """Multiplies the wavelengths (Chen et al. 2023); 1 leaves them as they are."""
    low_freq_factor: float | None = None
    """With the next two (Llama 3): waves that fit the original length less often are stretched."""
    high_freq_factor: float | None = None
    """Waves that fit it more often are not; those in between are in part."""
    original_max_seq_len: int | None = None
    """The original length: the longest sequence that the model was trained on before."""
    ramp: Literal["llama3", "yarn"] = "llama3"
    """How far the waves in between are stretched: by how often they fit, or their number (YaRN)."""
    truncate: bool = True
    """Let YaRN's ramp begin and end at whole numbers of waves (not in gpt-oss)."""
    short_factors: tuple[float, ...] = ()
    """Factors of the wavelengths one by one, in place of one factor (LongRoPE)."""
    long_factors: tuple[float, ...] = ()
    """The same in rows with a position beyond the original length."""
    attention_factor: float = 1.0
    """Factor of the rotated features of queries and keys (YaRN and LongRoPE)."""
    query_growth: float = 0.0
    """After n original lengths a query is 1 + query_growth · log(1 + n) times as large (Llama 4,
    Ministral 3)."""

    def __post_init__(self) -> None:
        configuration.check(self, "positions.scaling.")
        waves = "low_freq_factor", "high_freq_factor", "original_max_seq_len"
        positive = ("factor", "attention_factor", *waves)
        configuration.check_positive(self, "positions.scaling.", *positive)
        given = [name for name in waves if getattr(self, name) is not None]
        if self.short_factors or self.long_factors:
            require(
                given == ["original_max_seq_len"] and self.factor == 1,
                f"positions.scaling has short_factors={self.short_factors} and factor="
                f"{self.factor}, {', '.join(given)}: with factors one by one give "
                "original_max_seq_len, and none of the others",
            )
            sizes = len(self.short_factors), len(self.long_factors)
            require(
                sizes[0] == sizes[1] and min(self.short_factors + self.long_factors) > 0,
                f"positions.scaling.short_factors={self.short_factors} and long_factors="
                f"{self.long_factors}: give as many positive numbers of both",
            )
            return
        require(
            len(given) in (0, 3),
            f"positions.scaling has {' and '.join(given)}: give all of {', '.join(waves)}, or none",
        )
        require(
            self.query_growth == 0 or self.original_max_seq_len is not None,
            f"positions.scaling.query_growth={self.query_growth}: needs original_max_seq_len",
        )
        require(
            self.ramp == "llama3" or len(given) == 3,
            f"positions.scaling.ramp={self.ramp!r}: needs {', '.join(waves)}",
        )

    @property
    def is_none(self) -> bool:
        """Whether nothing is stretched."""
        scales = self.factor, self.attention_factor, 1 + self.query_growth
        return scales == (1, 1, 1) and not self.short_factors

    def stretch(
        self,
        frequency: Float[Array, "pairs"],
        theta: float,
        positions: Int[Array, "batch seq"],
    ) -> Float[Array, "pairs"] | Float[Array, "batch 1 pairs"]:
        """The frequencies of the stretched wavelengths, of all rows or by row.

        Grattafiori et al. 2024 for Llama 3's, Peng et al. 2023 for YaRN's, Ding et al. 2024 for
        LongRoPE's: its long factors are for all positions of a row, once one is beyond the original
        length, as in transformers.
        """
        low, high, length = self.low_freq_factor, self.high_freq_factor, self.original_max_seq_len
        if self.short_factors and length is not None:
            is_long = positions.max(axis=-1, keepdims=True)[..., None] >= length
            short, long = (
                jnp.array(x)[None, None] for x in (self.short_factors, self.long_factors)
            )
            return frequency[None, None] / jnp.where(is_long, long, short)
        if self.factor == 1:
            return frequency
        stretched = frequency / self.factor
        if low is None or high is None or length is None:
            return stretched
        if self.ramp == "yarn":
            kept = self._yarn_ramp(len(frequency), theta, low, high, length)
        else:
            fits = length * frequency / (2 * math.pi)
            kept = jnp.clip((fits - low) / (high - low), 0.0, 1.0)
        return stretched + kept * (frequency - stretched)

    def _yarn_ramp(
        self, pairs: int, theta: float, low: float, high: float, length: int
    ) -> Float[Array, "pairs"]:
        """The part of each pair's frequency that is kept: linear in the pair's number."""
        number = lambda fits: pairs * math.log(length / (2 * math.pi * fits), theta)  # noqa: E731
        first, last = number(high), number(low)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        width = last - first or 0.001
        return 1 - jnp.clip((jnp.arange(pairs, dtype=jnp.float32) - first) / width, 0.0, 1.0)


@dataclass(frozen=True)
class PositionsConfig:
    """How the model knows where a token is."""

    kind: Literal["rotary", "learned", "none"] = "rotary"
    """Rotary positions in each attention, learned ones added to the embedding, or none (of a
    hybrid, whose recurrences know the order)."""
    theta: float = 10_000.0
    """Base of the rotary wavelengths."""
    scaling: RopeScaling = RopeScaling()
    """How the rotary wavelengths are stretched, except in layers with local_theta."""
    local_theta: float | None = None
    """Base in layers with a window, which are not stretched then; as elsewhere if not given."""
    rotary_fraction: float = 1.0
    """Share of a head's features, from the first on, that rotate (0.25 of Qwen3-Next's)."""
    pattern: tuple[Literal["rotary", "none"], ...] = ("rotary",)
    """Which layers have rotary positions, repeated over the layers (SmolLM3, Cohere 2, EXAONE 4);
    in the others only what a token sees tells it where it is (Kazemnejad et al. 2023)."""

    def __post_init__(self) -> None:
        configuration.check(self, "positions.")
        configuration.check_positive(self, "positions.", "theta", "local_theta")
        require(
            len(self.pattern) > 0, "positions.pattern=(): needs a 'rotary' or a 'none' at least"
        )
        require(
            0 < self.rotary_fraction <= 1,
            f"positions.rotary_fraction={self.rotary_fraction}: must be in (0, 1]",
        )
        for name in ("theta", "scaling", "local_theta", "rotary_fraction", "pattern"):
            value = getattr(self, name)
            require(
                self.kind == "rotary" or value == getattr(PositionsConfig, name),
                f"positions.{name}={value!r}: is of rotary positions, and positions.kind="
                f"{self.kind!r}; leave it out",
            )


def rotary_tables(
    positions: Int[Array, "batch seq"],
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None = None,
) -> Rotary:
    """The tables of rotary positions (Su et al. 2021), for `rotate`."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is not None:
        frequency = scaling.stretch(frequency, theta, positions)
    frequency = frequency[None, None, :] if frequency.ndim == 1 else frequency
    angles = positions.astype(jnp.float32)[:, :, None] * frequency
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if scaling is not None:
        cos, sin = times(cos, scaling.attention_factor), times(sin, scaling.attention_factor)
    tables = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
    if scaling is None or scaling.original_max_seq_len is None or scaling.query_growth == 0:
        return Rotary(*tables)
    lengths = (positions // scaling.original_max_seq_len).astype(jnp.float32)
    return Rotary(*tables, 1 + scaling.query_growth * jnp.log1p(lengths))


def rotate(
    x_BTNH: Float[Array, "batch seq heads head_dim"],
    rotary: Rotary,
) -> Float[Array, "batch seq heads head_dim"]:
    """Rotate each half-split pair of a head's features by its position's angle, in fp32.

    Tables of fewer features are for the first ones; the others stay.
    """
    size = rotary.cos.shape[-1]
    if size < x_BTNH.shape[-1]:
        return jnp.concatenate([rotate(x_BTNH[..., :size], rotary), x_BTNH[..., size:]], axis=-1)
    cos, sin = rotary.cos[:, :, None, :], rotary.sin[:, :, None, :]
    x32 = x_BTNH.astype(jnp.float32)
    # A roll, not a split and a concatenation: one pass over x.
    return (x32 * cos + jnp.roll(x32, x32.shape[-1] // 2, axis=-1) * sin).astype(x_BTNH.dtype)


def rotate_queries(
    q_BTNH: Float[Array, "batch seq heads head_dim"], rotary: Rotary
) -> Float[Array, "batch seq heads head_dim"]:
    """`rotate` for queries, which may grow with their positions."""
    q_BTNH = rotate(q_BTNH, rotary)
    if rotary.growth is None:
        return q_BTNH
    return (q_BTNH.astype(jnp.float32) * rotary.growth[:, :, None, None]).astype(q_BTNH.dtype)
