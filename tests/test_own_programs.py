"""Programs of one's own: all flags of a run work there, and a resume names what has changed."""

import dataclasses
import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import zoo
from zoo import sharding
from zoo.data import datasets
from zoo.runs.callbacks import hooks
from zoo.runs.config import Config
from zoo.runs.metrics import read_metrics
from zoo.runs.processes import RunError
from zoo.runs.remote import folder as remote_folder
from zoo.training import compiled

pytestmark = pytest.mark.usefixtures("no_curves")
ROWS = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)


class Net(eqx.Module):
    """A network of one's own, without annotations."""

    weight: jax.Array

    def __init__(self, key):
        self.weight = jax.random.normal(key, (4, 4))


def loss(model, batch, key):
    """The sum of squares, their count, and a metric of the same name as in an evaluation."""
    errors = ((batch["rows"] @ model.weight) ** 2).sum(1).astype(jnp.float32)
    weights = batch["weights"].astype(jnp.float32)
    return (errors * weights).sum(), weights.sum(), {"accuracy": (errors * weights).sum()}


def dataset(rows=ROWS, seed=0):
    return zoo.ArrayDataset({"rows": rows}, batch_size=8, seed=seed)


def config(folder, **options):
    defaults = {"steps": 8, "precision": "fp32", "compilation_cache": None, "eval_every": 100}
    return Config(run_dir=folder / "run", **defaults | options)


def fit(config, *callbacks, **options):
    """A program of one's own: the result of its run."""
    given = {
        "make_model": Net,
        "loss_fn": loss,
        "optimizer": optax.adam(1e-2),
        "data": dataset(),
        "evaluate": dataset(ROWS[:16]),
    }
    with zoo.Run(config) as run:
        return zoo.fit(run, zoo.Training(**given | options), callbacks)


def lines(config, name):
    records = read_metrics(config.run_dir / "metrics.jsonl")
    return {record["step"]: record[name] for record in records if name in record}


# --- Flags ------------------------------------------------------------------------------------


class Tracked(zoo.callbacks.Callback):
    """Stands for a tracker."""

    def on_start(self, loop, state):
        (loop.run.folder / f"{self.name}.tracked").touch()


def show_most(folder, monkeypatch):
    """The flags that one run shows together, each found by what it leaves."""
    names = ("wandb", "tensorboard")
    trackers = {name: type(name, (Tracked,), {"name": name}) for name in names}
    monkeypatch.setattr(hooks, "TRACKERS", trackers)
    seen = []

    def watched(model, batch, key):
        parts = sharding.num_parts("seq")
        seen.append((key is None, len(batch["rows"]), str(model.weight.dtype), parts))
        return loss(model, batch, key)

    given = {
        "steps": 17,
        "mesh": "fsdp=2,tensor=2",
        "precision": "bf16",
        "accumulate": 2,
        "clip_norm": 1e-9,
        "seed": 1,
        "average": 0.5,
        "keep_best": "average/eval_loss",
        "log_every": 6,
        "eval_every": 8,
        "eval_batches": 1,
        "checkpoint_every": 5,
        "keep_checkpoints": 2,
        "sequence_parallel": True,
        "track": "wandb,tensorboard",
        "norms_every": 6,
        "profile": True,
        "compilation_cache": folder / "cache",
    }
    compilation_cache.reset_cache()  # or JAX goes on with the one that this process began with
    wanted, options = config(folder, **given), {"loss_fn": watched, "optimizer": optax.sgd(1.0)}
    trained = fit(wanted, **options)
    run, state = wanted.run_dir, trained.state
    initial = Net(jax.random.split(jax.random.key(1))[0]).weight
    steps = [rows for is_evaluation, rows, *_ in seen if not is_evaluation]
    shown = {
        "run_dir": (run / "metrics.jsonl").exists(),
        "steps": int(state.step) == 17,
        "mesh": len(state.model.weight.sharding.device_set) == 4,
        "precision": {dtype for *_, dtype, _ in seen} == {"bfloat16"},
        "accumulate": 4 in steps,
        # 17 steps of 1e-9 leave the initial weights, and the seed decides which they are.
        "clip_norm": np.abs(state.model.weight - initial).max() < 1e-6,
        "seed": np.allclose(state.model.weight, initial, atol=1e-6),
        "average": trained.model is not state.model and "average/eval_loss" in trained.metrics,
        "keep_best": (run / "best" / "model.safetensors").exists(),
        "log_every": [*lines(wanted, "loss")] == [1, 6, 12, 17],
        "eval_every": [*lines(wanted, "eval_loss")] == [8, 16, 17],
        "eval_batches": lines(wanted, "eval_loss")[8] != lines(wanted, "eval_loss")[17],
        "checkpoint_every": (run / "checkpoints" / "15").is_dir(),
        "keep_checkpoints": len([*(run / "checkpoints").iterdir()]) == 2,
        "sequence_parallel": {parts for *_, parts in seen} == {2},
        "track": all((run / f"{x}.tracked").exists() for x in ("wandb", "tensorboard")),
        "norms_every": [*lines(wanted, "norms/weight")] == [6, 12],
        "profile": any((run / "profile").rglob("*.*")),
        # What is stored depends on how long a compile took.
        "compilation_cache": jax.config.jax_compilation_cache_dir == str(folder / "cache"),
    }
    assert shown.keys() == given.keys() | {"run_dir"}
    return shown


