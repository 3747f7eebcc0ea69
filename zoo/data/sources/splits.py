"""Splits: the files of a corpus in parts of about equal size, each read on its own."""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from zoo.common.addresses import Location, files_matching
from zoo.data.sources.formats import check_readable, is_divisible
from zoo.data.sources.pieces import Piece, whole_file


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
        return self._hash("name", "size", "begin", "end")

    @property
    def version(self) -> str:
        """Hash of the key and of the files' versions."""
        return self._hash("name", "size", "begin", "end", "version")

    def _hash(self, *names: str) -> str:
        pieces = [[getattr(piece, name) for name in names] for piece in self.pieces]
        return hashlib.sha256(json.dumps(pieces).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Given:
    """Documents in memory, as (name, text), that become one shard; each is known by its name."""

    documents: tuple[tuple[str, str], ...]

    @property
    def names(self) -> list[str]:
        """The names of the documents; `SourceDocument.source` is an index of this list."""
        return [name for name, _ in self.documents]

    @functools.cached_property
    def num_bytes(self) -> int:
        """Bytes of the texts."""
        return sum(len(text.encode()) for _, text in self.documents)

    @functools.cached_property
    def version(self) -> str:
        """Hash of the names and the texts."""
        return hashlib.sha256(json.dumps(self.documents).encode()).hexdigest()[:32]

    @property
    def key(self) -> str:
        """The version."""
        return self.version


def plan_splits(patterns: str | Sequence[str], *, shard_bytes: int) -> list[Split]:
    """The matching files in splits of about `shard_bytes`, a pure function of names and sizes.

    `patterns` are paths, globs or addresses: a list, or several with commas between them. JSON
    lines, Parquet and ArrayRecord are divided into pieces of at most `shard_bytes`; a row group of
    Parquet, a compressed file, CSV, text, and ArrayRecord at an address stay in one piece. Small
    files share a split.

    Raises:
        FileNotFoundError: a pattern matches no file.
        ImportError: a file's format needs an extra that is not installed.
        ValueError: a file cannot be read as documents, or a pattern's files are empty.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes}: must be positive")
    files: dict[str, Piece] = {}  # a file that two patterns match is read once
    for pattern in patterns.split(",") if isinstance(patterns, str) else patterns:
        found = list(_files(pattern.strip()))
        if not any(file.size for file in found):
            raise ValueError(f"{pattern.strip()!r}: all matching files ({len(found)}) are empty")
        for file in found:
            files.setdefault(file.path, file)
    return divide(files.values(), shard_bytes)


def divide(files: Iterable[Piece], shard_bytes: int) -> list[Split]:
    """Whole files in splits of about `shard_bytes`, in their order."""
    splits: list[list[Piece]] = []
    room = 0  # in the last split
    for file in files:
        if not splits or file.size > room:
            splits.append([])
            room = shard_bytes
        first, *others = _pieces(file, shard_bytes)
        splits[-1].append(first)
        splits += [[piece] for piece in others]
        room -= file.size
    return [Split(tuple(pieces)) for pieces in splits]


def _pieces(file: Piece, shard_bytes: int) -> list[Piece]:
    count = max(1, -(-file.size // shard_bytes)) if is_divisible(file.path) else 1
    bounds = [file.size * i // count for i in range(count + 1)]
    return [
        dataclasses.replace(file, begin=begin, end=end) for begin, end in itertools.pairwise(bounds)
    ]


def _files(pattern: str) -> Iterator[Piece]:
    matching = files_matching(pattern, "data")
    for path in matching:
        check_readable(str(path))

    def piece(path: Location) -> Piece:
        return whole_file(path.absolute() if isinstance(path, Path) else path, matching[path])

    with ThreadPoolExecutor(16) as threads:  # a store is asked for each file
        return iter(list(threads.map(piece, matching)))
