"""Copies of a run at an address: in which order objects come and go, and what is damaged."""

import json
import logging
import re
import shutil

import fsspec
import jax
import pytest
from helpers import bytes_read
from test_lease import ADDRESS, bucket

from zoo.common import checksums, files
from zoo.common.store import Store
from zoo.runs import checkpoint
from zoo.runs.metrics import MetricsLog, read_metrics
from zoo.runs.remote import copies as remote_copies
from zoo.runs.remote.copies import Record, RemoteCopies

__all__ = ["bucket"]


def make_copies(work, *, keep=1):
    return RemoteCopies(work, Store(ADDRESS), Record(), owner="me", keep=keep)


def test_half_written_lines_are_not_copied(tmp_path, bucket):
    path, copies = tmp_path / "metrics.jsonl", make_copies(tmp_path)
    path.write_bytes(b'{"step": 1}\n{"ste')
    copies.copy_files(lambda: None)
    assert bucket()["metrics.jsonl"] == b'{"step": 1}\n'
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n')
    copies.copy_files(lambda: None)
    assert bucket()["metrics.jsonl"] == path.read_bytes()


def test_metrics_are_copied_after_the_files_that_their_lines_mean(tmp_path, bucket, monkeypatch):
    """An evaluation's line says that best/ is that of its step: best/ is at the address before."""
    log, copies = MetricsLog(tmp_path / "metrics.jsonl"), make_copies(tmp_path)
    plain = copies._store.put

    def put(*arguments):  # another evaluation ends meanwhile
        found = plain(*arguments)
        if arguments[1] == ["best.json"] and len(read_metrics(tmp_path / "metrics.jsonl")) < 2:
            (tmp_path / "other.json").write_text("2")
            log.write(2, eval_loss=0.5)
        return found

    monkeypatch.setattr(copies._store, "put", put)
    (tmp_path / "best.json").write_text("1")
    log.write(1, eval_loss=1.0)
    copies.copy_files(lambda: None)
    assert bucket()["other.json"] == b"2"
    assert bucket()["metrics.jsonl"].count(b"\n") == 1
    copies.copy_files(lambda: None)
    assert bucket()["metrics.jsonl"].count(b"\n") == 2


def write_step(checkpoints, step):
    """A folder like a checkpoint's."""
    made = checkpoints / str(step)
    files.remove(made)
    (made / "arrays").mkdir(parents=True)
    (made / "arrays" / "data").write_bytes(f"arrays of {step}".encode())
    (made / "meta.json").write_text(json.dumps({"step": step}))
    checkpoint.seal(made)
    return made


def test_steps_are_complete_last_and_removed_incomplete_first(tmp_path, bucket, monkeypatch):
    copies, seen = make_copies(tmp_path), []
    for name in ("put", "write", "remove"):
        plain = getattr(copies._store, name)

        def call(*arguments, plain=plain, **more):
            seen.append({x for x in bucket() if x.startswith("checkpoints")})
            return plain(*arguments, **more)

        monkeypatch.setattr(copies._store, name, call)
    for step in (1, 2):
        write_step(tmp_path / "checkpoints", step)
        copies.copy_step(step, lambda: None)
    seen.append({*bucket()})
    for step in (1, 2):
        parts = {f"checkpoints/{step}/{x}" for x in ("arrays/data", "meta.json")}
        whole = parts | {f"checkpoints/{step}/checksums.json"}
        complete = [x for x in seen if f"checkpoints/{step}/checksums.json" in x]
        assert complete
        assert all(x >= whole for x in complete)
        assert parts in [x & whole for x in seen]
    assert seen[-1] == whole
    assert copies.good == {2}


def write_part(checkpoints, step, number):
    """A step's folder of a process: its own part, and what all have."""
    made = write_step(checkpoints, step)
    shutil.rmtree(made / "arrays")
    (made / "arrays" / str(number)).mkdir(parents=True)
    (made / "arrays" / str(number) / "data").write_text(f"part {number} of {step}")
    checkpoint.seal(made)


