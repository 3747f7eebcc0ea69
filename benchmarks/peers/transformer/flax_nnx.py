"""The same model in the style of Flax's documentation, of NNX's own layers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from benchmarks.peers import flax_step, jax_step
from benchmarks.peers.common import Built, Precision
from benchmarks.peers.transformer import given
from benchmarks.peers.transformer.given import Remat, Shape


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
    def __init__(self, shape: Shape, layer: dict[str, np.ndarray], dtype: type):
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
        for linear, name in zip((*projections, self.attention.out), given.ATTENTION, strict=True):
            flax_step.assign(linear.kernel, layer[name])
        self.up = flax_step.linear(layer["w_up"], None, dtype)
        self.down = flax_step.linear(layer["w_down"], None, dtype)

    def __call__(self, x: Array) -> Array:
        """[batch, seq, d_model] to the same."""
        x = x + self.attention(self.attention_norm(x), is_causal=True)
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class Decoder(nnx.Module):
    def __init__(self, shape: Shape, remat: Remat, dtype: type):
        weights = given.weights(shape)
        self.embedding = flax_step.embedding(weights.pop("embedding"), dtype)
        self.head = flax_step.linear(weights.pop("head"), None, dtype)
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


def build(shape: Shape, precision: Precision, *, remat: Remat) -> Built:
    model = Decoder(shape, remat, jax_step.DTYPES[precision])
    return flax_step.build(model, given.batch(shape), precision)
