"""The losses of both networks: sums over the batch, in fp32, and their weight.

A loss without a key is of an evaluation: no dropout, and the running statistics of batch norms.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import Array

SMOOTHING = 0.1


def digits(pair: Any, batch: dict[str, Array], key: Array | None) -> tuple[Any, ...]:
    """Cross-entropy with smoothed labels, and the accuracy; the fourth value is the new State."""
    net, state = pair
    if key is None:
        net = eqx.nn.inference_mode(net)
    keys = None if key is None else jax.random.split(key, len(batch["images"]))
    logits, state = jax.vmap(
        net, in_axes=(0, None, None if key is None else 0), out_axes=(0, None), axis_name="batch"
    )(batch["images"], state, keys)
    logits, weights = logits.astype(jnp.float32), batch["weights"]
    labels = optax.smooth_labels(jax.nn.one_hot(batch["labels"], 10), SMOOTHING)
    losses = optax.softmax_cross_entropy(logits, labels)
    right = (logits.argmax(1) == batch["labels"]).astype(jnp.float32)
    return (losses * weights).sum(), weights.sum(), {"accuracy": (right * weights).sum()}, state


def dates(net: Any, batch: dict[str, Array], key: Array | None) -> tuple[Any, ...]:
    """Mean cross-entropy of a date's characters, and how often all of them are right."""
    keys = None if key is None else jax.random.split(key, len(batch["source"]))
    logits = jax.vmap(net, in_axes=(0, 0, None if key is None else 0))(
        batch["source"], batch["prefix"], keys
    ).astype(jnp.float32)
    weights, targets = batch["weights"], batch["targets"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(1)
    right = (logits.argmax(2) == targets).all(1).astype(jnp.float32)
    return (losses * weights).sum(), weights.sum(), {"accuracy": (right * weights).sum()}
