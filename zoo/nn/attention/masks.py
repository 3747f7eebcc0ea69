"""The keys that a query sees, and kernels: attention under such a mask, forward and backward.

Legend of suffixes: as in `zoo.nn.attention.attention`.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from zoo.nn.products import custom_vjp, platform
from zoo.nn.remat import KEPT

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
        reach = start + num_keys if self.window is None else self.window - 1
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


NO_SEGMENT = np.iinfo(np.int32).min  # of padding around a row
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
    """The pairs of a block of queries, from `first` on, and one of keys that some of them see."""
    for query, start in enumerate(range(first, first + length, query_size)):
        stop = min(start + query_size, first + length)
        seen, end = mask.keys_of(start, stop, num_keys)
        for key in range(seen // key_size, math.ceil(end / key_size)):
            yield query, key


@runtime_checkable
class Kernel(Protocol):
    """Softmax attention on one device, under a mask by position and by segments.

    Sums are those of the exponentials of a query's logits. They and the output may be of more keys
    than a backward pass is given; it then gives the part of the gradients that its keys have. A
    query that sees none of the keys has a sum as good as zero.
    """

    @property
    def mask(self) -> Mask:
        """The keys that a query sees, by position."""

    def under(self, mask: Mask, first: int = 0) -> "Kernel":
        """The same with another mask; `first` is the first query's position among the keys."""

    def __call__(self, q: Array, k: Array, v: Array, segments: Segments | None) -> Array:
        """The output, which has a gradient."""

    def forward(
        self, q: Array, k: Array, v: Array, segments: Segments | None
    ) -> tuple[Array, Float[Array, "batch queries heads"]]:
        """The output, and the logarithms of the sums in fp32."""

    def backward(
        self,
        qkv: tuple[Array, Array, Array],
        segments: Segments | None,
        out: Array,
        log_sum: Float[Array, "batch queries heads"],
        g: Array,
    ) -> tuple[Array, Array, Array]:
        """The gradients of queries, keys and values, given the output's."""


@functools.partial(custom_vjp, nondiff_argnums=(4,))
def attend(q: Array, k: Array, v: Array, segments: Any, kernel: Any) -> Array:
    """The output of a kernel's `forward`, whose gradient its `backward` gives."""
    return kernel.forward(q, k, v, segments)[0]


def _forward(q: Array, k: Array, v: Array, segments: Any, kernel: Any) -> Any:
    out, log_sum = kernel.forward(q, k, v, segments)
    return out, ((q, k, v), segments, out, log_sum)


def _backward(kernel: Any, residuals: Any, g: Array) -> Any:
    return *kernel.backward(*residuals, g), None


attend.defvjp(_forward, _backward)


def run(
    kernel: Any, q: Array, k: Array, v: Array, segments: Any, sinks: Float[Array, "heads"] | None
) -> Array:
    """The output of a kernel, perhaps with sinks: logits per head beside those of its keys.

    A sink takes part in the softmax, and has no value (gpt-oss, 2025; Xiao et al. 2023): it adds
    to the sum that the output is divided by, so that kernels need to know nothing of it.
    """
    if sinks is None:
        return kernel(q, k, v, segments)
    return _attend_with_sinks(q, k, v, segments, sinks, kernel)


@functools.partial(custom_vjp, nondiff_argnums=(5,))
def _attend_with_sinks(
    q: Array, k: Array, v: Array, segments: Any, sinks: Array, kernel: Any
) -> Array:
    return _forward_with_sinks(q, k, v, segments, sinks, kernel)[0]


def _forward_with_sinks(
    q: Array, k: Array, v: Array, segments: Any, sinks: Array, kernel: Any
) -> Any:
    out, log_sum = kernel.forward(q, k, v, segments)
    total = jnp.logaddexp(log_sum, sinks.astype(jnp.float32)[None, None])
    out = (out.astype(jnp.float32) * jnp.exp(log_sum - total)[..., None]).astype(out.dtype)
    out, total = checkpoint_name(out, KEPT), checkpoint_name(total, KEPT)
    return out, ((q, k, v), segments, out, total, sinks)


def _backward_with_sinks(kernel: Any, residuals: Any, g: Array) -> Any:
    qkv, segments, out, total, sinks = residuals
    dq, dk, dv = kernel.backward(qkv, segments, out, total, g)
    delta = (out.astype(jnp.float32) * g.astype(jnp.float32)).sum(-1)
    share = jnp.exp(sinks.astype(jnp.float32)[None, None] - total)
    return dq, dk, dv, None, -(share * delta).sum((0, 1)).astype(sinks.dtype)


_attend_with_sinks.defvjp(_forward_with_sinks, _backward_with_sinks)
