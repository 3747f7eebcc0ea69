"""The keys that a query sees, by position, and the logits of queries and keys in plain XLA.

An `AxisOrder` is the order of axes inside. Legend of suffixes: as in `zoo.nn.attention.attention`.
"""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from zoo.nn.products import platform

MASKED = -1e30  # finite: a masked row gives no NaN, forward or backward

# Long enough for efficient products, short enough that a causal chunk skips most of the future. On
# a CPU the logits of a pair stay in the cache, which makes attention 1.3 to 3 times as fast.
CHUNK, CPU_CHUNK = 512, 128


def chunk_size(length: int) -> int:
    """The queries of a chunk, and its keys: equal chunks of a row of `length`."""
    largest = CPU_CHUNK if platform() == "cpu" else CHUNK
    return math.ceil(length / math.ceil(length / largest))


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


NO_SEGMENT = np.iinfo(np.int32).min  # of what is padded around a row
Segments = tuple[Int[Array, "batch queries"], Int[Array, "batch keys"]]


def pad_to_multiple(x: Array, multiple: int, value: Any = 0) -> Array:
    """[B, T, …] padded behind T."""
    missing = -x.shape[1] % multiple
    if not missing:
        return x
    sizes = [(0, missing if axis == 1 else 0) for axis in range(x.ndim)]
    return jnp.pad(x, sizes, constant_values=value)


def pairs(
    first: int, length: int, num_keys: int, mask: Mask, query_size: int, key_size: int
) -> Iterator[tuple[int, int]]:
    """The blocks of queries, from position `first` on, and of keys of which some sees some."""
    for query, start in enumerate(range(first, first + length, query_size)):
        stop = min(start + query_size, first + length)
        seen, end = mask.keys_of(start, stop, num_keys)
        for key in range(seen // key_size, math.ceil(end / key_size)):
            yield query, key


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
