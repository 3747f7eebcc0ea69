"""The train step of the Flax NNX peers, as in Flax's documentation."""

import time
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array

from benchmarks.peers import jax_step
from benchmarks.peers.common import Batch, Built, Precision


def build(model: nnx.Module, batch: Batch, precision: Precision) -> Built:
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
    start = time.perf_counter()
    # On GPU the default precision of fp32 products is less than fp32.
    with jax.default_matmul_precision("highest" if precision == "fp32" else None):
        compiled = jitted.lower(model, optimizer, on_device).compile()
    seconds = time.perf_counter() - start

    def step(state: tuple, batch: tuple) -> tuple[tuple, Array]:
        return state, compiled(*state, batch)  # updates the state in place

    planned = jax_step.planned_bytes(compiled)
    return Built(step, (model, optimizer), on_device, seconds, planned)


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
