import dataclasses
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo import sharding
from zoo.common import checksums, files
from zoo.common.configuration import may_differ
from zoo.nn.precision import native_precision
from zoo.runs.checkpoint import Checkpointer
from zoo.runs.config import Config, as_json
from zoo.runs.processes import RunError
from zoo.runs.run import Run


@dataclass(frozen=True)
class Model:
    width: int = 8
    buckets: tuple[int, ...] = (1, 2)
    remat: str = may_differ("none")


@dataclass(frozen=True, kw_only=True)
class RecipeConfig(Config):
    run_dir: Path = Path("run")
    steps: int = 10
    compilation_cache: Path | None = None
    model: Model = Model()


def config(folder, **options):
    return RecipeConfig(run_dir=folder / "run", **options)


def begin(config):
    """Make the folder of a run with one checkpoint, which binds it to its configuration."""
    with Run(config) as run:
        run.checkpointer.save(1, {"x": jnp.ones(2)}, {})
    return config.run_dir


# --- The configuration ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("accumulate", 0),
        ("log_every", 0),
        ("eval_every", -1),
        ("eval_batches", 0),
        ("final_eval_batches", 0),
        ("checkpoint_every", 0),
        ("keep_checkpoints", 0),
        ("clip_norm", 0.0),
        ("seed", -1),
        ("seed", 2**32),  # of which JAX makes what it makes of 0
        ("seed", 10**20),
    ],
)
def test_out_of_range_fields_are_named(field, value, tmp_path):
    with pytest.raises(ValueError, match=f"{field}={value}: must"):
        config(tmp_path, **{field: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"run_dir": ""}, "run_dir='':"),
        ({"epochs": 0.0}, r"epochs=0\.0:"),
        ({"epochs": 2.0, "steps": 7}, r"epochs=2\.0 and steps=7:"),
    ],
)
def test_fields_that_do_not_go_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        RecipeConfig(**fields)


def test_epochs_are_the_steps_of_the_data(tmp_path, capsys):
    dataset = zoo.ArrayDataset({"x": np.zeros(10)}, 4, seed=0)  # three batches
    with Run(config(tmp_path, epochs=2.5)) as run:
        assert run.steps_of(dataset) == run.steps_of(dataset) == run.config.steps == 8
        stored = json.loads((run.folder / "config.json").read_text())
        assert (stored["epochs"], stored["steps"]) == (None, 8)
    assert "2.5 epochs of 3 batches: 8 steps" in capsys.readouterr().out


def test_whole_configuration_is_stored(tmp_path):
    folder = begin(config(tmp_path, seed=3))
    stored = json.loads((folder / "config.json").read_text())
    assert stored == as_json(config(tmp_path, seed=3, precision=native_precision()))
    assert stored["seed"] == 3
    assert stored["run_dir"] == str(folder)
    assert stored["model"] == {"width": 8, "buckets": [1, 2], "remat": "none"}
    assert stored.keys() == {field.name for field in dataclasses.fields(RecipeConfig)}


def test_changed_fields_are_refused_and_listed(tmp_path):
    folder = begin(config(tmp_path))
    before = (folder / "config.json").read_text()
    other = config(tmp_path, seed=1, steps=20, model=Model(width=16, buckets=(1, 3)))
    with pytest.raises(RunError) as e, Run(other):
        pass
    message = str(e.value)
    assert "model.width: was 8, is 16\n" in message
    assert "model.buckets: was [1, 2], is [1, 3]\n" in message
    assert "seed: was 0, is 1\n" in message
    assert message.count(": was ") == 3  # steps may differ
    assert "another --run-dir" in message
    assert (folder / "config.json").read_text() == before


def test_precision_is_known_inside_the_run(tmp_path):
    run = Run(config(tmp_path))
    with pytest.raises(RunError, match="precision='auto'"):
        run.precision  # noqa: B018
    with run:
        assert run.precision == native_precision()


def test_flags_that_the_devices_lack_are_refused_at_the_start(tmp_path):
    with (
        pytest.raises(ValueError, match=r"xla='overlap'.*cpu"),
        Run(config(tmp_path, xla="overlap")),
    ):
        pass


def test_fields_that_may_differ_are_updated(tmp_path):
    folder = begin(config(tmp_path))
    changes = {"steps": 5, "mesh": "data=2", "eval_every": 7, "model": Model(remat="full")}
    other = config(tmp_path, precision=native_precision(), **changes)
    with Run(other) as run:
        assert run.mesh.size == 2
    assert json.loads((folder / "config.json").read_text()) == as_json(other)


