"""Formats of files by their suffixes, and a reader for each: the records, with their places."""

import codecs
import contextlib
import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from os.path import splitext
from typing import Any, NamedTuple

from zoo.common.addresses import is_remote
from zoo.data.sources.streams import Piece, compression_of, extra, found, local_copy, opened

_MODULE = "array_record.python.array_record_module"
MAX_DOCUMENT = 256 * 2**20
"""Largest document of a prepared corpus, in bytes as stored: memory stays bounded."""

Record = tuple[int, str, dict[str, Any]]
"""A record's number, its location in words, and its fields."""


class Fields(NamedTuple):
    """The names of a record's text field and, optionally, its label field."""

    text: str = "text"
    label: str | None = None


def read_jsonl(piece: Piece, fields: Fields | None = None) -> Iterator[Record]:
    """The objects of the lines that begin in a piece, with their numbers counted from there."""
    after = f" after byte {piece.begin}" if piece.begin else ""
    with opened(piece) as stream:
        for number, line in enumerate(_lines(stream, piece), start=1):
            if number == 1 and not piece.begin:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            where = f"{piece.path}, line {number}{after}"
            try:
                _check_length(len(line), where)
                record = _object(_parsed(line, where), where)
            except ValueError:
                _refuse_other_json(piece)
                raise
            yield number, where, record


def read_json(piece: Piece, fields: Fields | None = None) -> Iterator[Record]:
    """The objects of the array that a file is, numbered from 0; or as `read_jsonl` of lines."""
    if not _head(piece).startswith(b"["):
        yield from read_jsonl(piece, fields)
        return
    with opened(piece) as stream:
        records = _parsed(stream.read().removeprefix(codecs.BOM_UTF8), piece.path)
    for number, record in enumerate(records):
        where = f"{piece.path}, element {number}"
        yield number, where, _object(record, where)


def read_text(piece: Piece, fields: Fields) -> Iterator[Record]:
    """A file as one record, whose text is the whole file."""
    with opened(piece) as stream:
        data = stream.read(MAX_DOCUMENT + 1)
    _check_length(len(data), piece.path)
    yield 0, piece.path, {fields.text: _decode(data, piece.path)}


def _lines(stream: io.BufferedReader, piece: Piece) -> Iterator[bytes]:
    """The lines that begin in a piece; of one beyond the limit only its beginning."""
    # Lines end at b"\n" alone: str.splitlines also splits at U+2028, which JSON allows in a string.
    position = piece.begin
    end = math.inf if compression_of(piece.path) else piece.end
    if position:  # the line that contains the byte before the piece is of the piece before
        position -= 1
        stream.seek(position)
        while position < end:
            part = stream.readline(2**20)
            position += len(part)
            if part.endswith(b"\n") or not part:
                break
    while position < end and (line := stream.readline(MAX_DOCUMENT + 1)):
        position += len(line)
        yield line


def _parsed(data: bytes, where: str) -> Any:
    text = _decode(data, where)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        message = f"{where} is not JSON: {error.msg}: character {error.pos}"
        raise ValueError(message) from error
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


def _refuse_other_json(piece: Piece) -> None:
    """Raise a ValueError if a file's beginning shows that its lines are no values of their own."""
    head = _head(piece)
    if head.startswith(b"["):
        found, selected = "a JSON array", "'.[]'"
    elif head.partition(b"\n")[0].strip() == b"{":
        found, selected = "JSON with values over several lines", "."
    else:
        return
    read = {".gz": "zcat", ".zst": "zstdcat"}.get(compression_of(piece.path), "cat")
    raise ValueError(
        f"{piece.path} is {found}, and needs an object per line instead: "
        f"{read} {piece.path} | jq -c {selected} > lines.jsonl"
    )


