"""Files and addresses, whole or a piece of one, as streams of bytes, decompressed on the way."""

import contextlib
import gzip
import importlib
import io
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from os.path import splitext
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from zoo.common.addresses import Location, explained, is_remote, location

COMPRESSIONS = (".gz", ".zst")
_HEAD = 2**20  # bytes that are hashed
_BLOCK = 2**23  # bytes that are asked of a store at a time; s3fs would ask for 50 MiB


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
        version = "" if is_remote(path) else _hash_of_head(path)
    if is_remote(path) or stat.st_size > _HEAD:
        version = f"{version} {stat.st_mtime or ''}".strip()
    return Piece(str(path), name or path.name, stat.st_size, 0, stat.st_size, version)


def _hash_of_head(path: Path) -> str:
    with open(path, "rb") as file:
        return xxhash.xxh3_128_hexdigest(file.read(_HEAD))


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
    with found(piece) as place, _buffered(place) as file:
        if not compression:
            yield file
            return
        try:
            if not piece.size:
                raise EOFError("it is empty")
            with _decompressed(file, compression, piece.path) as stream:
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


@contextlib.contextmanager
def local_copy(place: Any) -> Iterator[Any]:
    """A file of this machine with the content of a file; of an address a copy, which goes."""
    if not is_remote(place):
        yield place
        return
    with tempfile.NamedTemporaryFile(prefix="zoo-copy-") as copy:
        with _buffered(place) as remote:
            shutil.copyfileobj(remote, copy, _BLOCK)
        copy.flush()
        yield copy.name


def extra(module: str, name: str, path: str) -> ModuleType:
    """A module of an extra; an ImportError names the file that needs it and the command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{path} needs an extra: pip install 'zoo[{name}]'") from error


def _buffered(place: Any) -> Any:
    if not is_remote(place):
        return place.open("rb")
    # Files of fsspec have a slow readline of their own.
    return io.BufferedReader(place.open("rb", block_size=_BLOCK), 2**20)


def _decompressed(file: io.BufferedReader, compression: str, path: str) -> io.BufferedReader:
    content: Any = gzip.GzipFile(fileobj=file) if compression == ".gz" else _Zstandard(file, path)
    return io.BufferedReader(content, 2**17)


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
