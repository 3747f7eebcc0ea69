"""The train steps of the JAX peers other than the zoo, compiled ahead of time.

Both take the model's `forward(model, inputs)`, which gives logits, and a batch (inputs, targets).
"""

import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from benchmarks.peers.given import CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY, Batch, Built, Precision

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
Forward = Callable[[Any, Array], Array]


def optimizer() -> optax.GradientTransformation:
    """The optimizer of all peers: AdamW on all parameters."""
    return optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)


def clipped_optimizer() -> optax.GradientTransformation:
    """`optimizer` behind the clip by global norm."""
    return optax.chain(optax.clip_by_global_norm(CLIP_NORM), optimizer())


def mean_loss(logits: Array, targets: Array) -> Array:
    """Cross-entropy in fp32."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def with_weights(model: Any, weights: dict[str, np.ndarray]) -> Any:
    """A model with these arrays by the paths of its parameters, which they have the order of."""
    left = dict(weights)

    def chosen(path: tuple, x: Any) -> Any:
        array = left.pop(jax.tree_util.keystr(path, simple=True, separator="."), None)
        return x if array is None else jnp.asarray(array).reshape(x.shape)

    model = jax.tree_util.tree_map_with_path(chosen, model)
    assert not left, f"the model has no {sorted(left)}"
    return model


def handwritten(forward: Forward, params: Any, batch: Batch, precision: Precision) -> Built:
    """A step over a tree of arrays in plain JAX; `forward` does its own casts."""
    optimizer = clipped_optimizer()

    def step(state: tuple, batch: tuple) -> tuple[tuple, Array]:
        params, opt_state = state
        inputs, targets = batch
        loss, grads = jax.value_and_grad(lambda p: mean_loss(forward(p, inputs), targets))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    state, on_device = (params, optimizer.init(params)), jax.device_put(batch)
    jitted = jax.jit(step, donate_argnums=0)
    return compiled(lambda: jitted.lower(state, on_device), state, on_device, precision)


def equinox(forward: Forward, model: Any, batch: Batch, precision: Precision) -> Built:
    """A step over an Equinox model by Equinox's transformations; the model is cast first."""
    optimizer, dtype = clipped_optimizer(), DTYPES[precision]

    @eqx.filter_value_and_grad
    def loss_and_gradient(model: Any, batch: tuple[Array, Array]) -> Array:
        inputs, targets = batch
        model = jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, model)
        return mean_loss(forward(model, inputs), targets)

    def step(batch: tuple, state: tuple) -> tuple[tuple, Array]:
        model, opt_state = state
        loss, grads = loss_and_gradient(model, batch)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (eqx.apply_updates(model, updates), opt_state), loss

    state = (model, optimizer.init(eqx.filter(model, eqx.is_inexact_array)))
    on_device = jax.device_put(batch)
    jitted: Any = eqx.filter_jit(step, donate="all-except-first")
    built = compiled(lambda: jitted.lower(on_device, state), state, on_device, precision)
    return built._replace(step=lambda state, batch: built.step(batch, state))


def compiled(lower: Callable[[], Any], state: Any, batch: Any, precision: Precision) -> Built:
    """Compile `lower().compile()`, a step (state, batch) -> (state, loss)."""
    start = time.perf_counter()
    # On GPU the default precision of fp32 products is less than fp32.
    with jax.default_matmul_precision("highest" if precision == "fp32" else None):
        step = lower().compile()
    seconds = time.perf_counter() - start
    return Built(step, state, batch, seconds, planned_bytes(step))


def planned_bytes(executable: Any) -> int:
    """XLA's planned peak of a compiled program."""
    plan = getattr(executable, "compiled", executable).memory_analysis()  # Equinox wraps it
    sizes = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    return sizes - plan.alias_size_in_bytes
