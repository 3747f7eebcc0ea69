"""A piece of a file: the unit in which files are read."""

from dataclasses import dataclass

from zoo.base.addresses import Location


@dataclass(frozen=True)
class Piece:
    """A file, or the part of it that begins in its bytes [begin, end).

    A line, a row group or a record belongs to the piece in which it begins. Of a compressed file,
    of CSV and of text there is only the whole.
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

    @property
    def label(self) -> str:
        """The name, and the byte from which lines are counted where that is not the first."""
        return f"{self.name}+{self.begin}" if self.begin else self.name


def whole_file(path: Location, name: str = "") -> Piece:
    """A file as one piece."""
    size = path.stat().st_size
    return Piece(str(path), name or path.name, size, 0, size)
