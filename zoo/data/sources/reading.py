"""The documents of a split, in a stream."""

from collections.abc import Iterator
from typing import NamedTuple

from zoo.data.sources.formats import format_of
from zoo.data.sources.records import MAX_DOCUMENT, Fields, text_of
from zoo.data.sources.splits import Given, Split


class SourceDocument(NamedTuple):
    """A text with the place it was read from."""

    source: int
    """Index of the file in `Split.names`."""
    record: int
    """Line (of a CSV file, where the row ends), row or record number; 0 for a text file."""
    text: str


def read_split(split: Split | Given, field: str = "text") -> Iterator[SourceDocument]:
    """The documents of a split in their order, read in a stream; `field` names the text's field.

    Raises:
        ValueError: what cannot be read, with its file and line, row or record, and the fix.
    """
    if isinstance(split, Given):
        for source, (_, text) in enumerate(split.documents):
            yield SourceDocument(source, 0, text)
        return
    fields = Fields(field)
    for source, piece in enumerate(split.pieces):
        for number, where, record in format_of(piece.path).read(piece, fields, MAX_DOCUMENT):
            yield SourceDocument(source, number, text_of(record, where, field))
