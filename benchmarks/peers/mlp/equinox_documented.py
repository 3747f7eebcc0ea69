"""The same model by Equinox's own MLP, under `jax.vmap`."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.peers import jax_step
from benchmarks.peers.common import Built, Precision
from benchmarks.peers.mlp import given
from benchmarks.peers.mlp.given import Shape


def init(shape: Shape) -> eqx.nn.MLP:
    """The model with the weights of all peers; Equinox holds them as [out, in]."""
    key = jax.random.key(0)
    model = eqx.nn.MLP(shape.in_size, shape.out_size, shape.hidden_size, depth=2, key=key)
    return eqx.tree_at(
        lambda m: [x for layer in m.layers for x in (layer.weight, layer.bias)],
        model,
        [jnp.asarray(x) for weight, bias in given.weights(shape) for x in (weight.T, bias)],
    )


def build(shape: Shape, precision: Precision) -> Built:
    dtype = jax_step.DTYPES[precision]

    def forward(model: eqx.nn.MLP, points: Array) -> Array:
        return jax.vmap(model)(points.astype(dtype))

    return jax_step.equinox(forward, init(shape), given.batch(shape), precision)
