"""Formats of files by their suffixes, a reader for each, and the documents in splits of files.

A reader gives the records of a piece in a stream, each with its place.
"""

import codecs
import contextlib
import csv
import dataclasses
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from zoo.common.files import is_remote
from zoo.data.splits import (
    Given,
    Piece,
    Split,
    compression_of,
    divide,
    extra,
    located,
    opened,
    suffix_of,
)

MAX_DOCUMENT = 256 * 2**20
"""Largest document of a prepared corpus, in bytes as stored: memory stays bounded."""
_PLACES = 256  # in the corpus that are sampled, about

Record = tuple[int, str, dict[str, Any]]
"""A record's number, its location in words, and its fields."""
Columns = Sequence[str] | None
"""The fields that are wanted, a document's text before the others; None: all."""


def read_text(piece: Piece, columns: Sequence[str]) -> Iterator[Record]:
    """A file as one record, whose text is the whole file."""
    with opened(piece) as stream:
        data = stream.read(MAX_DOCUMENT + 1)
    _check_length(len(data), piece.path)
    yield 0, piece.path, {columns[0]: _decode(data, piece.path)}


def read_jsonl(piece: Piece, columns: Columns = None) -> Iterator[Record]:
    """The objects of the lines that begin in a piece, with their numbers counted from there."""
    try:
        for number, where, line in _lines(piece):
            if line.strip():
                yield number, where, _object(_parsed(line, where), where)
    except ValueError as error:
        head = _head(piece)
        if head.startswith(b"["):
            problem, selected = "a JSON array", "'.[]'"
        elif head.partition(b"\n")[0].strip() == b"{":
            problem, selected = "JSON with values over several lines", "."
        else:
            raise
        raise ValueError(
            f"{piece.path} is {problem}, and needs an object per line instead, as "
            f"`jq -c {selected}` writes them"
        ) from error


def read_json(piece: Piece, columns: Columns = None) -> Iterator[Record]:
    """The objects of a file's array, numbered from 0; for a file of lines, as `read_jsonl`."""
    if not _head(piece).startswith(b"["):
        yield from read_jsonl(piece)
        return
    with opened(piece) as stream:
        records = _parsed(stream.read().removeprefix(codecs.BOM_UTF8), piece.path)
    for number, record in enumerate(records):
        where = f"{piece.path}, element {number}"
        yield number, where, _object(record, where)


