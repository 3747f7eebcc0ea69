"""The inputs of all peers: the recurrent language model's sizes, initial weights and batch."""

from dataclasses import dataclass

import numpy as np

from benchmarks.peers.common import Batch, normal, token_batch


@dataclass(frozen=True)
class Shape:
    """A language model of LSTM layers, as wide as their embedding, and a head with a bias.

    An LSTM has one bias for each gate, as in Equinox and the zoo; gates are i, f, g, o.
    """

    num_layers: int = 2
    hidden_size: int = 512
    vocab_size: int = 512
    seq_len: int = 128
    batch_size: int = 32


def weights(shape: Shape) -> dict[str, np.ndarray]:
    """The initial weights, as [in, out] matrices; layers are stacked on axis 0."""
    rng = np.random.default_rng(0)
    layers, hidden, vocab = shape.num_layers, shape.hidden_size, shape.vocab_size
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


def batch(shape: Shape) -> Batch:
    """Tokens and next-token targets."""
    return token_batch(shape.vocab_size, shape.batch_size, shape.seq_len)
