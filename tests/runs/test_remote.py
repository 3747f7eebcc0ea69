"""Run folders at an address: on memory:// quickly, and (slow) on servers of S3 and of GCS."""

import json
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

import fsspec
import jax.numpy as jnp
import pytest
from helpers import contents
from test_copies import complete, write_step
from test_lease import ADDRESS, bucket, clock, make_lease

from zoo.common import checksums, files
from zoo.common.store import Store
from zoo.runs.checkpoint import CheckpointError, local_steps
from zoo.runs.config import Config, as_json
from zoo.runs.metrics import MetricsLog, read_metrics
from zoo.runs.processes import RunError
from zoo.runs.remote import folder
from zoo.runs.remote.copies import RemoteCopies
from zoo.runs.remote.folder import RemoteFolder
from zoo.runs.remote.lease import LeaseError
from zoo.runs.run import Run

__all__ = ["bucket", "clock"]


def test_a_step_that_is_being_copied_stays_in_the_folder(tmp_path, monkeypatch, bucket):
    slowed, release = threading.Event(), threading.Event()
    plain = RemoteCopies.copy_step

    def slow(self, *arguments):
        slowed.set()
        assert release.wait(60)
        plain(self, *arguments)

    with Run(config(tmp_path, keep_checkpoints=1)) as run:
        run.settle()
        monkeypatch.setattr(RemoteCopies, "copy_step", slow)
        run.checkpointer.save(1, {"x": jnp.ones(2)}, {})
        assert slowed.wait(60)
        for step in (2, 3, 4):
            run.checkpointer.save(step, {"x": jnp.ones(2)}, {})
            run.checkpointer.wait()
        assert run.checkpointer.good_steps() == [1, 4]
        release.set()
    assert {x.split("/")[1] for x in bucket() if x.startswith("checkpoints")} == {"4"}


# --- The working folder -------------------------------------------------------------------------


class KilledError(BaseException):
    """The process is no more."""


@dataclass
class Mortal:
    """A process that is killed before its n-th request to the store."""

    monkeypatch: pytest.MonkeyPatch
    left: float = float("inf")

    def __enter__(self):
        for name in ("read", "write", "create", "put", "get", "remove", "names"):
            plain = getattr(Store, name)

            def call(store, *arguments, plain=plain, **more):
                if self.left <= 0:
                    raise KilledError
                if plain.__name__ in ("put", "remove", "get"):  # a request for each file
                    where, names = (
                        (arguments[:1], arguments[1]) if len(arguments) > 1 else ((), arguments[0])
                    )
                    results = []
                    for each in names:
                        if self.left <= 0:
                            raise KilledError
                        self.left -= 1
                        one = {each: names[each]} if isinstance(names, dict) else [each]
                        found = plain(store, *where, one, *arguments[2:], **more)
                        results += found.items() if isinstance(found, dict) else found or []
                    return dict(results) if plain.__name__ == "get" else results
                self.left -= 1
                return plain(store, *arguments, **more)

            self.monkeypatch.setattr(Store, name, call)
        return self

    def __exit__(self, *_):
        self.monkeypatch.undo()


class AtOnce:
    """A copier that copies in the foreground."""

    def __init__(self, copy, address, working_folder):
        self._copy = copy

    def begin(self):
        self._copy()

    def wait(self, say, *, patient=True):
        pass

    def close(self, seconds=60.0):
        return True


LAST = 6


def train(work, clock, *, until=LAST, said=None):
    """A run without its computations; it resumes."""
    said = [] if said is None else said
    mine = make_lease(clock)
    remote = RemoteFolder(ADDRESS, work, keep=2, say=said.append, lease=mine)
    try:
        remote.__enter__()
        checkpoints = work / "checkpoints"
        start = max(local_steps(checkpoints), default=0)
        if not (work / "config.json").exists():
            (work / "config.json").write_text("{}")
        if not (work / "tokenizer").exists():
            made = work / "tokenizer.tmp"
            files.remove(made)
            made.mkdir()
            (made / "a").write_text("a")
            (made / "b").write_text("b")
            checksums.write(made)
            made.rename(work / "tokenizer")
        assert checksums.problems(work / "tokenizer") == []
        log = MetricsLog(work / "metrics.jsonl", resume_step=start)
        remote.copier.begin()

        def evaluate(step):
            log.write(step, eval_loss=step / 4)
            (work / "best").mkdir(exist_ok=True)
            (work / "best" / "of").write_text(str(step))
            remote.copier.begin()

        written = read_metrics(work / "metrics.jsonl")
        if start and not any("eval_loss" in x and x["step"] == start for x in written):
            evaluate(start)  # it was cut short
        for step in range(start + 1, until + 1):
            log.write(step, loss=step / 2)
            if step % 2 == 0:
                made = write_step(work / "partial", step)
                files.make_folder(checkpoints, "checkpoints")
                made.rename(checkpoints / str(step))
                remote.choose(step)
                remote.committed(step)
                evaluate(step)
        remote.__exit__(None, None, None)
    except BaseException:
        if hasattr(remote, "_lock"):
            remote._lock.__exit__(None, None, None)
        raise
    finally:
        files.remove(work / "partial")
    return start


