"""Images as tokens: patches, and their positions by row and column."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from zoo.nn.layers import add_bias, normal
from zoo.nn.products import matmul
from zoo.transformer.rotary import Rotary


class Patches(eqx.Module):
    """From images to a vector per patch: a product with each patch's pixels."""

    weight: Float[Array, "patch_rows patch_columns channels embed"]
    bias: Float[Array, "embed"]

    def __init__(self, size: int, channels: int, width: int, *, key: Key[Array, ""]):
        shape = (size, size, channels, width)
        self.weight = normal(key, shape, size * size * channels)
        self.bias = jnp.zeros(width)

    def __call__(
        self, images: Float[Array, "batch height width channels"]
    ) -> Float[Array, "batch patches embed"]:
        """The patches row by row."""
        batch, height, width, channels = images.shape
        size, dtype = self.weight.shape[0], self.weight.dtype
        x = images.astype(dtype).reshape(batch, height // size, size, width // size, size, channels)
        x = x.swapaxes(2, 3).reshape(batch, -1, size, size, channels)
        return add_bias(matmul(x, self.weight, contract=3), self.bias)


def bicubic(size: int, new_size: int) -> Float[np.ndarray, "new old"]:
    """The matrix of a bicubic interpolation as PyTorch's: a = -0.75, and no antialiasing."""
    places = (np.arange(new_size) + 0.5) * size / new_size - 0.5
    matrix, a = np.zeros((new_size, size)), -0.75
    for offset in range(-1, 3):
        neighbours = np.floor(places).astype(int) + offset
        x = np.abs(places - neighbours)
        near, far = ((a + 2) * x - (a + 3)) * x * x + 1, ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
        weights = np.where(x <= 1, near, far)
        np.add.at(matrix, (np.arange(new_size), np.clip(neighbours, 0, size - 1)), weights)
    return matrix.astype(np.float32)


def sines_of_patches(grid: tuple[int, int], size: int) -> Float[np.ndarray, "patches embed"]:
    """A quarter of the features each: sines and cosines of the row, and of the column."""
    frequency = 10_000.0 ** -(np.arange(size // 4) / (size // 4))
    row, column = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    angles = [places[:, None] * frequency for places in (row, column)]
    parts = [f(x) for x in angles for f in (np.sin, np.cos)]
    return np.concatenate(parts, axis=1).astype(np.float32)


def rotary_of_patches(
    grid: tuple[int, int], num_prefix: int, head_dim: int, theta: float
) -> Rotary:
    """The tables of DINOv3's rotary positions, for `rotate`: tokens before the patches stay.

    Half of the pairs rotate by the row, half by the column, as shares of the image from -1 to 1.
    """
    frequency = theta ** -(np.arange(head_dim // 4) * 4 / head_dim)
    centres = [2 * (np.arange(size) + 0.5) / size - 1 for size in grid]
    places = np.stack(np.meshgrid(*centres, indexing="ij"), -1).reshape(-1, 2, 1)
    angles = (2 * np.pi * places * frequency).reshape(len(places), -1)
    angles = np.concatenate([np.zeros((num_prefix, angles.shape[1])), angles])
    cos, sin = (f(angles)[None].astype(np.float32) for f in (np.cos, np.sin))
    tables = np.concatenate([cos, cos], -1), np.concatenate([-sin, sin], -1)
    return Rotary(*map(jnp.asarray, tables))
