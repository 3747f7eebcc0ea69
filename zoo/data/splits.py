"""Splits: the files of a corpus in parts of about equal size, and their content as streams.

Files and addresses are read whole or a piece of one, and decompressed on the way.
"""

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import importlib
import io
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os.path import splitext
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from zoo.common.files import Location, is_remote
from zoo.common.store import explained, files_matching, location

COMPRESSIONS = (".gz", ".zst")
_DIVISIBLE = (".jsonl", ".ndjson", ".parquet")  # whose readers take a part of a file
_REFUSED = {
    ".arrow": "write it as Parquet",
    ".feather": "write it as Parquet",
    **dict.fromkeys((".tar", ".tgz", ".zip", ".7z"), "unpack the archive"),
    **dict.fromkeys((".bz2", ".xz", ".lz4", ".br"), "compress it as .gz or .zst instead"),
}
_HEAD = 2**20  # bytes that are hashed
_BLOCK = 2**23  # bytes that are asked of a store at a time; s3fs would ask for 50 MiB


@dataclass(frozen=True)
class Piece:
    """A file, or the part of it that begins in its bytes [begin, end).

    A line or a row group belongs to the piece in which it begins. Compressed files, CSV and text
    come whole.
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
    for a larger file, the time of its last change; at an address the time alone. Empty: not
    known."""

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


@dataclass(frozen=True)
class Split:
    """Files, or a part of one file, that become one shard."""

    pieces: tuple[Piece, ...]

    @property
    def names(self) -> list[str]:
        """The names of the sources; `SourceDocument.source` is an index of this list."""
        return [piece.label for piece in self.pieces]

    @property
    def num_bytes(self) -> int:
        """Bytes as stored, of compressed files too."""
        return sum(piece.end - piece.begin for piece in self.pieces)

    @property
    def key(self) -> str:
        """Hash of the names, sizes and ranges, in hexadecimal; where the files lie is left out."""
        return self._hash("name", "size", "begin", "end")

    @property
    def version(self) -> str:
        """Hash of the key and of the files' versions."""
        return self._hash("name", "size", "begin", "end", "version")

    def _hash(self, *names: str) -> str:
        pieces = [[getattr(piece, name) for name in names] for piece in self.pieces]
        return hashlib.sha256(json.dumps(pieces).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Given:
    """Documents in memory, as (name, text), that become one shard; each is known by its name."""

    documents: tuple[tuple[str, str], ...]

    @property
    def names(self) -> list[str]:
        """The names of the documents; `SourceDocument.source` is an index of this list."""
        return [name for name, _ in self.documents]

    @functools.cached_property
    def num_bytes(self) -> int:
        """Bytes of the texts."""
        return sum(len(text.encode()) for _, text in self.documents)

    @functools.cached_property
    def version(self) -> str:
        """Hash of the names and the texts."""
        return hashlib.sha256(json.dumps(self.documents).encode()).hexdigest()[:32]

    @property
    def key(self) -> str:
        """The version."""
        return self.version


def plan_splits(patterns: str | Sequence[str], *, shard_bytes: int) -> list[Split]:
    """The matching files in splits of about `shard_bytes`, a pure function of names and sizes.

    `patterns` are paths, globs or addresses: a list, or several with commas between them. JSON
    lines and Parquet are divided into pieces of at most `shard_bytes`; a row group of Parquet, a
    compressed file, CSV and text stay in one piece. Small files share a split.

    Raises:
        FileNotFoundError: a pattern matches no file.
        ImportError: a file's format needs an extra that is not installed.
        ValueError: a file cannot be read as documents, or a pattern's files are empty.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes}: must be positive")
    files: dict[str, Piece] = {}  # a file that two patterns match is read once
    for pattern in patterns.split(",") if isinstance(patterns, str) else patterns:
        matching = files_matching(pattern.strip(), "data")
        for path in matching:
            check_readable(str(path))
        absolute = [path.absolute() if isinstance(path, Path) else path for path in matching]
        with ThreadPoolExecutor(16) as threads:  # a store is asked for each file
            found = list(threads.map(whole_file, absolute, matching.values()))
        if not any(file.size for file in found):
            raise ValueError(f"{pattern.strip()!r}: all matching files ({len(found)}) are empty")
        for file in found:
            files.setdefault(file.path, file)
    return divide(files.values(), shard_bytes)


def divide(files: Iterable[Piece], shard_bytes: int) -> list[Split]:
    """Whole files in splits of about `shard_bytes`, in their order."""
    splits: list[list[Piece]] = []
    room = 0  # in the last split
    for file in files:
        if not splits or file.size > room:
            splits.append([])
            room = shard_bytes
        first, *others = _pieces(file, shard_bytes)
        splits[-1].append(first)
        splits += [[piece] for piece in others]
        room -= file.size
    return [Split(tuple(pieces)) for pieces in splits]


def _pieces(file: Piece, shard_bytes: int) -> list[Piece]:
    divisible = suffix_of(file.path) in _DIVISIBLE and not compression_of(file.path)
    count = max(1, -(-file.size // shard_bytes)) if divisible else 1
    bounds = [file.size * i // count for i in range(count + 1)]
    return [
        dataclasses.replace(file, begin=begin, end=end) for begin, end in itertools.pairwise(bounds)
    ]


def check_readable(path: str) -> None:
    """Raise an error for a file that cannot be prepared, by its name alone.

    Raises:
        ImportError: it needs an extra that is not installed.
        ValueError: its format has no documents, with what to do.
    """
    compression, suffix = compression_of(path), suffix_of(path)
    reason = _REFUSED.get(suffix)
    if compression and suffix == ".parquet":
        reason = ".parquet files compress their content by themselves: decompress it"
    if reason:
        raise ValueError(f"{path} cannot be read: {reason}; or leave it out of the pattern")
    if compression == ".zst":
        extra("zstandard", "compressed", path)
    if suffix == ".parquet":
        extra("pyarrow", "parquet", path)


def compression_of(path: str) -> str:
    """The suffix that says how a file is compressed, or ""."""
    suffix = splitext(path)[1].lower()
    return suffix if suffix in COMPRESSIONS else ""


def suffix_of(path: str) -> str:
    """The suffix that names a file's format, in lower case: of `a.CSV.gz` it is `.csv`."""
    return splitext(path.lower().removesuffix(compression_of(path)))[1]


@contextlib.contextmanager
def opened(piece: Piece) -> Iterator[io.BufferedReader]:
    """The content of a piece's whole file as a stream; a compressed one cannot be sought.

    Raises:
        ImportError: the compression needs an extra that is not installed.
        ValueError: the file has changed since its splits were planned, or, while it is read, its
            compression is broken.
    """
    compression = compression_of(piece.path)
    with located(piece) as place, contextlib.ExitStack() as stack:
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
def located(piece: Piece) -> Iterator[Any]:
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
