"""The zoo's LSTM language model."""

from typing import Literal

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from benchmarks.peers import zoo_step
from benchmarks.peers.common import Built, Precision
from benchmarks.peers.rnn import given
from benchmarks.peers.rnn.given import Shape
from zoo import losses, rnn


def init(config: rnn.Config, shape: Shape, key: Array) -> rnn.RNN:
    """The model with the weights of all peers."""
    arrays = {name: jnp.asarray(w) for name, w in given.weights(shape).items()}
    gates = (shape.num_layers, shape.hidden_size, 4, shape.hidden_size)
    arrays["ih"], arrays["hh"] = arrays["ih"].reshape(gates), arrays["hh"].reshape(gates)
    arrays["bias"] = arrays["bias"].reshape(shape.num_layers, 4, -1)

    def parameters(model: rnn.RNN) -> list[Array]:
        directions = [layer.directions[0] for layer in model.layers]
        layers = [w for d in directions for w in (d.weight_ih, d.weight_hh, d.bias)]
        return [model.embedding.weight, model.head.weight, model.head.bias, *layers]

    layers = [arrays[name][i] for i in range(shape.num_layers) for name in ("ih", "hh", "bias")]
    outer = [arrays[name] for name in ("embedding", "head", "head_bias")]
    return eqx.tree_at(parameters, rnn.RNN(config, key=key), [*outer, *layers])


def build(shape: Shape, precision: Precision, *, remat: Literal["none", "full"]) -> Built:
    config = sizes(shape, remat)
    batch = zoo_step.token_batch(given.batch(shape))
    return zoo_step.build(losses.next_token, lambda key: init(config, shape, key), batch, precision)


def sizes(shape: Shape, remat: Literal["none", "full"]) -> rnn.Config:
    """The zoo's configuration of those sizes."""
    return rnn.Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        remat=remat,
    )
