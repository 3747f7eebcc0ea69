"""The example project's network in a loop as Equinox's and Optax's documentation writes it."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.peers import jax_step
from benchmarks.peers.common import Built, Precision
from benchmarks.peers.example.given import Shape, project


def build(shape: Shape, precision: Precision) -> Built:
    """`eqx.filter_jit` over `eqx.filter_value_and_grad`, with everything donated."""
    make_model, loss_fn, optimizer, batch = project(shape)
    made = make_model(jax.random.key(0))
    has_state = isinstance(made, tuple)

    @eqx.filter_value_and_grad(has_aux=True)
    def loss_and_gradient(
        net: Any, net_state: Any, batch: dict[str, Array], key: Array
    ) -> tuple[Array, tuple]:
        if has_state:
            total, weight, sums, net_state = loss_fn((net, net_state), batch, key)
        else:
            total, weight, sums = loss_fn(net, batch, key)
        return total / weight, (net_state, {name: x / weight for name, x in sums.items()})

    def step(batch: dict[str, Array], state: tuple) -> tuple[tuple, Array]:
        net, net_state, opt_state, key, count = state
        # The zoo's keys, for the same dropout: by step, and by microbatch, of which there is one.
        step_key = jax.random.fold_in(jax.random.fold_in(key, count), 0)
        (loss, (net_state, _)), grads = loss_and_gradient(net, net_state, batch, step_key)
        params = eqx.filter(net, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        net = eqx.apply_updates(net, updates)
        return (net, net_state, opt_state, key, count + 1), loss

    net, net_state = made if has_state else (made, None)
    opt_state = optimizer.init(eqx.filter(net, eqx.is_inexact_array))
    _, dropout_key = jax.random.split(jax.random.key(0))
    state = (net, net_state, opt_state, dropout_key, jnp.int32(0))
    on_device = jax.device_put(batch)
    jitted: Any = eqx.filter_jit(step, donate="all-except-first")
    built = jax_step.compiled(lambda: jitted.lower(on_device, state), state, on_device, precision)
    return built._replace(step=lambda state, batch: built.step(batch, state))
