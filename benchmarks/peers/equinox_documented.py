"""The same models in the style of Equinox's documentation: its own layers, under `jax.vmap`.

Weights are those of all peers; Equinox holds them as [out, in].
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.peers import given, jax_step
from benchmarks.peers.given import MLP, RNN, Built, Precision, Remat, Transformer


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
        self.attention_norm = eqx.nn.RMSNorm(embed, eps=given.NORM_EPS, use_bias=False)
        self.attention = eqx.nn.MultiheadAttention(shape.num_heads, embed, key=keys[0])
        self.rotary = eqx.nn.RotaryPositionalEmbedding(
            shape.head_dim, given.ROPE_THETA, dtype=dtype
        )
        self.mlp_norm = eqx.nn.RMSNorm(embed, eps=given.NORM_EPS, use_bias=False)
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
        self.final_norm = eqx.nn.RMSNorm(shape.d_model, eps=given.NORM_EPS, use_bias=False)
        self.head = eqx.nn.Linear(shape.d_model, shape.vocab_size, use_bias=False, key=keys[1])

    def __call__(self, tokens: Array, remat: Remat) -> Array:
        """int32[seq] to logits, [seq, vocab]."""
        x = jax.vmap(self.embedding)(tokens)
        mask = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
        for block in self.blocks:
            x = (eqx.filter_checkpoint(block) if remat == "full" else block)(x, mask)
        return jax.vmap(self.head)(jax.vmap(self.final_norm)(x))


def _init_transformer(shape: Transformer, dtype: type) -> Decoder:
    """The model with the weights of all peers; `eqx.nn.Linear` holds them as [out, in]."""
    arrays = {name: jnp.asarray(w) for name, w in shape.weights().items()}

    def linears(model: Decoder) -> list[Array]:
        layers = [
            (
                b.attention.query_proj,
                b.attention.key_proj,
                b.attention.value_proj,
                b.attention.output_proj,
                b.up,
                b.down,
            )
            for b in model.blocks
        ]
        return [model.embedding.weight, model.head.weight, *(x.weight for y in layers for x in y)]

    names = ("wq", "wk", "wv", "wo", "w_up", "w_down")
    layers = [arrays[name][i].T for i in range(shape.num_layers) for name in names]
    model = Decoder(shape, dtype, key=jax.random.key(0))
    return eqx.tree_at(linears, model, [arrays["embedding"], arrays["head"].T, *layers])


def transformer(shape: Transformer, precision: Precision, *, remat: Remat) -> Built:
    def forward(model: Decoder, tokens: Array) -> Array:
        return jax.vmap(model, in_axes=(0, None))(tokens, remat)

    model = _init_transformer(shape, jax_step.DTYPES[precision])
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


def _init_rnn(shape: RNN) -> LanguageModel:
    """The model with the weights of all peers; Equinox holds them as [out, in]."""
    arrays = {name: jnp.asarray(w) for name, w in shape.weights().items()}

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


def rnn(shape: RNN, precision: Precision) -> Built:
    def forward(model: LanguageModel, tokens: Array) -> Array:
        return jax.vmap(model)(tokens)

    return jax_step.equinox(forward, _init_rnn(shape), shape.batch(), precision)


def _init_mlp(shape: MLP) -> eqx.nn.MLP:
    """The model with the weights of all peers; Equinox holds them as [out, in]."""
    key = jax.random.key(0)
    model = eqx.nn.MLP(shape.in_size, shape.out_size, shape.hidden_size, depth=2, key=key)
    return eqx.tree_at(
        lambda m: [x for layer in m.layers for x in (layer.weight, layer.bias)],
        model,
        [jnp.asarray(x) for weight, bias in shape.weights() for x in (weight.T, bias)],
    )


def mlp(shape: MLP, precision: Precision) -> Built:
    dtype = jax_step.DTYPES[precision]

    def forward(model: eqx.nn.MLP, points: Array) -> Array:
        return jax.vmap(model)(points.astype(dtype))

    return jax_step.equinox(forward, _init_mlp(shape), shape.batch(), precision)