def show_patience(folder, monkeypatch):
    state, _ = fit(config(folder, patience=1, eval_every=2), optimizer=optax.set_to_zero())
    return {"patience": int(state.step) == 4}


def show_nonfinite(folder, monkeypatch):
    options = {"data": dataset(np.where(ROWS[3, 0] == ROWS, np.nan, ROWS)), "evaluate": by_hand()}
    with pytest.raises(ValueError, match=r"rows\[\d, 0\] is nan"):
        fit(config(folder), **options)
    skipped = fit(config(folder, on_nonfinite="skip"), **options).state.skipped
    return {"on_nonfinite": int(skipped) == 3}


def show_plan(folder, monkeypatch):
    with pytest.raises(SystemExit):
        fit(config(folder, plan="cpu:1"))
    return {"plan": not (folder / "run").exists()}


def show_distributed(folder, monkeypatch):
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    with pytest.raises(RunError, match="--distributed: JAX_COORDINATOR_ADDRESS"):
        fit(config(folder, distributed=True))
    return {"distributed": True}


def show_epochs(folder, monkeypatch):
    with zoo.Run(config(folder, epochs=1.5)) as run:
        steps = run.steps_of(dataset())
        given = {"make_model": Net, "loss_fn": loss, "optimizer": optax.adam(1e-2)}
        state, _ = zoo.fit(run, zoo.Training(**given, data=dataset(), evaluate=dataset(ROWS[:16])))
    return {"epochs": int(state.step) == steps == -(-3 * dataset().batches_per_epoch // 2)}


def show_final_evaluation(folder, monkeypatch):
    bounded = fit(config(folder / "one", final_eval_batches=1), optimizer=optax.sgd(0.0))
    whole = fit(config(folder / "two"), optimizer=optax.sgd(0.0))
    return {"final_eval_batches": bounded.metrics["eval_loss"] != whole.metrics["eval_loss"]}


def show_remote(folder, monkeypatch):
    given = {}

    def remember(address, local, **options):
        given.update(address=address, local=local)
        raise RunError("as far as this")

    monkeypatch.setattr(remote_folder, "RemoteFolder", remember)
    given_flags = {"work_dir": folder / "work", "compilation_cache": None}
    with pytest.raises(RunError, match="as far as this"):
        fit(Config(run_dir="s3://bucket/run", steps=1, **given_flags))
    return {"work_dir": given["local"].is_relative_to(folder / "work")}


def show_xla(folder, monkeypatch):
    """The compiler gets the set's flags: it refuses one that it lacks."""
    monkeypatch.setitem(compiled.FLAG_SETS, "cpu", {"overlap": {"no_such_flag": True}})
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_flag"):
        fit(config(folder, xla="overlap"))
    return {"xla": True}


SHOWN = (show_most, show_patience, show_nonfinite, show_plan, show_distributed, show_remote)
SHOWN += (show_epochs, show_final_evaluation, show_xla)


@pytest.mark.slow
def test_every_flag_of_a_run_works_in_a_program_of_ones_own(tmp_path, monkeypatch):
    found = {}
    for show in SHOWN:
        (tmp_path / show.__name__).mkdir()
        with monkeypatch.context() as context:
            found |= show(tmp_path / show.__name__, context)
    assert found.keys() == {field.name for field in dataclasses.fields(Config)}
    assert [name for name, works in found.items() if not works] == []


def test_a_flag_and_a_callback_of_one_kind_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'average', .* flag"):
        fit(config(tmp_path, average=0.9), zoo.callbacks.Average(0.9))


def test_nothing_is_clipped_without_a_norm(tmp_path):
    wanted = config(tmp_path, steps=1, clip_norm=None)
    state, _ = fit(wanted, optimizer=optax.sgd(1.0))
    initial = Net(jax.random.split(jax.random.key(0))[0]).weight
    norm = lines(wanted, "grad_norm")[1]
    assert norm > 2
    assert np.linalg.norm(state.model.weight - initial) == pytest.approx(norm, rel=1e-5)


# --- Evaluations ------------------------------------------------------------------------------


def by_hand(**values):
    return lambda model, whole: {"eval_loss": 1.0, **values}


@pytest.mark.parametrize("kind", ["dataset", "evaluator", "function"])
def test_evaluations_have_names_of_their_own(kind, tmp_path):
    wanted = config(tmp_path, eval_every=4, log_every=1)
    with zoo.Run(wanted) as run:
        held_out = dataset(ROWS[:16])
        means = zoo.evaluator(run, loss, held_out)
        given = {
            "dataset": held_out,
            "evaluator": means,
            "function": lambda *x: {**means(*x), "n": 2},
        }
        training = zoo.Training(
            make_model=Net,
            loss_fn=loss,
            optimizer=optax.adam(1e-2),
            data=dataset(),
            evaluate=given[kind],
        )
        others = zoo.callbacks.Evaluations({"other": held_out})
        trained = zoo.fit(run, training, [others])
    weight = np.asarray(trained.state.model.weight)
    expected = ((ROWS[:16] @ weight) ** 2).sum(1).mean()
    accuracy = {"function": "accuracy"}.get(kind, "eval_accuracy")
    more = {"n": 2.0} if kind == "function" else {}
    found = {"eval_loss", accuracy, "other/eval_loss", "other/eval_accuracy", *more}
    assert trained.metrics.keys() == found
    assert trained.metrics["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert trained.metrics["other/eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert [*lines(wanted, "loss")] == [*range(1, 9)]  # and no evaluation in that curve
    assert [*lines(wanted, "eval_loss")] == [4, 8]


def test_an_evaluation_divides_pairs_by_their_own_weight(tmp_path):
    def paired(model, batch, key):
        total, weight, _ = loss(model, batch, key)
        first = batch["rows"][:, 0]
        return total, weight, {"first": (first.sum(), (first > 0).sum())}

    result = fit(config(tmp_path, steps=1), loss_fn=paired).metrics
    first = ROWS[:16, 0]
    assert result["eval_first"] == pytest.approx(first.sum() / (first > 0).sum(), rel=1e-5)


def vector(model, batch, key):
    total, weight, _ = loss(model, batch, key)
    return total, weight, {"by_row": batch["weights"]}


class NoStep(zoo.callbacks.Callback):
    def on_step(self, *_):
        pytest.fail("a step was taken")


@pytest.mark.parametrize(
    ("flags", "options", "message"),
    [
        ({}, {"loss_fn": vector}, r"vector .* 'by_row', float32\[8\]:"),
        (
            {"keep_best": "eval_los"},
            {},
            r"'best': metric='eval_los' .* eval_loss, eval_accuracy",
        ),
        ({"patience": 2}, {"evaluate": lambda *_: {"score": 1.0}}, "metric='eval_loss'"),
        (
            {"average": 0.9, "keep_best": "average/score"},
            {},
            r"'average/score' .*average/eval_loss",
        ),
        ({"patience": 2}, {"evaluate": lambda *_: {"score": np.ones(3)}}, "'score'=.*one number"),
    ],
    ids=["vector", "best", "patience", "average", "a function's vector"],
)
def test_unfit_metrics_are_refused_before_the_first_step(flags, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        fit(config(tmp_path, **flags), NoStep(), **options)


def test_a_vector_of_an_evaluation_alone_is_refused_before_the_first_step(tmp_path):
    with zoo.Run(config(tmp_path)) as run:
        means = zoo.evaluator(run, vector, dataset(ROWS[:16]))
        training = zoo.Training(
            make_model=Net, loss_fn=loss, optimizer=optax.adam(1e-2), data=dataset(), evaluate=means
        )
        with pytest.raises(ValueError, match=r"'by_row', float32\[8\]"):
            zoo.fit(run, training, [NoStep()])


def test_what_is_no_evaluation_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"evaluate=3: give a zoo\.Dataset|'evaluate': 3"):
        fit(config(tmp_path), evaluate=3)


# --- What a run began with --------------------------------------------------------------------


def test_resume_on_other_arrays_is_refused(tmp_path):
    fit(config(tmp_path, steps=2))
    other = ROWS.copy()
    other[17, 2] += 1
    for data in (dataset(other), dataset(seed=1), dataset(ROWS[:23])):
        with pytest.raises(RunError, match=r"the data of .* has changed since step 2"):
            fit(config(tmp_path), data=data)
    assert int(fit(config(tmp_path)).state.step) == 8


class Drawn:
    """A dataset of one's own without a fingerprint."""

    unit, batch_size, buckets, batches_per_epoch = "examples", 8, (1,), 40

    def __init__(self, changed=None):
        self._changed = changed

    def row(self, bucket):
        return {"rows": ((4,), np.float32), "weights": ((), np.float32)}

    def batch(self, k, rows=None):
        batch = np.random.default_rng(k).normal(size=(8, 4)).astype(np.float32)
        batch += k == self._changed
        return {"rows": batch[rows], "weights": np.ones(len(batch[rows]), np.float32)}


def test_datasets_without_a_fingerprint_have_that_of_some_batches(tmp_path):
    prints = [datasets.fingerprint(Drawn(changed)) for changed in (None, None, 0, 15, 35)]
    assert prints[0] == prints[1]
    assert len({*prints}) == 4
    fit(config(tmp_path, steps=2), data=Drawn())
    with pytest.raises(RunError, match="has changed since step 2"):
        fit(config(tmp_path), data=Drawn(15))


@pytest.mark.parametrize(
    ("made", "stepped", "message"),
    [
        (optax.sgd(1e-2), optax.adam(1e-2), r"0 is EmptyState, .* ScaleByAdamState"),
        (optax.adam(1e-2), optax.adamw(1e-2), r"2 is absent, .* EmptyState"),
    ],
    ids=["sgd", "adam"],
)
def test_a_step_refuses_the_state_of_another_optimizer(made, stepped, message):
    state = zoo.init_state(Net, made, key=jax.random.key(0))
    step = zoo.make_train_step(loss, stepped, precision="fp32")
    with pytest.raises(ValueError, match=f"optimizer: the step's is not .*{message}"):
        step(state, dataset().batch(0))
    assert not state.model.weight.is_deleted()
    state, _ = zoo.make_train_step(loss, made, precision="fp32")(state, dataset().batch(0))
    assert int(state.step) == 1


def adamw(rate=1e-2, **options):
    return optax.chain(optax.clip(1.0), optax.adamw(rate, **options))


def scaled(factor, model, batch, key):
    total, *rest = loss(model, batch, key)
    return total * factor, *rest


FACTOR = 1.0


def by_global(model, batch, key):
    total, *rest = loss(model, batch, key)
    return total * FACTOR, *rest


def test_another_optimizer_or_loss_is_named_at_a_resume(tmp_path, capsys, monkeypatch):
    def resumed(steps, **options):
        capsys.readouterr()
        fit(config(tmp_path, steps=steps), **{"optimizer": adamw(), "loss_fn": by_global} | options)
        return capsys.readouterr().out

    assert "goes on" not in resumed(2) + resumed(3)
    output = resumed(4, optimizer=adamw(b1=0.8))
    assert re.search(
        r"the optimizer has changed since step 3.*:\n  optimizer\..*b1: was 0\.9, is 0\.8\n", output
    )
    assert re.search(r"step_size: was -0\.01, is -0\.02", resumed(5, optimizer=adamw(0.02)))
    resumed(6)
    with monkeypatch.context() as context:
        context.setitem(globals(), "FACTOR", 2.0)
        assert re.search(r"the loss_fn .*\n  loss_fn\.FACTOR: was 1\.0, is 2\.0\n", resumed(7))
    output = resumed(8, loss_fn=functools.partial(scaled, 1.0))
    assert "loss_fn: was by_global, source " in output
    output = resumed(9, loss_fn=functools.partial(scaled, 3.0))
    assert "loss_fn.0: was 1.0, is 3.0" in output


def test_values_that_cannot_be_told_are_said_to_be_unknown(tmp_path, capsys):
    class Opaque:
        __slots__ = ()

    opaque = Opaque()

    def with_opaque(model, batch, key):
        assert opaque
        return loss(model, batch, key)

    for steps in (2, 4):
        fit(config(tmp_path, steps=steps), loss_fn=with_opaque)
    output = capsys.readouterr().out
    assert re.search(r"whether loss_fn\.opaque \(unknown: a .*Opaque\) has changed .* told", output)


def test_a_schedule_over_more_steps_is_no_other_optimizer(tmp_path, capsys):
    for steps in (2, 4):
        rate = optax.cosine_decay_schedule(1e-2, steps)
        fit(config(tmp_path, steps=steps), optimizer=optax.adam(rate), schedule=rate)
    output = capsys.readouterr().out
    assert "--steps was 2 and is 4" in output
    assert "has changed" not in output
