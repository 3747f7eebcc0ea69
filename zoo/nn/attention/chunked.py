"""Attention in plain XLA: a scan over the pairs of chunks of which one sees the other.

With an online softmax (Milakov and Gimelshein 2018): outputs are rescaled as larger logits come.
The gradient is written out so that the backward pass keeps no [seq, seq] array, and so that its
products take inputs of the compute dtype: autodiff of fp32 logits would multiply fp32 by bf16.
Legend of suffixes: as in `zoo.nn.attention.attention`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zoo.nn.attention import masks
from zoo.nn.attention.masks import (
    MASKED,
    AxisOrder,
    Mask,
    Places,
    Segments,
    axis_order,
    logit_gradients,
    masked_logits,
    pad_pieces,
    product,
    without_padding,
)
from zoo.nn.products import custom_vjp


def chunked(
    q_BTNH: Float[Array, "batch queries heads head_dim"],
    k_BSKH: Float[Array, "batch keys kv_heads head_dim"],
    v_BSKH: Float[Array, "batch keys kv_heads head_dim"],
    segments: Segments | None,
    places: Places,
    part: Array | int,
    *,
    mask: Mask,
    scale: float,
    soft_cap: float | None,
) -> Float[Array, "batch queries heads head_dim"]:
    """Attention in plain XLA of one part of a row, whose queries have `places` among the keys.

    Neither the program nor its memory grows with the square of the row.
    """
    length = q_BTNH.shape[1] // places.pieces
    grid = Grid(masks.chunk_size(length), k_BSKH.shape[1])
    work = _work(places, length, mask, grid)
    pad_queries = functools.partial(pad_pieces, pieces=places.pieces, multiple=grid.size)
    pad_keys = functools.partial(pad_pieces, pieces=1, multiple=grid.size)
    if segments is not None:
        segments = pad_queries(segments[0]), pad_keys(segments[1])
    out_BTNH = _scanned(
        pad_queries(q_BTNH),
        pad_keys(k_BSKH),
        pad_keys(v_BSKH),
        segments,
        jax.tree.map(lambda x: x[part if len(x) > 1 else 0], work),
        mask,
        scale,
        soft_cap,
        grid,
    )
    return without_padding(out_BTNH, places.pieces, length)


class Grid(NamedTuple):
    """The queries and the keys of a chunk, and how many keys there are before padding."""

    size: int
    num_keys: int


class Work(NamedTuple):
    """The products of a part: the first position of each chunk of queries, and pairs of chunks.

    Where parts have unequal numbers of pairs, a third entry is 0 for a pair that does not count.
    """

    starts: Int[Array, "*parts chunks"]
    pairs: Int[Array, "*parts pairs entries"]


def _work(places: Places, length: int, mask: Mask, grid: Grid) -> Work:
    """The work of all parts of a row, of pieces of this length."""
    within = range(0, length, grid.size)
    starts = [[start + i for start in part for i in within] for part in places.starts]
    of_part = functools.partial(
        masks.pairs,
        length=length,
        num_keys=grid.num_keys,
        mask=mask,
        query_size=grid.size,
        key_size=grid.size,
    )
    pairs: Any = [[*of_part(part)] for part in places.starts]
    most = max(map(len, pairs))
    if min(map(len, pairs)) < most:
        counted = [[(*pair, 1) for pair in part] for part in pairs]
        pairs = [part + [(0, 0, 0)] * (most - len(part)) for part in counted]
    return Work(jnp.array(starts, jnp.int32), jnp.array(pairs, jnp.int32))


@functools.partial(custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def _scanned(q_BTNH, k_BSKH, v_BSKH, segments, work, mask, scale, soft_cap, grid):
    """Attention of whole chunks, of which a part has its `work`."""
    return _scanned_forward(q_BTNH, k_BSKH, v_BSKH, segments, work, mask, scale, soft_cap, grid)[0]


def _scanned_forward(q_BTNH, k_BSKH, v_BSKH, segments, work, mask, scale, soft_cap, grid):
    order = axis_order(q_BTNH.dtype)
    q = order.of_queries(q_BTNH, k_BSKH.shape[2])
    k, v = (jnp.einsum(f"bskh->{order.keys}", x) for x in (k_BSKH, v_BSKH))

    def body(carry: Any, pair: Int[Array, "entries"]) -> tuple[Any, None]:
        out, top, total = carry
        of_queries, of_keys = _slicers(order, pair, grid)
        at = pair[0] * grid.size
        rows = functools.partial(_slice, axis=3, chunk=pair[0], size=grid.size)
        seen = _seen_by_pair(mask, pair, segments, work, grid)
        logits, _ = masked_logits(of_queries(q), of_keys(k), seen, order, scale, soft_cap)
        # A softmax does not depend on what is subtracted: as a constant, it leaves gradients exact.
        new_top = jnp.maximum(rows(top), logits.max(-1, keepdims=True))
        new_top = jax.lax.stop_gradient(new_top)
        kept, exponentials = jnp.exp(rows(top) - new_top), jnp.exp(logits - new_top)
        new_total = kept * rows(total) + exponentials.sum(-1, keepdims=True)
        formula = f"bkgts,{order.keys}->{order.queries}"
        added = product(formula, exponentials.astype(v.dtype), of_keys(v))
        new_out = _by_query(order, kept) * of_queries(out) + added
        update = jax.lax.dynamic_update_slice_in_dim
        out = update(out, new_out, at, order.queries.index("t"))
        return (out, update(top, new_top, at, 3), update(total, new_total, at, 3)), None

    per_query = jax.eval_shape(functools.partial(order.sum_of_products, q), q).shape
    empty: Any = (jnp.zeros(q.shape), jnp.full(per_query, MASKED), jnp.zeros(per_query))
    (out, top, total), _ = jax.lax.scan(body, empty, work.pairs)
    out = (out / _by_query(order, total)).astype(q.dtype)
    residuals = (q_BTNH, k_BSKH, v_BSKH, segments, work, out, top + jnp.log(total))
    return order.to_heads(out, q_BTNH.shape), residuals


def _scanned_backward(mask, scale, soft_cap, grid, residuals, g_BTNH):
    q_BTNH, k_BSKH, v_BSKH, segments, work, out, log_sum = residuals
    order = axis_order(q_BTNH.dtype)
    queries, keys = order
    q, g = (order.of_queries(x, k_BSKH.shape[2]) for x in (q_BTNH, g_BTNH))
    k, v = (jnp.einsum(f"bskh->{keys}", x) for x in (k_BSKH, v_BSKH))
    delta = order.sum_of_products(g, out)

    def body(carry: Any, pair: Int[Array, "entries"]) -> tuple[Any, None]:
        of_queries, of_keys = _slicers(order, pair, grid)
        rows = functools.partial(_slice, axis=3, chunk=pair[0], size=grid.size)
        inputs = (of_queries(q), of_keys(k), of_keys(v), of_queries(g))
        seen = _seen_by_pair(mask, pair, segments, work, grid)
        dlogits, weights = logit_gradients(
            inputs, rows(log_sum), rows(delta), seen, order, scale, soft_cap
        )
        added = (
            product(f"bkgts,{keys}->{queries}", dlogits, inputs[1]),
            product(f"bkgts,{queries}->{keys}", dlogits, inputs[0]),
            product(f"bkgts,{queries}->{keys}", weights, inputs[3]),
        )
        axes = (queries.index("t"), keys.index("s"), keys.index("s"))
        where = (pair[0], pair[1], pair[1])
        return tuple(map(functools.partial(_add, size=grid.size), carry, added, where, axes)), None

    zeros: Any = tuple(jnp.zeros(x.shape) for x in (q, k, v))
    (dq, dk, dv), _ = jax.lax.scan(body, zeros, work.pairs)
    dq_BTNH = order.to_heads(dq.astype(q.dtype), q_BTNH.shape)
    dk_BSKH, dv_BSKH = (jnp.einsum(f"{keys}->bskh", x).astype(q.dtype) for x in (dk, dv))
    return dq_BTNH, dk_BSKH, dv_BSKH, None, None


_scanned.defvjp(_scanned_forward, _scanned_backward)


def _slice(x: Array, *, axis: int, chunk: Array, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, chunk * size, size, axis)


def _add(x: Array, added: Array, chunk: Array, axis: int, *, size: int) -> Array:
    changed = _slice(x, axis=axis, chunk=chunk, size=size) + added
    return jax.lax.dynamic_update_slice_in_dim(x, changed, chunk * size, axis)


def _slicers(order: AxisOrder, pair: Array, grid: Grid) -> tuple[Any, Any]:
    """Functions to the chunk of queries and to the chunk of keys."""
    chunk = functools.partial(_slice, size=grid.size)
    of_queries = functools.partial(chunk, axis=order.queries.index("t"), chunk=pair[0])
    return of_queries, functools.partial(chunk, axis=order.keys.index("s"), chunk=pair[1])


def _by_query(order: AxisOrder, x: Array) -> Array:
    return jnp.einsum(f"bkgth->{order.queries}", x)


def _seen_by_pair(
    mask: Mask, pair: Array, segments: Segments | None, work: Work, grid: Grid
) -> Bool[Array, "b 1 1 t s"]:
    size, num_keys = grid
    of_both = None
    if segments is not None:
        of_queries, of_keys = segments
        of_both = (
            _slice(of_queries, axis=1, chunk=pair[0], size=size),
            _slice(of_keys, axis=1, chunk=pair[1], size=size),
        )
    seen = mask.seen(work.starts[pair[0]], pair[1] * size, (size, size), of_both)
    if num_keys % size:
        keys = jax.lax.broadcasted_iota(jnp.int32, seen.shape, 4) + pair[1] * size
        seen &= keys < num_keys
    return seen if len(pair) == 2 else seen & (pair[2] > 0)
