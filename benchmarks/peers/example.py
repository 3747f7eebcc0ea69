"""The networks of the example project: in the zoo's step, and in a loop by hand.

The loop is as Equinox's and Optax's documentation writes it: the losses, the optimizers and the
dropout are the same.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from benchmarks.peers import jax_step, zoo_model
from benchmarks.peers.given import ROOT, Built, Precision


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
    folder = str(ROOT / "docs" / "examples" / "digits_and_dates")
    if folder not in sys.path:
        sys.path.insert(0, folder)  # the project's own modules, by the names that it has for them
    import data
    import losses
    import nets

    if shape.network == "digits":
        optimizer = optax.chain(
            optax.clip_by_global_norm(2.0),
            optax.add_decayed_weights(5e-4),
            optax.sgd(1e-2, momentum=0.9, nesterov=True),
        )
        make: Any = lambda key: eqx.nn.make_with_state(nets.ConvNet)(shape.width, key)  # noqa: E731
        return Project(
            make, losses.digits, optimizer, data.digits(shape.batch_size, 0).train.batch(0)
        )
    optimizer = optax.chain(optax.clip(0.1), optax.adamw(1e-3, b2=0.98, weight_decay=0.01))
    sizes = {"num_heads": 4, "size": shape.size, "num_layers": shape.num_layers}
    make = lambda key: nets.EncoderDecoder(  # noqa: E731
        data.NUM_TOKENS, data.SOURCE_LENGTH, **sizes, key=key
    )
    return Project(make, losses.dates, optimizer, data.dates(shape.batch_size, 0).train.batch(0))


def zoo_step(shape: Shape, precision: Precision) -> Built:
    """`zoo.make_train_step` with the project's loss and optimizer, which clips itself."""
    make_model, loss_fn, optimizer, batch = project(shape)
    return zoo_model.step_of(
        loss_fn, make_model, batch, precision, optimizer=optimizer, clip_norm=None
    )


def loop(shape: Shape, precision: Precision) -> Built:
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


def flops(shape: Shape) -> float:
    """FLOPs of the loss and its gradient, as XLA counts them."""
    make_model, loss_fn, _, batch = project(shape)
    params, static = eqx.partition(make_model(jax.random.key(0)), eqx.is_inexact_array)

    def loss(params: object, batch: dict, key: jax.Array) -> jax.Array:
        return loss_fn(eqx.combine(params, static), batch, key)[0]

    lowered = jax.jit(jax.grad(loss)).lower(params, batch, jax.random.key(0))
    return lowered.cost_analysis()["flops"]
