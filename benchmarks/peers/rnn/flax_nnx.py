"""The same model by Flax NNX's own LSTM cell, in its `nnx.RNN`."""

import numpy as np
from flax import nnx
from jax import Array

from benchmarks.peers import flax_step, jax_step
from benchmarks.peers.common import Built, Precision
from benchmarks.peers.rnn import given
from benchmarks.peers.rnn.given import Shape


class LanguageModel(nnx.Module):
    def __init__(self, shape: Shape, dtype: type):
        weights = given.weights(shape)
        self.embedding = flax_step.embedding(weights["embedding"], dtype)
        self.layers = nnx.List(
            nnx.RNN(cell(*(weights[name][i] for name in ("ih", "hh", "bias")), dtype))
            for i in range(shape.num_layers)
        )
        self.head = flax_step.linear(weights["head"], weights["head_bias"], dtype)

    def __call__(self, tokens: Array) -> Array:
        """int32[batch, seq] to logits, [batch, seq, vocab]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def cell(ih: np.ndarray, hh: np.ndarray, bias: np.ndarray, dtype: type) -> nnx.OptimizedLSTMCell:
    """The cell that computes all gates by one product; it has one bias per gate."""
    cell = nnx.OptimizedLSTMCell(len(ih), len(hh), dtype=dtype, rngs=nnx.Rngs(0))
    flax_step.assign(cell.dense_i.kernel, ih)
    flax_step.assign(cell.dense_h.kernel, hh)
    flax_step.assign(cell.dense_h.bias, bias)
    return cell


def build(shape: Shape, precision: Precision) -> Built:
    model = LanguageModel(shape, jax_step.DTYPES[precision])
    return flax_step.build(model, given.batch(shape), precision)
