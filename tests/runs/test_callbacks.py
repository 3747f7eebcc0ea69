import contextlib
import dataclasses
import json
import os
import re
import signal
from types import SimpleNamespace

import equinox as eqx
import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_loop
from helpers import drawn_transformer, low, only_norms, parameters
from model_folders import flip_bit
from test_loop import (
    HELD_OUT,
    Bigram,
    arrays,
    assert_equal_states,
    checkpoints,
    interrupt_at,
    lines,
    poisoned,
    poisoned_dataset,
    poisoned_steps,
    training,
    without_speed,
)

import zoo
from zoo import callbacks, lora, losses, mlp, sharding
from zoo.common import checksums
from zoo.publishing.tensors import read_tensors
from zoo.runs import checkpoint
from zoo.runs.callbacks.evaluations import save_somehow
from zoo.runs.checkpoint import CheckpointError
from zoo.runs.metrics import read_metrics
from zoo.runs.monitor import CompileCounter
from zoo.runs.processes import RunError

pytestmark = pytest.mark.usefixtures("no_curves")


def config(folder, **options):
    defaults = {"steps": 12, "log_every": 4, "eval_every": 4, "checkpoint_every": 4}
    return test_loop.config(folder, **defaults | options)


def fit(config, *given, **options):
    """(the state, the whole evaluation) of a run with callbacks."""
    with zoo.Run(config) as run:
        return zoo.fit(run, training(**options), given)


class Killed(Exception):
    pass


class Kill(callbacks.Callback):
    """Ends the process, as good as: all that is under way is lost; or by another error."""

    def __init__(self, moment, step, error=Killed):
        def fail(loop, at, *_):
            if at == step:
                raise error

        setattr(self, moment, fail)


# --- Moments ----------------------------------------------------------------------------------


class Recording(callbacks.Callback):
    """Writes down each call, and keeps a sum of its own of all losses."""

    def __init__(self):
        self.arrays = {"sum": jnp.zeros(())}
        self.values = {"steps": 0, "evaluations": []}
        self.calls = []

    def on_start(self, loop, state):
        self.calls.append(("start", int(state.step)))

    def on_step(self, loop, step, state, metrics):
        assert set(metrics) >= {"loss", "grad_norm", "tokens"}
        self.arrays = {"sum": self.arrays["sum"] + metrics["loss"]}
        self.values["steps"] += 1
        self.calls.append(("step", step))
        return {"loss_so_far": self.arrays["sum"]}

    def on_log(self, loop, step, values):
        self.calls.append(("log", step, sorted({"loss", "loss_so_far", "eval_loss"} & set(values))))

    def on_evaluation(self, loop, step, state, values):
        self.values["evaluations"].append(step)
        self.calls.append(("evaluation", step, dict(values), loop.whole))
        return {"doubled": 2 * values["eval_loss"]}

    def on_checkpoint(self, loop, step, state):
        self.calls.append(("checkpoint", step))

    def on_end(self, loop, step, state):
        self.calls.append(("end", step, state is not None))


def test_moments_come_in_the_documented_order(tmp_path):
    recording = Recording()
    run = config(tmp_path, steps=3, eval_every=2, checkpoint_every=2, log_every=2)
    _, result = fit(run, recording)
    step, value = ["loss", "loss_so_far"], {"eval_loss": 1.0}
    assert recording.calls == [
        ("start", 0),
        ("step", 1),
        ("step", 2),
        ("log", 1, step),
        ("log", 2, step),
        ("checkpoint", 2),
        ("evaluation", 2, value, False),
        ("log", 2, ["eval_loss"]),
        ("step", 3),
        ("log", 3, step),
        ("checkpoint", 3),
        ("evaluation", 3, value, True),
        ("log", 3, ["eval_loss"]),
        ("end", 3, True),
    ]
    assert result == {"eval_loss": 1.0, "doubled": 2.0}
    assert lines(run, "doubled") == {2: 2.0, 3: 2.0}
    assert lines(run, "loss_so_far")[2] == pytest.approx(sum(lines(run).values()) - lines(run)[3])


