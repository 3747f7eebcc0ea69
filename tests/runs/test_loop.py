import errno
import functools
import json
import math
import os
import signal
import threading
from datetime import timedelta
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array, Float
from model_folders import flip_bit

import zoo
import zoo.runs.loop
from zoo import losses, sharding
from zoo.common import checksums
from zoo.data.corpus import Corpus
from zoo.data.mixtures import MixtureDataset, Stage
from zoo.planning import planner
from zoo.runs import recorder
from zoo.runs.callbacks.hooks import Hooks
from zoo.runs.checkpoint import CheckpointError
from zoo.runs.config import Config
from zoo.runs.metrics import read_metrics
from zoo.runs.monitor import CompileCounter
from zoo.runs.processes import RunError
from zoo.training.compiled import CompiledStep
from zoo.training.state import Blueprint, Pretrained

pytestmark = pytest.mark.usefixtures("no_curves")
VOCAB, SEPARATOR, POISON = 16, 0, 15


class Bigram(eqx.Module):
    """The smallest language model there is: logits from the last token alone."""

    table: Float[Array, "vocab embed"]
    head: Float[Array, "embed vocab"]

    def __init__(self, key):
        self.table = jax.random.normal(key, (VOCAB, 4))
        self.head = jax.random.normal(jax.random.fold_in(key, 1), (4, VOCAB))

    def __call__(self, tokens, *, segment_ids, positions, key):
        return jnp.take(self.table, tokens, axis=0) @ self.head


def poisoned(model, batch, key):
    """The loss, and nan in a batch with the token POISON."""
    total, weight, metrics = losses.next_token(model, batch, key)
    poison = (batch["tokens"] == POISON).any()
    return jnp.where(poison, jnp.nan, 1.0) * total, weight, metrics


def make_dataset(num_documents=60, poison=None, lengths=(5, 12)):
    choose = np.random.default_rng(0)
    sizes = choose.integers(*lengths, num_documents)
    documents = [choose.integers(1, POISON, size).astype(np.int32) for size in sizes]
    if poison is not None:
        documents[poison][0] = POISON
    corpus = Corpus.from_arrays(documents, VOCAB, 100)
    return zoo.PackedDataset(corpus, SEPARATOR, 8, 4, 0)


def poisoned_steps(dataset, steps):
    return [k + 1 for k in range(steps) if (dataset.batch(k)["tokens"] == POISON).any()]


@functools.cache
def poisoned_dataset(first):
    """A dataset whose batches hold the token POISON for the first time in that step."""
    datasets = (make_dataset(poison=document) for document in range(60))
    return next(dataset for dataset in datasets if poisoned_steps(dataset, first) == [first])


def config(folder, **options):
    defaults = {"steps": 30, "log_every": 10, "eval_every": 1000, "checkpoint_every": 1000}
    options = defaults | {"precision": "fp32", "compilation_cache": None} | options
    return Config(**{"run_dir": folder / "run"} | options)


def training(dataset=None, *, schedule=None, **options):
    given = {
        "make_model": Bigram,
        "loss_fn": losses.next_token,
        "optimizer": optax.adam(schedule or 1e-2),
        "data": dataset or make_dataset(),
        "evaluate": lambda model, whole: {"eval_loss": 1.0},
        "schedule": schedule,
    }
    return zoo.Training(**given | options)


def fit(config, dataset=None, **options):
    """(the state, the whole evaluation) of a run."""
    with zoo.Run(config) as run:
        return zoo.fit(run, training(dataset, **options))


def checkpoints(config):
    return sorted(int(path.name) for path in (config.run_dir / "checkpoints").iterdir())


def lines(config, name="loss"):
    records = read_metrics(config.run_dir / "metrics.jsonl")
    return {record["step"]: record[name] for record in records if name in record}


def arrays(state):
    leaves = jax.tree.leaves(eqx.filter(state, eqx.is_array))
    return [
        jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in leaves
    ]


def assert_equal_states(state, other):
    for x, y in zip(arrays(state), arrays(other), strict=True):
        np.testing.assert_array_equal(x, y)


# --- Steps, resume ----------------------------------------------------------------------------


