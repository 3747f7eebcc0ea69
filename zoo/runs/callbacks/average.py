"""An exponential moving average of the weights."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from zoo.common.configuration import require
from zoo.runs.callbacks.callback import Callback, Loop
from zoo.training.state import TrainState, trained_leaves


class Average(Callback):
    """An exponential moving average of the trained weights: sharded as they are, saved, evaluated.

    It begins as the initial weights. Update n moves it to `d average + (1 - d) weights`, where d is
    `decay` or, with `warmup`, the smaller of that and (1 + n) / (10 + n), so that the average of a
    short run forgets its initial weights too (as `tf.train.ExponentialMovingAverage` does). A
    skipped step does not move it. Each evaluation is also of the averaged model, as
    `average/eval_loss` beside `eval_loss`; `model` is that model, for `zoo.save`.

    It takes the memory of the trained weights once more, in their dtype, float32.

    Raises:
        ValueError: a decay that is not in [0, 1).
    """

    name = "average"

    def __init__(self, decay: float = 0.999, *, warmup: bool = True):
        require(0 <= decay < 1, f"decay={decay}: must be in [0, 1), such as 0.999")
        self.decay, self.warmup = decay, warmup
        self._trained: PyTree = None
        self._rest: PyTree = None
        self._move: Any = None

    @property
    def model(self) -> PyTree:
        """The averaged model: what is not trained is that of the model itself."""
        return eqx.combine(self.arrays["model"], self._rest)

    def initial_arrays(self, loop: Loop, state: TrainState) -> PyTree:
        """A copy of the trained weights, and the number of updates that they have behind them."""
        self._trained = trained_leaves(state.model, loop.training.trainable)
        weights = self._trained_part(state)
        placed = jax.tree.map(lambda x: x.sharding, weights)
        copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=placed)
        return {"model": copy(weights), "updates": state.step - state.skipped}

    def on_start(self, loop: Loop, state: TrainState) -> None:
        """Compile the update, which is dispatched after each step."""
        weights = self._trained_part(state)
        placed = jax.tree.map(lambda x: x.sharding, self.arrays)
        move = jax.jit(self._moved, donate_argnums=0, out_shardings=placed)
        self._move = move.lower(self.arrays, weights, state.step, state.skipped).compile()

    def on_step(
        self, loop: Loop, step: int, state: TrainState, metrics: Mapping[str, Array]
    ) -> None:
        """Move the average towards the weights."""
        weights = self._trained_part(state)
        self.arrays = self._move(self.arrays, weights, state.step, state.skipped)

    def on_evaluation(
        self, loop: Loop, step: int, state: TrainState, values: Mapping[str, float]
    ) -> dict[str, float]:
        """The evaluation of the averaged model."""
        averaged = loop.evaluate(self.model)
        return {f"{self.name}/{name}": value for name, value in averaged.items()}

    def _trained_part(self, state: TrainState) -> PyTree:
        weights, self._rest = eqx.partition(state.model, self._trained)
        return weights

    def _moved(self, arrays: PyTree, weights: PyTree, step: Array, skipped: Array) -> PyTree:
        updates = step - skipped
        share = jnp.float32(1 - self.decay)
        if self.warmup:
            share = jnp.maximum(share, 9.0 / (10.0 + updates.astype(jnp.float32)))
        changed = updates > arrays["updates"]

        def move(average: Array, weight: Array) -> Array:
            return jnp.where(changed, average + share * (weight - average), average)

        return {"model": jax.tree.map(move, arrays["model"], weights), "updates": updates}
