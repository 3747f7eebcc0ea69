"""Changes of pictures by chance, each a function of (row, rng) as `zoo.batches` calls them.

Chain them by a function of yours, the processor last: each takes a row of `zoo.images.Folder` and
gives one. By the generator of `zoo.batches` they are a function of the seed, the epoch and the row.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from zoo.common.configuration import require

Row = dict[str, Any]
Change = Callable[[Row, np.random.Generator], Row]


def crop(size: int, smallest: float = 0.35) -> Change:
    """A square of `size` pixels, from a part of the picture with `smallest` to 1 of its area.

    Sides are in a ratio of 3/4 to 4/3 before they are resized (Szegedy et al. 2015).
    """
    require(0 < smallest <= 1, f"smallest={smallest}: must be in (0, 1]")

    def change(row: Row, rng: np.random.Generator) -> Row:
        import PIL.Image

        image = row["image"]
        height, width, channels = image.shape
        area = height * width * rng.uniform(smallest, 1)
        ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        part = min(height, round((area / ratio) ** 0.5)), min(width, round((area * ratio) ** 0.5))
        rows, columns = (max(1, x) for x in part)
        top, left = rng.integers(height - rows + 1), rng.integers(width - columns + 1)
        cut = image[top : top + rows, left : left + columns]
        picture = PIL.Image.fromarray(cut.squeeze(2) if channels == 1 else cut)
        resized = picture.resize((size, size), PIL.Image.Resampling.BILINEAR)
        return {**row, "image": np.asarray(resized).reshape(size, size, channels)}

    return change


def flip(row: Row, rng: np.random.Generator) -> Row:
    """The picture, or by an even chance its mirror image."""
    return {**row, "image": row["image"][:, ::-1]} if rng.random() < 0.5 else row


def colour(strength: float = 0.4) -> Change:
    """Brightness, contrast and saturation times factors within 1 ± `strength`."""
    require(0 <= strength < 1, f"strength={strength}: must be in [0, 1)")

    def change(row: Row, rng: np.random.Generator) -> Row:
        brightness, contrast, saturation = rng.uniform(1 - strength, 1 + strength, 3)
        x = row["image"].astype(np.float32) * brightness
        x = x.mean() + (x - x.mean()) * contrast
        grey = x.mean(-1, keepdims=True)
        x = grey + (x - grey) * saturation
        return {**row, "image": np.clip(np.rint(x), 0, 255).astype(np.uint8)}

    return change


def mixed_up(
    inputs: Float[Array, "batch height width channels"],
    labels: Int[Array, "batch"],
    num_classes: int,
    *,
    alpha: float = 0.2,
    key: Key[Array, ""],
) -> tuple[Float[Array, "batch height width channels"], Float[Array, "batch classes"]]:
    """Each picture mixed with the next of its batch, and the shares of classes (Zhang et al. 2018).

    For a loss of one's own, on the device: a pair's share is drawn from a beta distribution.
    """
    share = jax.random.beta(key, alpha, alpha, (len(inputs),))
    of_classes = jax.nn.one_hot(labels, num_classes)
    mix = lambda x: (  # noqa: E731
        x * share.reshape(-1, *[1] * (x.ndim - 1))
        + jnp.roll(x, 1, axis=0) * (1 - share).reshape(-1, *[1] * (x.ndim - 1))
    )
    return mix(inputs), mix(of_classes)
