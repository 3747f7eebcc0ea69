import dataclasses
import json
import logging
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import zoo
from zoo import sharding
from zoo.base import checksums, files
from zoo.base.configuration import may_differ
from zoo.nn.precision import native_precision
from zoo.runs.checkpoint import Checkpointer
from zoo.runs.command_line import cli
from zoo.runs.processes import RunError
from zoo.runs.run import Config, Run, as_json, versions


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
        ("checkpoint_every", 0),
        ("keep_checkpoints", 0),
        ("clip_norm", 0.0),
        ("seed", -1),
        ("seed", 2**32),  # of which JAX makes what it makes of 0
        ("seed", 10**20),
    ],
)
def test_a_field_out_of_range_is_named(field, value, tmp_path):
    with pytest.raises(ValueError, match=f"{field}={value}: must"):
        config(tmp_path, **{field: value})


def test_the_folder_holds_the_whole_configuration(tmp_path):
    folder = begin(config(tmp_path, seed=3))
    stored = json.loads((folder / "config.json").read_text())
    assert stored == as_json(config(tmp_path, seed=3, precision=native_precision()))
    assert stored["seed"] == 3
    assert stored["run_dir"] == str(folder)
    assert stored["model"] == {"width": 8, "buckets": [1, 2], "remat": "none"}
    assert stored.keys() == {field.name for field in dataclasses.fields(RecipeConfig)}


def test_the_same_configuration_is_taken_again(tmp_path):
    begin(config(tmp_path))
    with Run(config(tmp_path)):
        pass


def test_another_configuration_is_refused_with_what_differs(tmp_path):
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


def test_a_run_has_a_precision_once_it_is_open(tmp_path):
    run = Run(config(tmp_path))
    with pytest.raises(RunError, match="precision='auto'"):
        run.precision  # noqa: B018
    with run:
        assert run.precision == native_precision()


def test_what_may_differ_may(tmp_path):
    folder = begin(config(tmp_path))
    changes = {"steps": 5, "mesh": "data=2", "eval_every": 7, "model": Model(remat="full")}
    other = config(tmp_path, precision=native_precision(), **changes)
    with Run(other) as run:
        assert run.mesh.size == 2
    assert json.loads((folder / "config.json").read_text()) == as_json(other)


def test_a_run_never_changes_the_precision_that_it_chose(tmp_path, monkeypatch):
    monkeypatch.setattr(zoo.runs.run, "native_precision", lambda: "bf16")
    begin(config(tmp_path))
    monkeypatch.setattr(zoo.runs.run, "native_precision", lambda: "fp32")
    with pytest.raises(RunError, match="precision: was 'bf16', is 'fp32'"), Run(config(tmp_path)):
        pass
    with Run(config(tmp_path, precision="bf16")) as run:
        assert run.config.precision == "bf16"


@pytest.mark.parametrize("damage", [b"", b'{"steps": 1', b"[]", b"null", b"\xff\xfe"])
def test_a_damaged_configuration_is_no_reason_to_begin_anew(damage, tmp_path):
    folder = begin(config(tmp_path))
    (folder / "config.json").write_bytes(damage)
    with pytest.raises(RunError, match=r"config.json is damaged.*meta.json of each checkpoint"):
        Run(config(tmp_path)).__enter__()
    assert (folder / "config.json").read_bytes() == damage


def strip(folder):
    (folder / "config.json").unlink()


def swap(folder):
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))


def test_an_empty_configuration_is_another(tmp_path):
    folder = begin(config(tmp_path))
    (folder / "config.json").write_text("{}")
    with pytest.raises(RunError, match="seed: was None, is 0"):
        Run(config(tmp_path)).__enter__()


@pytest.mark.parametrize("tamper", [strip, swap])
def test_a_checkpoint_knows_the_configuration_whatever_the_file_says(tamper, tmp_path):
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
def test_a_copy_of_the_configuration_that_is_damaged_is_not_asked(damage, tmp_path):
    with Run(config(tmp_path)) as run:
        for step in (1, 2):
            stored = as_json(dataclasses.replace(run.config, seed=step))
            run.checkpointer.save(step, {"x": jnp.ones(2)}, {"config": stored})
    (run.folder / "config.json").unlink()
    damage(run.folder / "checkpoints" / "2")
    with Run(config(tmp_path, seed=1)):
        pass


# --- The folder -------------------------------------------------------------------------------