def test_resumed_run_equals_an_unbroken_run(tmp_path, capsys):
    whole = config(tmp_path / "whole")
    parts = config(tmp_path / "parts")
    schedule = optax.linear_schedule(1e-2, 0.0, 30)
    state, _ = fit(whole, schedule=schedule)

    first = config(tmp_path / "parts", steps=14)
    fit(first, schedule=schedule)
    assert "resumed" not in capsys.readouterr().out
    resumed, _ = fit(parts, schedule=schedule)
    output = capsys.readouterr().out
    assert f"resumed {parts.run_dir} at step 14" in output
    assert "--steps was 14 and is 30: the schedule is laid out anew over all of them" in output
    assert f"the learning rate continues at {1e-2 * 16 / 30:.2e}" in output
    assert_equal_states(resumed, state)
    assert lines(parts)[30] == lines(whole)[30]


class Shifted(Bigram):
    """A bigram model whose large matrices are frozen, and a shift of its logits trained."""

    shift: Float[Array, "vocab"]

    def __init__(self, seed=0):
        draw = np.random.default_rng(seed).normal
        self.table = jnp.asarray(draw(size=(VOCAB, 8192)), jnp.bfloat16)
        self.head = jnp.asarray(draw(size=(8192, VOCAB)) / 64, jnp.bfloat16)
        self.shift = jnp.zeros(VOCAB, jnp.bfloat16)

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs) + self.shift[None, None]


def fit_shift(config, checksum="a-base", load=Shifted):
    """The state of a run that begins with a model in bf16, of which it trains the shift."""
    options = {
        "make_model": lambda key, model: model,
        "trainable": lambda model: jax.tree.map(lambda x: x.ndim == 1, model),
        "pretrained": Pretrained(eqx.filter_eval_shape(Shifted), load, checksum),
    }
    return fit(config, **options).state


def on_device(load, mesh):
    model = load()
    return jax.device_put(model, sharding.shardings(model, mesh))


