"""Marks of the steps of rows: which count, and where a document begins; and time in chunks."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, PyTree

from zoo.nn.remat import Policy, checkpoint


class Marks(NamedTuple):
    """Which steps count (None: all), and which begin with a state of zeros (None: none)."""

    valid: Bool[Array, "batch seq"] | None = None
    restart: Bool[Array, "batch seq"] | None = None


def make_marks(
    segment_ids: Int[Array, "batch seq"] | None,
    mask: Bool[Array, "batch seq"] | None,
    before: Int[Array, "batch"],
) -> tuple[tuple[Marks, Marks], Int[Array, "batch"]]:
    """The marks of both directions, and the segment that each row ends in, given that `before`."""
    if segment_ids is None:
        return (Marks(mask), Marks(mask)), before
    ids = segment_ids if mask is None else jnp.where(mask, segment_ids, 0)
    valid = ids != 0

    def restarts(ids: Array, before: Array) -> tuple[Array, Array]:
        """Where another segment begins, padding before it or not, and the last segment."""
        padded = jnp.concatenate([before[:, None], ids], 1)
        steps = lax.broadcasted_iota(jnp.int32, padded.shape, 1)
        latest = lax.cummax(jnp.where(padded != 0, steps, 0), axis=1)
        current = jnp.take_along_axis(padded, latest, 1)
        previous = current[:, :-1]
        return (ids != 0) & (previous != 0) & (ids != previous), current[:, -1]

    forward, last = restarts(ids, before)
    backward, _ = restarts(ids[:, ::-1], jnp.zeros_like(before))
    return (Marks(valid, forward), Marks(valid, backward[:, ::-1])), last


class Chunks(NamedTuple):
    """Time cut into chunks: the gradient stops between them, or each is recomputed."""

    size: int
    truncate: bool
    remat: Policy


def over_time(
    chunks: Chunks | None,
    function: Callable[[PyTree, Any, Marks], tuple[PyTree, Array]],
    carry: PyTree,
    x: PyTree,
    marks: Marks,
    *,
    reverse: bool = False,
) -> tuple[PyTree, Array]:
    """`carry, y = function(carry, x, marks)` over arrays [batch, seq, …], at once or in chunks.

    With chunks of √seq steps that are recomputed, the backward pass keeps the carries at their
    ends and one chunk's intermediates, so that memory grows with √seq.
    """
    if chunks is None:
        return function(carry, x, marks)
    batch, seq = jax.tree.leaves(x)[0].shape[:2]
    num_chunks = math.ceil(seq / chunks.size)
    padding = num_chunks * chunks.size - seq
    if padding and marks.valid is None:
        marks = marks._replace(valid=jnp.ones((batch, seq), bool))

    def cut(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        return x.reshape(batch, num_chunks, chunks.size, *x.shape[2:]).swapaxes(0, 1)

    def chunk(carry: PyTree, inputs: tuple[PyTree, Marks]) -> tuple[PyTree, Array]:
        return function(lax.stop_gradient(carry) if chunks.truncate else carry, *inputs)

    body = checkpoint(chunk, chunks.remat, in_scan=True)
    carry, y = lax.scan(body, carry, jax.tree.map(cut, (x, marks)), reverse=reverse)
    y = y.swapaxes(0, 1)
    return carry, y.reshape(batch, num_chunks * chunks.size, *y.shape[3:])[:, :seq]
