"""Local copies of the shards of a prepared corpus that lies at an address."""

import tempfile
from pathlib import Path

from zoo.common import files
from zoo.common.addresses import Location, explained, inside
from zoo.data.prepared.format import SHARDS
from zoo.data.prepared.once import made_once


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