def num_bytes(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_checkpoints_leave_out_a_base_that_is_loaded_anew(tmp_path):
    whole, parts = config(tmp_path / "whole", steps=8), config(tmp_path / "parts", steps=8)
    mesh = zoo.make_mesh("")
    load = lambda: on_device(Shifted, mesh)
    unbroken = fit_shift(whole, load=load)
    fit_shift(config(tmp_path / "parts", steps=3), load=load)
    resumed = fit_shift(parts, load=load)
    assert_equal_states(resumed, unbroken)
    assert {str(x.dtype) for x in arrays(resumed.model)} == {"bfloat16", "float32"}
    np.testing.assert_array_equal(resumed.model.table, Shifted().table)
    assert np.abs(resumed.model.shift).max() > 0

    newest = parts.run_dir / "checkpoints" / "8"
    meta = json.loads((newest / "meta.json").read_text())
    assert meta["meta"]["base"] == "a-base"
    of_model = {name for name in meta["arrays"] if name.startswith("model.")}
    assert of_model == {"model.shift"}
    assert num_bytes(newest) < Shifted().table.nbytes / 4

    mesh = zoo.make_mesh("fsdp=4,tensor=2")
    continued = config(tmp_path / "parts", steps=12, mesh="fsdp=4,tensor=2")
    sharded = fit_shift(continued, load=lambda: on_device(Shifted, mesh))
    assert len(sharded.model.table.sharding.device_set) == 8
    mesh = zoo.make_mesh("")
    alone = fit_shift(config(tmp_path / "whole", steps=12), load=load)
    np.testing.assert_allclose(sharded.model.shift, alone.model.shift, rtol=1e-5)


def test_another_base_is_refused_before_it_is_loaded(tmp_path):
    mesh = zoo.make_mesh("")
    fit_shift(config(tmp_path, steps=3), load=lambda: on_device(Shifted, mesh))

    def load():
        raise AssertionError("it was loaded")

    with pytest.raises(RunError, match=r"--model .* base") as error:
        fit_shift(config(tmp_path, steps=6), "another-base", load)
    assert "another-base" in str(error.value)
    assert "a-base" in str(error.value)
    with pytest.raises(RunError, match="its weights have no checksum"):
        fit_shift(config(tmp_path, steps=6), "", load)

    files = (tmp_path / "run" / "checkpoints" / "3" / "arrays").rglob("*")
    flip_bit(max((x for x in files if x.is_file()), key=lambda path: path.stat().st_size))
    with pytest.raises(CheckpointError, match="is damaged"):
        fit_shift(config(tmp_path, steps=6), load=load)


def test_finished_runs_are_not_changed(tmp_path, capsys):
    state, _ = fit(config(tmp_path, steps=8))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    again, result = fit(config(tmp_path, steps=5))  # fewer than it has behind it undo none
    output = capsys.readouterr().out
    assert "has finished 8 steps; more --steps would continue it" in output
    assert "schedule" not in output
    assert_equal_states(again, state)
    assert result == {"eval_loss": 1.0}
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_other_data_is_refused_at_resume(tmp_path):
    fit(config(tmp_path, steps=8), fingerprint="a")
    with pytest.raises(RunError, match=r"has changed since step 8.*Put the files back"):
        fit(config(tmp_path), fingerprint="b")
    fit(config(tmp_path), fingerprint="a")


def test_metrics_and_checkpoints_belong_to_their_step(tmp_path, monkeypatch):
    schedule = optax.cosine_decay_schedule(1e-2, 30)
    monkeypatch.setattr(planner, "make_job", lambda *_: pytest.fail("a run needs no plan"))
    every = config(tmp_path / "every", log_every=1)
    some = config(tmp_path / "some", eval_every=7, checkpoint_every=8, keep_checkpoints=2)
    threads = set(threading.enumerate())
    fit(every, schedule=schedule)
    fit(some, schedule=schedule)
    assert not [t for t in set(threading.enumerate()) - threads if not t.daemon]
    assert checkpoints(some) == [24, 30]
    assert list(lines(every)) == list(range(1, 31))
    assert list(lines(some)) == [1, 10, 20, 30]
    assert list(lines(some, "eval_loss")) == [7, 14, 21, 28, 30]
    assert all(lines(every)[step] == loss for step, loss in lines(some).items())
    rates = lines(some, "learning_rate")
    assert rates == pytest.approx({step: float(schedule(step - 1)) for step in rates}, rel=1e-6)


def test_a_run_of_many_steps_is_not_laid_out(tmp_path):
    given = config(tmp_path)
    with zoo.Run(given) as run:
        object.__setattr__(run.config, "steps", 2**50)
        described = training(schedule=optax.constant_schedule(1.0))
        recorder.Recorder(Hooks(run, described, []))


def test_epochs_without_steps_are_refused(tmp_path):
    with (
        zoo.Run(config(tmp_path, epochs=2.0)) as run,
        pytest.raises(ValueError, match=r"epochs=2\.0: .*run\.steps_of\(dataset\)"),
    ):
        zoo.fit(run, training())


def test_a_step_without_memory_is_explained_by_the_planner(tmp_path, monkeypatch):
    def fail(*_):
        raise jax.errors.JaxRuntimeError(message)

    explain = lambda run, training, message, programs: f"take --accumulate 2: {message}"
    monkeypatch.setattr(zoo.Run, "planner", SimpleNamespace(explain=explain))
    monkeypatch.setattr("zoo.training.compiled.CompiledStep.__call__", fail)
    message = "RESOURCE_EXHAUSTED: allocating 2.00GiB"
    with pytest.raises(RunError, match="--accumulate 2: RESOURCE_EXHAUSTED"):
        fit(config(tmp_path))
    message = "INTERNAL: something else"
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        fit(config(tmp_path))


def test_fit_plans_its_training_without_running(tmp_path, capsys):
    wanted = training(flops_per_token=4e9, remat="none")
    with zoo.Run(config(tmp_path, plan="cpu:8", mesh="fsdp=2", accumulate=2)) as run:
        job = planner.make_job(run, wanted)
        assert job.training is wanted
        with pytest.raises(SystemExit) as end:
            zoo.fit(run, wanted)
    assert not end.value.code
    output = " ".join(capsys.readouterr().out.split())
    for text in ("(fsdp=2), 32 tokens per step", "remat none, 2 microbatches", "1.280e+11"):
        assert text in output
    assert not (tmp_path / "run").exists()


def test_indivisible_batches_are_refused_before_compute(tmp_path):
    fail = lambda key: pytest.fail("a model was made")
    with pytest.raises(ValueError, match=r"batch_size=4 .* 3"):
        fit(config(tmp_path, accumulate=3), make_model=fail)


def test_batches_larger_than_the_memory_are_refused_before_compute(tmp_path):
    fail = lambda key: pytest.fail("a model was made")
    dataset = zoo.PackedDataset(make_dataset().corpus, SEPARATOR, 8, 10**11, 0)
    with pytest.raises(ValueError, match=r"batch_size=100000000000: .*160 bytes each\) has 14,9"):
        fit(config(tmp_path), dataset, make_model=fail)


@pytest.mark.parametrize("of_arrays", [True, False])
def test_ids_beyond_the_vocabulary_are_refused_before_compute(tmp_path, of_arrays, monkeypatch):
    tokens = np.zeros((20, 3), np.int32)
    tokens[17, 2] = VOCAB
    dataset = zoo.ArrayDataset({"tokens": tokens}, 4, 0) if of_arrays else make_dataset()
    rnn = zoo.rnn.Config(vocab_size=VOCAB if of_arrays else VOCAB - 1, hidden_size=8)
    monkeypatch.setattr(Blueprint, "state", lambda _: pytest.fail("a state was made"))
    place = rf"tokens\[17, 2\] is {VOCAB}" if of_arrays else f"the data has vocab_size={VOCAB}"
    with pytest.raises(ValueError, match=rf"{place}, and the model .*vocab_size={rnn.vocab_size}"):
        fit(config(tmp_path), dataset, make_model=lambda key: zoo.rnn.RNN(rnn, key=key))


# --- Steps under way --------------------------------------------------------------------------


def test_steps_in_flight_are_bounded(monkeypatch):
    unread, most = [], 0

    def program(leaves):
        nonlocal most
        unread.append(jnp.float32(len(unread)))
        most = max(most, len(unread))
        return None, {"loss": unread[-1]}

    def wait(results):
        for result in results:
            unread[:] = [x for x in unread if x is not result]

    monkeypatch.setattr(CompiledStep, "lower", lambda *_: program)
    monkeypatch.setattr(jax, "block_until_ready", wait)
    step = zoo.make_eval_step(losses.next_token)
    for _ in range(40):
        step(None, {"tokens": np.zeros((2, 3))})
    assert most == 2


# --- A loss that is not finite ----------------------------------------------------------------


def test_non_finite_loss_stops_the_run(tmp_path):
    dataset = poisoned_dataset(7)  # between two lines of the log
    run = config(tmp_path, checkpoint_every=4)
    for _ in range(2):  # at resume it is the same step, not one that is passed over
        with pytest.raises(RunError, match=r"step 7: .*checkpoint .* 4") as e:
            fit(run, dataset, loss_fn=poisoned)
        assert "--optimizer.learning-rate" in str(e.value)
        assert "--on-nonfinite skip" in str(e.value)
        assert "another --run-dir" in str(e.value)
    assert checkpoints(run) == [4]


def test_non_finite_updates_are_not_saved(tmp_path):
    def schedule(step):
        return jnp.where(step == 6, jnp.nan, 1e-2)

    run = config(tmp_path, steps=10, checkpoint_every=1, keep_checkpoints=1)
    with pytest.raises(RunError, match=r"step 7: .* and nan\. .*checkpoint .* 6"):
        fit(run, schedule=schedule)
    assert checkpoints(run) == [6]
    state, _ = fit(config(tmp_path, steps=10, on_nonfinite="skip"), schedule=schedule)
    # The schedule counts the updates, and so comes to no other step.
    assert (int(state.step), int(state.skipped)) == (10, 4)
    assert len(arrays(state)) > 5
    assert all(np.isfinite(x).all() for x in arrays(state))


def test_non_finite_updates_stop_fp16_runs(tmp_path):
    run = config(tmp_path, precision="fp16")
    with pytest.raises(RunError, match="step 3: "):
        fit(run, schedule=lambda step: jnp.where(step == 2, jnp.nan, 1e-2))


def test_skipped_steps_are_counted_and_move_no_schedule(tmp_path, capsys):
    dataset = poisoned_dataset(7)
    bad = poisoned_steps(dataset, 30)
    assert len(bad) >= 2
    schedule = optax.linear_schedule(1.0, 0.0, 40)

    def fit(steps):
        with zoo.Run(config(tmp_path, steps=steps, log_every=1, on_nonfinite="skip")) as run:
            optimizer = optax.inject_hyperparams(optax.sgd)(schedule)
            options = {"loss_fn": poisoned, "optimizer": optimizer, "schedule": schedule}
            return zoo.fit(run, training(dataset, **options)).state

    def updates(step):
        return step - sum(b <= step for b in bad)

    for steps in (20, 30):
        state = fit(steps)
        rates = lines(config(tmp_path), "learning_rate")
        applied = float(state.opt_state.hyperparams["learning_rate"])
        assert rates[steps] == pytest.approx(applied, rel=1e-6)
    assert (int(state.step), int(state.skipped)) == (30, len(bad))
    assert all(np.isfinite(x).all() for x in arrays(state))
    assert lines(config(tmp_path), "skipped")[30] == len(bad)
    goes_on = float(schedule(updates(20)))
    assert f"the learning rate continues at {goes_on:.2e}" in capsys.readouterr().out
    assert len(rates) == 30
    assert rates == pytest.approx({s: float(schedule(updates(s) - 1)) for s in rates}, rel=1e-6)


def test_fp16_overflow_does_not_stop_training(tmp_path):
    def steep(model, batch, key):
        total, weight, metrics = losses.next_token(model, batch, key)
        return total * 30, weight, metrics

    state, _ = fit(config(tmp_path, precision="fp16"), loss_fn=steep)
    assert int(state.skipped) > 0
    assert lines(config(tmp_path), "loss_scale")[30] < 2.0**15


# --- Signals ----------------------------------------------------------------------------------


def signals(*numbers):
    """An evaluation that sends signals to this process."""

    def evaluate(model, whole):
        for number in numbers:
            os.kill(os.getpid(), number)
        return {"eval_loss": 1.0}

    return evaluate


def test_signals_save_and_exit(tmp_path, capsys):
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    run = config(tmp_path, eval_every=5)
    with pytest.raises(SystemExit) as exit:
        fit(run, evaluate=signals(signal.SIGINT))
    assert exit.value.code == 130
    assert checkpoints(run) == [5]  # the step of the evaluation
    assert "saved step 5" in capsys.readouterr().out
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    fit(run)
    assert list(lines(run, "eval_loss")) == [5, 10, 15, 20, 25, 30]


HELD_OUT = make_dataset(100)


def fit_judged(config):
    """`fit`, with an evaluation of its own on HELD_OUT, of 20 batches and more."""
    with zoo.Run(config) as run:
        mean = zoo.evaluator(run, losses.next_token, HELD_OUT)
        evaluate = lambda model, whole: {"eval_loss": mean(model, whole)["loss"]}
        return zoo.fit(run, training(evaluate=evaluate))


def count_batches(monkeypatch):
    """The batches that were evaluated, one entry each."""
    seen, call = [], CompiledStep.__call__

    def counted(step, state, batch):
        if isinstance(state, Bigram):
            seen.append(batch)
        return call(step, state, batch)

    monkeypatch.setattr(CompiledStep, "__call__", counted)
    return seen


def test_finished_runs_evaluate_nothing_again_unless_it_has_changed(tmp_path, monkeypatch):
    run, whole = config(tmp_path, steps=4), HELD_OUT.batches_per_epoch
    seen = count_batches(monkeypatch)
    _, result = fit_judged(run)
    assert len(seen) == whole > 2
    assert fit_judged(run).metrics == result
    assert len(seen) == whole

    # Fewer batches of them, other ones of as many, one other number of the model, another loss.
    bounded, other = config(tmp_path, steps=4, final_eval_batches=2), make_dataset(110)
    assert fit_judged(bounded).metrics != result
    assert len(seen) == whole + 2
    model = Bigram(jax.random.key(7))
    changed = eqx.tree_at(lambda x: x.head, model, replace_fn=lambda x: x.at[0, 0].add(1e-3))

    class Other(Bigram):  # the same leaves, another forward pass
        def __call__(self, *given, **options):
            return 2 * super().__call__(*given, **options)

    again = Other(jax.random.key(7))
    half = lambda *given: (losses.next_token(*given)[0] / 2, *losses.next_token(*given)[1:])
    cases = [(model, HELD_OUT), (model, other), (changed, HELD_OUT), (again, HELD_OUT)]
    cases.append((model, HELD_OUT, half))
    for count in (2, 0):  # the second time all are known
        values = set()
        for model, dataset, *loss_fn in cases:
            seen.clear()
            with zoo.Run(bounded) as opened:
                evaluate = zoo.evaluator(opened, *loss_fn or [losses.next_token], dataset)
                values.add(evaluate(model, True)["loss"])
            assert len(seen) == count
        assert len(values) == len(cases)


def test_damaged_records_of_evaluations_are_made_again(tmp_path, monkeypatch):
    run = config(tmp_path, steps=4)
    _, result = fit_judged(run)
    record = run.run_dir / zoo.runs.evaluation.RECORD
    record.write_text(record.read_text()[:-9])
    seen = count_batches(monkeypatch)
    assert fit_judged(run).metrics == result
    assert len(seen) == HELD_OUT.batches_per_epoch
    assert fit_judged(run).metrics == result
    assert len(seen) == HELD_OUT.batches_per_epoch


@pytest.mark.parametrize(("eval_every", "limit"), [(1000, None), (2, 9)])
def test_time_of_long_evaluations_is_said_beforehand(
    eval_every, limit, tmp_path, monkeypatch, capsys
):
    """By a clock of the batches alone, 5 seconds each: other threads look at it too."""
    seen = count_batches(monkeypatch)
    monkeypatch.setattr(zoo.runs.evaluation.time, "monotonic", lambda: 5.0 * len(seen))
    count = limit or HELD_OUT.batches_per_epoch
    assert 10 < HELD_OUT.batches_per_epoch < 100
    options = {"eval_every": eval_every, "eval_batches": 4, "final_eval_batches": limit}
    fit_judged(config(tmp_path, steps=4, **options))
    shown = f"evaluating {count} batches takes about {timedelta(seconds=5 * count)}; "
    assert capsys.readouterr().out.count(shown + "--final-eval-batches bounds it") == 1


def interrupt_at(monkeypatch, interrupt, evaluation):
    """`interrupt()` in the third batch of that evaluation; returns the batches of each."""
    batches, seen = zoo.runs.evaluation.batches, []

    def interrupting(dataset, *arguments, **options):
        if dataset is HELD_OUT:
            seen.append(0)
        for k, batch in batches(dataset, *arguments, **options):
            if dataset is HELD_OUT:
                seen[-1] += 1
                if (len(seen), seen[-1]) == (evaluation, 3):
                    interrupt()
            yield k, batch

    monkeypatch.setattr(zoo.runs.evaluation, "batches", interrupting)
    return seen


def without_speed(config):
    records = read_metrics(config.run_dir / "metrics.jsonl")
    return [{k: v for k, v in r.items() if k != "tokens_per_second"} for r in records]


class Killed(Exception):
    pass


def kill():
    raise Killed


@pytest.mark.parametrize(
    ("how", "step"), [("SIGTERM", 6), pytest.param("SIGKILL", 12, marks=pytest.mark.slow)]
)
def test_interrupted_evaluations_are_repeated(how, step, tmp_path, monkeypatch, capsys):
    options = {"eval_every": 6, "checkpoint_every": 4, "eval_batches": 10}
    options["steps"] = min(step + 6, 30)
    whole, run = config(tmp_path / "whole", **options), config(tmp_path, **options)
    state, result = fit_judged(whole)
    assert HELD_OUT.batches_per_epoch > 10

    with monkeypatch.context() as context:
        stop = {"SIGTERM": lambda: signal.raise_signal(signal.SIGTERM), "SIGKILL": kill}[how]
        batches = interrupt_at(context, stop, step // 6)
        with pytest.raises((SystemExit, Killed)) as end:
            fit_judged(run)
        assert batches == [10] * (step // 6 - 1) + [3]
    assert list(lines(run, "eval_loss")) == list(range(6, step, 6))
    saved = step if how == "SIGTERM" or step != 6 else 4
    assert checkpoints(run)[-1] == saved
    if how == "SIGTERM":
        assert end.value.code == 143
        assert f"SIGTERM: saved step {step} in" in capsys.readouterr().out

    again, same = fit_judged(run)
    assert same == result
    assert_equal_states(again, state)
    assert without_speed(run) == without_speed(whole)


def test_runs_on_a_full_disk_say_what_is_left_and_resume(tmp_path, monkeypatch):
    write = checksums.write

    def full(folder, **options):
        if folder.name != "4.tmp":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(folder, **options)

    options = {"steps": 12, "checkpoint_every": 4}
    whole, run = config(tmp_path / "whole", **options), config(tmp_path, **options)
    with monkeypatch.context() as context:
        context.setattr(checksums, "write", full)
        with pytest.raises(CheckpointError, match=r"Step 8 .*disk is full\. .*step 4 is there"):
            fit(run)
    assert_equal_states(fit(run).state, fit(whole).state)
    assert without_speed(run) == without_speed(whole)


def test_signalled_runs_evaluate_after_resuming(tmp_path, monkeypatch):
    run = config(tmp_path, eval_every=6)
    compiled = CompiledStep.__call__

    def signalled(step_fn, state, batch):
        if getattr(state, "step", None) is not None and int(state.step) == 11:
            signal.raise_signal(signal.SIGTERM)
        return compiled(step_fn, state, batch)

    with monkeypatch.context() as context:
        context.setattr(CompiledStep, "__call__", signalled)
        with pytest.raises(SystemExit):
            fit(run)
    assert checkpoints(run)[-1] == 12
    assert list(lines(run, "eval_loss")) == [6]
    fit(run)
    assert list(lines(run, "eval_loss")) == [6, 12, 18, 24, 30]


def test_second_interrupt_exits_immediately(tmp_path):
    run = config(tmp_path, steps=9, eval_every=5, checkpoint_every=3, log_every=1)
    with pytest.raises(KeyboardInterrupt):
        fit(run, evaluate=signals(signal.SIGINT, signal.SIGINT))
    assert checkpoints(run) == [3]
    fit(run)  # which takes steps 4 and 5 again
    records = read_metrics(run.run_dir / "metrics.jsonl")
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 10))


# --- Compiles ---------------------------------------------------------------------------------


def test_each_bucket_compiles_once_and_nothing_in_the_loop(tmp_path, monkeypatch):
    dataset = make_dataset(100, lengths=(2, 30))
    dataset = zoo.BucketedDataset(dataset.corpus, SEPARATOR, (8, 16, 32), 4)
    assert {dataset.bucket(k) for k in range(40)} == {8, 16, 32}
    counter, batches = CompileCounter(), zoo.runs.loop.batches
    compiles, compile = [], CompiledStep.compile

    def counting(*arguments, **options):
        with counter:
            yield from batches(*arguments, **options)

    def counted(step, *arguments):
        with CompileCounter() as own:
            compile(step, *arguments)
        compiles.append(own.compiles)

    monkeypatch.setattr(zoo.runs.loop, "batches", counting)
    monkeypatch.setattr(CompiledStep, "compile", counted)
    run = config(tmp_path, steps=40, checkpoint_every=10, eval_every=10)
    fit(run, dataset, schedule=optax.cosine_decay_schedule(1e-2, 40))
    assert counter.compiles == 0
    assert compiles == [1, 1, 1]  # a bucket at a time


# --- Evaluation -------------------------------------------------------------------------------


def test_evaluation_is_a_weighted_mean(tmp_path):
    dataset, model = make_dataset(), Bigram(jax.random.key(0))

    def mean(batches):
        sums = [losses.next_token(model, jax.device_put(dataset.batch(k)), None) for k in batches]
        return float(sum(total for total, _, _ in sums) / sum(weight for _, weight, _ in sums))

    with zoo.Run(config(tmp_path, eval_batches=3)) as run:
        evaluate = zoo.evaluator(run, losses.next_token, dataset)
        assert evaluate(model, True)["loss"] == pytest.approx(
            mean(range(dataset.batches_per_epoch)), rel=1e-6
        )
        assert evaluate(model, False)["loss"] == pytest.approx(mean(range(3)), rel=1e-6)
    with zoo.Run(config(tmp_path, eval_batches=3, final_eval_batches=2)) as run:
        evaluate = zoo.evaluator(run, losses.next_token, dataset)
        assert evaluate(model, True)["loss"] == pytest.approx(mean(range(2)), rel=1e-6)
        assert not math.isclose(
            mean(range(3)), mean(range(dataset.batches_per_epoch)), rel_tol=1e-4
        )


def test_evaluation_compiles_each_bucket_once(tmp_path):
    corpus = make_dataset(50, lengths=(2, 30)).corpus
    dataset, model = (
        zoo.BucketedDataset(corpus, SEPARATOR, (8, 16, 32), 4),
        Bigram(jax.random.key(0)),
    )
    with zoo.Run(config(tmp_path)) as run:
        evaluate = zoo.evaluator(run, losses.next_token, dataset)
        with CompileCounter() as first:
            evaluate(model, False)
        with CompileCounter() as later:
            evaluate(model, True)
    assert (first.compiles, later.compiles) == (3, 0)


def test_runs_killed_before_their_first_checkpoint_keep_the_first_evaluation(tmp_path, monkeypatch):
    def train(folder):
        with zoo.Run(config(folder, steps=4)) as run:
            mean = zoo.evaluator(run, losses.next_token, HELD_OUT)
            evaluate = lambda model, whole: {"eval_loss": mean(model, whole)["loss"]}
            make_model, begin_with = lambda _, model: model, Bigram(jax.random.key(5))
            zoo.fit(run, training(make_model=make_model, pretrained=begin_with, evaluate=evaluate))

    train(tmp_path / "whole")
    with monkeypatch.context() as context:
        context.setattr(zoo.runs.recorder.Recorder, "save", lambda *_: kill())
        with pytest.raises(Killed):
            train(tmp_path)
    assert list(lines(config(tmp_path), "eval_loss")) == [0]
    train(tmp_path)
    assert without_speed(config(tmp_path)) == without_speed(config(tmp_path / "whole"))
    assert list(lines(config(tmp_path), "eval_loss")) == [0, 4]


@pytest.mark.parametrize(
    ("owner", "name"), [(zoo.runs.metrics.MetricsLog, "close"), (zoo.runs.recorder, "plot_curves")]
)
def test_cleanup_errors_do_not_mask_original(owner, name, tmp_path, monkeypatch):
    """On a full disk each file that is written at the end fails as well."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def evaluate(model, whole):
        raise RunError("this is why")

    monkeypatch.setattr(owner, name, full)
    with pytest.raises(RunError, match="this is why"):
        fit(config(tmp_path, steps=1), evaluate=evaluate)


def test_sources_without_a_token_in_a_step_have_no_loss(tmp_path):
    datasets = {"code": make_dataset(), "docs": make_dataset(lengths=(3, 9))}
    dataset = MixtureDataset(datasets, [Stage(0, (1, 0)), Stage(4, (0, 1))])
    loss_fn = losses.per_source(losses.next_token, [*datasets])
    of_run = config(tmp_path, steps=6, log_every=1)
    fit(of_run, dataset, loss_fn=loss_fn)
    whole = lines(of_run)
    assert len(whole) == 6
    for name, steps in (("code", (1, 2, 3, 4)), ("docs", (5, 6))):
        assert lines(of_run, f"{name}/loss") == pytest.approx({step: whole[step] for step in steps})
