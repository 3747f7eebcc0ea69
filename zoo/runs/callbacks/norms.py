"""Norms of parameters and of their updates, per layer, as a callback."""

import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from zoo import sharding
from zoo.common.configuration import require
from zoo.runs.callbacks.callback import Callback, Loop, Scalars
from zoo.sharding.axes import is_parameter, keystr, named_alone
from zoo.training.state import TrainState, trained_leaves


class Norms(Callback):
    """The norm of each trained parameter, and of its update over it, every so many steps.

    They are in the line of that step in metrics.jsonl: `norms/blocks.0.attention.wq`, the Euclidean
    norm after the step, and `updates/blocks.0.attention.wq`, the norm of the step's change divided
    by it, of each layer where layers are stacked in one array. The parameters are copied on the
    devices before such a step, which takes their size in memory; other steps cost nothing.

    Raises:
        ValueError: an `every` below 1; at the start, one that is no multiple of `--log-every`.
    """

    name = "norms"

    def __init__(self, every: int = 100):
        require(every >= 1, f"Norms(every={every}): must be at least 1")
        self._every = every
        self._before: PyTree = None

    def on_start(self, loop: Loop, state: TrainState) -> None:
        """Compile both programs, so that no step waits for them."""
        between = loop.run.config.log_every
        require(
            self._every % between == 0,
            f"norms_every={self._every}: must be a multiple of log_every={between}",
        )
        trained = self._trained(loop, state)
        names = layer_names(state.model, trained)
        places = jax.tree.map(lambda x: x.sharding, trained)
        self._copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=places)
        self._measure = jax.jit(
            lambda before, after: _measured(before, after, names),
            out_shardings=sharding.replicated(loop.run.mesh),
        )
        before = self._copy(trained)
        jax.block_until_ready(self._measure(before, trained))
        self._before = before if self._is_due(loop.start + 1) else None

    def on_step(
        self, loop: Loop, step: int, state: TrainState, metrics: Scalars
    ) -> dict[str, Array]:
        """Measure the change since the copy; copy for the next step."""
        found: dict[str, Array] = {}
        if self._is_due(step):
            found = self._measure(self._before, self._trained(loop, state))
        is_next = self._is_due(step + 1)
        self._before = self._copy(self._trained(loop, state)) if is_next else None
        return found

    def _is_due(self, step: int) -> bool:
        return step % self._every == 0

    def _trained(self, loop: Loop, state: TrainState) -> PyTree:
        return eqx.filter(state.model, trained_leaves(state.model, loop.training.trainable))


def _measured(
    before: PyTree, after: PyTree, layers: list[tuple[tuple[int, ...], list[str]]]
) -> dict[str, Array]:
    """Norms, and norms of the change divided by them, float32[] for each layer."""
    found: dict[str, Array] = {}
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), layers, strict=True)
    for old, new, (stack, names) in pairs:
        axes = tuple(range(len(stack), new.ndim))
        norms, changes = (jnp.sqrt(jnp.sum(x * x, axis=axes)).reshape(-1) for x in (new, new - old))
        updates = changes / jnp.where(norms > 0, norms, 1.0)
        for i, name in enumerate(names):
            found |= {f"norms/{name}": norms[i], f"updates/{name}": updates[i]}
    return found


def layer_names(model: PyTree, trained: PyTree) -> list[tuple[tuple[int, ...], list[str]]]:
    """The shape of the stack and the name of each layer in it, of each trained array.

    The axes that stack a module from outside are not named by its annotations. A layer's index
    follows the outermost field that is stacked: `blocks.0.attention.wq`.
    """
    counts: dict[tuple, int] = {}  # of stacked axes: of each array, and the least below each node
    for path, leaf in jax.tree_util.tree_leaves_with_path(eqx.filter(model, is_parameter)):
        count = _num_stacked(model, path, leaf)
        for length in range(len(path) + 1):
            node = path[:length]
            counts[node] = min(count, counts.get(node, count))
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(trained):
        shape = leaf.shape[: counts[path]]
        nodes = [path[:length] for length in range(len(path) + 1)]
        places = [
            next(length for length, node in enumerate(nodes) if length and counts[node] > axis)
            for axis in range(len(shape))
        ]
        names = []
        for index in itertools.product(*map(range, shape)):
            parts = [keystr((entry,)) for entry in path]
            for place, i in reversed(list(zip(places, index, strict=True))):
                parts.insert(place, str(i))
            names.append(".".join(parts))
        found.append((shape, names))
    return found


def _num_stacked(model: PyTree, path: tuple, leaf: Any) -> int:
    try:
        names = named_alone(model, path, leaf).names
    except sharding.ShardingError:  # nothing says so
        return 0
    leading = len(list(itertools.takewhile(lambda name: name is None, names)))
    return leading if leading < len(names) else 0
