"""Train one of two networks of Equinox's layers, with a loss, an optimizer and data of its own.

python -m train digits
python -m train dates --mesh fsdp=2,tensor=2 --precision bf16
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import optax
from jax import Array

import data
import losses
import nets
import zoo
from zoo.runs.command_line import cli
from zoo.runs.config import Config as RunConfig


@dataclass(frozen=True, kw_only=True)
class Digits(RunConfig):
    """A convolutional network with batch norm, on handwritten digits."""

    run_dir: Path = Path("runs/digits")
    """Folder of the run; the same command on the same folder resumes it."""
    steps: int = 450
    """Optimizer steps in all."""
    batch_size: int = 96
    """Images of a batch."""
    width: int = 32
    """Channels of the first convolution."""
    learning_rate: float = 0.1
    """Largest learning rate, which falls to 0 along a cosine."""
    average: float | None = 0.99
    """Decay of the average of the weights, which is published beside the model."""
    clip_norm: float | None = None
    """Global norm that gradients are clipped to, before the optimizer's own clip."""


@dataclass(frozen=True, kw_only=True)
class Dates(RunConfig):
    """An encoder-decoder with attention, which translates dates to ISO 8601."""

    run_dir: Path = Path("runs/dates")
    """Folder of the run; the same command on the same folder resumes it."""
    steps: int = 600
    """Optimizer steps in all."""
    batch_size: int = 128
    """Dates of a batch."""
    size: int = 64
    """Size of the embedding."""
    num_layers: int = 2
    """Blocks of the encoder, and of the decoder."""
    learning_rate: float = 3e-3
    """Largest learning rate, after a tenth of the steps; it falls to 0 along a cosine."""
    average: float | None = 0.99
    """Decay of the average of the weights, which is published beside the model."""
    clip_norm: float | None = None
    """Global norm that gradients are clipped to, before the optimizer's own clip."""


def digits(run: zoo.Run[Digits]) -> zoo.Training:
    """The convolutional network: SGD with Nesterov's momentum, and L2 in the gradient."""
    config = run.config
    given = data.digits(config.batch_size, config.seed)
    schedule = optax.cosine_decay_schedule(config.learning_rate, run.steps_of(given.train))
    optimizer = optax.chain(
        optax.clip_by_global_norm(2.0),
        optax.add_decayed_weights(5e-4),
        optax.sgd(schedule, momentum=0.9, nesterov=True),
    )
    make_model = functools.partial(nets.digits, config.width)
    return training(make_model, losses.digits, optimizer, schedule, given)


def dates(run: zoo.Run[Dates]) -> zoo.Training:
    """The encoder-decoder: AdamW after a clip of each element."""
    config = run.config
    given = data.dates(config.batch_size, config.seed)
    steps = run.steps_of(given.train)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, max(steps // 10, 1), steps
    )
    optimizer = optax.chain(optax.clip(0.1), optax.adamw(schedule, b2=0.98, weight_decay=0.01))
    make_model = functools.partial(nets.dates, config.size, config.num_layers)
    return training(make_model, losses.dates, optimizer, schedule, given)


def training(
    make_model: Callable[[Array], object],
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    given: data.Data,
) -> zoo.Training:
    """The description of a training for `zoo.fit`."""
    return zoo.Training(
        make_model=make_model,
        loss_fn=loss_fn,
        optimizer=optimizer,
        schedule=schedule,
        data=given.train,
        fingerprint=given.fingerprint,
        evaluate=given.held_out,
    )


def main(config: Digits | Dates) -> None:
    """Train, and publish the model and the average of its weights."""
    with zoo.Run(config) as run:
        trained = zoo.fit(run, digits(run) if isinstance(config, Digits) else dates(run))
        zoo.save(run.folder / "model", trained.state.model, metrics=trained.metrics)
        if config.average is not None:
            zoo.save(run.folder / "average", trained.model, metrics=trained.model_metrics)
        run.say(f"held out: {trained.metrics}")


if __name__ == "__main__":
    cli(Digits | Dates, main, "train")
