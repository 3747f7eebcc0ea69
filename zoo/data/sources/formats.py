"""The formats of files, by the suffixes of their names."""

from collections.abc import Callable, Iterator
from os.path import splitext
from typing import NamedTuple

from zoo.common.addresses import is_remote
from zoo.data.sources.readers import (
    MODULE,
    Record,
    read_array_record,
    read_csv,
    read_json,
    read_jsonl,
    read_parquet,
    read_text,
)
from zoo.data.sources.streams import compression_of, extra


class Format(NamedTuple):
    """How the files of a suffix are read."""

    read: Callable[..., Iterator[Record]]
    """Reader of a piece: its records, with all fields, or the given ones alone."""
    fields: bool
    """Whether records have fields; otherwise each is a text."""
    divisible: bool
    """Whether a file can be read in pieces, if it is not compressed."""
    compressible: bool = True
    """Whether its files are read with .gz or .zst after the suffix."""
    needs: tuple[str, str] | None = None
    """The module that reads it, and the extra that brings the module."""


TEXT = Format(read_text, fields=False, divisible=False)
_LINES = Format(read_jsonl, fields=True, divisible=True)
_RECORDS = Format(read_array_record, False, True, False, (MODULE, "array-record"))
FORMATS = {
    ".jsonl": _LINES,
    ".ndjson": _LINES,
    ".json": Format(read_json, fields=True, divisible=False),
    ".csv": Format(read_csv, fields=True, divisible=False),
    ".parquet": Format(read_parquet, True, True, False, ("pyarrow", "parquet")),
    ".array_record": _RECORDS,
    ".arrayrecord": _RECORDS,
}
"""Formats by suffix; every other file is a text."""

_REFUSED = {
    ".arrow": "write it as Parquet",
    ".feather": "write it as Parquet",
    **dict.fromkeys((".tar", ".tgz", ".zip", ".7z"), "unpack the archive"),
    **dict.fromkeys((".bz2", ".xz", ".lz4", ".br"), "compress it as .gz or .zst instead"),
}


def is_divisible(path: str) -> bool:
    """Whether a file is read in pieces; ArrayRecord at an address is not, but copied as a whole."""
    format = format_of(path)
    copied = format is _RECORDS and is_remote(path)
    return format.divisible and not copied and not compression_of(path)


def format_of(path: str) -> Format:
    """The format of a file, by its suffix, or the one before .gz or .zst."""
    return FORMATS.get(_suffixes(path)[0], TEXT)


def _suffixes(path: str) -> tuple[str, str]:
    """The suffix that names a file's format, and that of its compression, in lower case."""
    compression = compression_of(path)
    return splitext(path.lower().removesuffix(compression))[1], compression


def check_readable(path: str) -> None:
    """Raise an error for a file that cannot be prepared, by its name alone.

    Raises:
        ImportError: it needs an extra that is not installed.
        ValueError: its format has no documents, with what to do.
    """
    (suffix, compression), format = _suffixes(path), format_of(path)
    reason = _REFUSED.get(suffix)
    if compression and not format.compressible:
        reason = f"{suffix} files compress their content by themselves: decompress it"
    if reason:
        raise ValueError(f"{path} cannot be read: {reason}; or leave it out of the pattern")
    if compression == ".zst":
        extra("zstandard", "compressed", path)
    if format.needs:
        extra(*format.needs, path)