def test_two_runs_in_one_folder_are_refused(tmp_path):
    with Run(config(tmp_path)), pytest.raises(RunError, match="another process is training in"):
        Run(config(tmp_path)).__enter__()
    with Run(config(tmp_path)):
        pass


def test_a_run_of_another_process_is_seen_until_it_is_killed(tmp_path):
    begin(config(tmp_path))
    code = "import fcntl, sys, time; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX)"
    other = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"{code}; print(flush=True); time.sleep(60)",
            tmp_path / "run/.lock",
        ],
        stdout=subprocess.PIPE,
    )
    other.stdout.readline()
    with pytest.raises(RunError, match="another process"):
        Run(config(tmp_path)).__enter__()
    other.kill()
    other.communicate()
    with Run(config(tmp_path)):
        pass


@pytest.mark.parametrize("place", ["run", "", "run/checkpoints"])
def test_a_file_in_the_place_of_a_folder_is_named(place, tmp_path):
    wanted = config(tmp_path / "parent")
    file = tmp_path / "parent" / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("kept")
    with pytest.raises(ValueError, match=f"'.*parent/run.*': {file} is a file, and has to be"):
        Run(wanted).__enter__()
    assert file.read_text() == "kept"


def test_a_batch_that_does_not_divide_is_refused_before_there_is_a_folder(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class WithData(RecipeConfig):
        data: zoo.text.Config = zoo.text.Config(batch_size=12)

        @property
        def batch_size(self):
            return self.data.batch_size

    for mesh, accumulate in (("data=8", 1), ("", 8), ("fsdp=2", 4)):
        wrong = WithData(run_dir=tmp_path / "run", mesh=mesh, accumulate=accumulate)
        with pytest.raises(ValueError, match=r"^batch_size=12 is not divisible by 8,"):
            Run(wrong).__enter__()
    assert not (tmp_path / "run").exists()
    with Run(WithData(run_dir=tmp_path / "run", mesh="data=2", accumulate=3)):
        pass


def test_a_refused_start_leaves_the_folder_free(tmp_path):
    begin(config(tmp_path))
    with pytest.raises(RunError) as refused:
        Run(config(tmp_path, seed=1)).__enter__()
    with Run(config(tmp_path)):
        assert refused.value  # while what was raised is still at hand, as in a notebook


def test_what_is_made_once_stays(tmp_path):
    def make(text):
        def write(folder):
            folder.mkdir()
            (folder / "file").write_text(text)

        return write

    with Run(config(tmp_path)) as run:
        assert run.once("thing", make("first")) == tmp_path / "run" / "thing"
    with Run(config(tmp_path)) as run:
        assert (run.once("thing", make("second")) / "file").read_text() == "first"


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "file").write_text("firsT"),
        lambda folder: (folder / "file").unlink(),
        lambda folder: (shutil.rmtree(folder), folder.mkdir()),
        lambda folder: (shutil.rmtree(folder), folder.write_text("text")),
    ],
    ids=["other bytes", "a file gone", "emptied", "a file in its place"],
)
def test_what_is_made_once_and_was_damaged_is_refused(damage, tmp_path):
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


def test_what_a_killed_write_left_is_removed_and_nothing_else(tmp_path):
    begin(config(tmp_path))
    folder = tmp_path / "run"
    for name in ("curves.png.tmp", "metrics.jsonl.tmp", "config.json.tmp", "notes.tmp"):
        (folder / name).write_text("half")
    with Run(config(tmp_path)):
        assert [path.name for path in folder.glob("*.tmp")] == ["notes.tmp"]


def test_what_an_earlier_version_made_is_used_without_a_list(tmp_path):
    with Run(config(tmp_path)) as run:
        folder = run.once("thing", Path.mkdir)
        (folder / "file").write_text("first")
        (folder / checksums.NAME).unlink()
    begin(config(tmp_path))
    with Run(config(tmp_path)) as run:
        assert (run.once("thing", Path.mkdir) / "file").read_text() == "first"


def test_what_another_run_made_is_not_taken_for_this_ones(tmp_path):
    made = tmp_path / "run" / "thing"
    made.mkdir(parents=True)
    run = Run(config(tmp_path))
    with pytest.raises(RunError, match=f"{made} is there, without the config.json"), run:
        run.once("thing", Path.mkdir)
    assert made.exists()
    with Run(config(tmp_path, seed=1)) as run:
        assert run.once("other", Path.mkdir) == run.once("other", Path.mkdir)