def work_files(work):
    """What matters of a working folder."""
    return {name: x for name, x in contents(work).items() if not name.startswith(".")}


OLDER = ("checkpoints/2", "checkpoints/4")


def _outside(folders, names):
    return {name for name in names if not name.startswith(folders)}


@pytest.mark.parametrize(
    ("first", "stride"),
    [
        (0, 3),
        pytest.param(0, 1, marks=pytest.mark.slow),
        pytest.param(1, 1, marks=pytest.mark.slow),
    ],
)
def test_a_kill_between_any_two_requests_loses_nothing(
    first, stride, tmp_path, monkeypatch, bucket, clock
):
    """Every other time the working folder is lost, too."""
    monkeypatch.setattr(folder, "Copier", AtOnce)
    train(tmp_path / "straight", clock)
    wanted, stored = work_files(tmp_path / "straight"), bucket()
    fs = fsspec.filesystem("memory")
    starts, requests = [], 0
    while True:
        fs.store.clear()
        work = tmp_path / f"{requests}"
        with pytest.MonkeyPatch.context() as patch, Mortal(patch, left=requests) as mortal:
            try:
                train(work, clock)
                break
            except KilledError:
                assert mortal.left <= 0
        marked = [int(x) for x in complete(bucket())]
        kept = local_steps(work / "checkpoints")
        is_lost = (requests + first) // stride % 2 == 1
        if is_lost:
            shutil.rmtree(work)
        start = train(work, clock)
        starts.append(start)
        assert start == max([0, *marked, *([] if is_lost else kept)])
        kept = {x: y for x, y in work_files(work).items() if not x.startswith(OLDER)}
        assert kept == {x: y for x, y in wanted.items() if not x.startswith(OLDER)}
        shutil.rmtree(work)
        train(work, clock)  # all of it is at the address
        found = work_files(work)
        assert found.pop("metrics.jsonl") == wanted["metrics.jsonl"]
        assert found.items() <= wanted.items()
        assert "checkpoints/6/arrays/data" in found
        assert {"tokenizer/a", "tokenizer/checksums.json", "best/of", "config.json"} <= found.keys()
        apart = ("lease", "checkpoints")
        assert _outside(apart, bucket()) == _outside(apart, stored)
        marked = complete(bucket())
        assert "6" in marked
        assert len(marked) <= 2
        assert len(_outside(("checkpoints",), stored) ^ {*stored}) == 6
        assert len(_outside(("checkpoints",), bucket()) ^ {*bucket()}) == 3 * len(marked)
        requests += stride
    assert requests >= 40
    assert {*starts} == {0, 2, 4, 6}


def open_folder(work, clock, **options):
    options = {"keep": 2, "say": lambda text: None, "lease": make_lease(clock)} | options
    return RemoteFolder(ADDRESS, work, **options)


def test_a_lost_lease_stops_what_is_written(tmp_path, clock, bucket):
    first, second = open_folder(tmp_path / "a", clock), open_folder(tmp_path / "b", clock)
    first.__enter__()
    with second:
        before = bucket()
        (tmp_path / "a" / "config.json").write_text("{}")
        write_step(tmp_path / "a" / "checkpoints", 1)
        first.committed(1)
        first.copier._thread.join()
        for check in (
            first.lease.check_known,
            first.copier.check,
            lambda: first.__exit__(None, None, None),
        ):
            with pytest.raises(LeaseError, match="This process stops, and writes nothing there"):
                check()
        assert bucket() == before
    assert before.keys() >= {"run.json"}


