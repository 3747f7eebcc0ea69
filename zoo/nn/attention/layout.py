"""The order of axes inside of attention in plain XLA, and its products."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.nn.attention.masks import Chunk
from zoo.nn.precision import platform


class Layout(NamedTuple):
    """The order of axes inside, as einsum letters: b batch, k, g heads, t, s time, h head size."""

    queries: str
    keys: str

    def of_queries(self, x_BTNH: Array, num_kv_heads: int) -> Array:
        """From [B, T, N, H]."""
        batch, time, heads, size = x_BTNH.shape
        x = x_BTNH.reshape(batch, time, num_kv_heads, heads // num_kv_heads, size)
        return jnp.einsum(f"btkgh->{self.queries}", x)

    def to_heads(self, x: Array, shape: tuple[int, ...]) -> Array:
        """Back to [B, T, N, H], without what was padded at the end of the row."""
        batch, time, heads, size = shape
        x = jnp.einsum(f"{self.queries}->btkgh", x)
        return x[:, :time].reshape(batch, time, heads, size)

    def sum_of_products(self, x: Array, y: Array) -> Float[Array, "b k g t 1"]:
        """The sum over h of the products of two arrays of queries' layout, in fp32."""
        products = x.astype(jnp.float32) * y.astype(jnp.float32)
        return jnp.einsum(f"{self.queries}->bkgth", products).sum(-1, keepdims=True)

    def slice_queries(self, x: Array, chunk: Chunk) -> Array:
        """The queries of a chunk."""
        return jax.lax.slice_in_dim(x, chunk.start, chunk.stop, axis=self.queries.index("t"))

    def slice_keys(self, x: Array, chunk: Chunk) -> Array:
        """The keys of a chunk."""
        return jax.lax.slice_in_dim(x, chunk.first_key, chunk.last_key, axis=self.keys.index("s"))

    def pad_keys(self, x: Array, chunk: Chunk, num_keys: int) -> Array:
        """Zeros for the keys that a chunk does not see."""
        unseen = [(0, 0)] * 4
        unseen[self.keys.index("s")] = (chunk.first_key, num_keys - chunk.last_key)
        return jnp.pad(x, unseen)


def layout_for(dtype: Any) -> Layout:
    """The faster layout: on CPU in fp32 heads before time, as batched products want them."""
    if dtype == jnp.float32 and platform() == "cpu":
        return Layout("bkgth", "bksh")
    return Layout("btkgh", "bskh")


def einsum32(formula: str, x: Array, y: Array) -> Float[Array, "..."]:
    """A product that is accumulated, and returned, in fp32."""
    return jnp.einsum(formula, x, y, preferred_element_type=jnp.float32)


def product(formula: str, x: Array, y: Array) -> Float[Array, "..."]:
    """`einsum32`, with the axes g and t as one where they are neighbours in every operand.

    For two axes XLA for CPU transposes an operand in memory.
    """
    of_x, of_y, of_out = re.split(",|->", formula)
    if formula.count("gt") != formula.count("g"):
        return einsum32(formula, x, y)
    sizes = dict(zip(of_x + of_y, x.shape + y.shape, strict=True))
    x, y = _fold(of_x, x), _fold(of_y, y)
    return einsum32(formula.replace("gt", "t"), x, y).reshape([sizes[axis] for axis in of_out])


def _fold(axes: str, x: Array) -> Array:
    g = axes.find("g")
    return x if g < 0 else x.reshape(*x.shape[:g], -1, *x.shape[g + 2 :])