def test_what_was_made_halfway_is_made_again(tmp_path):
    def halfway(folder):
        folder.mkdir(exist_ok=True)
        (folder / "file").write_text("half")
        raise KeyboardInterrupt

    def whole(folder):
        folder.mkdir(exist_ok=True)
        (folder / "file").write_text("whole")

    begin(config(tmp_path))
    with pytest.raises(KeyboardInterrupt), Run(config(tmp_path)) as run:
        run.once("thing", halfway)
    with Run(config(tmp_path)) as run:
        assert (run.once("thing", whole) / "file").read_text() == "whole"


def test_a_start_that_fails_with_nothing_saved_binds_the_folder_to_nothing(tmp_path):
    run = Run(config(tmp_path))
    run.__enter__().once("thing", Path.mkdir)
    run.__exit__(OSError, OSError("no such corpus"), None)
    with Run(config(tmp_path, seed=1)) as run:
        assert not (run.folder / "thing").exists()


def test_a_run_that_fails_after_a_checkpoint_stays_bound(tmp_path):
    run = Run(config(tmp_path))
    run.__enter__().checkpointer.save(1, {"x": jnp.ones(2)}, {})
    run.__exit__(OSError, OSError("disk full"), None)
    with pytest.raises(RunError, match="seed: was 0, is 1"):
        Run(config(tmp_path, seed=1)).__enter__()


def test_leaving_waits_for_the_save_under_way(tmp_path):
    begin(config(tmp_path))
    restored = Checkpointer(tmp_path / "run" / "checkpoints").restore({"x": jnp.zeros(2)})
    assert restored is not None
    assert restored[0]["x"].tolist() == [1, 1]


def test_sequence_parallel_is_a_table_of_rules(tmp_path):
    with Run(config(tmp_path)) as run:
        assert run.rules == sharding.RULES
    with Run(config(tmp_path, sequence_parallel=True)) as run:
        assert run.rules == sharding.SEQUENCE_PARALLEL


# --- The command line -------------------------------------------------------------------------


def call(main, monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["recipe", *flags])
    cli(RecipeConfig, main, "recipes.some")


def test_the_command_line_makes_the_configuration(monkeypatch):
    made = []
    call(made.append, monkeypatch, "--steps", "7", "--model.width", "4", "--mesh", "data=-1")
    assert made == [RecipeConfig(steps=7, mesh="data=-1", model=Model(width=4))]


@pytest.mark.parametrize("error", [RunError, ValueError, FileNotFoundError, ImportError])
def test_what_the_user_can_mend_is_a_message(error, monkeypatch, capsys):
    def main(config):
        raise error("this is how")

    with pytest.raises(SystemExit) as exit:
        call(main, monkeypatch)
    assert exit.value.code == 1
    assert capsys.readouterr().err.startswith("error: this is how\n")
    monkeypatch.setenv("ZOO_TRACEBACK", "1")
    with pytest.raises(error):
        call(main, monkeypatch)


def test_what_only_we_can_mend_is_a_traceback(monkeypatch):
    def main(config):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        call(main, monkeypatch)


def test_an_interrupt_has_its_code_and_no_traceback(monkeypatch, capsys):
    def main(config):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as exit:
        call(main, monkeypatch)
    assert exit.value.code == 128 + signal.SIGINT
    assert "the same command resumes" in capsys.readouterr().err


def test_a_missing_variable_of_several_processes_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1")
    monkeypatch.delenv("JAX_NUM_PROCESSES", raising=False)
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    with pytest.raises(RunError, match="--distributed: JAX_NUM_PROCESSES must be set"):
        Run(config(tmp_path, distributed=True)).__enter__()


def test_the_log_of_what_orbax_raises_too_is_not_shown(tmp_path, caplog, monkeypatch):
    monkeypatch.delenv("ZOO_TRACEBACK", raising=False)
    with Run(config(tmp_path)):
        log = logging.getLogger("absl")
        log.error("a thread failed", exc_info=ValueError("disk full"))
        log.warning("something else")
        monkeypatch.setenv("ZOO_TRACEBACK", "1")
        log.error("a thread failed again", exc_info=ValueError("disk full"))
    messages = [record.message for record in caplog.records if record.name == "absl"]
    assert messages == ["something else", "a thread failed again"]


def test_versions_are_those_of_what_runs():
    assert versions()["jax"] == jax.__version__
