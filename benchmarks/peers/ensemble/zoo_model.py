"""The zoo's classifiers, as one program or one after the other."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.peers import jax_step, zoo_step
from benchmarks.peers.common import Built, Precision
from benchmarks.peers.ensemble import given
from benchmarks.peers.ensemble.given import Shape
from benchmarks.peers.mlp.zoo_model import init
from zoo import ensemble, losses


class Mean:
    """The mean of the members' losses, which waits for all of them."""

    def __init__(self, losses: list[Array]):
        self._losses = losses

    def __float__(self) -> float:
        return sum(map(float, self._losses)) / len(self._losses)


def together(shape: Shape, precision: Precision) -> Built:
    members = [init(shape, weights, jax.random.key(0)) for weights in given.weights(shape)]

    def make_model(key: Array) -> ensemble.Ensemble:
        model = ensemble.Ensemble(lambda key: members[0], shape.num_members, key=key)
        stacked = jax.tree.map(lambda *x: jnp.stack(x) if eqx.is_array(x[0]) else x[0], *members)
        return eqx.tree_at(lambda model: model.members, model, stacked)

    return zoo_step.build(
        ensemble.member_loss(losses.classification),
        make_model,
        zoo_step.class_batch(given.batch(shape)),
        precision,
        optimizer=ensemble.per_member(jax_step.clipped_optimizer()),
        clip_norm=None,
    )


def apart(shape: Shape, precision: Precision) -> Built:
    built = [
        zoo_step.build(
            losses.classification,
            lambda key, weights=weights: init(shape, weights, key),
            zoo_step.class_batch(given.batch(shape)),
            precision,
            optimizer=jax_step.clipped_optimizer(),
            clip_norm=None,
        )
        for weights in given.weights(shape)
    ]
    states = [one.state for one in built]
    first = built[0]  # its compiled step serves the others too

    def step(states: list[Any], batch: Any) -> tuple[list[Any], Mean]:
        states, losses = zip(*(first.step(state, batch) for state in states), strict=True)
        return states, Mean(losses)

    return first._replace(step=step, state=states)


def build(shape: Shape, precision: Precision, *, as_one: bool) -> Built:
    return together(shape, precision) if as_one else apart(shape, precision)