def read_csv(piece: Piece, columns: Columns = None) -> Iterator[Record]:
    """The rows of a CSV file, numbered by the lines they end in; the first names the columns."""
    # The limit is the whole process', 128 KiB at first. The parser takes 4 bytes per character.
    csv.field_size_limit(MAX_DOCUMENT // 4)
    lines = (  # which may end in a carriage return alone
        part
        for _, where, line in _lines(piece)
        for part in io.StringIO(_decode(line, where), newline="")
    )
    rows = csv.DictReader(lines, strict=True)
    try:
        names = rows.fieldnames or ()
        _check_columns(names, names if columns is None else columns, piece.path)
        for row in rows:
            where = f"{piece.path}, line {rows.line_num}"
            if None in row or None in row.values():
                raise ValueError(f"{where} does not have as many columns as the first line")
            yield rows.line_num, where, row
    except csv.Error as error:
        raise ValueError(f"{piece.path} is not CSV after line {rows.line_num}: {error}") from error


def read_fasta(piece: Piece, columns: Columns = None) -> Iterator[Record]:
    """The sequences of a FASTA file, numbered by the lines of their headers.

    A record has the sequence as its text, `id` and `description` of its header, and a field for
    each `name=value` there, as in UniProt's.
    """
    text, header, sequence = columns[0] if columns else "text", "", list[str]()
    number, where = 0, ""

    def record() -> Record:
        if not sequence:
            raise ValueError(f"{where}: the header has no sequence below it")
        id, _, description = header.partition(" ")
        named = dict(re.findall(r"(\w+)=(.*?)(?=\s+\w+=|$)", description))
        about = {"id": id, "description": description}
        return number, where, {**about, **named, text: "".join(sequence)}

    for line_number, line_where, data in _lines(piece):
        line = _decode(data, line_where).strip()
        if line.startswith(">"):
            if number:
                yield record()
            number, where, header, sequence = line_number, line_where, line[1:].strip(), []
        elif line and not number:
            raise ValueError(f"{line_where} is no FASTA: a sequence comes after a line with >")
        elif line:
            sequence.append(line)
    if number:
        yield record()


def _lines(piece: Piece) -> Iterator[tuple[int, str, bytes]]:
    """The lines that begin in a piece, with their numbers and their places in words."""
    # Lines end at b"\n" alone: str.splitlines also splits at U+2028, which JSON allows in a string.
    after = f" after byte {piece.begin}" if piece.begin else ""
    position, number = piece.begin, 0
    end = math.inf if compression_of(piece.path) else piece.end
    with opened(piece) as stream:
        if position:  # the line with the byte before the piece belongs to the piece before
            position -= 1
            stream.seek(position)
            while position < end and (part := stream.readline(2**20)):
                position += len(part)
                if part.endswith(b"\n"):
                    break
        while position < end and (line := stream.readline(MAX_DOCUMENT + 1)):
            position, number = position + len(line), number + 1
            where = f"{piece.path}, line {number}{after}"
            _check_length(len(line), where)
            yield (
                number,
                where,
                line.removeprefix(codecs.BOM_UTF8 if position == len(line) else b""),
            )


def _parsed(data: bytes, where: str) -> Any:
    text = _decode(data, where)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is a JSON {type(value).__name__}, not an object")
    return value


def _head(piece: Piece) -> bytes:
    """The beginning of a file, from its first character that is not a space."""
    with opened(piece) as stream:
        return stream.read(2**16).removeprefix(codecs.BOM_UTF8).lstrip()


def read_parquet(piece: Piece, columns: Columns = None) -> Iterator[Record]:
    """The rows of the row groups that begin in a piece; only their `columns` are read."""
    arrow: Any = extra("pyarrow", "parquet", piece.path)
    parquet: Any = extra("pyarrow.parquet", "parquet", piece.path)
    row = 0
    with located(piece) as place, contextlib.ExitStack() as stack:
        source = place
        if is_remote(place):
            source = stack.enter_context(place.open("rb", cache_type="none"))
        try:
            # `pre_buffer` would hold a whole row group. This is also the size of requests.
            file = parquet.ParquetFile(source, buffer_size=2**22, pre_buffer=False)
            names = file.schema_arrow.names
            if missing := set(columns or ()) - set(names):
                raise ValueError(
                    f"{piece.path} has no field {missing.pop()!r}: its fields are {names}"
                )
            _check_columns(names, names if columns is None else columns, piece.path)
            for group in range(file.num_row_groups):
                metadata = file.metadata.row_group(group)
                first = metadata.column(0)
                begin = min(filter(None, (first.dictionary_page_offset, first.data_page_offset)))
                if not piece.begin <= begin < piece.end:
                    row += metadata.num_rows
                    continue
                for batch in file.iter_batches(
                    64, [group], columns and [*columns], use_threads=False
                ):
                    # One by one, so that an error names the row.
                    for record in (batch.slice(i, 1).to_pylist()[0] for i in range(len(batch))):
                        where = f"{piece.path}, row {row}"
                        if columns is not None and isinstance(record[columns[0]], str):
                            _check_length(len(record[columns[0]]), where)
                        yield row, where, record
                        row += 1
        except UnicodeDecodeError as error:
            raise _not_utf8(error, f"{piece.path}, row {row}") from error
        except (arrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and type(error) is not OSError:
                raise  # of a disk or a store; Arrow's own have no subclass
            raise ValueError(
                f"{piece.path} is no Parquet file, or damaged from row {row}; copy it again: "
                f"{error}"
            ) from error


def _decode(data: bytes, where: str) -> str:
    """The text of bytes in UTF-8; other bytes are an error that says `where`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(error, where) from error


def _not_utf8(error: UnicodeDecodeError, where: str) -> ValueError:
    byte = error.object[error.start]
    return ValueError(f"{where} is not UTF-8: byte {byte:#04x} at offset {error.start}")


def _check_columns(names: Sequence[str], wanted: Iterable[str], path: str) -> None:
    """Raise a ValueError where a wanted column is there twice."""
    if twice := [name for name in wanted if names.count(name) > 1]:
        raise ValueError(
            f"{path} has {names.count(twice[0])} columns named {twice[0]!r}, and one of them would "
            "be read: give each a name of its own"
        )


def _check_length(length: int, where: str) -> None:
    if length > MAX_DOCUMENT:
        raise ValueError(
            f"{where} is longer than a document may be ({MAX_DOCUMENT / 2**20:g} MiB): divide "
            "it into several documents"
        )


FORMATS: dict[str, Callable[..., Iterator[Record]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    **dict.fromkeys((".fasta", ".fa", ".faa", ".fna"), read_fasta),
    ".parquet": read_parquet,
}
"""Readers of records with fields by suffix; every other file is a text."""


def reader_of(path: str) -> Callable[..., Iterator[Record]]:
    """The reader of a file's pieces, by its suffix, or the one before .gz or .zst."""
    return FORMATS.get(suffix_of(path), read_text)


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
        read = reader_of(piece.path)
        if label is not None and read is read_text:
            raise ValueError(
                f"{piece.path} has no field {label!r}: labels are in {', '.join(FORMATS)} files"
            )
        for number, where, record in read(piece, columns):
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

    They are the first texts in each of a few hundred parts of equal size, in a compressed file its
    beginning, or all texts where the files have no more; and only `wanted` ones, such as texts that
    are not held out.
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
