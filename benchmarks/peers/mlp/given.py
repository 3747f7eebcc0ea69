"""The inputs of all peers: the classifier's sizes, initial weights and batch."""

from dataclasses import dataclass

import numpy as np

from benchmarks.peers.common import Batch, normal

Weights = list[tuple[np.ndarray, np.ndarray]]  # (weight, bias) by layer


@dataclass(frozen=True)
class Shape:
    """A classifier: two hidden layers of the same width with ReLU, and biases everywhere."""

    in_size: int = 784
    hidden_size: int = 1024
    out_size: int = 10
    batch_size: int = 512

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return (self.in_size, self.hidden_size, self.hidden_size, self.out_size)


def weights(shape: Shape, seed: int = 0) -> Weights:
    """The initial weights, [in, out], and biases of each layer, the head last."""
    rng = np.random.default_rng(seed)
    return [
        (normal(rng, size, out), rng.normal(0, 0.1, out).astype(np.float32))
        for size, out in zip(shape.sizes, shape.sizes[1:], strict=False)
    ]


def batch(shape: Shape) -> Batch:
    """Points, float32[batch, in_size], and classes."""
    rng = np.random.default_rng(1)
    points = rng.normal(size=(shape.batch_size, shape.in_size)).astype(np.float32)
    return points, rng.integers(0, shape.out_size, shape.batch_size, dtype=np.int32)
