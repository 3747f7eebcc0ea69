"""The same models and their train step as in Flax's documentation, of NNX's own layers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from benchmarks.peers import given, jax_step
from benchmarks.peers.given import MLP, RNN, Batch, Built, Precision, Remat, Transformer


def _step(model: nnx.Module, batch: Batch, precision: Precision) -> Built:
    """A step of a model that returns logits, and was made with the compute dtype as `dtype`."""
    optimizer = nnx.Optimizer(model, jax_step.clipped_optimizer(), wrt=nnx.Param)

    def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: tuple) -> Array:
        inputs, targets = batch
        loss, grads = nnx.value_and_grad(
            lambda model: jax_step.mean_loss(model(inputs), targets)  # type: ignore[operator]
        )(model)
        optimizer.update(model, grads)
        return loss

    on_device = jax.device_put(batch)
    jitted: Any = nnx.jit(train_step, donate_argnums=(0, 1))
    lower = lambda: jitted.lower(model, optimizer, on_device)  # noqa: E731
    built = jax_step.compiled(lower, (model, optimizer), on_device, precision)
    update: Any = built.step  # in place
    return built._replace(step=lambda state, batch: (state, update(*state, batch)))


def assign(parameter: nnx.Param, value: np.ndarray) -> None:
    """Give a parameter its first value, in its own shape."""
    parameter[...] = jax.numpy.asarray(value).reshape(parameter.shape)


def linear(weight: np.ndarray, bias: np.ndarray | None, dtype: Any) -> nnx.Linear:
    """A linear layer of weights [in, out]."""
    layer = nnx.Linear(*weight.shape, use_bias=bias is not None, dtype=dtype, rngs=nnx.Rngs(0))
    assign(layer.kernel, weight)
    if bias is not None:
        assign(layer.bias, bias)
    return layer


def embedding(weight: np.ndarray, dtype: Any) -> nnx.Embed:
    """An embedding of weights [vocab, features]."""
    layer = nnx.Embed(*weight.shape, dtype=dtype, rngs=nnx.Rngs(0))
    assign(layer.embedding, weight)
    return layer


def rotate(x: Array) -> Array:
    """Rotary positions of [batch, seq, heads, head_dim], for which NNX has no layer."""
    seq_len, size = x.shape[1], x.shape[3]
    frequency = given.ROPE_THETA ** (-jnp.arange(0, size, 2) / size)
    angles = jnp.arange(seq_len)[:, None, None] * frequency
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, -1).astype(x.dtype)


def rotary_attention(query: Array, key: Array, value: Array, **options: Any) -> Array:
    """An attention function for `nnx.MultiHeadAttention`."""
    return nnx.dot_product_attention(rotate(query), rotate(key), value, **options)


class Block(nnx.Module):
    def __init__(self, shape: Transformer, layer: dict[str, np.ndarray], dtype: type):
        rngs, embed = nnx.Rngs(0), shape.d_model
        self.attention_norm = nnx.RMSNorm(embed, epsilon=given.NORM_EPS, dtype=dtype, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(embed, epsilon=given.NORM_EPS, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            shape.num_heads,
            embed,
            use_bias=False,
            decode=False,
            dtype=dtype,
            attention_fn=rotary_attention,
            keep_rngs=False,
            rngs=rngs,
        )
        projections = (self.attention.query, self.attention.key, self.attention.value)
        for projection, name in zip(
            (*projections, self.attention.out), given.ATTENTION, strict=True
        ):
            assign(projection.kernel, layer[name])
        self.up = linear(layer["w_up"], None, dtype)
        self.down = linear(layer["w_down"], None, dtype)

    def __call__(self, x: Array) -> Array:
        """[batch, seq, d_model] to the same."""
        x = x + self.attention(self.attention_norm(x), is_causal=True)
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class Decoder(nnx.Module):
    def __init__(self, shape: Transformer, remat: Remat, dtype: type):
        weights = shape.weights()
        self.embedding = embedding(weights.pop("embedding"), dtype)
        self.head = linear(weights.pop("head"), None, dtype)
        self.blocks = nnx.List(
            Block(shape, {name: w[i] for name, w in weights.items()}, dtype)
            for i in range(shape.num_layers)
        )
        self.final_norm = nnx.RMSNorm(
            shape.d_model, epsilon=given.NORM_EPS, dtype=dtype, rngs=nnx.Rngs(0)
        )
        self.remat = remat

    def __call__(self, tokens: Array) -> Array:
        """int32[batch, seq] to logits, [batch, seq, vocab]."""
        x = self.embedding(tokens)
        run = nnx.remat(Block.__call__) if self.remat == "full" else Block.__call__
        for block in self.blocks:
            x = run(block, x)
        return self.head(self.final_norm(x))


def transformer(shape: Transformer, precision: Precision, *, remat: Remat) -> Built:
    model = Decoder(shape, remat, jax_step.DTYPES[precision])
    return _step(model, shape.batch(), precision)


class LanguageModel(nnx.Module):
    def __init__(self, shape: RNN, dtype: type):
        weights = shape.weights()
        self.embedding = embedding(weights["embedding"], dtype)
        self.layers = nnx.List(
            nnx.RNN(cell(weights["ih"][i], weights["hh"][i], weights["bias"][i], dtype))
            for i in range(shape.num_layers)
        )
        self.head = linear(weights["head"], weights["head_bias"], dtype)

    def __call__(self, tokens: Array) -> Array:
        """int32[batch, seq] to logits, [batch, seq, vocab]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def cell(ih: np.ndarray, hh: np.ndarray, bias: np.ndarray, dtype: type) -> nnx.OptimizedLSTMCell:
    """The cell that computes all gates by one product; it has one bias per gate."""
    cell = nnx.OptimizedLSTMCell(len(ih), len(hh), dtype=dtype, rngs=nnx.Rngs(0))
    assign(cell.dense_i.kernel, ih)
    assign(cell.dense_h.kernel, hh)
    assign(cell.dense_h.bias, bias)
    return cell


def rnn(shape: RNN, precision: Precision) -> Built:
    model = LanguageModel(shape, jax_step.DTYPES[precision])
    return _step(model, shape.batch(), precision)


class Classifier(nnx.Module):
    def __init__(self, shape: MLP, dtype: type):
        *hidden, head = (linear(*pair, dtype) for pair in shape.weights())
        self.hidden, self.head = nnx.List(hidden), head

    def __call__(self, x: Array) -> Array:
        """float[batch, in_size] to logits, [batch, out_size]."""
        for layer in self.hidden:
            x = jax.nn.relu(layer(x))
        return self.head(x)


def mlp(shape: MLP, precision: Precision) -> Built:
    model = Classifier(shape, jax_step.DTYPES[precision])
    return _step(model, shape.batch(), precision)