def test_resumed_runs_make_the_calls_of_an_unbroken_one(tmp_path):
    whole, first, second = Recording(), Recording(), Recording()
    options = {"eval_every": 2}
    state, _ = fit(config(tmp_path / "whole", **options), whole)
    with pytest.raises(Killed):
        fit(config(tmp_path, **options), first, Kill("on_evaluation", 10))
    assert first.calls[-1] == ("end", 10, False)
    resumed, result = fit(config(tmp_path, **options), second)

    assert second.calls[0] == ("start", 8)
    since = whole.calls.index(("checkpoint", 8)) + 1
    assert whole.calls[since][:2] == ("evaluation", 8)
    assert second.calls[1:] == whole.calls[since:]
    assert second.values == whole.values == {"steps": 12, "evaluations": [2, 4, 6, 8, 10, 12]}
    assert second.arrays["sum"].tobytes() == whole.arrays["sum"].tobytes()
    assert float(second.arrays["sum"]) > 12
    assert_equal_states(resumed, state)
    assert without_speed(config(tmp_path)) == without_speed(config(tmp_path / "whole"))
    assert result == {"eval_loss": 1.0, "doubled": 2.0}


def test_finished_runs_show_callbacks_their_last_evaluation(tmp_path):
    fit(config(tmp_path, steps=4), Recording())
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    again = Recording()
    _, result = fit(config(tmp_path, steps=4), again)
    assert [call[:2] for call in again.calls] == [
        ("start", 4),
        ("evaluation", 4),
        ("log", 4),
        ("end", 4),
    ]
    assert again.values == {"steps": 4, "evaluations": [4]}
    assert result == {"eval_loss": 1.0, "doubled": 2.0}
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_signals_end_callbacks_with_a_state(tmp_path):
    class Signalled(Recording):
        def on_evaluation(self, loop, step, state, values):
            os.kill(os.getpid(), signal.SIGTERM)
            return super().on_evaluation(loop, step, state, values)

    whole, first, second = Recording(), Signalled(), Recording()
    run = config(tmp_path, checkpoint_every=1000)
    with pytest.raises(SystemExit):
        fit(run, first)
    assert first.calls[-1] == ("end", 4, True)
    assert checkpoints(run) == [4]
    second.name = first.name
    fit(run, second)  # whose checkpoint was written after the evaluation, with the state of before
    fit(config(tmp_path / "whole"), whole)
    assert second.values == whole.values
    assert without_speed(run) == without_speed(config(tmp_path / "whole"))


@pytest.mark.slow
def test_evaluations_cut_short_within_callbacks_are_repeated(tmp_path, monkeypatch):
    def judged(folder, *given):
        with zoo.Run(config(folder)) as run:
            other = zoo.evaluator(run, losses.next_token, HELD_OUT)
            named = callbacks.Evaluations({"other": other})
            return zoo.fit(run, training(), [*given, named])

    whole, first, second = Recording(), Recording(), Recording()
    judged(tmp_path / "whole", whole)
    with monkeypatch.context() as context:
        interrupt_at(context, lambda: signal.raise_signal(signal.SIGTERM), 2)
        with pytest.raises(SystemExit):
            judged(tmp_path, first)
    assert list(lines(config(tmp_path), "other/eval_loss")) == [4]
    judged(tmp_path, second)
    assert second.values == whole.values == {"steps": 12, "evaluations": [4, 8, 12]}
    assert without_speed(config(tmp_path)) == without_speed(config(tmp_path / "whole"))


def test_returned_metrics_cost_no_transfer_of_their_own(tmp_path, monkeypatch):
    def counted(*given):
        calls, get, wait = [], jax.device_get, jax.block_until_ready
        with monkeypatch.context() as context:
            context.setattr(jax, "device_get", lambda x: (calls.append("get"), get(x))[1])
            context.setattr(jax, "block_until_ready", lambda x: (calls.append("wait"), wait(x))[1])
            fit(config(tmp_path / str(len(given))), *given)
        return calls

    none = counted()
    assert none.count("wait") > 10
    assert none.count("get") == 4  # steps 1, 4, 8, 12
    assert counted(Recording()) == none


# --- Errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((Recording(), Recording()), ValueError, "two have the name 'recording'"),
        ((Recording,), TypeError, "callbacks"),
        ((type("Odd", (callbacks.Callback,), {"name": "a.b"})(),), ValueError, "name 'a.b' may"),
    ],
    ids=["same name", "a class", "a dot"],
)
def test_unfit_callbacks_are_refused_before_compute(given, error, message, tmp_path):
    fail = lambda key: pytest.fail("a model was made")
    with pytest.raises(error, match=re.escape(message)):
        fit(config(tmp_path), *given, make_model=fail)


class Broken(callbacks.Callback):
    def __init__(self, moment):
        setattr(self, moment, self.fail)

    def fail(self, *_):
        raise ValueError("this is why")


