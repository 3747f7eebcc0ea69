"""Shared by all peers of all models: the drawing of weights and tokens, and the result."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

Precision = Literal["fp32", "bf16"]

LEARNING_RATE, WEIGHT_DECAY, CLIP_NORM = 1e-3, 0.1, 1.0

Batch = tuple[np.ndarray, np.ndarray]  # the model's input, and its targets as int32


class Built(NamedTuple):
    """A peer, ready to run: `state, loss = step(state, batch)`; float(loss) waits for the step."""

    step: Callable[[Any, Any], tuple[Any, Any]]
    state: Any
    batch: Any
    compile_seconds: float | None = None  # None: it compiles in its first step
    planned_bytes: int | None = None  # peak by XLA's own plan: arguments and temporaries


def normal(rng: np.random.Generator, *sizes: int) -> np.ndarray:
    """Weights [..., in, out] of variance 1 / in."""
    scale = np.float32(1 / math.sqrt(sizes[-2]))
    return rng.standard_normal(sizes, dtype=np.float32) * scale


def token_batch(vocab_size: int, batch_size: int, seq_len: int) -> Batch:
    """Inputs and next-token targets, int32[batch, seq]."""
    sizes = (batch_size, seq_len + 1)
    tokens = np.random.default_rng(1).integers(0, vocab_size, sizes, dtype=np.int32)
    return tokens[:, :-1], tokens[:, 1:]
