"""Kernels: attention of some queries to some keys, forward and backward, and its gradient.

Legend of suffixes: as in `zoo.nn.attention.attention`.
"""

import functools
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from zoo.nn.attention.masks import Mask, Segments
from zoo.nn.products import custom_vjp
from zoo.nn.remat import KEPT


@runtime_checkable
class Kernel(Protocol):
    """Softmax attention on one device, under a mask by position and by segments.

    Sums are those of the exponentials of a query's logits; they and the output may be of more keys
    than a backward pass is given, whose gradients are then the part of the keys that it is given. A
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
