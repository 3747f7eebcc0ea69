"""Norms of parameters and of their updates, per layer, as a callback."""

import itertools
import math
import re
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from zoo import sharding
from zoo.common import files
from zoo.common.configuration import require
from zoo.runs.callbacks.callback import Callback, Loop, Numbers, Scalars
from zoo.runs.callbacks.trackers import Tracker
from zoo.runs.metrics import MetricsLog, read_metrics
from zoo.sharding.axes import is_parameter, keystr, named_alone
from zoo.training.state import TrainState, trained_leaves

NORMS, UPDATES = "norms/", "updates/"  # before the names of parameters


class Norms(Callback):
    """The norm of each trained parameter, and of its update over it, every so many steps.

    A line of the run folder's norms.jsonl has `norms/blocks.0.attention.wq`, the Euclidean norm
    after the step, and `updates/blocks.0.attention.wq`, the norm of the step's change divided by
    it: of each layer where layers are stacked in one array. The run's trackers are given them too,
    and norms.png shows them. The parameters are copied on the devices before such a step, which
    takes their size in memory; other steps cost nothing.
    """

    name = "norms"

    def __init__(self, every: int = 100):
        require(every >= 1, f"Norms(every={every}): must be at least 1")
        self._every = every
        self._before: PyTree = None
        self._pending: tuple[int, Any] | None = None

    def on_start(self, loop: Loop, state: TrainState) -> None:
        """Compile both programs, so that no step waits for them, and open norms.jsonl."""
        trained = self._trained(loop, state)
        self._names = layer_names(state.model, trained)
        places = jax.tree.map(lambda x: x.sharding, trained)
        self._copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=places)
        stacked = [len(shape) for shape, _ in self._names]
        everywhere = sharding.replicated(loop.run.mesh)
        self._measure = jax.jit(
            lambda before, after: _measured(before, after, stacked), out_shardings=everywhere
        )
        before = self._copy(trained)
        jax.block_until_ready(self._measure(before, trained))
        if self._is_due(loop.start + 1):
            self._before = before
        if loop.run.is_main:
            path = loop.run.folder / "norms.jsonl"
            self._log = MetricsLog(path, resume_step=loop.start)

    def on_step(self, loop: Loop, step: int, state: TrainState, metrics: Scalars) -> None:
        """Measure the change since the copy; copy for the next one."""
        self._flush(loop)
        if self._is_due(step) or self._is_due(step + 1):
            trained = self._trained(loop, state)
        if self._is_due(step):
            self._pending = step, self._measure(self._before, trained)
        self._before = self._copy(trained) if self._is_due(step + 1) else None

    def on_evaluation(self, loop: Loop, step: int, state: TrainState, values: Numbers) -> None:
        """Draw norms.png."""
        self._flush(loop)
        if loop.run.is_main:
            plot_norms(loop.run.folder)

    def on_checkpoint(self, loop: Loop, step: int, state: TrainState) -> None:
        """Write what a run that resumes here would not have."""
        self._flush(loop)

    def on_end(self, loop: Loop, step: int, state: TrainState | None) -> None:
        """Close norms.jsonl."""
        if state is not None:
            self._flush(loop)
        if loop.run.is_main:
            self._log.close()

    def _is_due(self, step: int) -> bool:
        return step % self._every == 0

    def _trained(self, loop: Loop, state: TrainState) -> PyTree:
        return eqx.filter(state.model, trained_leaves(state.model, loop.training.trainable))

    def _flush(self, loop: Loop) -> None:
        """Write what was measured, one step late: by then it is there."""
        if self._pending is None:
            return
        (step, measured), self._pending = self._pending, None
        if not loop.run.is_main:
            return
        columns = zip(self._names, *jax.device_get(measured), strict=True)
        values: dict[str, float] = {}
        for (_, names), norm, update in columns:
            values |= {NORMS + n: float(x) for n, x in zip(names, norm.flat, strict=True)}
            values |= {UPDATES + n: float(x) for n, x in zip(names, update.flat, strict=True)}
        self._log.write(step, **values)
        for tracker in loop.callbacks:
            if isinstance(tracker, Tracker):
                tracker.on_log(loop, step, values)


def _measured(before: PyTree, after: PyTree, stacked: list[int]) -> tuple[list[Array], list[Array]]:
    """Norms, and norms of the change divided by them, float32[layers…] of each array."""

    def norm(x: Array, stack: int) -> Array:
        return jnp.sqrt(jnp.sum(x * x, axis=tuple(range(stack, x.ndim))))

    norms, updates = [], []
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    for (old, new), stack in zip(pairs, stacked, strict=True):
        size, change = norm(new, stack), norm(new - old, stack)
        norms.append(size)
        updates.append(change / jnp.where(size > 0, size, 1.0))
    return norms, updates


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


def plot_norms(folder: Path) -> None:
    """Draw norms.jsonl as norms.png: a row per layer, a column per line, of two lines at least."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    records = read_metrics(folder / "norms.jsonl")
    if len(records) < 2:
        return
    names = [name.removeprefix(NORMS) for name in records[-1] if name.startswith(NORMS)]
    groups = [
        (label, len(list(rows)))
        for label, rows in itertools.groupby(re.sub(r"(^|\.)\d+(?=\.)", r"\1*", x) for x in names)
    ]
    figure = Figure(figsize=(13, 1.2 + 0.28 * len(groups)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    # A band of one height for each array, cut into its layers.
    rows = [g + i / count for g, (_, count) in enumerate(groups) for i in range(count)]
    steps = np.array([record["step"] for record in records], np.float64)
    middles = (steps[1:] + steps[:-1]) / 2
    columns = [2 * steps[0] - middles[0], *middles, 2 * steps[-1] - middles[-1]]
    titles = {UPDATES: "norm of the update / norm", NORMS: "norm"}
    for axes, (prefix, title) in zip(panels, titles.items(), strict=True):
        values = np.array([[r.get(prefix + n, math.nan) for r in records] for n in names])
        seen = values[np.isfinite(values) & (values > 0)]
        scale = LogNorm(seen.min(), seen.max()) if seen.size else None
        mesh = axes.pcolormesh(
            columns, [*rows, len(groups)], np.ma.masked_invalid(values), norm=scale, rasterized=True
        )
        axes.hlines(range(1, len(groups)), columns[0], columns[-1], color="white", linewidth=0.8)
        axes.set(title=title, xlabel="step")
        figure.colorbar(mesh, ax=axes, pad=0.01)
    panels[0].set_yticks(np.arange(len(groups)) + 0.5, [label for label, _ in groups])
    panels[0].tick_params(axis="y", labelsize=8)
    panels[0].invert_yaxis()
    files.replace(
        folder / "norms.png", lambda temporary: figure.savefig(temporary, format="png", dpi=130)
    )
