"""The logits of some queries and some keys, and their gradient, in plain XLA."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from zoo.nn.attention.layout import Layout, product
from zoo.nn.attention.masks import MASKED


def masked_logits(
    q: Array,
    k: Array,
    seen: Bool[Array, "#b 1 1 t s"],
    layout: Layout,
    scale: float,
    soft_cap: float | None,
) -> tuple[Float[Array, "b k g t s"], Float[Array, "b k g t s"]]:
    """Logits of these queries and keys in fp32, masked, and before the mask."""
    raw = product(f"{layout.queries},{layout.keys}->bkgts", q, k) * scale
    if soft_cap is not None:
        raw = soft_cap * jnp.tanh(raw / soft_cap)
    return jnp.where(jnp.broadcast_to(seen, raw.shape), raw, MASKED), raw


def logit_gradients(
    qkvg: tuple[Array, Array, Array, Array],
    log_sum: Float[Array, "b k g t 1"],
    delta: Float[Array, "b k g t 1"],
    seen: Bool[Array, "#b 1 1 t s"],
    layout: Layout,
    scale: float,
    soft_cap: float | None,
) -> tuple[Float[Array, "b k g t s"], Float[Array, "b k g t s"]]:
    """The gradient of the products q·k, and the weights, both of the compute dtype.

    `g` is the gradient of the output, `delta` the sum of its product with the output.
    """
    q, k, v, g = qkvg
    logits, raw = masked_logits(q, k, seen, layout, scale, soft_cap)
    weights = jnp.exp(logits - log_sum)
    dweights = product(f"{layout.queries},{layout.keys}->bkgts", g, v)
    dlogits = weights * (dweights - delta) * scale
    if soft_cap is not None:
        dlogits = dlogits * (1 - jnp.square(raw / soft_cap))
    return dlogits.astype(q.dtype), weights.astype(q.dtype)
