"""What all peers share: the model's sizes, its first weights and batch, and what a peer returns."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

Precision = Literal["fp32", "bf16"]
Remat = Literal["none", "full"]

LEARNING_RATE, WEIGHT_DECAY, CLIP_NORM, NORM_EPS, ROPE_THETA = 1e-3, 0.1, 1.0, 1e-6, 1e4


@dataclass(frozen=True)
class Shape:
    """A causal decoder: RMSNorm before each part, rotary positions, GELU MLP, no biases."""

    num_layers: int = 6
    d_model: int = 384
    num_heads: int = 6
    d_ff: int = 1536
    vocab_size: int = 512
    seq_len: int = 256
    batch_size: int = 8

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads


class Built(NamedTuple):
    """A peer, ready to run: `state, loss = step(state, batch)`, where float(loss) waits for it."""

    step: Callable[[Any, Any], tuple[Any, Any]]
    state: Any
    batch: Any
    compile_seconds: float | None = None  # None: it compiles in its first step
    planned_bytes: int | None = None  # peak by XLA's own plan: arguments and temporaries


def weights(shape: Shape) -> dict[str, np.ndarray]:
    """The first weights of every peer, as [in, out] matrices; layers are stacked on axis 0."""
    rng = np.random.default_rng(0)
    layers, embed, hidden = shape.num_layers, shape.d_model, shape.d_ff

    def normal(*sizes: int) -> np.ndarray:
        return rng.normal(0, 1 / math.sqrt(sizes[-2]), sizes).astype(np.float32)

    return {
        "embedding": normal(shape.vocab_size, embed),
        **{name: normal(layers, embed, embed) for name in ("wq", "wk", "wv", "wo")},
        "w_up": normal(layers, embed, hidden),
        "w_down": normal(layers, hidden, embed),
        "head": normal(embed, shape.vocab_size),
    }


def token_batch(shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and next-token targets, int32[batch, seq]."""
    sizes = (shape.batch_size, shape.seq_len + 1)
    tokens = np.random.default_rng(1).integers(0, shape.vocab_size, sizes, dtype=np.int32)
    return tokens[:, :-1], tokens[:, 1:]