def test_native_precision_is_fixed_at_start(tmp_path, monkeypatch):
    monkeypatch.setattr(zoo.runs.run, "native_precision", lambda: "bf16")
    begin(config(tmp_path))
    monkeypatch.setattr(zoo.runs.run, "native_precision", lambda: "fp32")
    with pytest.raises(RunError, match="precision: was 'bf16', is 'fp32'"), Run(config(tmp_path)):
        pass
    with Run(config(tmp_path, precision="bf16")) as run:
        assert run.config.precision == "bf16"


@pytest.mark.parametrize("damage", [b"", b"[]", b"\xff\xfe"])
def test_damaged_configuration_is_refused(damage, tmp_path):
    folder = begin(config(tmp_path))
    (folder / "config.json").write_bytes(damage)
    with pytest.raises(RunError, match=r"config.json is damaged.*meta.json"):
        Run(config(tmp_path)).__enter__()
    assert (folder / "config.json").read_bytes() == damage


def strip(folder):
    (folder / "config.json").unlink()


def swap(folder):
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))


@pytest.mark.parametrize("tamper", [strip, swap])
def test_checkpoint_configuration_overrides_the_file(tamper, tmp_path):
    with Run(config(tmp_path)) as run:
        for step, seed in ((1, 7), (2, 0)):
            stored = as_json(dataclasses.replace(run.config, seed=seed))
            run.checkpointer.save(step, {"x": jnp.ones(2)}, {"config": stored})
    tamper(run.folder)
    before = sorted(path.name for path in run.folder.iterdir())
    with pytest.raises(RunError, match="another configuration:\n  seed: was 0, is 1\n"):
        Run(config(tmp_path, seed=1)).__enter__()
    assert sorted(path.name for path in run.folder.iterdir()) == before
    if tamper is strip:
        with Run(config(tmp_path)):
            assert json.loads((run.folder / "config.json").read_text())["seed"] == 0


def change_a_number(step):
    meta = step / "meta.json"
    meta.write_text(meta.read_text().replace('"seed": 2', '"seed": 3'))


def take_the_list_of_another_folder(step):
    (step / "other").mkdir()
    checksums.write(step / "other")
    (step / "other" / checksums.NAME).replace(step / checksums.NAME)


@pytest.mark.parametrize("damage", [change_a_number, take_the_list_of_another_folder])
def test_damaged_checkpoint_configurations_are_ignored(damage, tmp_path):
    with Run(config(tmp_path)) as run:
        for step in (1, 2):
            stored = as_json(dataclasses.replace(run.config, seed=step))
            run.checkpointer.save(step, {"x": jnp.ones(2)}, {"config": stored})
    (run.folder / "config.json").unlink()
    damage(run.folder / "checkpoints" / "2")
    with Run(config(tmp_path, seed=1)):
        pass


# --- The folder -------------------------------------------------------------------------------


def test_concurrent_runs_are_refused(tmp_path):
    with Run(config(tmp_path)), pytest.raises(RunError, match="another process is training in"):
        Run(config(tmp_path)).__enter__()
    with Run(config(tmp_path)):
        pass


@pytest.mark.parametrize("place", ["run", "", "run/checkpoints"])
def test_files_blocking_folders_are_named(place, tmp_path):
    wanted = config(tmp_path / "parent")
    file = tmp_path / "parent" / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("kept")
    with pytest.raises(ValueError, match=f"'.*parent/run.*': {file} is a file, and has to be"):
        Run(wanted).__enter__()
    assert file.read_text() == "kept"


def test_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "mkdir", mock.Mock(side_effect=PermissionError))
    with pytest.raises(PermissionError) as e:
        Run(config(tmp_path)).__enter__()
    assert e.value.__notes__ == [f"run_dir='{tmp_path}/run': give a folder that can be made"]


