"""Lines and text: JSON objects, one per line, and files that are one document each."""

import codecs
import io
import json
import math
from collections.abc import Iterator

from zoo.data.sources.pieces import Piece
from zoo.data.sources.records import Fields, Record, check_length, decode
from zoo.data.sources.streams import compression_of, opened


def read_jsonl(
    piece: Piece, fields: Fields | None = None, limit: int | None = None
) -> Iterator[Record]:
    """The objects of the lines that begin in a piece, with their numbers counted from there."""
    after = f" after byte {piece.begin}" if piece.begin else ""
    with opened(piece) as stream:
        for number, line in enumerate(_lines(stream, piece, limit), start=1):
            if number == 1 and not piece.begin:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            where = f"{piece.path}, line {number}{after}"
            try:
                check_length(len(line), limit, where)
                record = _parse(line, where)
            except ValueError:
                _refuse_other_json(piece)
                raise
            yield number, where, record


def read_json(
    piece: Piece, fields: Fields | None = None, limit: int | None = None
) -> Iterator[Record]:
    """The objects of the array that a file is, numbered from 0; or as `read_jsonl` of lines."""
    with opened(piece) as stream:
        data = stream.read().removeprefix(codecs.BOM_UTF8)
    if not data.lstrip().startswith(b"["):
        yield from read_jsonl(piece, fields, limit)
        return
    try:
        records = json.loads(decode(data, piece.path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{piece.path} is not JSON: {error}") from error
    for number, record in enumerate(records):
        where = f"{piece.path}, element {number}"
        if not isinstance(record, dict):
            raise ValueError(f"{where} is a JSON {type(record).__name__}, not an object")
        yield number, where, record


def read_text(piece: Piece, fields: Fields, limit: int | None = None) -> Iterator[Record]:
    """A file as one record, whose text is the whole file."""
    with opened(piece) as stream:
        data = stream.read(-1 if limit is None else limit + 1)
    check_length(len(data), limit, piece.path)
    yield 0, piece.path, {fields.text: decode(data, piece.path)}


def _lines(stream: io.BufferedReader, piece: Piece, limit: int | None) -> Iterator[bytes]:
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
    size = -1 if limit is None else limit + 1
    while position < end and (line := stream.readline(size)):
        position += len(line)
        yield line


def _parse(line: bytes, where: str) -> dict:
    text = decode(line, where)
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {getattr(error, 'msg', error)}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where} is a JSON {type(record).__name__}, not an object")
    return record


def _refuse_other_json(piece: Piece) -> None:
    """Raise a ValueError if a file's beginning shows that its lines are no values of their own."""
    with opened(piece) as stream:
        head = stream.read(2**16).lstrip()
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
