"""Records of ArrayRecord files: a text each."""

from collections.abc import Iterator
from typing import Any

from zoo.data.sources.pieces import Piece
from zoo.data.sources.records import Fields, Record, check_length, decode
from zoo.data.sources.streams import extra, found, local_copy

MODULE = "array_record.python.array_record_module"


def read_array_record(piece: Piece, fields: Fields, limit: int | None = None) -> Iterator[Record]:
    """The records that begin in a piece, as if all of a file's were of one size.

    The library reads no addresses: a file there is copied into a temporary one first.
    """
    module: Any = extra(MODULE, "array-record", piece.path)
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
            check_length(len(data), limit, where)
            yield number, where, {fields.text: decode(data, where)}
        reader.close()