def read_csv(piece: Piece, fields: Fields | None = None) -> Iterator[Record]:
    """The rows of a CSV file, numbered by the lines they end in; the first names the columns."""
    with opened(piece) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        rows = csv.DictReader(_text_lines(text, piece.path), strict=True)
        # It is the whole process' limit, 128 KiB at first. The parser takes 4 bytes per character.
        csv.field_size_limit(MAX_DOCUMENT // 4)
        try:
            names = rows.fieldnames or ()
            _check_columns(names, names if fields is None else filter(None, fields), piece.path)
            for row in rows:
                where = f"{piece.path}, line {rows.line_num}"
                if None in row or None in row.values():
                    raise ValueError(f"{where} does not have as many columns as the first line")
                yield rows.line_num, where, row
        except csv.Error as error:
            raise ValueError(
                f"{piece.path} is not CSV after line {rows.line_num}: {error}"
            ) from error
        except UnicodeDecodeError:  # in some line of a block
            with opened(piece) as again:
                for number, line in enumerate(again, start=1):
                    _decode(line, f"{piece.path}, line {number}")
            raise


def _text_lines(text: io.TextIOWrapper, path: str) -> Iterator[str]:
    for number, line in enumerate(iter(lambda: text.readline(MAX_DOCUMENT + 1), ""), start=1):
        _check_length(len(line), f"{path}, line {number}")
        yield line


def read_parquet(piece: Piece, fields: Fields | None = None) -> Iterator[Record]:
    """The rows of the row groups that begin in a piece; of an address their bytes alone are read.

    Of their columns only the named ones are read, if there are `fields`.
    """
    arrow: Any = extra("pyarrow", "parquet", piece.path)
    parquet: Any = extra("pyarrow.parquet", "parquet", piece.path)
    columns, row = None if fields is None else list(filter(None, fields)), 0
    with found(piece) as place, contextlib.ExitStack() as stack:
        source = (
            stack.enter_context(place.open("rb", cache_type="none")) if is_remote(place) else place
        )
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
                if not piece.begin <= _begin(metadata) < piece.end:
                    row += metadata.num_rows
                    continue
                for batch in file.iter_batches(64, [group], columns, use_threads=False):
                    for record in _dictionaries(batch, piece.path, row):
                        where = f"{piece.path}, row {row}"
                        if fields is not None and isinstance(record[fields.text], str):
                            _check_length(len(record[fields.text]), where)
                        yield row, where, record
                        row += 1
        except (arrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and type(error) is not OSError:
                raise  # of a disk or a store; Arrow's own have no subclass
            raise ValueError(
                f"{piece.path} is no Parquet file, or damaged from row {row}; copy it again: "
                f"{error}"
            ) from error


def _begin(row_group: Any) -> int:
    column = row_group.column(0)
    return min(filter(None, (column.dictionary_page_offset, column.data_page_offset)))


def _dictionaries(batch: Any, path: str, row: int) -> list[dict[str, Any]]:
    try:
        return batch.to_pylist()
    except UnicodeDecodeError as error:
        if len(batch) > 1:  # which row?
            parts = (_dictionaries(batch.slice(i, 1), path, row + i) for i in range(len(batch)))
            return [record for part in parts for record in part]
        byte = error.object[error.start]
        raise ValueError(
            f"{path}, row {row} is not UTF-8: byte {byte:#04x} at offset {error.start}"
        ) from error


def read_array_record(piece: Piece, fields: Fields) -> Iterator[Record]:
    """The records that begin in a piece, as if all of a file's were of one size.

    The library reads no addresses: a file there is copied into a temporary one first.
    """
    module: Any = extra(_MODULE, "array-record", piece.path)
    with found(piece) as place, local_copy(place) as path:
        reader = module.ArrayRecordReader(str(path), "readahead_buffer_size:1M,max_parallelism:1")
        if not reader.ok():
            raise ValueError(f"{piece.path} is no ArrayRecord file, or truncated: copy it again")
        first, stop = (
            -(-reader.num_records() * at // piece.size) for at in (piece.begin, piece.end)
        )
        reader.seek(first)
        for number in range(first, stop):
            where = f"{piece.path}, record {number}"
            try:
                data = reader.read()
            except RuntimeError as error:
                raise ValueError(f"{where} is damaged: {error}; copy the file again") from error
            _check_length(len(data), where)
            yield number, where, {fields.text: _decode(data, where)}
        reader.close()


def _decode(data: bytes, where: str) -> str:
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


def _check_columns(names: Sequence[str], wanted: Iterable[str], path: str) -> None:
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


def _check_length(length: int, where: str) -> None:
    if length > MAX_DOCUMENT:
        raise ValueError(
            f"{where} is longer than a document may be ({MAX_DOCUMENT / 2**20:g} MiB): divide "
            "it into several documents"
        )


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
_RECORDS = Format(read_array_record, False, True, False, (_MODULE, "array-record"))
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
