"""The same models in the style of Equinox's documentation: its own layers, under `jax.vmap`.

Weights are those of all peers; Equinox holds them as [out, in].
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.peers import jax_step
from benchmarks.peers.given import (
    MLP,
    NORM_EPS,
    RNN,
    ROPE_THETA,
    Built,
    Precision,
    Remat,
    Transformer,
)

# The layers of a block, by the names that all peers' weights have.
PATHS = {"w_up": "up", "w_down": "down"} | {
    f"w{letter}": f"attention.{name}_proj"
    for letter, name in zip("qkvo", ("query", "key", "value", "output"), strict=True)
}


class Block(eqx.Module):
    attention_norm: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention
    rotary: eqx.nn.RotaryPositionalEmbedding
    mlp_norm: eqx.nn.RMSNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, shape: Transformer, dtype: type, *, key: Array):
        keys = jax.random.split(key, 3)
        embed = shape.d_model
        self.attention_norm = eqx.nn.RMSNorm(embed, eps=NORM_EPS, use_bias=False)
        self.attention = eqx.nn.MultiheadAttention(shape.num_heads, embed, key=keys[0])
        self.rotary = eqx.nn.RotaryPositionalEmbedding(shape.head_dim, ROPE_THETA, dtype=dtype)
        self.mlp_norm = eqx.nn.RMSNorm(embed, eps=NORM_EPS, use_bias=False)
        self.up = eqx.nn.Linear(embed, shape.d_ff, use_bias=False, key=keys[1])
        self.down = eqx.nn.Linear(shape.d_ff, embed, use_bias=False, key=keys[2])

    def _rotate(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        rotary = jax.vmap(self.rotary, in_axes=1, out_axes=1)
        return rotary(q), rotary(k), v

    def __call__(self, x: Array, mask: Array) -> Array:
        """[seq, d_model] to [seq, d_model]."""
        normed = jax.vmap(self.attention_norm)(x)
        x = x + self.attention(normed, normed, normed, mask, process_heads=self._rotate)
        hidden = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.mlp_norm)(x)))
        return x + jax.vmap(self.down)(hidden)


class Decoder(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: list[Block]
    final_norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, shape: Transformer, dtype: type, *, key: Array):
        keys = jax.random.split(key, shape.num_layers + 2)
        self.embedding = eqx.nn.Embedding(shape.vocab_size, shape.d_model, key=keys[0])
        self.blocks = [Block(shape, dtype, key=key) for key in keys[2:]]
        self.final_norm = eqx.nn.RMSNorm(shape.d_model, eps=NORM_EPS, use_bias=False)
        self.head = eqx.nn.Linear(shape.d_model, shape.vocab_size, use_bias=False, key=keys[1])

    def __call__(self, tokens: Array, remat: Remat) -> Array:
        """int32[seq] to logits, [seq, vocab]."""
        x = jax.vmap(self.embedding)(tokens)
        mask = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
        for block in self.blocks:
            x = (eqx.filter_checkpoint(block) if remat == "full" else block)(x, mask)
        return jax.vmap(self.head)(jax.vmap(self.final_norm)(x))


def transformer(shape: Transformer, precision: Precision, *, remat: Remat) -> Built:
    def forward(model: Decoder, tokens: Array) -> Array:
        return jax.vmap(model, in_axes=(0, None))(tokens, remat)

    given = shape.weights()
    weights = {"embedding.weight": given.pop("embedding"), "head.weight": given.pop("head").T}
    for name, stacked in given.items():
        for i, w in enumerate(stacked):
            weights[f"blocks.{i}.{PATHS[name]}.weight"] = w.T
    model = Decoder(shape, jax_step.DTYPES[precision], key=jax.random.key(0))
    model = jax_step.with_weights(model, weights)
    return jax_step.equinox(forward, model, shape.batch(), precision)


class LanguageModel(eqx.Module):
    embedding: eqx.nn.Embedding
    cells: list[eqx.nn.LSTMCell]
    head: eqx.nn.Linear

    def __init__(self, shape: RNN, *, key: Array):
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


def rnn(shape: RNN, precision: Precision) -> Built:
    def forward(model: LanguageModel, tokens: Array) -> Array:
        return jax.vmap(model)(tokens)

    given = shape.weights()
    weights = {"embedding.weight": given["embedding"], "head.weight": given["head"].T}
    weights["head.bias"] = given["head_bias"]
    for i in range(shape.num_layers):
        weights[f"cells.{i}.weight_ih"] = given["ih"][i].T
        weights[f"cells.{i}.weight_hh"] = given["hh"][i].T
        weights[f"cells.{i}.bias"] = given["bias"][i]
    model = jax_step.with_weights(LanguageModel(shape, key=jax.random.key(0)), weights)
    return jax_step.equinox(forward, model, shape.batch(), precision)


def mlp(shape: MLP, precision: Precision) -> Built:
    dtype = jax_step.DTYPES[precision]

    def forward(model: eqx.nn.MLP, points: Array) -> Array:
        return jax.vmap(model)(points.astype(dtype))

    key = jax.random.key(0)
    model = eqx.nn.MLP(shape.in_size, shape.out_size, shape.hidden_size, depth=2, key=key)
    weights = {}
    for i, (weight, bias) in enumerate(shape.weights()):
        weights |= {f"layers.{i}.weight": weight.T, f"layers.{i}.bias": bias}
    model = jax_step.with_weights(model, weights)
    return jax_step.equinox(forward, model, shape.batch(), precision)
