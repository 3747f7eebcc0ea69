"""Shared by the peers of the example project: its networks, losses, optimizers and data."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import equinox as eqx
import numpy as np
import optax
from jax import Array

# The project's own modules, by the names that it has for them.
sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "examples" / "digits_and_dates"))

import data
import losses
import nets


@dataclass(frozen=True)
class Shape:
    """Sizes of a network of the example project, and of its batch."""

    network: Literal["digits", "dates"] = "digits"
    batch_size: int = 96
    width: int = 32
    """Channels of the first convolution."""
    size: int = 64
    """Size of the embedding."""
    num_layers: int = 2
    """Blocks of the encoder, and of the decoder."""


class Project(NamedTuple):
    """The project's arguments of `zoo.Training`, and its first batch."""

    make_model: Callable[[Array], Any]
    loss_fn: Callable[..., tuple[Any, ...]]
    optimizer: optax.GradientTransformation
    batch: dict[str, np.ndarray]


def project(shape: Shape) -> Project:
    """The network of a shape, as the project trains it, at a constant learning rate."""
    if shape.network == "digits":
        optimizer = optax.chain(
            optax.clip_by_global_norm(2.0),
            optax.add_decayed_weights(5e-4),
            optax.sgd(1e-2, momentum=0.9, nesterov=True),
        )
        make: Any = lambda key: eqx.nn.make_with_state(nets.ConvNet)(shape.width, key)  # noqa: E731
        batch = data.digits(shape.batch_size, 0).train.batch(0)
        return Project(make, losses.digits, optimizer, batch)
    optimizer = optax.chain(optax.clip(0.1), optax.adamw(1e-3, b2=0.98, weight_decay=0.01))
    sizes = {"num_heads": 4, "size": shape.size, "num_layers": shape.num_layers}
    make = lambda key: nets.EncoderDecoder(  # noqa: E731
        data.NUM_TOKENS, data.SOURCE_LENGTH, **sizes, key=key
    )
    batch = data.dates(shape.batch_size, 0).train.batch(0)
    return Project(make, losses.dates, optimizer, batch)
