import concurrent.futures
import contextlib
import errno
import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import zoo
from recipes import lm, mlp
from zoo import tabular
from zoo.common import files
from zoo.common.files import local_path
from zoo.data.tokenizer import load_tokenizer
from zoo.publishing import replacing
from zoo.runs.checkpoint import Checkpointer

# --- Transfers --------------------------------------------------------------------------------


def test_transfers_off_a_terminal_say_every_15_seconds_how_far_they_are(monkeypatch, capsys):
    clock = [100.0]
    monkeypatch.setattr(files, "monotonic", lambda: clock[0])
    with files.Transfer("fetching a", 4_000_000) as transfer:
        for clock[0] in (114.9, 115.0, 129.9, 130.0):
            transfer.add(1_000_000)
        assert capsys.readouterr().err.splitlines() == [
            "fetching a: 2.0 of 4.0 MB",
            "fetching a: 4.0 of 4.0 MB",
        ]
    assert capsys.readouterr().err == "fetching a: 4.0 of 4.0 MB\n"
    with files.Transfer("", 1) as transfer:
        clock[0] = 1000.0
        transfer.add(1)
    assert capsys.readouterr().err == ""


# --- Where they may be ------------------------------------------------------------------------


def test_local_paths_expand_home(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    for path in ("runs/a", "/runs/a", "./gs:/a", "a b:c/d", "", "~nobody-of-this-name/a"):
        assert local_path(path, "run_dir") == Path(path)
    assert local_path("~/a", "run_dir") == Path("/somewhere/a")


@pytest.mark.parametrize("path", ["s3://bucket/a/b", "gs://bucket", "FILE://a", "hf+x.y-z://a"])
def test_remote_paths_are_refused(path):
    for given in (path, Path(path)):  # a Path has one slash of them left
        with pytest.raises(ValueError, match=f"^run_dir='{re.escape(path)}': only local"):
            local_path(given, "run_dir")


REMOTE = "s3://bucket/thing"
TAKERS = {
    "work_dir": lambda: lm.Config(run_dir=REMOTE, work_dir=Path(REMOTE)),
    "compilation_cache": lambda: mlp.Config(compilation_cache=Path(REMOTE)),
    "data.cache": lambda: lm.Config(data=zoo.text.Config(cache=Path(REMOTE))),
    "data.tokenizer": lambda: lm.Config(data=zoo.text.Config(tokenizer=REMOTE)),
    "data of rows": lambda: tabular.read_table(tabular.Config(REMOTE), seed=0),
    "tokenizer": lambda: load_tokenizer(REMOTE),
    "folder of checkpoints": lambda: Checkpointer(Path(REMOTE)),
}


@pytest.mark.parametrize("taker", TAKERS)
def test_every_path_argument_refuses_remote_paths(taker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("local").mkdir()
    Path("local/a.txt").write_text("a")
    with pytest.raises(ValueError, match=f"^{taker.split()[0]}='{REMOTE}[^']*': only local"):
        TAKERS[taker]()
    assert os.listdir() == ["local"]


# --- How they are written ---------------------------------------------------------------------


@pytest.fixture
def journal(monkeypatch):
    """What is synced and renamed, in order: ("sync", inode) and ("rename", source, target)."""
    found = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def synced(descriptor):
        found.append(("sync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def renamed(call):
        def move(source, target, **options):
            found.append(("rename", Path(source), Path(target)))
            call(source, target, **options)

        return move

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed(rename))
    monkeypatch.setattr(os, "replace", renamed(replace))
    return found


def assert_outlives_a_power_cut(journal, source, target):
    """The rename came after a sync of all that was renamed, and before one of the folder."""
    at = journal.index(("rename", source, target))
    before, after = journal[:at], journal[at:]
    inside = [target, *target.rglob("*")]
    assert [path for path in inside if ("sync", path.stat().st_ino) not in before] == []
    assert ("sync", target.parent.stat().st_ino) in after


def test_file_replacement_is_atomic_and_durable(journal, tmp_path):
    path, temporary = tmp_path / "file", tmp_path / "file.tmp"
    path.write_text("old")

    def write(to):
        assert to == temporary
        to.write_text("new")
        assert path.read_text() == "old"

    files.replace(path, write)
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]
    assert_outlives_a_power_cut(journal, temporary, path)


def test_checkpoints_are_synced_before_commit(journal, tmp_path):
    checkpointer = Checkpointer(tmp_path / "checkpoints", keep=1)
    for step in (1, 2):
        checkpointer.save(step, {"x": jnp.arange(8)}, {})
    checkpointer.close()
    step = tmp_path / "checkpoints" / "2"
    assert len(list(step.rglob("*"))) > 6
    assert_outlives_a_power_cut(journal, step.with_name("2.tmp"), step)
    pruned = journal.index(("rename", step.with_name("1"), step.with_name("1.tmp")))
    kept = journal.index(("rename", step.with_name("2.tmp"), step))
    assert ("sync", step.parent.stat().st_ino) in journal[kept:pruned]


def test_initial_run_files_are_synced(journal, tmp_path):
    def make(folder):
        folder.mkdir()
        (folder / "file").write_text("made")

    folder = tmp_path / "run"
    with zoo.Run(lm.Config(run_dir=folder, compilation_cache=None)) as run:
        run.once("thing", make)
    assert_outlives_a_power_cut(journal, folder / "config.json.tmp", folder / "config.json")
    assert_outlives_a_power_cut(journal, folder / "thing.tmp", folder / "thing")


def test_saved_models_are_synced(journal, tmp_path):
    config = zoo.mlp.Config(in_size=2, hidden_size=3, num_layers=1, out_size=2)
    for seed in (0, 1):  # the second takes the place of the first
        zoo.save(tmp_path / "model", zoo.mlp.MLP(config, key=jax.random.key(seed)))
        [new] = [x[1] for x in journal if x[0] == "rename" and x[2] == tmp_path / "model"]
        assert_outlives_a_power_cut(journal, new, tmp_path / "model")
        journal.clear()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_a_file_system_need_not_sync_folders(code, monkeypatch, tmp_path):
    fsync = os.fsync

    def synced(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    fails = pytest.raises(OSError, match=os.strerror(errno.EIO))
    with fails if code == errno.EIO else contextlib.nullcontext():
        files.replace(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new"


def test_full_disk_error_names_the_file(tmp_path):
    def write(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        files.replace(path, write)
    assert path.read_text() == "old"


def test_remove_does_not_follow_links(tmp_path):
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    for name in ("folder", "file", "link", "nothing"):
        files.remove(tmp_path / name)
    assert os.listdir(tmp_path) == ["kept"]


def test_a_folder_is_made_once_while_others_wait(tmp_path):
    made = []

    def make(folder):
        made.append(folder)
        time.sleep(0.05)
        (folder / "file").write_text("whole")

    (tmp_path / "entry.part").mkdir()  # of a kill
    (tmp_path / "entry.part" / "file").write_text("half of")
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        futures = [
            threads.submit(files.made_once, tmp_path / "entry", make, "cache") for _ in range(4)
        ]
        folders = {future.result() for future in futures}
    assert folders == {tmp_path / "entry"}
    assert len(made) == 1
    assert (tmp_path / "entry" / "file").read_text() == "whole"
    assert not (tmp_path / "entry.part").exists()


# --- What is left of them by kills --------------------------------------------------------------

WRITERS = """
import os, signal, sys
from pathlib import Path
import jax
import zoo
from zoo import mlp
from zoo.common import checksums
from zoo.publishing import replacing

folder, die = Path(sys.argv[1]), lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
net = lambda seed: mlp.MLP(mlp.Config(2, 2, hidden_size=2), key=jax.random.key(seed))

def save():
    checksums.write = die
    zoo.save(folder / "run/best", net(0))

def replace():
    zoo.save(folder / "run/model", net(0))
    rename, renamed = Path.rename, []
    Path.rename = lambda *pair: die() if renamed else renamed.append(rename(*pair))
    zoo.save(folder / "run/model", net(1))

def upload():
    with replacing.replacing("memory://bucket/net") as new:
        die()

for write in (save, replace, upload):
    if (child := os.fork()) == 0:
        write()
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
"""


def test_what_kills_left_beside_folders_is_removed(tmp_path, monkeypatch):
    """Of each writer at its next start; what is being written now, and what is no such, stays."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    subprocess.run([sys.executable, "-c", WRITERS, tmp_path], check=True)
    run, saving = tmp_path / "run", tmp_path / "home/.cache/zoo/models/saving"
    left = lambda folder, name: list(folder.glob(f".{name}.????????"))
    assert [len(left(run, name)) for name in ("best", "model")] == [1, 1]
    assert len(left(saving, "net")) == 1
    assert not (run / "model").exists()  # it was killed between the two renames
    others = [run / ".best.mistaken", run / ".best.notes", run / ".git"]
    for other in others:
        (other / "new").mkdir(parents=True)
    (others[0] / "a.txt").touch()
    with files.unfinished(run / "best") as live:
        assert left(run, "best") != [live]
        with zoo.Run(lm.Config(run_dir=run, compilation_cache=None)):
            assert {*left(run, "*")} == {live, others[0]}
    assert not live.exists()
    assert all(other.exists() for other in others)
    wanted = zoo.mlp.MLP(zoo.mlp.Config(2, 2, hidden_size=2), key=jax.random.key(1))
    assert eqx.tree_equal(zoo.load(run / "model"), wanted)
    with replacing.replacing("memory://bucket/net") as new:
        (new / "config.json").touch()
        assert left(saving, "net") == [new.parent]
    assert os.listdir(saving) == []


def test_a_folder_that_is_taken_for_a_killed_ones_is_made_again(tmp_path, monkeypatch):
    """Another process looks between the making of the folder and its lock."""
    made, make = [], files.tempfile.mkdtemp

    def mkdtemp(**options):
        made.append(make(**options))
        if len(made) == 1:
            files.remove_unfinished(tmp_path)
        return made[-1]

    monkeypatch.setattr(files.tempfile, "mkdtemp", mkdtemp)
    with files.unfinished(tmp_path / "best") as folder:
        assert str(folder) == made[1]
        assert [str(path) for path in tmp_path.iterdir()] == made[1:]


def test_a_folder_is_made_where_there_are_no_locks(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with files.unfinished(tmp_path / "best") as folder:
        (folder / "new").mkdir()
        files.remove_unfinished(tmp_path)
        assert (folder / "new").exists()
    assert os.listdir(tmp_path) == []