@pytest.mark.parametrize(
    "moment", ["on_start", "on_step", "on_log", "on_evaluation", "on_checkpoint", "on_end"]
)
def test_errors_of_callbacks_name_them(moment, tmp_path):
    before, after = Recording(), Counting()
    with pytest.raises(ValueError, match="this is why") as e:
        fit(config(tmp_path, steps=4), before, Broken(moment), after)
    assert e.value.__notes__ == [f"in {moment} of the callback 'broken'"]
    assert before.calls[-1][0] == "end"
    assert after.ended == (moment != "on_start")
    saved = moment in ("on_evaluation", "on_checkpoint", "on_end")
    assert checkpoints(config(tmp_path)) == ([4] if saved else [])


def test_errors_at_the_end_do_not_mask_the_first(tmp_path, capsys):
    with pytest.raises(Killed):
        fit(config(tmp_path), Broken("on_end"), Kill("on_step", 2))
    assert "this is why') in on_end of the callback 'broken'" in capsys.readouterr().out


def state_of(name, value):
    def on_step(self, *_):
        setattr(self, name, value)

    return type("Odd", (callbacks.Callback,), {"on_step": on_step})()


@pytest.mark.parametrize(
    ("callback", "error", "message"),
    [
        (state_of("values", {"x": {1, 2}}), TypeError, "'odd': `values` has to be JSON"),
        (state_of("arrays", {"x": 1.0}), TypeError, "'odd': arrays.x is a float, and no array"),
        (
            type("Odd", (callbacks.Callback,), {"on_step": lambda *_: {"loss": 1.0}})(),
            ValueError,
            "'odd' returned a metric 'loss', which there is already: rename it",
        ),
        (
            type("Odd", (callbacks.Callback,), {"on_log": lambda _, loop, *__: loop.stop("x")})(),
            RunError,
            "loop.stop('x') in on_log: call it in on_start, on_step or on_evaluation",
        ),
        (
            type("Odd", (callbacks.Callback,), {"on_step": lambda *_: "text"})(),
            TypeError,
            "on_step of the callback 'odd' returned a str: return a dict of scalars by name",
        ),
    ],
    ids=["values", "arrays", "metric", "stop", "text"],
)
def test_mistakes_of_callbacks_are_named(callback, error, message, tmp_path):
    with pytest.raises(error, match=re.escape(message)):
        fit(config(tmp_path, steps=4), callback)


def test_misspelt_moments_are_refused():
    with pytest.raises(TypeError, match=r"Odd\.on_evalution .*'on_evaluation'"):
        type("Odd", (callbacks.Callback,), {"on_evalution": lambda *_: None})


# --- State ------------------------------------------------------------------------------------


class Counting(callbacks.Callback):
    def __init__(self):
        self.values = {"steps": 0}
        self.ended = False

    def on_step(self, *_):
        self.values["steps"] += 1

    def on_end(self, *_):
        self.ended = True


def test_callbacks_that_go_or_come_are_named(tmp_path, capsys):
    fit(config(tmp_path, steps=4), Counting())
    fit(config(tmp_path, steps=8))
    assert "the callback 'counting' is not there any more" in capsys.readouterr().out
    counting, bare = Counting(), type("Bare", (callbacks.Callback,), {})()
    fit(config(tmp_path), counting, bare)
    output = capsys.readouterr().out
    assert "has no state of the callback 'counting': it starts anew" in output
    assert "'bare'" not in output
    assert counting.values == {"steps": 4}


def test_arrays_of_absent_and_of_other_callbacks_are_refused(tmp_path):
    fit(config(tmp_path, steps=4), Recording())
    with pytest.raises(RunError, match="callback 'recording'"):
        fit(config(tmp_path), Counting())
    other = Recording()
    other.arrays = {"sum": jnp.zeros(3)}
    with pytest.raises(CheckpointError, match=r"of another model .*\n  callbacks\.recording\.sum"):
        fit(config(tmp_path), other)
    fit(config(tmp_path), Recording())