def test_each_process_copies_and_fetches_its_part(tmp_path, bucket, monkeypatch):
    """From its own folder; process 0 completes a step once all have said that theirs is there."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(remote_copies, "_SECONDS", 0)
    index = 0
    monkeypatch.setattr(jax, "process_index", lambda: index)
    both = [make_copies(tmp_path / str(number), keep=2) for number in range(2)]
    looks = iter([True, True, False])
    for step, first in ((1, 0), (2, 1)):
        for number in range(2):
            write_part(tmp_path / str(number) / "checkpoints", step, number)
        fsspec.filesystem("memory").pipe_file(f"/bucket/run/checkpoints/{step}/arrays/1/old", b"")
        if first == 0:  # the other one's part is not there yet
            both[0].copy_step(step, lambda: None, lambda: next(looks))
            assert complete(bucket()) == set()
        for index in (1, 0):
            both[index].copy_step(step, lambda: None)
            assert complete(bucket()) == {str(x) for x in range(1, step + (index == 0))}
    names = {f"checkpoints/{step}/arrays/{number}/data" for step in (1, 2) for number in range(2)}
    names |= {f"checkpoints/{step}/{x}" for step in (1, 2) for x in ("meta.json", "checksums.json")}
    assert {*bucket()} == names
    index = 1
    shutil.rmtree(tmp_path / "1")
    other, within = make_copies(tmp_path / "1"), tmp_path / "1" / "checkpoints" / "2"
    monkeypatch.setattr(remote_copies.processes, "from_first", lambda content: {"step": 2})
    monkeypatch.setattr(remote_copies, "anywhere", bool)
    assert other.fetch_step(above=1) == 2
    files_of = lambda: {x.relative_to(within).as_posix() for x in within.rglob("*") if x.is_file()}
    assert files_of() == {"arrays/1/data", "meta.json", "checksums.json"}
    assert other.fetch_part(2, 0) == ""  # on another mesh
    assert (within / "arrays" / "0" / "data").read_text() == "part 0 of 2"
    assert checksums.listed(within) == {"arrays/0/data", "arrays/1/data", "meta.json"}
    (within / "meta.json").write_text('{"saved_by": "another"}')
    assert "meta.json is that of another save" in other.fetch_part(2, 0)


def test_an_upload_reads_a_large_file_twice(tmp_path):
    """For its SHA-256, and to send it."""
    made, size = write_step(tmp_path / "checkpoints", 1), 2**24
    (made / "arrays" / "data").write_bytes(bytes(size))
    checkpoint.seal(made)
    copies, before = make_copies(tmp_path), bytes_read()
    copies.copy_step(1, lambda: None)
    assert 2 * size <= bytes_read() - before < 2.1 * size


@pytest.mark.parametrize(
    "damage",
    [
        lambda fs: fs.pipe_file("/bucket/run/checkpoints/4/arrays/data", b"arrays of 5"),
        lambda fs: fs.rm_file("/bucket/run/checkpoints/4/meta.json"),
        lambda fs: fs.pipe_file("/bucket/run/checkpoints/4/checksums.json", b"{"),
    ],
    ids=["other bytes", "a file is missing", "the list"],
)
def test_damaged_remote_steps_fall_back(damage, tmp_path, caplog, bucket, monkeypatch):
    monkeypatch.setattr(checkpoint, "_SMALL", 0)  # the arrays' file is a large one
    first = make_copies(tmp_path / "a", keep=2)
    for step in (2, 4):
        made = write_step(tmp_path / "a" / "checkpoints", step)
        assert b"sha256" not in (made / "checksums.json").read_bytes().partition(b"meta.json")[0]
        first.copy_step(step, lambda: None)
    damage(fsspec.filesystem("memory"))
    copies = make_copies(tmp_path / "b")
    assert copies.fetch_step(above=2) is None  # the local step is newer than a good one
    copies = make_copies(tmp_path / "b")
    with caplog.at_level(logging.WARNING):
        assert copies.fetch_step(above=-1) == 2
    assert "Damaged checkpoint, step 4 in memory://bucket/run" in caplog.text
    checkpoints = tmp_path / "b" / "checkpoints"
    assert sorted(x.name for x in checkpoints.iterdir()) == ["2"]
    assert checksums.problems(checkpoints / "2") == []
    sealed = [x / "checkpoints" / "2" / "checksums.json" for x in (tmp_path / "a", tmp_path / "b")]
    assert sealed[0].read_bytes() == sealed[1].read_bytes()
    write_step(checkpoints, 3)
    copies.copy_step(3, lambda: None)  # and not the damaged one is kept
    assert {x.split("/")[1] for x in bucket() if x.startswith("checkpoints")} == {"3"}


def complete(names):
    """The steps that are complete at the address."""
    return {x.split("/")[1] for x in names if re.fullmatch(r"checkpoints/\d+/checksums.json", x)}
