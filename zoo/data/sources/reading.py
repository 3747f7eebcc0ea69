"""The documents of a split, in a stream."""

from collections.abc import Iterator
from typing import NamedTuple

from zoo.data.sources.formats import FORMATS, format_of
from zoo.data.sources.records import MAX_DOCUMENT, Fields, field_of, text_of
from zoo.data.sources.splits import Given, Split


class SourceDocument(NamedTuple):
    """A text with the place it was read from."""

    source: int
    """Index of the file in `Split.names`."""
    record: int
    """Line (of a CSV file, where the row ends), row or record number; 0 for a text file."""
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
    fields = Fields(field, label)
    for source, piece in enumerate(split.pieces):
        format = format_of(piece.path)
        if label is not None and not format.fields:
            labelled = ", ".join(suffix for suffix, one in FORMATS.items() if one.fields)
            raise ValueError(f"{piece.path} has no field {label!r}: labels are in {labelled} files")
        for number, where, record in format.read(piece, fields, MAX_DOCUMENT):
            text = text_of(record, where, field)
            found = None if label is None else field_of(record, where, label)
            if label is not None and (not isinstance(found, str | int) or found == ""):
                raise ValueError(
                    f"{where}: field {label!r} is {found!r}: a label is a string or an integer"
                )
            yield SourceDocument(source, number, text, None if label is None else str(found))
