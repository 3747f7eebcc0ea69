"""Callbacks of evaluations: the average, early stopping, the best model, samples."""

import contextlib
import dataclasses
import json
import re
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import drawn_transformer, low, only_norms, parameters
from test_hooks import Kill, config, fit
from test_loop import (
    Bigram,
    Killed,
    arrays,
    assert_equal_states,
    checkpoints,
    poisoned,
    poisoned_dataset,
    poisoned_steps,
)

import zoo
from zoo import callbacks, lora, mlp, sharding
from zoo.common import checksums
from zoo.publishing.tensors import read_tensors
from zoo.runs.callbacks.evaluations import save_somehow
from zoo.runs.metrics import read_metrics
from zoo.runs.monitor import CompileCounter

pytestmark = pytest.mark.usefixtures("no_curves")


def by_step(losses):
    """An evaluation that gives these losses by the steps that the run has behind it."""

    class Script(callbacks.Callback):
        def on_evaluation(self, loop, step, state, values):
            return {"scripted": losses[step]}

    return Script()


LOSSES = {2: 3.0, 4: 1.0, 6: 1.0, 8: float("nan"), 10: 1.5, 12: 0.5}


def test_early_stopping_counts_evaluations_without_improvement(tmp_path, capsys):
    def stopping(patience, **options):
        return callbacks.EarlyStopping("scripted", patience, **options)

    run = config(tmp_path, eval_every=2)
    state, _ = fit(run, by_step(LOSSES), stopping(3))
    reason = "scripted has not improved since step 4 (1), in 3 evaluation(s)"
    assert f"the callback 'early-stopping' has ended the run at step 10: {reason}" in (
        capsys.readouterr().out
    )
    assert checkpoints(run) == [4, 8, 10]
    evaluated = [r["step"] for r in read_metrics(run.run_dir / "metrics.jsonl") if "scripted" in r]
    assert evaluated == [2, 4, 6, 8, 10, 10]  # the last one is of all that is held out

    before = (run.run_dir / "metrics.jsonl").read_bytes()
    again, _ = fit(run, by_step(LOSSES), stopping(3))
    assert reason in capsys.readouterr().out
    assert int(again.step) == 10
    assert_equal_states(again, state)
    assert (run.run_dir / "metrics.jsonl").read_bytes() == before
    more = stopping(4)
    state, _ = fit(run, by_step(LOSSES), more)
    assert int(state.step) == 12
    assert more.values == {"best": 0.5, "step": 12, "since": 0}
    # Of a metric that should grow, the first one is the best.
    state, _ = fit(config(tmp_path / "max", eval_every=2), by_step(LOSSES), stopping(3, mode="max"))
    assert int(state.step) == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [({"patience": 0}, "patience=0"), ({"mode": "lowest"}, "'lowest'")],
    ids=str,
)
def test_unfit_arguments_of_early_stopping_are_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        callbacks.EarlyStopping(**options)
    if "mode" in options:
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            callbacks.BestCheckpoint(**options)


# --- The average of the weights -----------------------------------------------------------------


class Weights(callbacks.Callback):
    """The head's values after each step."""

    def __init__(self):
        self.seen = []

    def on_start(self, loop, state):
        self.seen.append(np.asarray(state.model.head))

    def on_step(self, loop, step, state, metrics):
        self.seen.append(np.asarray(state.model.head))


def averaged(weights, decay, *, warmup):
    average = weights[0].astype(np.float64)
    for n, x in enumerate(weights[1:], start=1):
        share = 1 - (min(decay, (1 + n) / (10 + n)) if warmup else decay)
        average = average + share * (x - average)
    return average


class Compiles(callbacks.Callback):
    """Counts the compiles after the first step."""

    def on_step(self, loop, step, *_):
        if step == 1:
            self.counter = CompileCounter()
            self.counter.__enter__()

    def on_end(self, *_):
        self.counter.__exit__(None, None, None)


def test_averages_follow_their_formula_without_skipped_steps_and_compiles(tmp_path):
    dataset = poisoned_dataset(7)
    bad = poisoned_steps(dataset, 12)
    assert bad
    warm, plain = (callbacks.Average(0.9, warmup=warmup) for warmup in (True, False))
    plain.name, weights, compiles = "plain", Weights(), Compiles()
    options = {"dataset": dataset, "loss_fn": poisoned}
    fit(config(tmp_path, on_nonfinite="skip"), compiles, warm, plain, weights, **options)
    assert len(weights.seen) == 13
    kept = [x for step, x in enumerate(weights.seen) if step not in bad]
    for average in (warm, plain):
        wanted = averaged(kept, 0.9, warmup=average is warm)
        np.testing.assert_allclose(average.model.head, wanted, rtol=1e-5)
        assert not np.allclose(average.model.head, weights.seen[-1], rtol=1e-2)
    assert compiles.counter.compiles == 0


