"""Formats of files by their suffixes, and a reader for each: the records, with their places.

Files and addresses are read in a stream, whole or a piece of one, and decompressed on the way.
"""

import codecs
import contextlib
import csv
import gzip
import importlib
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from os.path import splitext
from types import ModuleType
from typing import Any, NamedTuple

import xxhash

from zoo.common.addresses import Location, explained, is_remote, location

COMPRESSIONS = (".gz", ".zst")
MAX_DOCUMENT = 256 * 2**20
"""Largest document of a prepared corpus, in bytes as stored: memory stays bounded."""
_HEAD = 2**20  # bytes that are hashed
_BLOCK = 2**23  # bytes that are asked of a store at a time; s3fs would ask for 50 MiB

Record = tuple[int, str, dict[str, Any]]
"""A record's number, its location in words, and its fields."""
Columns = Sequence[str] | None
"""The fields that are wanted, a document's text before the others; None: all."""


@dataclass(frozen=True)
class Piece:
    """A file, or the part of it that begins in its bytes [begin, end).

    A line or a row group belongs to the piece in which it begins. Of a compressed file, of CSV and
    of text there is only the whole.
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
        version = ""
        if not is_remote(path):
            with open(path, "rb") as file:
                version = xxhash.xxh3_128_hexdigest(file.read(_HEAD))
    if is_remote(path) or stat.st_size > _HEAD:
        version = f"{version} {stat.st_mtime or ''}".strip()
    return Piece(str(path), name or path.name, stat.st_size, 0, stat.st_size, version)


def compression_of(path: str) -> str:
    """The suffix that says how a file is compressed, or ""."""
    suffix = splitext(path)[1].lower()
    return suffix if suffix in COMPRESSIONS else ""


@contextlib.contextmanager
def opened(piece: Piece) -> Iterator[io.BufferedReader]:
    """The content of a piece's whole file as a stream; a compressed one cannot be sought.

    Raises:
        ImportError: the compression needs an extra that is not installed.
        ValueError: the file has changed since its splits were planned, or, while it is read, its
            compression is broken.
    """
    compression = compression_of(piece.path)
    with found(piece) as place, contextlib.ExitStack() as stack:
        if is_remote(place):  # files of fsspec have a slow readline of their own
            file = io.BufferedReader(place.open("rb", block_size=_BLOCK), 2**20)
        else:
            file = place.open("rb")
        stack.enter_context(file)
        if not compression:
            yield file
            return
        try:
            if not piece.size:
                raise EOFError("it is empty")
            gzipped = compression == ".gz"
            content: Any = gzip.GzipFile(fileobj=file) if gzipped else _Zstandard(file, piece.path)
            with io.BufferedReader(content, 2**17) as stream:
                yield stream
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(
                f"{piece.path} is no whole {compression} file: {error}; copy or compress it again"
            ) from error


@contextlib.contextmanager
def found(piece: Piece) -> Iterator[Any]:
    """The location of a piece, in a context that explains a store's errors.

    Raises:
        ValueError: the file has changed since its splits were planned.
    """
    place, own = location(piece.path, "data"), None
    with explained(place):
        try:
            now = whole_file(place)
            if (now.size, now.version) != (piece.size, piece.version or now.version):
                raise ValueError(
                    f"{piece.path} has {now.size} bytes and has changed since its splits were "
                    f"planned, when it had {piece.size}: files must not change while they are "
                    "read; start again"
                )
            yield place
        except ValueError as error:  # of content; it could be mistaken for the store's
            own = error
    if own is not None and "support range requests" in str(own):
        raise ValueError(
            f"{piece.path}: its server does not send parts of files; copy it here"
        ) from own
    if own is not None:
        raise own


def extra(module: str, name: str, path: str) -> ModuleType:
    """A module of an extra; an ImportError names the file that needs it and the command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{path} needs an extra: pip install 'zoo[{name}]'") from error


class _Zstandard(io.RawIOBase):
    """The content of zstd frames, one after the other.

    The stream readers of zstandard end a truncated file without an error, so the frames are
    followed here. Little is fed at a time: 4 bytes can give 128 KiB.
    """

    def __init__(self, file: io.BufferedReader, path: str):
        self._zstandard: Any = extra("zstandard", "compressed", path)
        self._file = file
        self._frame: Any = None  # the one that is being decompressed
        self._fed, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            fed = self._fed or self._file.read(2048)
            if not fed:
                if self._frame is not None:
                    raise EOFError("it ends within a frame")
                return 0
            self._frame = self._frame or self._zstandard.ZstdDecompressor().decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(fed))
            except self._zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
            self._fed = self._frame.unused_data if self._frame.eof else b""
            self._frame = None if self._frame.eof else self._frame
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


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
    """The objects of the array that a file is, numbered from 0; or as `read_jsonl` of lines."""
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
        if position:  # the line that contains the byte before the piece is of the piece before
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
    """The rows of the row groups that begin in a piece; no more than their columns is read."""
    arrow: Any = extra("pyarrow", "parquet", piece.path)
    parquet: Any = extra("pyarrow.parquet", "parquet", piece.path)
    row = 0
    with found(piece) as place, contextlib.ExitStack() as stack:
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
    """Raise a ValueError where a column that is wanted is there twice."""
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


class Format(NamedTuple):
    """How the files of a suffix are read."""

    read: Callable[..., Iterator[Record]]
    """Reader of a piece: its records, with all fields, or the given ones alone."""
    divisible: bool
    """Whether a file can be read in pieces, if it is not compressed."""


TEXT = Format(read_text, divisible=False)
PARQUET = Format(read_parquet, divisible=True)
FORMATS = {
    ".jsonl": Format(read_jsonl, divisible=True),
    ".ndjson": Format(read_jsonl, divisible=True),
    ".json": Format(read_json, divisible=False),
    ".csv": Format(read_csv, divisible=False),
    **dict.fromkeys((".fasta", ".fa", ".faa", ".fna"), Format(read_fasta, divisible=False)),
    ".parquet": PARQUET,
}
"""Formats of records with fields by suffix; every other file is a text."""


def format_of(path: str) -> Format:
    """The format of a file, by its suffix, or the one before .gz or .zst."""
    return FORMATS.get(splitext(path.lower().removesuffix(compression_of(path)))[1], TEXT)
