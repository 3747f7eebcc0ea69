"""Whole rows for a share of the heads, where the mesh splits the tokens of a row.

An all-to-all gives each device the queries, keys and values of whole rows for its share of the
heads, and another brings the output back to its part of the row (Jacobs et al. 2023, DeepSpeed
Ulysses). Legend of suffixes: as in `zoo.nn.attention.attention`.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from zoo.nn.attention.masks import WHOLE, Attend, Mask

# Of keys and values to the queries, or of heads for tokens; "auto" is what sends less.
Transfer = Literal["auto", "gather", "exchange"]


class Exchange(NamedTuple):
    """The exchange of heads for tokens among the devices that have the parts of a row."""

    axes: tuple[str, ...]
    """Mesh axes that cut the row."""
    parts: int
    heads: int
    """Heads of queries on a device, of each token that it has."""
    kv_heads: int

    @property
    def divides(self) -> bool:
        """Whether each device gets as many heads of queries."""
        return self.heads % self.parts == 0

    @property
    def copies(self) -> int:
        """How often each key-value head is sent: more than once if several devices need it."""
        group, share = self.heads // self.kv_heads, self.heads // self.parts
        if share % group == 0:
            return 1
        return group // share if group % share == 0 else group

    def numbers(self, length: int) -> float:
        """Numbers that a device sends per row and pass, per element of a head.

        Of queries, keys, values and outputs of `length` tokens in all it keeps one part, and so
        of their gradients backward: 2·(heads + copies·kv_heads)·(length/parts)·(parts-1)/parts.
        """
        sent = 2 * (self.heads + self.copies * self.kv_heads) * (length / self.parts)
        return sent * (self.parts - 1) / self.parts

    def sends_less(self, length: int, mask: Mask, reach: int | None) -> bool:
        """Whether it is possible, and sends less than `gathered_numbers`."""
        gathered = gathered_numbers(self, length, mask, reach)
        return self.divides and self.numbers(length) < gathered

    def attend(
        self, attend: Attend, q: Array, k: Array, v: Array, segment_ids: Array | None
    ) -> Array:
        """`attend` to whole rows, for this device's share of the heads, and back to its tokens."""
        to = functools.partial(jax.lax.all_to_all, axis_name=self.axes, tiled=True)
        k, v = (jnp.repeat(x, self.copies, axis=2) for x in (k, v))
        q, k, v = (to(x, split_axis=2, concat_axis=1) for x in (q, k, v))
        segments = None if segment_ids is None else (segment_ids, segment_ids)
        return to(attend(q, k, v, segments, WHOLE, 0), split_axis=1, concat_axis=2)


def gathered_numbers(exchange: Exchange, length: int, mask: Mask, reach: int | None) -> float:
    """Numbers that a device sends likewise where keys and values come to the queries.

    They are gathered, and causal queries and outputs exchanged in zigzag, half of each:
    2·kv_heads·length·(parts-1)/parts + heads·length/parts. Or `reach` positions of the neighbours
    are all that a window sees: 2·kv_heads·reach. Gradients send as many backward.
    """
    parts = exchange.parts
    if reach is not None:
        return 2.0 * exchange.kv_heads * reach
    gathered = 2 * exchange.kv_heads * length * (parts - 1) / parts
    return gathered + (exchange.heads * length / parts if mask.causal else 0)
