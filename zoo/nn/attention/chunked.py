"""Attention in plain XLA: a scan over the pairs of chunks of which one sees the other.

With an online softmax (Milakov and Gimelshein 2018): outputs are rescaled as larger logits come.
The gradient is written out so that the backward pass keeps no [seq, seq] array, and so that its
products take inputs of the compute dtype: autodiff of fp32 logits would multiply fp32 by bf16.
Legend of suffixes: as in `zoo.nn.attention.attention`.
"""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zoo.nn.attention import masks
from zoo.nn.attention.masks import MASKED, Mask, Segments, attend, pad_to_multiple
from zoo.nn.products import platform


class Chunked(NamedTuple):
    """Attention in plain XLA: neither its program nor its memory grows with the row's square."""

    mask: Mask
    scale: float
    soft_cap: float | None
    first: int = 0

    def under(self, mask: Mask, first: int = 0) -> "Chunked":
        """The same with another mask, and another position of the first query among the keys."""
        return self._replace(mask=mask, first=first)

    def __call__(self, q: Array, k: Array, v: Array, segments: Segments | None) -> Array:
        """The output."""
        return attend(q, k, v, segments, self)

    def forward(
        self,
        q_BTNH: Float[Array, "batch queries heads head_dim"],
        k_BSKH: Float[Array, "batch keys kv_heads head_dim"],
        v_BSKH: Float[Array, "batch keys kv_heads head_dim"],
        segments: Segments | None,
    ) -> tuple[Array, Float[Array, "batch queries heads"]]:
        """The output, and the logarithms of the sums."""
        grid, order = Grid.of(q_BTNH, k_BSKH, self.first), axis_order(q_BTNH.dtype)
        q = order.of_queries(grid.padded(q_BTNH), k_BSKH.shape[2])
        k, v = (order.of_keys(grid.padded(x)) for x in (k_BSKH, v_BSKH))
        segments = jax.tree.map(grid.padded, segments)

        def body(carry: Any, pair: Int[Array, "2"]) -> tuple[Any, None]:
            out, top, total = carry
            of_queries, of_keys = _slicers(order, pair, grid)
            at = pair[0] * grid.size
            rows = functools.partial(_slice, axis=3, chunk=pair[0], size=grid.size)
            seen = grid.seen(self.mask, pair, segments)
            both = of_queries(q), of_keys(k)
            logits, _ = masked_logits(*both, seen, order, self.scale, self.soft_cap)
            # A softmax does not depend on what is subtracted: as a constant, it leaves gradients
            # exact.
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
        (out, top, total), _ = jax.lax.scan(body, empty, grid.pairs(self.mask))
        out = (out / _by_query(order, total)).astype(q.dtype)
        log_sum = order.by_time(top + jnp.log(total))
        return order.to_heads(out, q_BTNH.shape), log_sum[:, : grid.num_queries]

    def backward(
        self,
        qkv: tuple[Array, Array, Array],
        segments: Segments | None,
        out_BTNH: Float[Array, "batch queries heads head_dim"],
        log_sum_BTN: Float[Array, "batch queries heads"],
        g_BTNH: Float[Array, "batch queries heads head_dim"],
    ) -> tuple[Array, Array, Array]:
        """The gradients of queries, keys and values."""
        q_BTNH, k_BSKH, v_BSKH = qkv
        grid, order = Grid.of(q_BTNH, k_BSKH, self.first), axis_order(q_BTNH.dtype)
        queries, keys = order
        heads = k_BSKH.shape[2]
        q, out, g = (order.of_queries(grid.padded(x), heads) for x in (q_BTNH, out_BTNH, g_BTNH))
        k, v = (order.of_keys(grid.padded(x)) for x in (k_BSKH, v_BSKH))
        segments = jax.tree.map(grid.padded, segments)
        log_sum = order.by_head(grid.padded(log_sum_BTN), heads)
        delta = order.sum_of_products(g, out)

        def body(carry: Any, pair: Int[Array, "2"]) -> tuple[Any, None]:
            of_queries, of_keys = _slicers(order, pair, grid)
            rows = functools.partial(_slice, axis=3, chunk=pair[0], size=grid.size)
            inputs = (of_queries(q), of_keys(k), of_keys(v), of_queries(g))
            seen = grid.seen(self.mask, pair, segments)
            dlogits, weights = logit_gradients(
                inputs, rows(log_sum), rows(delta), seen, order, self.scale, self.soft_cap
            )
            added = (
                product(f"bkgts,{keys}->{queries}", dlogits, inputs[1]),
                product(f"bkgts,{queries}->{keys}", dlogits, inputs[0]),
                product(f"bkgts,{queries}->{keys}", weights, inputs[3]),
            )
            axes = (queries.index("t"), keys.index("s"), keys.index("s"))
            where = (pair[0], pair[1], pair[1])
            add = functools.partial(_add, size=grid.size)
            return tuple(map(add, carry, added, where, axes)), None

        zeros: Any = tuple(jnp.zeros(x.shape) for x in (q, k, v))
        (dq, *dkv), _ = jax.lax.scan(body, zeros, grid.pairs(self.mask))
        dk, dv = (jnp.einsum(f"{keys}->bskh", x)[:, : grid.num_keys].astype(q.dtype) for x in dkv)
        return order.to_heads(dq.astype(q.dtype), q_BTNH.shape), dk, dv


