"""Records: the entries of a file, and their texts."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

MAX_DOCUMENT = 256 * 2**20
"""Largest document of a prepared corpus, in bytes as stored: memory stays bounded."""

Record = tuple[int, str, dict[str, Any]]
"""A record's number, its location in words, and its fields."""


class Fields(NamedTuple):
    """The names of a record's text field and, optionally, its label field."""

    text: str = "text"
    label: str | None = None


def decode(data: bytes, where: object) -> str:
    """The text of bytes in UTF-8; other bytes are an error that says `where`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8: byte {data[error.start]:#04x} at offset {error.start}"
        ) from error


def field_of(record: dict[str, Any], where: str, field: str) -> Any:
    """The value of a record's field; a missing one is an error that says `where`."""
    if field not in record:
        raise ValueError(f"{where} has no field {field!r}: its fields are {sorted(record)}")
    return record[field]


def check_columns(names: Sequence[str], wanted: Iterable[str], path: str) -> None:
    """Raise a ValueError where a column that is wanted is there twice."""
    if twice := [name for name in wanted if names.count(name) > 1]:
        raise ValueError(
            f"{path} has {names.count(twice[0])} columns named {twice[0]!r}, and one of them would "
            "be read: give each a name of its own"
        )


def text_of(record: dict[str, Any], where: str, field: str) -> str:
    """The text in a record's field; a missing field or no text is an error that says `where`."""
    text = field_of(record, where, field)
    if not isinstance(text, str):
        raise ValueError(f"{where}: field {field!r} is a {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # "\ud800" is valid JSON, but no text
        raise ValueError(f"{where}: lone surrogate at character {error.start}") from error
    return text


def check_length(length: int, limit: int | None, where: object) -> None:
    """Raise a ValueError that says `where` for a document of more bytes than the limit."""
    if limit is not None and length > limit:
        raise ValueError(
            f"{where} is longer than a document may be ({limit / 2**20:g} MiB): divide it into "
            "several documents"
        )
