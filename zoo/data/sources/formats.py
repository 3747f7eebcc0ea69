"""The formats of files, by the suffixes of their names."""

from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from zoo.base.addresses import is_remote
from zoo.data.sources.array_records import MODULE, read_array_record
from zoo.data.sources.lines import read_jsonl, read_text
from zoo.data.sources.pieces import Piece
from zoo.data.sources.records import Fields, Record
from zoo.data.sources.streams import compression_of, extra
from zoo.data.sources.tables import read_csv, read_parquet


class Format(NamedTuple):
    """How the files of a suffix are read."""

    read: Callable[[Piece, Fields, int | None], Iterator[Record]]
    """Reader of a piece: its records, each of at most so many bytes."""
    fields: bool
    """Whether records have fields; otherwise each is a text."""
    divisible: bool
    """Whether a file can be read in pieces, if it is not compressed."""
    compressible: bool = True
    """Whether its files are read with .gz or .zst after the suffix."""
    module: str = "builtins"
    """The module that its extra brings."""
    extra: str = ""


TEXT = Format(read_text, fields=False, divisible=False)
_LINES = Format(read_jsonl, fields=True, divisible=True)
_RECORDS = Format(read_array_record, False, True, False, MODULE, "array-record")
FORMATS = {
    ".jsonl": _LINES,
    ".ndjson": _LINES,
    ".csv": Format(read_csv, fields=True, divisible=False),
    ".parquet": Format(read_parquet, True, True, False, "pyarrow", "parquet"),
    ".array_record": _RECORDS,
    ".arrayrecord": _RECORDS,
}
"""Formats by suffix; every other file is a text."""

_REFUSED = {
    ".json": "a JSON file is one value, and no lines: jq -c '.[]' FILE.json > FILE.jsonl",
    ".arrow": "write it as Parquet",
    ".feather": "write it as Parquet",
    **dict.fromkeys((".tar", ".tgz", ".zip", ".7z"), "unpack the archive"),
    **dict.fromkeys((".bz2", ".xz", ".lz4", ".br"), "compress it as .gz or .zst instead"),
}


def format_of(path: str) -> Format:
    """The format of a file, by its suffix, or the one before .gz or .zst."""
    name = PurePosixPath(path)
    suffix = (PurePosixPath(name.stem) if compression_of(path) else name).suffix
    return FORMATS.get(suffix.lower(), TEXT)


def check_readable(path: str) -> Format:
    """The format of a file to prepare.

    Raises:
        ImportError: it needs an extra that is not installed.
        ValueError: it holds no documents that can be read, with what to do.
    """
    suffix, format = PurePosixPath(path).suffix.lower(), format_of(path)
    inner = PurePosixPath(PurePosixPath(path).stem).suffix.lower() if compression_of(path) else ""
    reason = _REFUSED.get(suffix) or _REFUSED.get(inner)
    if not reason and inner and not format.compressible:
        reason = f"{inner} files compress their content by themselves: decompress it"
    if not reason and format.read is read_array_record and is_remote(path):
        reason = "ArrayRecord files are read from local folders alone: copy it here"
    if reason:
        raise ValueError(f"{path} cannot be read: {reason}; or leave it out of the pattern")
    if suffix == ".zst":
        extra("zstandard", "compressed", path)
    extra(format.module, format.extra, path)
    return format
