"""Tables: rows of CSV and Parquet files."""

import contextlib
import csv
import io
from collections.abc import Iterator
from typing import Any

from zoo.common.addresses import is_remote
from zoo.data.sources.pieces import Piece
from zoo.data.sources.records import (
    MAX_DOCUMENT,
    Fields,
    Record,
    check_columns,
    check_length,
    decode,
)
from zoo.data.sources.streams import extra, found, opened


def read_csv(
    piece: Piece, fields: Fields | None = None, limit: int | None = None
) -> Iterator[Record]:
    """The rows of a CSV file, numbered by the lines they end in; the first names the columns."""
    with opened(piece) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        rows = csv.DictReader(_text_lines(text, piece.path, limit), strict=True)
        # It is the whole process' limit, 128 KiB at first. The parser takes 4 bytes per character.
        csv.field_size_limit((limit or MAX_DOCUMENT) // 4)
        try:
            names = rows.fieldnames or ()
            check_columns(names, names if fields is None else filter(None, fields), piece.path)
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
                    decode(line, f"{piece.path}, line {number}")
            raise


def _text_lines(text: io.TextIOWrapper, path: str, limit: int | None) -> Iterator[str]:
    size = -1 if limit is None else limit + 1
    for number, line in enumerate(iter(lambda: text.readline(size), ""), start=1):
        if len(line) == size:
            check_length(size, limit, f"{path}, line {number}")
        yield line


def read_parquet(
    piece: Piece, fields: Fields | None = None, limit: int | None = None
) -> Iterator[Record]:
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
            check_columns(names, names if columns is None else columns, piece.path)
            for group in range(file.num_row_groups):
                metadata = file.metadata.row_group(group)
                if not piece.begin <= _begin(metadata) < piece.end:
                    row += metadata.num_rows
                    continue
                for batch in file.iter_batches(64, [group], columns, use_threads=False):
                    for record in _dictionaries(batch, piece.path, row):
                        where = f"{piece.path}, row {row}"
                        if fields is not None:
                            check_length(_length(record[fields.text]), limit, where)
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


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str) else 0


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
