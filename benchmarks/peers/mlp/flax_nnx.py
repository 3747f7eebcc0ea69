"""The same model by Flax NNX's own linear layers."""

import jax
from flax import nnx
from jax import Array

from benchmarks.peers import flax_step, jax_step
from benchmarks.peers.common import Built, Precision
from benchmarks.peers.mlp import given
from benchmarks.peers.mlp.given import Shape


class Classifier(nnx.Module):
    def __init__(self, shape: Shape, dtype: type):
        *hidden, head = (flax_step.linear(*pair, dtype) for pair in given.weights(shape))
        self.hidden, self.head = nnx.List(hidden), head

    def __call__(self, x: Array) -> Array:
        """float[batch, in_size] to logits, [batch, out_size]."""
        for layer in self.hidden:
            x = jax.nn.relu(layer(x))
        return self.head(x)


def build(shape: Shape, precision: Precision) -> Built:
    model = Classifier(shape, jax_step.DTYPES[precision])
    return flax_step.build(model, given.batch(shape), precision)