def test_damaged_local_steps_fall_back_to_the_address(tmp_path):
    with Run(config(tmp_path, keep_checkpoints=2)) as run:
        for step in (1, 2):
            run.checkpointer.save(step, {"x": jnp.full(2, step)}, {})
            run.settle()
        run.checkpointer.save(3, {"x": jnp.full(2, 3)}, {})
    for step, copy in ((3, True), (2, False)):
        path = tmp_path / "work" / "checkpoints" / str(step) / "meta.json"
        path.write_bytes(path.read_bytes().replace(b"step", b"pets"))
        if copy:
            fs = fsspec.filesystem("memory")
            fs.pipe_file(f"/bucket/run/checkpoints/{step}/meta.json", path.read_bytes())
    with Run(config(tmp_path)) as run:
        state, step, _ = run.restore({"x": jnp.zeros(2, jnp.int32)})
        assert step == 2
        assert state["x"].tolist() == [2, 2]
        run.checkpointer.save(3, {"x": jnp.full(2, 5)}, {})
    shutil.rmtree(tmp_path / "work")
    with Run(config(tmp_path)) as run:
        assert run.restore({"x": jnp.zeros(2, jnp.int32)})[0]["x"].tolist() == [5, 5]


@dataclass(frozen=True, kw_only=True)
class RecipeConfig(Config):
    run_dir: Path | str = ADDRESS
    steps: int = 10
    compilation_cache: Path | None = None


def config(tmp_path, **options):
    return RecipeConfig(**{"work_dir": tmp_path / "work", **options})


def test_an_address_is_a_text_in_the_configuration(tmp_path):
    for given in (ADDRESS, Path(ADDRESS)):  # a command line gives paths
        with Run(config(tmp_path, run_dir=given)) as run:
            assert run.config.run_dir == run.address == ADDRESS
            assert run.folder == tmp_path / "work"
            stored = json.loads((run.folder / "config.json").read_text())
            assert stored == as_json(run.config)
            assert stored["run_dir"] == ADDRESS
    local = Run(config(tmp_path, run_dir=str(tmp_path / "run"), work_dir=None))
    assert local.config.run_dir == local.folder == tmp_path / "run"
    assert local.address == str(tmp_path / "run")
    with pytest.raises(ValueError, match=r"work_dir='w': .* run_d"):
        config(tmp_path, run_dir="run", work_dir=Path("w"))
    with pytest.raises(ValueError, match="run_dir='hf://a/b':"):
        config(tmp_path, run_dir="hf://a/b")


def test_other_flags_are_refused_from_the_address_alone(tmp_path):
    with Run(config(tmp_path)) as run:
        run.checkpointer.save(1, {"x": jnp.ones(2)}, {})
    shutil.rmtree(run.folder)
    with pytest.raises(RunError, match=f"{ADDRESS} holds a run of another configuration:\n  seed"):
        Run(config(tmp_path, seed=1)).__enter__()
    with Run(config(tmp_path)):  # and the lease is given back at once
        pass


def test_a_failed_start_leaves_the_address_unbound(tmp_path, bucket):
    run = Run(config(tmp_path))
    run.__enter__().once("thing", lambda folder: (folder.mkdir(), (folder / "a").write_text("a")))
    run.settle()
    assert bucket().keys() >= {"thing/a", "config.json"}
    run.__exit__(OSError, OSError("no such corpus"), None)
    assert not bucket().keys() & {"thing/a", "config.json"}
    with Run(config(tmp_path, seed=1)):
        pass


def test_working_folders_of_other_runs_are_refused(tmp_path):
    with Run(config(tmp_path)) as run:
        run.checkpointer.save(1, {"x": jnp.ones(2)}, {})
    fs = fsspec.filesystem("memory")
    fs.rm("/bucket/run", recursive=True)
    with pytest.raises(RunError, match=r"holds no run any more, and its .* has step 1"):
        Run(config(tmp_path)).__enter__()
    with Run(config(tmp_path, work_dir=tmp_path / "other", seed=1)):
        pass
    with pytest.raises(RunError, match=r"holds another run, and its .* has step 1"):
        Run(config(tmp_path)).__enter__()
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "config.json").write_text("{}")
    with pytest.raises(RunError, match="local holds a run of its own"):
        Run(config(tmp_path, work_dir=tmp_path / "local")).__enter__()


def test_one_run_works_in_a_working_folder(tmp_path):
    with (
        Run(config(tmp_path)),
        pytest.raises(RunError, match=f"another process is training in {ADDRESS}; use another"),
    ):
        Run(config(tmp_path)).__enter__()


def test_a_plan_touches_no_address(tmp_path, bucket):
    with Run(config(tmp_path, plan="cpu:8")) as run:
        assert run.folder != tmp_path / "work"
    assert not bucket()
    assert not (tmp_path / "work").exists()


