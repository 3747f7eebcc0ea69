"""The same model in the style of Equinox's documentation: a cell in `lax.scan` under `jax.vmap`."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.peers import jax_step
from benchmarks.peers.common import Built, Precision
from benchmarks.peers.rnn import given
from benchmarks.peers.rnn.given import Shape


class LanguageModel(eqx.Module):
    embedding: eqx.nn.Embedding
    cells: list[eqx.nn.LSTMCell]
    head: eqx.nn.Linear

    def __init__(self, shape: Shape, *, key: Array):
        keys = jax.random.split(key, shape.num_layers + 2)
        size = shape.hidden_size
        self.embedding = eqx.nn.Embedding(shape.vocab_size, size, key=keys[0])
        self.cells = [eqx.nn.LSTMCell(size, size, key=key) for key in keys[2:]]
        self.head = eqx.nn.Linear(size, shape.vocab_size, key=keys[1])

    def __call__(self, tokens: Array) -> Array:
        """int32[seq] to logits, [seq, vocab]."""
        x = jax.vmap(self.embedding)(tokens)
        for cell in self.cells:

            def step(state: tuple, x: Array, cell: eqx.nn.LSTMCell = cell) -> tuple:
                state = cell(x, state)
                return state, state[0]

            zeros = jnp.zeros(cell.hidden_size, x.dtype)
            _, x = jax.lax.scan(step, (zeros, zeros), x)
        return jax.vmap(self.head)(x)


def init(shape: Shape) -> LanguageModel:
    """The model with the weights of all peers; Equinox holds them as [out, in]."""
    arrays = {name: jnp.asarray(w) for name, w in given.weights(shape).items()}

    def parameters(model: LanguageModel) -> list[Array]:
        cells = [w for cell in model.cells for w in (cell.weight_ih, cell.weight_hh, cell.bias)]
        return [model.embedding.weight, model.head.weight, model.head.bias, *cells]

    outer = [arrays["embedding"], arrays["head"].T, arrays["head_bias"]]
    cells = [
        w
        for i in range(shape.num_layers)
        for w in (arrays["ih"][i].T, arrays["hh"][i].T, arrays["bias"][i])
    ]
    return eqx.tree_at(parameters, LanguageModel(shape, key=jax.random.key(0)), [*outer, *cells])


def build(shape: Shape, precision: Precision) -> Built:
    def forward(model: LanguageModel, tokens: Array) -> Array:
        return jax.vmap(model)(tokens)

    return jax_step.equinox(forward, init(shape), given.batch(shape), precision)
