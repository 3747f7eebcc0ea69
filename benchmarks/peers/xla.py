"""Compiling a JAX peer ahead of time, with its compile seconds and XLA's memory plan."""

import time
from collections.abc import Callable
from typing import Any

import jax
import optax

from benchmarks.peers.common import CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY, Built, Precision


def optimizer() -> optax.GradientTransformation:
    """The recipe of every peer: AdamW on all parameters."""
    return optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)


def clipped_optimizer() -> optax.GradientTransformation:
    """`optimizer` behind the clip by global norm."""
    return optax.chain(optax.clip_by_global_norm(CLIP_NORM), optimizer())


def compiled(lower: Callable[[], Any], state: Any, batch: Any, precision: Precision) -> Built:
    """Compile `lower().compile()`, a step (state, batch) -> (state, loss)."""
    start = time.perf_counter()
    # On GPU the default precision of fp32 products is less than fp32.
    with jax.default_matmul_precision("highest" if precision == "fp32" else None):
        step = lower().compile()
    seconds = time.perf_counter() - start
    return Built(step, state, batch, seconds, planned_bytes(step))


def planned_bytes(executable: Any) -> int:
    """XLA's own peak of a compiled program."""
    plan = getattr(executable, "compiled", executable).memory_analysis()  # Equinox wraps it
    sizes = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    return sizes - plan.alias_size_in_bytes
