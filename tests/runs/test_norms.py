"""zoo.callbacks.Norms: per layer, on meshes, and over a resume."""

from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest
from helpers import make_transformer
from jaxtyping import Array, Float
from test_loop import config, training

import zoo
from zoo import callbacks, ensemble
from zoo.runs.callbacks.norms import layer_names
from zoo.runs.metrics import read_metrics
from zoo.runs.monitor import CompileCounter

pytestmark = pytest.mark.usefixtures("no_curves")


def names_of(make_model) -> list[str]:
    model = eqx.filter_eval_shape(make_model, jax.random.key(0))
    return [name for _, names in layer_names(model, model) for name in names]


def test_layers_are_named_where_they_are_stacked():
    names = names_of(make_transformer())
    assert {"embedding.weight", "blocks.0.attention.wq", "blocks.1.attention.wq"} <= {*names}
    assert len(names) == len({*names})
    members = names_of(lambda key: ensemble.Ensemble(make_transformer(), 3, key=key))
    assert {"members.2.embedding.weight", "members.2.blocks.1.attention.wq"} <= {*members}
    assert len(members) == 3 * len(names)


class Layer(eqx.Module):
    w: Float[Array, "embed mlp"]
    scale: Float[Array, "embed"]


class Stack(eqx.Module):
    layers: Layer
    table: Float[Array, "vocab embed"]

    def __init__(self, key):
        a, b = jax.random.split(key)
        w = jax.random.normal(a, (2, 8, 16))
        self.layers = Layer(w, w[:, :, 0])
        self.table = jax.random.normal(b, (16, 8))


def without_table(model):
    everything = jax.tree.map(lambda _: True, model)
    return eqx.tree_at(lambda tree: tree.table, everything, False)


def test_norms_on_a_mesh_are_those_of_numpy(tmp_path: Path):
    """Of each layer, of what is trained, with nothing compiled in the loop."""
    with zoo.Run(config(tmp_path, mesh="fsdp=2,tensor=2", log_every=1)) as run:
        task = training(make_model=Stack, trainable=without_table)
        state = task.blueprint(jax.random.key(0), mesh=run.layout).state()
        assert not state.model.layers.w.sharding.is_fully_replicated
        loop, norms = callbacks.Loop(run, task), callbacks.Norms(every=1)
        norms.on_start(loop, state)
        new = eqx.tree_at(lambda s: s.model.layers.w, state, state.model.layers.w * 1.5)
        with CompileCounter() as counter:
            line = jax.device_get(norms.on_step(loop, 1, new, {}))
        assert counter.compiles == 0
    w, scale = (np.asarray(x) for x in (new.model.layers.w, new.model.layers.scale))
    expected = {}
    for i in range(2):
        expected[f"norms/layers.{i}.w"] = np.linalg.norm(w[i])
        expected[f"norms/layers.{i}.scale"] = np.linalg.norm(scale[i])
        expected[f"updates/layers.{i}.w"] = 1 / 3
        expected[f"updates/layers.{i}.scale"] = 0.0
    assert line == pytest.approx(expected, rel=1e-5)


class Watch(callbacks.Callback):
    """The table before and after each step."""

    def __init__(self):
        self.tables = []

    def on_start(self, loop, state):
        self.tables.append(np.array(state.model.table))

    def on_step(self, loop, step, state, metrics):
        self.tables.append(np.array(state.model.table))


def fit(config, *given):
    """The lines of metrics.jsonl with norms, by step."""
    with zoo.Run(config) as run:
        zoo.fit(run, training(), callbacks=given)
    lines = read_metrics(config.run_dir / "metrics.jsonl")
    kept = {"step", "norms/table", "updates/table"}
    return [{n: line[n] for n in kept} for line in lines if "norms/table" in line]


def test_resumed_norms_are_those_of_an_unbroken_run(tmp_path: Path):
    watch, parts = Watch(), tmp_path / "parts"
    whole = fit(config(tmp_path / "whole", steps=9, log_every=3), callbacks.Norms(every=3), watch)
    assert [line["step"] for line in whole] == [3, 6, 9]
    for line in whole:
        old, new = watch.tables[line["step"] - 1], watch.tables[line["step"]]
        size, change = np.linalg.norm(new), np.linalg.norm(new - old)
        assert line["norms/table"] == pytest.approx(size, rel=1e-5)
        assert line["updates/table"] == pytest.approx(change / size, rel=1e-4)
        assert change > 0
    first = fit(config(parts, steps=8, norms_every=3, log_every=3))
    assert first == whole[:2]  # the step after is due
    assert fit(config(parts, steps=9, norms_every=3, log_every=3)) == whole


def test_norms_of_no_step_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"Norms\(every=0\): .* 1"):
        callbacks.Norms(every=0)
    with pytest.raises(ValueError, match=r"norms_every=-1: .* 0"):
        config(tmp_path, norms_every=-1)
    with pytest.raises(ValueError, match=r"norms_every=3: .* multiple of log_every=2"):
        fit(config(tmp_path, norms_every=3, log_every=2))
