"""Splits: the files of a corpus in parts of about equal size, and the documents of each."""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os.path import splitext
from pathlib import Path
from typing import Any, NamedTuple

from zoo.common.addresses import files_matching
from zoo.data.formats import (
    FORMATS,
    PARQUET,
    TEXT,
    Piece,
    compression_of,
    extra,
    format_of,
    whole_file,
)

_PLACES = 256  # in the corpus that are sampled, about
_REFUSED = {
    ".arrow": "write it as Parquet",
    ".feather": "write it as Parquet",
    **dict.fromkeys((".tar", ".tgz", ".zip", ".7z"), "unpack the archive"),
    **dict.fromkeys((".bz2", ".xz", ".lz4", ".br"), "compress it as .gz or .zst instead"),
}


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
    lines and Parquet are divided into pieces of at most `shard_bytes`; a row group of Parquet, a
    compressed file, CSV and text stay in one piece. Small files share a split.

    Raises:
        FileNotFoundError: a pattern matches no file.
        ImportError: a file's format needs an extra that is not installed.
        ValueError: a file cannot be read as documents, or a pattern's files are empty.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes}: must be positive")
    files: dict[str, Piece] = {}  # a file that two patterns match is read once
    for pattern in patterns.split(",") if isinstance(patterns, str) else patterns:
        matching = files_matching(pattern.strip(), "data")
        for path in matching:
            check_readable(str(path))
        absolute = [path.absolute() if isinstance(path, Path) else path for path in matching]
        with ThreadPoolExecutor(16) as threads:  # a store is asked for each file
            found = list(threads.map(whole_file, absolute, matching.values()))
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
    divisible = format_of(file.path).divisible and not compression_of(file.path)
    count = max(1, -(-file.size // shard_bytes)) if divisible else 1
    bounds = [file.size * i // count for i in range(count + 1)]
    return [
        dataclasses.replace(file, begin=begin, end=end) for begin, end in itertools.pairwise(bounds)
    ]


def check_readable(path: str) -> None:
    """Raise an error for a file that cannot be prepared, by its name alone.

    Raises:
        ImportError: it needs an extra that is not installed.
        ValueError: its format has no documents, with what to do.
    """
    compression, format = compression_of(path), format_of(path)
    reason = _REFUSED.get(splitext(path.lower().removesuffix(compression))[1])
    if compression and format is PARQUET:
        reason = ".parquet files compress their content by themselves: decompress it"
    if reason:
        raise ValueError(f"{path} cannot be read: {reason}; or leave it out of the pattern")
    if compression == ".zst":
        extra("zstandard", "compressed", path)
    if format is PARQUET:
        extra("pyarrow", "parquet", path)


class SourceDocument(NamedTuple):
    """A text with the place it was read from."""

    source: int
    """Index of the file in `Split.names`."""
    record: int
    """Line (of a CSV file, where the row ends), row or element; 0 for a text file."""
    text: str
    label: str | None = None


def read_split(
    split: Split | Given, field: str = "text", label: str | None = None
) -> Iterator[SourceDocument]:
    """The documents of a split in their order, read in a stream, by their text's and label's field.

    Raises:
        ValueError: what cannot be read, with its file and line, row or record, and the fix.
    """
    if isinstance(split, Given):
        for source, (_, text) in enumerate(split.documents):
            yield SourceDocument(source, 0, text)
        return
    columns = [field] if label is None else [field, label]
    for source, piece in enumerate(split.pieces):
        format = format_of(piece.path)
        if label is not None and format is TEXT:
            raise ValueError(
                f"{piece.path} has no field {label!r}: labels are in {', '.join(FORMATS)} files"
            )
        for number, where, record in format.read(piece, columns):
            try:
                text, found = text_of(record, field), None
                if label is not None:
                    if label not in record:
                        raise ValueError(f"no field {label!r}; its fields are {sorted(record)}")
                    found = record[label]
                    if not isinstance(found, str | int) or found == "":
                        raise ValueError(
                            f"field {label!r} is {found!r}: a label is a string or an integer"
                        )
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            yield SourceDocument(source, number, text, None if label is None else str(found))


def text_of(record: dict[str, Any], field: str) -> str:
    """The text in a field of a record; a ValueError unless it is one."""
    text = record.get(field)
    if not isinstance(text, str):
        hint = "; words with tags are rows of --data.format tags" if isinstance(text, list) else ""
        raise ValueError(
            f"no text in field {field!r}, but {text!r:.40}; its fields are {sorted(record)}{hint}"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:  # "\ud800" is valid JSON, but no text
        raise ValueError(f"lone surrogate at character {error.start} of {field!r}") from error
    return text


def sample_texts(
    splits: Sequence[Split],
    field: str = "text",
    *,
    num_bytes: int = 64 * 2**20,
    wanted: Callable[[str], bool] = lambda text: True,
) -> Iterator[str]:
    """Texts of about `num_bytes` in all, from everywhere in the files, whatever the splits.

    The first texts of each of some hundred parts of equal size; of a compressed file, its
    beginning. All texts where the files have no more. Only `wanted` ones, such as those
    that are not held out.
    """
    pieces = (piece for split in splits for piece in split.pieces)
    files = dict.fromkeys(dataclasses.replace(piece, begin=0, end=piece.size) for piece in pieces)
    total = sum(file.size for file in files)
    parts = divide(files, max(2**20, total // _PLACES))
    left = num_bytes
    # The smallest first: what a part leaves of its share is for those after it.
    for index, part in enumerate(sorted(parts, key=lambda part: part.num_bytes)):
        share = left // (len(parts) - index)
        for document in read_split(part, field):
            if wanted(document.text):
                size = len(document.text.encode())
                share, left = share - size, left - size
                yield document.text
            if share <= 0:
                break
