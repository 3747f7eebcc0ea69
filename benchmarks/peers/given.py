"""The inputs of all peers of a model (its sizes, initial weights and batch), and their results."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

ROOT = Path(__file__).parents[2]
Precision = Literal["fp32", "bf16"]
Remat = Literal["none", "full"]

LEARNING_RATE, WEIGHT_DECAY, CLIP_NORM = 1e-3, 0.1, 1.0
NORM_EPS, ROPE_THETA = 1e-6, 1e4
ATTENTION = ("wq", "wk", "wv", "wo")

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


@dataclass(frozen=True)
class Transformer:
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
    """A .npy file with rows of seq_len + 1 tokens of text, and with the documents of the tokens;
    random tokens if it is empty."""
    packed: bool = False
    """Whether a token sees its own document alone (only the zoo and PyTorch)."""

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def num_tokens(self) -> int:
        return self.batch_size * self.seq_len

    def weights(self) -> dict[str, np.ndarray]:
        """The initial weights, as [in, out] matrices; layers are stacked on axis 0."""
        rng = np.random.default_rng(0)
        layers, embed, hidden = self.num_layers, self.d_model, self.d_ff
        return {
            "embedding": normal(rng, self.vocab_size, embed),
            **{name: normal(rng, layers, embed, embed) for name in ATTENTION},
            "w_up": normal(rng, layers, embed, hidden),
            "w_down": normal(rng, layers, hidden, embed),
            **({} if self.tied else {"head": normal(rng, embed, self.vocab_size)}),
        }

    def batch(self) -> Batch:
        """Tokens and next-token targets."""
        if self.tokens:
            rows = np.load(self.tokens, mmap_mode="r")[0, : self.batch_size].astype(np.int32)
            return rows[:, :-1], rows[:, 1:]
        return token_batch(self.vocab_size, self.batch_size, self.seq_len)

    def documents(self) -> np.ndarray | None:
        """The document of each token in a packed row, int32[batch, seq]."""
        rows = np.load(self.tokens, mmap_mode="r")[1, : self.batch_size] if self.packed else None
        return None if rows is None else rows[:, :-1].astype(np.int32)


@dataclass(frozen=True)
class RNN:
    """A language model of LSTM layers, as wide as their embedding, and a head with a bias.

    An LSTM has one bias for each gate, as in Equinox and the zoo; gates are i, f, g, o.
    """

    num_layers: int = 2
    hidden_size: int = 512
    vocab_size: int = 512
    seq_len: int = 128
    batch_size: int = 32

    def weights(self) -> dict[str, np.ndarray]:
        """The initial weights, as [in, out] matrices; layers are stacked on axis 0."""
        rng = np.random.default_rng(0)
        layers, hidden, vocab = self.num_layers, self.hidden_size, self.vocab_size
        bias = rng.normal(0, 0.1, (layers, 4 * hidden)).astype(np.float32)
        bias[:, hidden : 2 * hidden] += 1  # the forget gate begins open
        return {
            "embedding": normal(rng, vocab, hidden),
            "ih": normal(rng, layers, hidden, 4 * hidden),
            "hh": normal(rng, layers, hidden, 4 * hidden),
            "bias": bias,
            "head": normal(rng, hidden, vocab),
            "head_bias": rng.normal(0, 0.1, vocab).astype(np.float32),
        }

    def batch(self) -> Batch:
        """Tokens and next-token targets."""
        return token_batch(self.vocab_size, self.batch_size, self.seq_len)


@dataclass(frozen=True)
class MLP:
    """A classifier: two hidden layers of the same width with ReLU, and biases everywhere."""

    in_size: int = 784
    hidden_size: int = 1024
    out_size: int = 10
    batch_size: int = 512

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return (self.in_size, self.hidden_size, self.hidden_size, self.out_size)

    def weights(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The initial weights, [in, out], and biases of each layer, the head last."""
        rng = np.random.default_rng(0)
        return [
            (normal(rng, size, out), rng.normal(0, 0.1, out).astype(np.float32))
            for size, out in zip(self.sizes, self.sizes[1:], strict=False)
        ]

    def batch(self) -> Batch:
        """Points, float32[batch, in_size], and classes."""
        rng = np.random.default_rng(1)
        points = rng.normal(size=(self.batch_size, self.in_size)).astype(np.float32)
        return points, rng.integers(0, self.out_size, self.batch_size, dtype=np.int32)