def test_objects_of_others_are_left_alone(tmp_path, bucket):
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/bucket/run/notes.txt", b"mine")
    with Run(config(tmp_path)):
        pass
    assert bucket()["notes.txt"] == b"mine"
    fs.rm("/bucket/run", recursive=True)
    fs.pipe_file("/bucket/run/checkpoints/1/checksums.json", b"{}")
    with pytest.raises(RunError, match=r"it has checkpoints/, but no run\.json that says"):
        Run(config(tmp_path, work_dir=tmp_path / "new")).__enter__()


def test_what_an_attempt_without_a_checkpoint_has_left_belongs_to_the_next(tmp_path, bucket):
    """As in a local folder; of a folder that is there in part nothing is taken."""
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/bucket/run/notes.txt", b"mine")
    killed = Run(config(tmp_path)).__enter__()
    for name in ("whole", "half"):
        killed.once(name, lambda at: (at.mkdir(), (at / "a").write_text("first")))
    for name in ("trackers.json", "passing.json"):
        (killed.folder / name).write_text("{}")
    killed.settle()
    left = {x: y for x, y in bucket().items() if not x.startswith("lease")}
    killed.__exit__(OSError, OSError(), None)  # which tidies up
    shutil.rmtree(killed.folder)
    for name in left.keys() - {"half/checksums.json"}:
        fs.pipe_file(f"/bucket/run/{name}", left[name])
    with Run(config(tmp_path)) as run:
        assert (run.folder / "trackers.json").exists()
        for name, wanted in (("whole", "first"), ("half", "second")):
            made = run.once(name, lambda at: (at.mkdir(), (at / "a").write_text("second")))
            assert (made / "a").read_text() == wanted
        (run.folder / "passing.json").unlink()
    assert "passing.json" not in bucket()
    assert bucket()["half/a"] == b"second"
    assert bucket()["notes.txt"] == b"mine"


# --- Stores that fail ---------------------------------------------------------------------------


def failing(monkeypatch, error, *names):
    """Make requests fail until the returned event is set."""
    mended = threading.Event()
    for name in names or ("read", "write", "put", "remove", "names"):
        plain = getattr(Store, name)

        def call(*arguments, plain=plain, **more):
            if not mended.is_set():
                raise error
            return plain(*arguments, **more)

        monkeypatch.setattr(Store, name, call)
    return mended


def test_an_outage_is_waited_for(tmp_path, monkeypatch, bucket):
    monkeypatch.setattr(folder, "_PAUSES", (0.01,))
    with Run(config(tmp_path)) as run:
        run.settle()
        mended = failing(monkeypatch, ConnectionError("refused"))
        run.checkpointer.save(1, {"x": jnp.ones(2)}, {})
        run.checkpointer.wait()
        while not run.status:
            pass
        assert run.status == f"no copy to {ADDRESS} for 0 of at most 30 min (refused)"
        run.check_address(copies=True)
        threading.Timer(0.05, mended.set).start()
    assert run.status == ""
    assert "checkpoints/1/checksums.json" in bucket()


@pytest.mark.parametrize("error", [ConnectionError("refused"), PermissionError("denied")])
def test_a_long_outage_stops_the_run_and_says_what_is_where(error, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "_PAUSES", (0.01,))
    with Run(config(tmp_path)) as run:
        run.settle()

    def save_in_vain():
        with Run(config(tmp_path)) as run, monkeypatch.context() as patch:
            run.settle()
            failing(patch, error)
            run.checkpointer.save(1, {"x": jnp.ones(2)}, {})
            run.checkpointer.wait()
            while not run.status:
                pass
            if isinstance(error, ConnectionError):
                run.check_address(copies=True)
                run._remote.copier._failing_since -= 60 * folder.MINUTES
            run.check_address(copies=True)

    with pytest.raises(CheckpointError) as raised:
        save_in_vain()
    lasting = " for 30 minutes" if isinstance(error, ConnectionError) else ""
    assert str(raised.value) == (
        f"nothing could be copied to {ADDRESS}{lasting}: {error}. Nothing is lost: all of it is in "
        f"{tmp_path / 'work'}, and the same command, on this machine, copies it and resumes the run"
    )
    with Run(config(tmp_path)):
        pass
    shutil.rmtree(run.folder)
    with Run(config(tmp_path)) as run:
        assert run.restore({"x": jnp.zeros(2)})[1] == 1


def test_the_error_of_a_run_comes_before_that_of_its_copies(tmp_path, monkeypatch, caplog):
    run = Run(config(tmp_path)).__enter__()
    run.settle()
    failing(monkeypatch, ConnectionError("refused"))
    run.__exit__(ZeroDivisionError, ZeroDivisionError(), None)  # it raises no other
    assert f"nothing could be copied to {ADDRESS}: refused" in caplog.text