def size(model, whole):
    """An evaluation that tells models apart."""
    return {"eval_loss": float(jnp.abs(model.head).sum())}


def test_average_of_trained_weights_is_sharded_and_evaluated(tmp_path):
    trainable = lambda model: eqx.tree_at(
        lambda m: m.table, jax.tree.map(lambda _: True, model), False
    )
    average, run = callbacks.Average(0.9), config(tmp_path, steps=2, mesh="fsdp=2,tensor=2")
    state, result = fit(run, average, evaluate=size, trainable=trainable)
    assert average.arrays["model"].table is None
    np.testing.assert_array_equal(average.model.table, state.model.table)
    assert not np.array_equal(average.model.head, state.model.head)
    for x, y in zip(arrays(average.model), arrays(state.model), strict=True):
        assert sharding.canonical(x.sharding) == sharding.canonical(y.sharding)
        assert not x.sharding.is_fully_replicated
    assert result == {**size(state.model, True), "average/eval_loss": result["average/eval_loss"]}
    assert result["average/eval_loss"] == size(average.model, True)["eval_loss"]
    assert result["average/eval_loss"] != result["eval_loss"]


@pytest.mark.usefixtures("unchecked_types")
def test_an_average_that_begins_later_leaves_out_skipped_steps():
    state = zoo.init_state(Bigram, optax.sgd(0.1), key=jax.random.key(0))
    state = dataclasses.replace(state, step=jnp.int32(5), skipped=jnp.int32(2))
    loop = SimpleNamespace(training=SimpleNamespace(trainable=None))
    assert callbacks.Average().initial_arrays(loop, state)["updates"] == 3


@pytest.mark.slow
def test_callbacks_take_frozen_parameters_as_they_are(tmp_path, capsys):
    base = low()
    options = {"pretrained": base, "trainable": only_norms, "make_model": lambda key, model: model}
    average, norms = callbacks.Average(0.9), callbacks.Norms(every=1)
    run = config(tmp_path, steps=2, mesh="fsdp=2", log_every=1)
    state, _ = fit(run, average, norms, **options)
    before, after, averaged = map(parameters, (base, state.model, average.model))
    trained = {name for name in before if name.endswith("scale")}
    assert 0 < len(trained) < len(before)
    for name, array in averaged.items():
        assert array.dtype == after[name].dtype == ("float32" if name in trained else "bfloat16")
        assert np.array_equal(array, before[name]) == (name not in trained), name
    last = next(x for x in read_metrics(run.run_dir / "metrics.jsonl") if x["step"] == 2)
    measured = {re.sub(r"blocks\.\d+", "blocks", name) for name in last if "norms/" in name}
    assert measured == {f"norms/{name}" for name in trained}
    # The placement table has the dtypes that they are held in.
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    dtypes = {row[0]: row[2] for row in rows if row and row[0] in before}
    assert dtypes == {name: str(x.dtype) for name, x in after.items()}


def test_unfit_decays_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"decay=1\.0: .* \[0, 1\)"):
        callbacks.Average(1.0)
    with pytest.raises(ValueError, match=r"decay=-0\.1: .* \[0, 1\)"):
        callbacks.Average(-0.1)
    callbacks.Average(0.0)
    with pytest.raises(ValueError, match=r"average=1\.5: .* \[0, 1\)"):
        config(tmp_path, average=1.5)
    with pytest.raises(ValueError, match="keep_best='average/eval_loss': needs --average"):
        config(tmp_path, keep_best="average/eval_loss")


# --- The best model ---------------------------------------------------------------------------


def test_best_model_is_kept_over_a_resume(tmp_path, capsys):
    script = {2: 3.0, 4: 1.0, 6: 2.0, 8: 0.5, 10: 0.7, 12: 0.6}
    weights = Weights()
    run = config(tmp_path, eval_every=2)
    with pytest.raises(Killed):
        fit(run, by_step(script), callbacks.BestCheckpoint("scripted"), weights, Kill("on_step", 7))

    def kept():
        like = eqx.filter_eval_shape(Bigram, jax.random.key(0))
        return read_tensors(run.run_dir / "best" / "model.safetensors", like, None, None)

    np.testing.assert_array_equal(kept().head, weights.seen[4])
    again = Weights()
    fit(run, by_step(script), callbacks.BestCheckpoint("scripted"), again)
    np.testing.assert_array_equal(kept().head, again.seen[8 - 4])
    metrics = json.loads((run.run_dir / "best" / "metrics.json").read_text())
    assert (metrics["steps"], metrics["scripted"]) == (8, 0.5)
    assert checksums.problems(run.run_dir / "best") == []
    assert "like=" in (run.run_dir / "best" / "README.md").read_text()
    assert "step 8: the best scripted so far, 0.5" in capsys.readouterr().out


