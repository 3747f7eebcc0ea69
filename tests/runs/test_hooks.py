"""Callbacks of a run: their moments and errors, their state in checkpoints, and how they end it."""

import os
import re
import signal

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_loop
from model_folders import flip_bit
from test_loop import (
    HELD_OUT,
    Killed,
    assert_equal_states,
    checkpoints,
    interrupt_at,
    lines,
    training,
    without_speed,
)

import zoo
from zoo import callbacks, losses
from zoo.common import checksums
from zoo.runs import checkpoint
from zoo.runs.checkpoint import CheckpointError
from zoo.runs.processes import RunError

pytestmark = pytest.mark.usefixtures("no_curves")


def config(folder, **options):
    defaults = {"steps": 12, "log_every": 4, "eval_every": 4, "checkpoint_every": 4}
    return test_loop.config(folder, **defaults | options)


def fit(config, *given, **options):
    """(the state, the whole evaluation) of a run with callbacks."""
    with zoo.Run(config) as run:
        return zoo.fit(run, training(**options), given)


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