class Grid(NamedTuple):
    """Chunks of `size` queries and keys; their numbers are those before padding."""

    size: int
    num_queries: int
    num_keys: int
    first: int

    @staticmethod
    def of(q_BTNH: Array, k_BSKH: Array, first: int) -> "Grid":
        """The chunks of these arrays."""
        length = q_BTNH.shape[1]
        return Grid(masks.chunk_size(length), length, k_BSKH.shape[1], first)

    def padded(self, x: Array) -> Array:
        """[B, T, …] padded to whole chunks."""
        return pad_to_multiple(x, self.size)

    def pairs(self, mask: Mask) -> Int[Array, "pairs 2"]:
        """The pairs of chunks in which some query sees some key."""
        sizes = (self.num_queries, self.num_keys, mask, self.size, self.size)
        return jnp.array([*masks.pairs(self.first, *sizes)], jnp.int32).reshape(-1, 2)

    def seen(
        self, mask: Mask, pair: Int[Array, "2"], segments: Segments | None
    ) -> Bool[Array, "b 1 1 t s"]:
        """Which keys of a pair of chunks each query sees."""
        of_both = None
        if segments is not None:
            cut = functools.partial(_slice, axis=1, size=self.size)
            of_both = cut(segments[0], chunk=pair[0]), cut(segments[1], chunk=pair[1])
        query, key = self.first + pair[0] * self.size, pair[1] * self.size
        seen = mask.seen(query, key, (self.size, self.size), of_both)
        if self.num_keys % self.size:
            seen &= jax.lax.broadcasted_iota(jnp.int32, seen.shape, 4) + key < self.num_keys
        return seen


