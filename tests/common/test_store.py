"""zoo.common.store: copies of files, whole or not there, and names that cannot be files here."""

import re
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile

from zoo.common import checksums, files
from zoo.common import store as store_module
from zoo.common.addresses import AddressError
from zoo.common.store import Store, sizes

ADDRESS = "memory://store-test/a"
WHOLE = {"bytes": 3, "sha256": checksums.sha256(b"abc")}


@pytest.fixture
def store() -> Store:
    fs = fsspec.filesystem("memory")
    if fs.exists("/store-test"):
        fs.rm("/store-test", recursive=True)
    return Store(ADDRESS)


def test_objects_are_read_written_and_created_once(store: Store):
    assert store.read("x/y") is None
    assert store.create("x/y", b"1")
    assert not store.create("x/y", b"2")
    assert store.read("x/y") == b"1"
    store.write("x/y", b"3")
    assert (store.names(), store.names("x")) == (["x/y"], ["y"])
    store.remove(["x/y", "none"])
    assert store.names() == []
    assert store.modified("x/y") is None


def test_files_are_copied_there_and_back(store: Store, tmp_path: Path):
    (tmp_path / "here/b").mkdir(parents=True)
    for name in ("a", "b/c"):
        (tmp_path / "here" / name).write_text("abc")
    assert store.put(tmp_path / "here", ["a", "gone"], "p/") == ["gone"]
    assert store.put(tmp_path / "here", sizes(tmp_path / "here", ["b/c"]), "p/") == []
    found = store.get(tmp_path / "there", {"a": WHOLE, "b/c": WHOLE, "none": {}}, "p/")
    assert found == {"none": "is missing"}
    assert (tmp_path / "there/b/c").read_text() == "abc"
    with pytest.raises(AddressError, match="p/a has 3 bytes instead of 4"):
        store.put(tmp_path / "here", {"a": {"bytes": 4}}, "p/")


def test_a_file_with_other_bytes_does_not_appear(store: Store, tmp_path: Path):
    for name, content in {"short": b"ab", "other": b"abd", "good": b"abc"}.items():
        store.write(name, content)
    wanted = dict.fromkeys(("short", "other", "good"), WHOLE)
    found = store.get(tmp_path, wanted)
    assert found.keys() == {"short", "other"}
    assert found["short"] == "has 2 bytes instead of 3"
    assert "SHA-256" in found["other"]
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


@pytest.mark.parametrize("names", [["a", "a/b"], ["c/d/e", "c"]])
def test_a_file_that_is_a_folder_too_is_named(store: Store, tmp_path: Path, names: list[str]):
    fs = fsspec.filesystem("memory")  # which, unlike a bucket, would refuse to write these
    for key in (f"/store-test/a/{name}" for name in names):
        fs.store[key] = MemoryFile(fs, key, b"x")
    short, long = sorted(names)
    message = f"{ADDRESS} lists {short!r} and {long!r}: a file here cannot be a folder too"
    with pytest.raises(AddressError, match=re.escape(message)):
        store.get(tmp_path, store.names())
    assert not [*tmp_path.iterdir()]


def test_the_first_error_ends_the_rest(store: Store, tmp_path: Path, monkeypatch):
    """And it does not come only after all others have been tried."""
    store.write("a", b"x")
    tried = []

    def refuse(path: Path, write: object) -> None:
        tried.append(path)
        raise OSError("the disk is full")

    monkeypatch.setattr(files, "replace", refuse)
    with pytest.raises(OSError, match="the disk is full"):
        store.get(tmp_path, [f"{i}" for i in range(1000)])
    assert len(tried) < 1000


def test_progress_counts_all_bytes(store: Store, tmp_path: Path, monkeypatch):
    """Of files whose size is known the sum, and each of them once."""
    shown: list[Shown] = []

    class Shown(files.Transfer):
        def __init__(self, title: str, total: int):
            super().__init__(title, total)
            shown.append(self)

    monkeypatch.setattr(store_module, "Transfer", Shown)
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").write_bytes(b"12345")
    store.put(tmp_path, sizes(tmp_path, ["a", "b"]), title="up")
    store.get(tmp_path / "there", {"a": WHOLE, "b": {}}, title="down")
    found = [(x.description, x.total, x.completed) for one in shown for x in one._progress.tasks]
    assert found == [("up", 8, 8), ("down", 3, 8)]
