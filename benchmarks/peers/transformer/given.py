"""The inputs of all peers: the decoder's sizes, initial weights and batch."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from benchmarks.peers.common import Batch, normal, token_batch

Remat = Literal["none", "full"]

NORM_EPS, ROPE_THETA = 1e-6, 1e4
ATTENTION = ("wq", "wk", "wv", "wo")


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
    tied: bool = False
    """Whether the embedding is the head too (only the zoo and PyTorch)."""
    tokens: str = ""
    """A .npy file with rows of seq_len + 1 tokens of text; random tokens if it is empty."""

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def num_tokens(self) -> int:
        return self.batch_size * self.seq_len


def weights(shape: Shape) -> dict[str, np.ndarray]:
    """The initial weights, as [in, out] matrices; layers are stacked on axis 0."""
    rng = np.random.default_rng(0)
    layers, embed, hidden = shape.num_layers, shape.d_model, shape.d_ff
    return {
        "embedding": normal(rng, shape.vocab_size, embed),
        **{name: normal(rng, layers, embed, embed) for name in ATTENTION},
        "w_up": normal(rng, layers, embed, hidden),
        "w_down": normal(rng, layers, hidden, embed),
        **({} if shape.tied else {"head": normal(rng, embed, shape.vocab_size)}),
    }


def batch(shape: Shape) -> Batch:
    """Tokens and next-token targets."""
    if shape.tokens:
        rows = np.load(shape.tokens, mmap_mode="r")[: shape.batch_size].astype(np.int32)
        return rows[:, :-1], rows[:, 1:]
    return token_batch(shape.vocab_size, shape.batch_size, shape.seq_len)