def test_a_finished_run_that_goes_on_keeps_the_best_of_its_last_step(tmp_path):
    """Whose evaluation comes after its checkpoint, and not at a multiple of --eval-every."""
    script = by_step({4: 1.0, 6: 0.5, 8: 0.8, 12: 0.9})
    fit(config(tmp_path, steps=6), script, callbacks.BestCheckpoint("scripted"))
    run, best = config(tmp_path), callbacks.BestCheckpoint("scripted")
    fit(run, script, best)
    assert (best.values["step"], best.values["best"]) == (6, 0.5)
    assert json.loads((run.run_dir / "best" / "metrics.json").read_text())["steps"] == 6
    lines = read_metrics(run.run_dir / "metrics.jsonl")
    assert [x["step"] for x in lines if "scripted" in x] == [4, 6, 8, 12]


def test_the_best_of_another_metric_does_not_count_after_a_resume(tmp_path, capsys):
    options = {"evaluate": lambda model, whole: {"eval_loss": 3.0, "accuracy": 0.5}}
    run = config(tmp_path, steps=4, eval_every=2, keep_best="eval_loss")
    fit(run, **options)
    capsys.readouterr()
    fit(dataclasses.replace(run, steps=6, keep_best="accuracy"), **options)
    said = capsys.readouterr().out
    assert "that of ['eval_loss', 'min']; best/ begins anew with ['accuracy', 'max']" in said
    assert "step 4: the best accuracy so far, 0.5" in said
    metrics = json.loads((run.run_dir / "best" / "metrics.json").read_text())
    assert metrics["steps"] == 4


def test_best_checkpoints_of_the_zoo_load(tmp_path):
    model = mlp.MLP(mlp.Config(in_size=2, out_size=3, hidden_size=4), key=jax.random.key(0))
    save_somehow(tmp_path / "best", model, {"eval_loss": 1.0})
    save_somehow(tmp_path / "best", model, {"eval_loss": 0.5})
    x = jnp.ones((1, 2))
    np.testing.assert_array_equal(zoo.load(tmp_path / "best")(x), model(x))
    assert json.loads((tmp_path / "best" / "metrics.json").read_text())["eval_loss"] == 0.5


def test_a_model_that_cannot_be_published_leaves_its_arrays(tmp_path):
    best, key = tmp_path / "best", jax.random.key(0)
    model = lora.adapt(drawn_transformer(num_layers=1), lora.Config(rank=2), key=key)
    for loss in (1.0, 0.5):
        save_somehow(best, model, {"eval_loss": loss})
    found = read_tensors(
        best / "model.safetensors", eqx.filter_eval_shape(lambda: model), None, None
    )
    for x, y in zip(arrays(found), arrays(model), strict=True):
        np.testing.assert_array_equal(x, y)
    assert json.loads((best / "metrics.json").read_text()) == {"eval_loss": 0.5}
    assert "`zoo.load` does not open it" in (best / "README.md").read_text()
    assert checksums.problems(best) == []


# --- Further evaluations, samples ---------------------------------------------------------------


def test_held_out_rows_that_do_not_divide_are_refused_before_the_first_step(tmp_path):
    rows = np.zeros((9, 8), np.int32)
    odd = callbacks.Evaluations({"odd": zoo.ArrayDataset({"tokens": rows}, 3, 0)})
    weights = Weights()
    with pytest.raises(ValueError, match=r"batch_size=3 is not divisible by 2, .* fsdp=2"):
        fit(config(tmp_path, mesh="fsdp=2"), odd, weights)
    assert weights.seen == []


def test_samples_are_printed_and_kept(tmp_path, capsys):
    def samples():
        return callbacks.Samples(lambda model: f"head {float(model.head.sum()):.6f}", every=3)

    fit(config(tmp_path / "whole"), samples())
    assert "--- a sample of step 3 ---\nhead " in capsys.readouterr().out
    with contextlib.suppress(Killed):
        fit(config(tmp_path), samples(), Kill("on_step", 7))
    fit(config(tmp_path), samples())
    whole, resumed = (
        read_metrics(folder / "run" / "samples.jsonl") for folder in (tmp_path / "whole", tmp_path)
    )
    assert [line["step"] for line in whole] == [3, 6, 9, 12]
    assert len({line["text"] for line in whole}) == 4
    assert resumed == whole
    assert (tmp_path / "run" / "samples.html").read_text().count("<h2>") == 4
    callbacks.Samples(str, every=1)
    with pytest.raises(ValueError, match=r"every=0: .* 1"):
        callbacks.Samples(str, every=0)