class AxisOrder(NamedTuple):
    """The order of axes inside, as einsum letters: b batch, k, g heads, t, s time, h head size."""

    queries: str
    keys: str

    def of_queries(self, x_BTNH: Array, num_kv_heads: int) -> Array:
        """From [B, T, N, H]."""
        batch, time, heads, size = x_BTNH.shape
        x = x_BTNH.reshape(batch, time, num_kv_heads, heads // num_kv_heads, size)
        return jnp.einsum(f"btkgh->{self.queries}", x)

    def of_keys(self, x_BSKH: Array) -> Array:
        """From [B, S, K, H]."""
        return jnp.einsum(f"bskh->{self.keys}", x_BSKH)

    def by_head(self, x_BTN: Array, num_kv_heads: int) -> Float[Array, "b k g t 1"]:
        """From [B, T, N], of the logits' axes."""
        x = x_BTN.reshape(*x_BTN.shape[:2], num_kv_heads, -1)
        return jnp.einsum("btkg->bkgt", x)[..., None]

    def by_time(self, x: Float[Array, "b k g t 1"]) -> Float[Array, "b t n"]:
        """Back to [B, T, N]."""
        x = jnp.einsum("bkgth->btkgh", x)
        return x.reshape(*x.shape[:2], -1)

    def to_heads(self, x: Array, shape: tuple[int, ...]) -> Array:
        """Back to [B, T, N, H], without what was padded at the end of the row."""
        batch, time, heads, size = shape
        x = jnp.einsum(f"{self.queries}->btkgh", x)
        return x[:, :time].reshape(batch, time, heads, size)

    def sum_of_products(self, x: Array, y: Array) -> Float[Array, "b k g t 1"]:
        """The sum over h of the products of two arrays of queries' order, in fp32."""
        products = x.astype(jnp.float32) * y.astype(jnp.float32)
        return jnp.einsum(f"{self.queries}->bkgth", products).sum(-1, keepdims=True)


def axis_order(dtype: Any) -> AxisOrder:
    """The faster order: on CPU in fp32 heads before time, as batched products want them."""
    if dtype == jnp.float32 and platform() == "cpu":
        return AxisOrder("bkgth", "bksh")
    return AxisOrder("btkgh", "bskh")


def einsum32(formula: str, x: Array, y: Array) -> Float[Array, "..."]:
    """A product that is accumulated, and returned, in fp32."""
    return jnp.einsum(formula, x, y, preferred_element_type=jnp.float32)


def product(formula: str, x: Array, y: Array) -> Float[Array, "..."]:
    """`einsum32`, with the axes g and t as one where they are neighbours in every operand.

    For two axes XLA for CPU transposes an operand in memory.
    """
    of_x, of_y, of_out = re.split(",|->", formula)
    if formula.count("gt") != formula.count("g"):
        return einsum32(formula, x, y)
    sizes = dict(zip(of_x + of_y, x.shape + y.shape, strict=True))
    x, y = _fold(of_x, x), _fold(of_y, y)
    return einsum32(formula.replace("gt", "t"), x, y).reshape([sizes[axis] for axis in of_out])


def _fold(axes: str, x: Array) -> Array:
    g = axes.find("g")
    return x if g < 0 else x.reshape(*x.shape[:g], -1, *x.shape[g + 2 :])


def masked_logits(
    q: Array,
    k: Array,
    seen: Bool[Array, "#b 1 1 t s"],
    order: AxisOrder,
    scale: float,
    soft_cap: float | None,
) -> tuple[Float[Array, "b k g t s"], Float[Array, "b k g t s"]]:
    """Logits of these queries and keys in fp32, masked, and before the mask."""
    raw = product(f"{order.queries},{order.keys}->bkgts", q, k) * scale
    if soft_cap is not None:
        raw = soft_cap * jnp.tanh(raw / soft_cap)
    return jnp.where(jnp.broadcast_to(seen, raw.shape), raw, MASKED), raw


def logit_gradients(
    qkvg: tuple[Array, Array, Array, Array],
    log_sum: Float[Array, "b k g t 1"],
    delta: Float[Array, "b k g t 1"],
    seen: Bool[Array, "#b 1 1 t s"],
    order: AxisOrder,
    scale: float,
    soft_cap: float | None,
) -> tuple[Float[Array, "b k g t s"], Float[Array, "b k g t s"]]:
    """The gradient of the products q·k, and the weights, both of the compute dtype.

    `g` is the gradient of the output, `delta` the sum of its product with the output.
    """
    q, k, v, g = qkvg
    logits, raw = masked_logits(q, k, seen, order, scale, soft_cap)
    weights = jnp.exp(logits - log_sum)
    dweights = product(f"{order.queries},{order.keys}->bkgts", g, v)
    dlogits = weights * (dweights - delta) * scale
    if soft_cap is not None:
        dlogits = dlogits * (1 - jnp.square(raw / soft_cap))
    return dlogits.astype(q.dtype), weights.astype(q.dtype)


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
