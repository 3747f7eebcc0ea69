"""The networks of the example project: the zoo's step against a hand-written loop.

The loop is as Equinox's and Optax's documentation writes it: the losses, the optimizers and the
dropout are the same.
"""

from dataclasses import dataclass

import equinox as eqx
import jax

from benchmarks.compare import compare
from benchmarks.peers.example.given import Shape, project
from benchmarks.report import Table
from benchmarks.timing import Peer, Timing

PEERS = {"handwritten": Peer("example.handwritten"), "zoo": Peer("example.zoo_model")}


@dataclass(frozen=True)
class Options:
    """The train steps of the example project's networks, in fp32."""

    digits: Shape = Shape("digits", batch_size=96)
    """The convolutional network with batch norm."""
    dates: Shape = Shape("dates", batch_size=128)
    """The encoder-decoder."""


def measure(options: Options, timing: Timing) -> list[Table]:
    """One table per network."""
    return [
        compare(
            f"train step of the example project's {shape.network}",
            PEERS,
            shape,
            "fp32",
            timing,
            flops=flops(shape),
            examples=shape.batch_size,
        )
        for shape in (options.digits, options.dates)
    ]


def flops(shape: Shape) -> float:
    """FLOPs of the loss and its gradient, as XLA counts them."""
    make_model, loss_fn, _, batch = project(shape)
    params, static = eqx.partition(make_model(jax.random.key(0)), eqx.is_inexact_array)

    def loss(params: object, batch: dict, key: jax.Array) -> jax.Array:
        return loss_fn(eqx.combine(params, static), batch, key)[0]

    lowered = jax.jit(jax.grad(loss)).lower(params, batch, jax.random.key(0))
    return lowered.cost_analysis()["flops"]