def test_indivisible_batch_is_refused_before_start(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class WithData(RecipeConfig):
        data: zoo.text.Config = zoo.text.Config(batch_size=12)

    for mesh, accumulate in (("data=8", 1), ("", 8), ("fsdp=2", 4), ("data=2,fsdp=4", 1)):
        wrong = WithData(run_dir=tmp_path / "run", mesh=mesh, accumulate=accumulate)
        message = f"^batch_size=12 is not divisible by 8, .* on {mesh or 'one device'} with"
        with pytest.raises(ValueError, match=message):
            Run(wrong).__enter__()
    assert not (tmp_path / "run").exists()
    with Run(WithData(run_dir=tmp_path / "run", mesh="data=2", accumulate=3)):
        pass


def test_refused_start_releases_the_lock(tmp_path):
    begin(config(tmp_path))
    with pytest.raises(RunError) as refused:
        Run(config(tmp_path, seed=1)).__enter__()
    with Run(config(tmp_path)):
        assert refused.value  # while what was raised is still at hand, as in a notebook


def test_once_keeps_the_first_result(tmp_path):
    def make(text):
        def write(folder):
            folder.mkdir()
            (folder / "file").write_text(text)

        return write

    with Run(config(tmp_path)) as run:
        assert run.once("thing", make("first")) == tmp_path / "run" / "thing"
    with Run(config(tmp_path)) as run:
        assert (run.once("thing", make("second")) / "file").read_text() == "first"
        (tmp_path / "run" / "other.tmp").mkdir()  # of a start that was killed in it
        (tmp_path / "run" / "other.tmp" / "torn").write_text("half")
        other = run.once("other", make("third"))
        assert (other / "file").read_text() == "third"
        assert not (other / "torn").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "file").write_text("firsT"),
        lambda folder: (shutil.rmtree(folder), folder.mkdir()),
        lambda folder: (shutil.rmtree(folder), folder.write_text("text")),
    ],
    ids=["other bytes", "emptied", "a file in its place"],
)
def test_once_refuses_damaged_results(damage, tmp_path):
    def make(folder):
        folder.mkdir()
        (folder / "file").write_text("first")

    with Run(config(tmp_path)) as run:
        folder = run.once("thing", make)
    begin(config(tmp_path))
    damage(folder)
    with Run(config(tmp_path)) as run:
        with pytest.raises(RunError, match=f"{folder} is damaged: .*remove it to have it made"):
            run.once("thing", make)
        files.remove(folder)
        assert (run.once("thing", make) / "file").read_text() == "first"


def test_leftover_temporary_files_are_removed(tmp_path):
    begin(config(tmp_path))
    folder = tmp_path / "run"
    for name in ("curves.png.tmp", "metrics.jsonl.tmp", "config.json.tmp", "notes.tmp"):
        (folder / name).write_text("half")
    with Run(config(tmp_path)):
        assert [path.name for path in folder.glob("*.tmp")] == ["notes.tmp"]


def test_once_refuses_results_of_other_runs(tmp_path):
    made = tmp_path / "run" / "thing"
    made.mkdir(parents=True)
    run = Run(config(tmp_path))
    with pytest.raises(RunError, match=f"{made} is there, without the config.json"), run:
        run.once("thing", Path.mkdir)
    assert made.exists()
    with Run(config(tmp_path, seed=1)) as run:
        assert run.once("other", Path.mkdir) == run.once("other", Path.mkdir)


def test_failed_start_leaves_folder_unbound(tmp_path):
    run = Run(config(tmp_path))
    run.__enter__().once("thing", Path.mkdir)
    run.__exit__(OSError, OSError("no such corpus"), None)
    with Run(config(tmp_path, seed=1)) as run:
        assert not (run.folder / "thing").exists()


def test_checkpoint_keeps_failed_run_bound(tmp_path):
    run = Run(config(tmp_path))
    run.__enter__().checkpointer.save(1, {"x": jnp.ones(2)}, {})
    run.__exit__(OSError, OSError("disk full"), None)
    with pytest.raises(RunError, match="seed: was 0, is 1"):
        Run(config(tmp_path, seed=1)).__enter__()


def test_exit_waits_for_pending_saves(tmp_path):
    begin(config(tmp_path))
    restored = Checkpointer(tmp_path / "run" / "checkpoints").restore({"x": jnp.zeros(2)})
    assert restored is not None
    assert restored[0]["x"].tolist() == [1, 1]


def test_sequence_parallel_selects_its_rules(tmp_path):
    with Run(config(tmp_path)) as run:
        assert run.layout.rules == sharding.RULES
    with Run(config(tmp_path, sequence_parallel=True)) as run:
        assert run.layout.rules == sharding.SEQUENCE_PARALLEL
