"""Prepared corpora at addresses: copied up by shards as they are prepared, and down as needed."""

import hashlib
import tempfile
from pathlib import Path

from zoo.common import files
from zoo.common.files import Location
from zoo.common.store import Store, sizes
from zoo.data.prepared import format
from zoo.data.prepared.format import Manifest

CACHE = Path("~/.cache/zoo/prepare")


def working_folder(address: Location) -> Path:
    """The local folder in which the corpus of an address is prepared."""
    return CACHE.expanduser() / hashlib.sha256(str(address).encode()).hexdigest()[:16]


def copy_shard(number: int, folder: Path, address: str) -> None:
    """Copy the files of a shard up, once."""
    copied = format.work_file(folder, number, ".copied")
    if not copied.exists():
        shards = folder / format.SHARDS
        names = _names(number, format.shard_file(folder, number, format.WEIGHTS).exists())
        Store(address, "out").put(shards, sizes(shards, names), f"{format.SHARDS}/")
        copied.touch()


def copy_tokenizer(folder: Path, address: str) -> None:
    """Copy the tokenizer's files up."""
    found = sorted(path for path in (folder / format.TOKENIZER).rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in found]
    Store(address, "out").put(folder, sizes(folder, names))


def _names(number: int, weighted: bool) -> list[str]:
    """The files of a shard."""
    suffixes = (format.TOKENS, format.TRAIN, format.HELD_OUT, format.SUMS, format.SOURCES)
    return [f"{number:08}{suffix}" for suffix in (*suffixes, *[format.WEIGHTS] * weighted)]


class Copies:
    """Copies of a corpus' folders and shards in `cache`, or in a temporary folder, when needed."""

    def __init__(self, source: Location, manifest: Manifest, cache: Path | None):
        self._store, self._weighted = Store(source, "data"), manifest.weighted
        if cache is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="zoo-shards-")
            cache = Path(self._temporary.name)
        self._cache = files.local_path(cache, "data.cache") / "copies" / manifest.fingerprint

    def folder(self, name: str) -> Path:
        """A copy of a folder."""
        return self._copied(name, None, f"{name}/")

    def stem(self, number: int) -> Path:
        """The path of the copies of a shard's files without their suffixes."""
        name = f"{number:08}"
        return self._copied(name, _names(number, self._weighted), f"{format.SHARDS}/") / name

    def _copied(self, name: str, names: list[str] | None, prefix: str) -> Path:
        """Copies of these files, or all, made at their first use; an error if one is missing."""

        def copy(folder: Path) -> None:
            wanted = self._store.names(name) if names is None else names
            for missing in self._store.get(folder, wanted, prefix):
                raise FileNotFoundError(f"{self._store.address}/{prefix}{missing} is missing")

        return files.made_once(self._cache / name, copy, "data.cache")
