"""Where a vision transformer looks: what its class token reads, over the picture.

Legend of suffixes: B batch, T tokens, N heads, H head size, R and C rows and columns of patches.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from zoo.common.configuration import require
from zoo.nn.attention.attention import attention
from zoo.nn.parameters import unshard
from zoo.transformer import VisionTransformer
from zoo.transformer.model import through_blocks


def class_attention(
    model: VisionTransformer, images: Float[Array, "batch height width channels"]
) -> Float[Array, "batch heads rows columns"]:
    """The weights by which each head of the last block has the class token read the patches.

    A head's weights of all tokens sum to 1; of the patches, to less.

    Raises:
        ValueError: a model without a class token.
    """
    config = model.config
    require(config.class_token, "class_token=False: nothing reads the patches for the image")
    x_BTE, rotary = model.embedded(images)
    before = jax.tree.map(lambda stacked: stacked[:-1], model.blocks)
    last = jax.tree.map(lambda stacked: stacked[-1], model.blocks)
    x_BTE, _ = through_blocks(config.parts, before, x_BTE, None, {"global": rotary}, None)
    found = []

    def attend(q_BTNH: Array, k_BTNH: Array, v_BTNH: Array, **options: Any) -> Array:
        logits_BNT = jnp.einsum("bnh,btnh->bnt", q_BTNH[:, 0], k_BTNH) * q_BTNH.shape[-1] ** -0.5
        found.append(jax.nn.softmax(logits_BNT.astype(jnp.float32), axis=-1))
        return attention(q_BTNH, k_BTNH, v_BTNH, **options)

    unshard(last)(x_BTE, None, rotary, None, None, attend=attend)
    weights_BNP = found[0][:, :, config.num_prefix :]
    size = (n // config.patch_size for n in images.shape[1:3])
    return weights_BNP.reshape(*weights_BNP.shape[:2], *size)


def draw_attention(
    path: Path,
    pictures: Float[np.ndarray, "batch height width channels"],
    weights_BNRC: Float[np.ndarray, "batch heads rows columns"],
    titles: Sequence[str],
) -> None:
    """Draw pictures, values from 0 to 1, and beside each the mean over the heads and each head.

    A map is as bright as its largest weight.
    """
    from matplotlib.figure import Figure  # here: who imports this need not draw

    columns = 2 + weights_BNRC.shape[1]
    figure = Figure(figsize=(1.3 * columns, 1.45 * len(pictures)), layout="constrained")
    grid = figure.subplots(len(pictures), columns, squeeze=False)
    height, width = pictures.shape[1:3]
    names = ["mean", *(f"head {i + 1}" for i in range(columns - 2))]
    for axes, picture, heads, title in zip(grid, pictures, weights_BNRC, titles, strict=True):
        axes[0].imshow(picture, cmap="gray", vmin=0, vmax=1)
        axes[0].set_title(title, fontsize=8)
        for map_axes, weights, name in zip(axes[1:], [heads.mean(0), *heads], names, strict=True):
            map_axes.imshow(picture, cmap="gray", vmin=0, vmax=1)
            extent = (-0.5, width - 0.5, height - 0.5, -0.5)
            map_axes.imshow(weights, cmap="inferno", alpha=0.75, extent=extent)
            map_axes.set_title(name, fontsize=8)
    for axes in grid.flat:
        axes.set_axis_off()
    figure.savefig(path, format="png", dpi=100)
