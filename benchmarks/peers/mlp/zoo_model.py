"""The zoo's MLP."""

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from benchmarks.peers import zoo_step
from benchmarks.peers.common import Built, Precision
from benchmarks.peers.mlp import given
from benchmarks.peers.mlp.given import Shape, Weights
from zoo import losses, mlp


def config(shape: Shape) -> mlp.Config:
    """The zoo's configuration of those sizes."""
    return mlp.Config(
        in_size=shape.in_size,
        out_size=shape.out_size,
        hidden_size=shape.hidden_size,
        num_layers=2,
        activation="relu",
    )


def init(shape: Shape, weights: Weights, key: Array) -> mlp.MLP:
    """A model of these weights."""

    def parameters(model: mlp.MLP) -> list[Array]:
        linears = (model.first.linear, model.last.linear, model.head)
        return [x for linear in linears for x in (linear.weight, linear.bias)]

    arrays = [jnp.asarray(x) for pair in weights for x in pair]
    return eqx.tree_at(parameters, mlp.MLP(config(shape), key=key), arrays)


def build(shape: Shape, precision: Precision) -> Built:
    batch = zoo_step.class_batch(given.batch(shape))
    weights = given.weights(shape)
    return zoo_step.build(
        losses.classification, lambda key: init(shape, weights, key), batch, precision
    )
