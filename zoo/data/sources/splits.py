"""Splits: the files of a corpus in parts of about equal size, each read on its own."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Piece:
    """A file, or the part of it that begins in its bytes [begin, end).

    A line, a row group or a record belongs to the piece in which it begins.
    """

    path: str
    """Absolute path or address."""
    name: str
    """Path relative to the fixed folder of the glob that found it."""
    size: int
    """Bytes of the whole file when the splits were planned; another size is an error later."""
    begin: int
    """First byte."""
    end: int
    """First byte of the next piece."""

    @property
    def label(self) -> str:
        """The name, and the byte from which lines are counted where that is not the first."""
        return f"{self.name}+{self.begin}" if self.begin else self.name


@dataclass(frozen=True)
class Split:
    """Files, or a part of one file, that become one shard."""

    pieces: tuple[Piece, ...]

    @property
    def names(self) -> list[str]:
        """The names of the sources; `SourceDocument.source` is an index of this list."""
        return [piece.label for piece in self.pieces]

    @property
    def num_bytes(self) -> int:
        """Bytes as stored, of compressed files too."""
        return sum(piece.end - piece.begin for piece in self.pieces)

    @property
    def key(self) -> str:
        """Hash of the names, sizes and ranges, in hexadecimal; where the files lie is left out."""
        pieces = [[piece.name, piece.size, piece.begin, piece.end] for piece in self.pieces]
        return hashlib.sha256(json.dumps(pieces).encode()).hexdigest()[:32]

    def to_json(self) -> dict[str, Any]:
        """What `json.dump` takes and `from_json` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Split":
        """The split that `to_json` gave."""
        return cls(tuple(Piece(**piece) for piece in content["pieces"]))


def plan_splits(patterns: str | Sequence[str], *, shard_bytes: int) -> list[Split]:
    """The matching files in splits of about `shard_bytes`, a pure function of names and sizes.

    Raises:
        FileNotFoundError: a pattern matches no file.
        ImportError: a file's format needs an extra that is not installed.
        ValueError: a file cannot be read as documents, or a pattern's files are empty.
    """
    raise NotImplementedError
