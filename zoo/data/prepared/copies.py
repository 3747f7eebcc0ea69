"""Copies of prepared corpora at addresses, and folders of a cache that are made once."""

import fcntl
import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path

from zoo.common import files
from zoo.common.addresses import Location, explained, inside, location
from zoo.data.prepared.format import SHARDS, SOURCES, SUMMED, SUMS, TOKENIZER, work_file


class Copies:
    """Copies of a corpus' folders and shards in `cache`, or in a temporary folder, when needed."""

    def __init__(self, source: Location, fingerprint: str, cache: Path | None):
        self._source = source
        if cache is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="zoo-shards-")
            cache = Path(self._temporary.name)
        self._cache = files.local_path(cache, "data.cache") / "copies" / fingerprint

    def folder(self, name: str) -> Path:
        """A copy of a folder."""
        return self._copied(name, f"{name}/*")

    def stem(self, number: int) -> Path:
        """The path of the copies of a shard's files without their suffixes."""
        name = f"{number:08}"
        return self._copied(name, f"{SHARDS}/{name}.*") / name

    def _copied(self, name: str, pattern: str) -> Path:
        def copy(folder: Path) -> None:
            with explained(self._source):
                for file in self._source.glob(pattern):
                    self._copy(file, inside(folder, file.name, self._source))

        return made_once(self._cache / name, copy)

    def _copy(self, source: Location, target: Path) -> None:
        with source.open("rb") as remote, open(target, "wb") as local:
            while part := remote.read(2**22):
                local.write(part)


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """The folder, which `make(partial)` fills unless it is there: one that a kill left partly too.

    It gets its name when it is whole. A process that comes while another one makes it waits.
    """
    if folder.exists():
        return folder
    files.make_folder(folder.parent, "data.cache")
    with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # its owner's end frees it
        if not folder.exists():
            partial = folder.with_name(f"{folder.name}.partial")
            partial.mkdir(exist_ok=True)
            make(partial)
            files.sync_all(partial)
            partial.rename(folder)
            files.sync(folder.parent)
    return folder


CACHE = Path("~/.cache/zoo/prepare")


def working_folder(address: Location) -> Path:
    """The local folder in which the corpus of an address is prepared."""
    return CACHE.expanduser() / hashlib.sha256(str(address).encode()).hexdigest()[:16]


def copy_shard(number: int, folder: Path, address: str) -> int:
    """Copy the files of a shard up, and return its number; what is there is not copied again."""
    copied = work_file(folder, number, ".copied")
    if not copied.exists():
        for suffix in (*SUMMED, SUMS, SOURCES):
            _copy(folder, address, f"{SHARDS}/{number:08}{suffix}")
        copied.touch()
    return number


def copy_tokenizer(folder: Path, address: str) -> None:
    """Copy the tokenizer's files up."""
    for path in sorted((folder / TOKENIZER).rglob("*")):
        if path.is_file():
            _copy(folder, address, path.relative_to(folder).as_posix())


def _copy(folder: Path, address: str, name: str) -> None:
    target = location(f"{address}/{name}", "out")
    with explained(target):
        target.fs.put_file(str(folder / name), target.path)
