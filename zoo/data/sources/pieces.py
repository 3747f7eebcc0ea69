"""A piece of a file: the unit in which files are read."""

from dataclasses import dataclass
from pathlib import Path

import xxhash

from zoo.common.addresses import Location, explained, is_remote

_HEAD = 2**20  # bytes


@dataclass(frozen=True)
class Piece:
    """A file, or the part of it that begins in its bytes [begin, end).

    A line, a row group or a record belongs to the piece in which it begins. Of a compressed file,
    of CSV and of text there is only the whole.
    """

    path: str
    """Path or address."""
    name: str
    """Path relative to the fixed folder of the glob that found it."""
    size: int
    """Bytes of the whole file when the splits were planned; another size is an error later."""
    begin: int
    """First byte."""
    end: int
    """First byte of the next piece."""
    version: str = ""
    """A mark that differs in another file of the same name and size: the hash of its first MiB and,
    of a larger one, the time of its last change; at an address the time alone. Empty: not known."""

    @property
    def label(self) -> str:
        """The name, and the byte from which lines are counted where that is not the first."""
        return f"{self.name}+{self.begin}" if self.begin else self.name


def whole_file(path: Location, name: str = "") -> Piece:
    """A file as one piece."""
    with explained(path):
        stat = path.stat()
        version = "" if is_remote(path) else _hash_of_head(path)
    if is_remote(path) or stat.st_size > _HEAD:
        version = f"{version} {stat.st_mtime or ''}".strip()
    return Piece(str(path), name or path.name, stat.st_size, 0, stat.st_size, version)


def _hash_of_head(path: Path) -> str:
    with open(path, "rb") as file:
        return xxhash.xxh3_128_hexdigest(file.read(_HEAD))
