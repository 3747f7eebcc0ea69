"""The keys that a query sees, by position: whole ranges for chunks, and masks within them."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

MASKED = -1e30  # finite: a masked row gives no NaN, forward or backward

# Long enough for efficient products, short enough that a causal chunk skips most of the future.
CHUNK = 512


class Mask(NamedTuple):
    """The positions that a query sees: causality and a sliding window."""

    causal: bool
    window: int | None

    def keys_of(self, start: int, stop: int, num_keys: int) -> tuple[int, int]:
        """The range of keys that the queries start…stop can see."""
        reach = num_keys if self.window is None else self.window - 1
        return max(0, start - reach), min(num_keys, stop + (0 if self.causal else reach))

    def seen(
        self,
        first_query: int | Array,
        first_key: int | Array,
        size: tuple[int, int],
        segments: tuple[Array, Array] | None,
    ) -> Bool[Array, "b 1 1 t s"]:
        """Which of some keys each of some queries sees; `segments` are theirs, [batch, t or s]."""
        shape = (1, 1, 1, *size)
        query = jax.lax.broadcasted_iota(jnp.int32, shape, 3) + first_query
        distance = query - jax.lax.broadcasted_iota(jnp.int32, shape, 4) - first_key
        seen = jnp.ones(shape, bool)
        if self.causal:
            seen &= distance >= 0
        if self.window is not None:
            seen &= jnp.abs(distance) < self.window
        if segments is not None:
            of_queries, of_keys = segments
            seen = seen & (of_queries[:, None, None, :, None] == of_keys[:, None, None, None])
        return seen


class Chunk(NamedTuple):
    """A range of queries and the range of keys that they can see."""

    start: int
    stop: int
    first_key: int
    last_key: int

    @property
    def size(self) -> tuple[int, int]:
        """The numbers of queries and of keys."""
        return self.stop - self.start, self.last_key - self.first_key


def chunks(num_queries: int, num_keys: int, mask: Mask) -> Iterator[Chunk]:
    """Every query once, with the keys that it can see."""
    # Two chunks at least, so that a short causal row skips a quarter of its products too.
    size = min(CHUNK, max(64, math.ceil(num_queries / 2)))
    for start in range(0, num_queries, size):
        stop = min(start + size, num_queries)
        yield Chunk(start, stop, *mask.keys_of(start, stop, num_keys))


def pairs(length: int, mask: Mask, query_size: int, key_size: int) -> Iterator[tuple[int, int]]:
    """The blocks of queries and of keys, by number, of which some query sees some key."""
    yield from pairs_of_pieces((0,), length, length, mask, query_size, key_size)


def pairs_of_pieces(
    starts: Sequence[int],
    length: int,
    num_keys: int,
    mask: Mask,
    query_size: int,
    key_size: int,
) -> Iterator[tuple[int, int]]:
    """The blocks likewise of pieces of `length` queries each, from the positions `starts` on."""
    per_piece = math.ceil(length / query_size)
    for piece, query in itertools.product(range(len(starts)), range(per_piece)):
        start, end = starts[piece] + query * query_size, starts[piece] + length
        first, last = mask.keys_of(start, min(start + query_size, end), num_keys)
        for key in range(first // key_size, math.ceil(last / key_size)):
            yield piece * per_piece + query, key
