"""zoo.common.store: locations and globs, copies of files, whole or not there, and their names."""

import re
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile
from stores import gs, gs_port, s3, s3_port  # noqa: F401

from zoo.common import checksums, files
from zoo.common import store as store_module
from zoo.common.files import AddressError, is_remote, scheme_of
from zoo.common.store import Store, files_matching, location, sizes

ADDRESS = "memory://store-test/a"
WHOLE = {"bytes": 3, "sha256": checksums.sha256(b"abc")}


@pytest.fixture
def store() -> Store:
    fs = fsspec.filesystem("memory")
    if fs.exists("/store-test"):
        fs.rm("/store-test", recursive=True)
    return Store(ADDRESS)


def test_local_paths_stay_paths(tmp_path: Path):
    assert location("~/x", "data") == Path.home() / "x"
    assert location(tmp_path, "data") == tmp_path
    assert location(f"file://{tmp_path}", "data") == tmp_path
    assert not is_remote("a:b/c.txt")
    assert not is_remote("file:///x")
    assert is_remote("s3://b/x")
    assert is_remote(Path("s3://b/x"))  # which makes one slash of the two
    assert scheme_of("S3://b") == "s3"


def test_light_until_an_address_is_given():
    program = (
        "import sys; from zoo.common.store import location; location('/x', 'data');"
        "assert not {'upath', 'fsspec', 's3fs'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ftp://host/x", "data='ftp://host/x': unknown scheme ftp://; known are s3://"),
        ("s3://", "data='s3://':"),
    ],
)
def test_addresses_that_cannot_be_meant_are_refused(address: str, message: str):
    with pytest.raises(ValueError, match=message):
        location(address, "data")


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"data='gs://b/x' .* pip install 'zoo\[gs\]'"):
        location("gs://b/x", "data")


def test_globs_of_memory_and_of_files_agree(tmp_path: Path):
    root = location("memory://folder", "data")
    for base in (tmp_path, root):
        for name in ("b/2.txt", "b/c/3.txt", "a.txt", "x.csv"):
            (base / name).parent.mkdir(parents=True, exist_ok=True)
            (base / name).write_text(name)
    for pattern in ("*.txt", "**/*.txt", "b/*.txt", "a.txt"):
        here = files_matching(f"{tmp_path}/{pattern}", "data")
        there = files_matching(f"memory://folder/{pattern}", "data")
        assert list(here.values()) == list(there.values())
        assert len(here) >= 1
        assert [path.read_text() for path in here] == [path.read_text() for path in there]
    assert list(files_matching("memory://folder/b/*/3.txt", "data").values()) == ["c/3.txt"]
    with pytest.raises(FileNotFoundError, match=r"no file matches 'memory://folder/\*.gz'"):
        files_matching("memory://folder/*.gz", "data")
    with pytest.raises(FileNotFoundError, match=r"is a folder: add"):
        files_matching("memory://folder/b", "data")
    with pytest.raises(FileNotFoundError, match=r"is a folder: add"):
        files_matching(str(tmp_path / "b"), "data")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_stores_are_read_and_written(kind: str, request: pytest.FixtureRequest):
    store: Store = request.getfixturevalue(kind)
    root = location(store.address, "data")
    for name in ("b/2.txt", "b/c/3.txt", "a.txt"):
        (root / name).write_text(name)
    found = files_matching(f"{store.address}/**/*.txt", "data")
    assert sorted(found.values()) == ["a.txt", "b/2.txt", "b/c/3.txt"]
    assert [path.read_text() for path in found] == [*found.values()]
    assert location(f"{store.address}/b/2.txt", "data").read_text() == "b/2.txt"
    # Another writer's file is seen: no listing is remembered.
    (location(store.address, "data") / "b" / "4.txt").write_text("4")
    assert len(files_matching(f"{store.address}/b/*.txt", "data")) == 2


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
    with pytest.raises(AddressError, match=r"p/a has 3 .* 4"):
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
