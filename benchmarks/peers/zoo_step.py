"""The zoo's own train step, through its public names."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax import Array

import zoo
from benchmarks.peers import jax_step
from benchmarks.peers.common import CLIP_NORM, Batch, Built, Precision
from zoo.training.loss_values import LossFunction


def build(
    loss: LossFunction,
    make_model: Callable[[Array], Any],
    batch: dict[str, np.ndarray],
    precision: Precision,
    *,
    optimizer: optax.GradientTransformation | None = None,
    clip_norm: float | None = CLIP_NORM,
) -> Built:
    """A step by `zoo.make_train_step`; the default optimizer is that of all peers."""
    optimizer = jax_step.optimizer() if optimizer is None else optimizer
    # Given as a whole: what `make_model` reads would be constants of the program that it is.
    model = make_model(jax.random.key(0))
    state = zoo.init_state(
        lambda key, model: model, optimizer, key=jax.random.key(0), pretrained=model
    )
    del model
    step = zoo.make_train_step(loss, optimizer, precision=precision, clip_norm=clip_norm)
    on_device = jax.device_put(batch)
    start = time.perf_counter()
    step.compile(state, on_device)
    seconds = time.perf_counter() - start
    [program] = step.programs

    def run(state: zoo.TrainState, batch: dict[str, Array]) -> tuple[zoo.TrainState, Array]:
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    return Built(run, state, on_device, seconds, jax_step.planned_bytes(program))


def token_batch(batch: Batch) -> dict[str, np.ndarray]:
    """A batch for `zoo.losses.next_token`."""
    tokens, targets = batch
    return {"tokens": tokens, "targets": targets, "weights": np.ones(tokens.shape, np.float32)}


def class_batch(batch: Batch) -> dict[str, np.ndarray]:
    """A batch for `zoo.losses.classification`."""
    inputs, labels = batch
    return {"inputs": inputs, "labels": labels, "weights": np.ones(labels.shape, np.float32)}