def test_damaged_arrays_of_a_callback_fall_back_to_the_step_before(tmp_path, caplog):
    """They are as large as arrays whose files are verified when they are read."""
    whole = config(tmp_path / "whole")
    fit(whole, *(wanted := [Recording(), Marked()]))
    parts, folder = tmp_path / "parts", tmp_path / "parts" / "run" / "checkpoints"
    fit(config(parts, steps=8), Recording(), Marked())
    assert flip(folder / "8") > MARK.nbytes
    found = [Recording(), Marked()]
    state, _ = fit(config(parts), *found)
    assert re.search(r"step 8: callbacks\.marked cannot .*8\.damaged.* step 4 is used", caplog.text)
    assert (folder / "8.damaged").is_dir()
    assert found[0].values == wanted[0].values
    assert found[0].arrays == wanted[0].arrays
    np.testing.assert_array_equal(found[1].arrays, MARK)
    assert without_speed(config(parts)) == without_speed(whole)
    assert int(state.step) == 12


def test_a_run_whose_only_step_has_damaged_callbacks_does_not_start_anew(tmp_path):
    fit(config(tmp_path, steps=4), Marked())
    flip(tmp_path / "run" / "checkpoints" / "4")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"undamaged:\n  step 4: callbacks\.marked"):
            fit(config(tmp_path), Marked())
    assert checkpoints(config(tmp_path)) == [4]


@pytest.mark.parametrize("damaged", ["in the folder", "before its upload"])
def test_damaged_arrays_of_a_callback_at_an_address(tmp_path, capsys, damaged):
    """The good copy at the address is taken; where that is damaged too, the step before."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    options = {"run_dir": "memory://bucket/run", "work_dir": tmp_path / "work"}
    local, remote = tmp_path / "work" / "checkpoints", "/bucket/run/checkpoints"
    fit(config(tmp_path, steps=8, **options), Marked())
    flip(local / "8")
    if damaged == "before its upload":
        fs.put(str(local / "8" / "arrays"), f"{remote}/8/", recursive=True)
        listed = checksums.as_text(checksums.of(local / "8"))
        fs.pipe_file(f"{remote}/8/checksums.json", listed.encode())
    fit(config(tmp_path, **options), found := Marked())
    resumed = 8 if damaged == "in the folder" else 4
    assert f"resumed memory://bucket/run at step {resumed}" in capsys.readouterr().out
    np.testing.assert_array_equal(found.arrays, MARK)
    there = {path.split("/")[4] for path in fs.find(remote)}
    assert "12" in there  # a step that a newer one overtook may never have been copied
    for step in there:  # a damaged step is not left there either
        fs.get(f"{remote}/{step}", str(tmp_path / step), recursive=True)
        assert checkpoint.problems(tmp_path / step) == []


MARK = np.random.default_rng(0).normal(size=2**19).astype("f4")


class Marked(callbacks.Callback):
    """Has an array that is larger than all others."""

    def __init__(self):
        self.arrays = jnp.asarray(MARK)


def flip(folder):
    """Change a bit in the midst of the largest file of a folder; its size."""
    path = max((x for x in folder.rglob("*") if x.is_file()), key=lambda x: x.stat().st_size)
    flip_bit(path)
    return path.stat().st_size


# --- Stopping ---------------------------------------------------------------------------------


class StopAt(callbacks.Callback):
    def __init__(self, step):
        self._step = step

    def on_step(self, loop, step, *_):
        if step == self._step:
            loop.stop("enough is enough")


def test_stopped_runs_end_as_at_their_last_step(tmp_path, capsys):
    run = config(tmp_path)
    state, _ = fit(run, StopAt(6))
    ended = "the callback 'stopat' has ended the run at step 6: enough is enough"
    assert ended in capsys.readouterr().out
    same, _ = fit(config(tmp_path / "same", steps=6))
    assert_equal_states(state, same)
    assert without_speed(run) == without_speed(config(tmp_path / "same"))
    assert list(lines(run)) == [1, 4, 6]
    assert checkpoints(run) == [4, 6]

    before = (run.run_dir / "metrics.jsonl").read_bytes()
    again, result = fit(run, StopAt(9))  # which does not say that it would continue
    assert ended in capsys.readouterr().out
    assert_equal_states(again, state)
    assert result == {"eval_loss": 1.0}
    assert (run.run_dir / "metrics.jsonl").read_bytes() == before
    more, _ = fit(run)
    assert "which ended the run at step 6, is not there any more: it" in capsys.readouterr().out
    assert int(more.step) == 12


def test_callbacks_may_stop_before_the_first_step(tmp_path):
    stop = type("Stop", (callbacks.Callback,), {"on_start": lambda _, loop, s: loop.stop("x")})()
    state, result = fit(config(tmp_path), stop)
    assert int(state.step) == 0
    assert result == {"eval_loss": 1.0}


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
