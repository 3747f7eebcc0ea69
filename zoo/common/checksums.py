"""Checksums of a folder: a file in it lists the size and the SHA-256 of the others.

Large files that carry checksums of their own are listed with their size alone. A file whose writer
made a `Digest` also has a checksum of each part, so that a reader of some parts verifies these.
"""

import errno
import hashlib
import json
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from zoo.common import files
from zoo.common.files import AddressError, Location, inside, is_remote, leaves

NAME = "checksums.json"
PART_BYTES = 2**23
WHOLE, SAMPLES = 2**30, 1024
_PARTS = "parts"


class Digest:
    """The size and the checksums of a file, made while it is written."""

    def __init__(self) -> None:
        self._size = 0
        self._whole, self._part = hashlib.sha256(), hashlib.sha256()
        self._parts: list[str] = []

    def update(self, content: Any) -> None:
        """Add what is written next, bytes or a buffer of them."""
        content = memoryview(content)
        self._whole.update(content)
        while len(content):
            left = PART_BYTES - self._size % PART_BYTES
            self._part.update(content[:left])
            self._size += len(content[:left])
            content = content[left:]
            if self._size % PART_BYTES == 0:
                self._parts.append(self._part.hexdigest())
                self._part = hashlib.sha256()

    def entry(self) -> dict[str, Any]:
        """The file's entry in `checksums.json`, with its parts if it has several."""
        found = {"bytes": self._size, "sha256": self._whole.hexdigest()}
        if self._size <= PART_BYTES:
            return found
        last = [self._part.hexdigest()] if self._size % PART_BYTES else []
        return {**found, _PARTS: {"bytes": PART_BYTES, "sha256": self._parts + last}}


class Parts(NamedTuple):
    """The checksums of a file's parts, all of one size but the last."""

    num_bytes: int
    sha256: list[str]


def write(
    folder: Path,
    *,
    skip: Collection[str] = (),
    trusted: Callable[[str, int], bool] = lambda name, size: False,
    known: Mapping[str, Digest] | None = None,
) -> None:
    """Write `checksums.json`, atomically, for every file under `folder` but those in `skip`.

    Files for which `trusted(name, size)` is true are listed with their size alone; files that are
    `known`, by their names, are not read again.
    """
    listed: dict[str, dict] = of(folder, skip=skip, trusted=trusted, known=known)
    listed |= {name: digest.entry() for name, digest in (known or {}).items()}
    files.replace(folder / NAME, as_text(listed))


def as_text(listed: dict[str, dict]) -> str:
    """The content of a `checksums.json` of files with these entries, as `of` returns them."""
    return json.dumps({"files": listed, "sha256": _digest(listed)}, indent=1)


def of(
    folder: Path,
    *,
    skip: Collection[str] = (),
    trusted: Callable[[str, int], bool] = lambda name, size: False,
    known: Mapping[str, Digest] | None = None,
) -> dict[str, dict[str, int | str]]:
    """The size and the SHA-256 of every file under `folder` but those in `skip`, by name."""
    digests = known or {}
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    chosen = {
        name: path for name, path in found.items() if path.is_file() and name not in (NAME, *skip)
    }

    def entry_of(name: str, path: Path) -> dict[str, int | str]:
        size = path.stat().st_size
        if name in digests:
            return _plain(digests[name].entry())
        return {"bytes": size} if trusted(name, size) else entry(path)

    return {name: entry_of(name, path) for name, path in chosen.items()}


def digest(folder: Path, names: Collection[str]) -> str:
    """One checksum of some files of `folder`: by its list where that has them, else by reading."""
    try:
        known = _read(folder)
    except ValueError:
        known = {}
    return _digest(
        {name: _plain(known[name]) if name in known else entry(folder / name) for name in names}
    )


def entry(path: Path) -> dict[str, int | str]:
    """The size and the SHA-256 of a file."""
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def joined(*sums: str) -> str:
    """One checksum of several."""
    return hashlib.sha256(" ".join(sums).encode()).hexdigest()


def of_values(values: Iterable[Any]) -> str:
    """A fast hash of arrays, and of the `repr` of other values.

    Of an array larger than `WHOLE` it takes `SAMPLES` evenly spaced blocks of 64 KiB, or of a row.
    """
    found = xxhash.xxh3_128()
    for value in values:
        if hasattr(value, "shape"):
            found.update(f"{value.dtype} {value.shape}\0".encode())
            for block in _blocks(value):
                found.update(np.asarray(block).tobytes())
        else:
            found.update(f"{value!r}\0".encode())
    return found.hexdigest()


def _blocks(array: Any) -> Iterator[Any]:
    """The array in blocks of rows, or some of them if it is large."""
    rows, row_bytes = len(array), max(array.nbytes // max(len(array), 1), 1)
    size = max(PART_BYTES // row_bytes, 1)
    starts: Any = range(0, rows, size)
    if array.nbytes > WHOLE:
        size = max(2**16 // row_bytes, 1)
        starts = np.linspace(0, rows - size, SAMPLES).astype(int)
    return (array[start : start + size] for start in starts)


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry without parts: the same for the same bytes, whichever version wrote them."""
    return {name: value for name, value in entry.items() if name != _PARTS}


def problems(folder: Location, *, only: str | None = None, by_parts: bool = False) -> list[str]:
    """One line per missing or damaged file of `folder`, or for its file `only`.

    Files that are not listed are ignored. With `by_parts`, a file whose parts have
    checksums is compared by its size only: its reader compares the `parts`.
    """
    try:
        found = _read(folder)
    except ValueError as error:
        return [str(error)]
    if only is not None and only not in found:
        return [f"{NAME} does not list {only}"]  # it belongs to another folder
    chosen = found if only is None else {only: found[only]}
    if by_parts:
        lighter = {name: {"bytes": x["bytes"]} for name, x in chosen.items() if _PARTS in x}
        chosen = {**chosen, **lighter}
    return [line for name, wanted in chosen.items() if (line := _problem(folder, name, wanted))]


def listed(folder: Location) -> set[str]:
    """The files that the checksums of `folder` list; none if the list is missing or damaged."""
    try:
        return set(_read(folder))
    except ValueError:
        return set()


def parts(path: Path) -> Parts:
    """The checksums of a file's parts, by the list in its folder; no parts if that has none."""
    try:
        found = _read(path.parent)[path.name][_PARTS]
    except (ValueError, KeyError):
        return Parts(PART_BYTES, [])
    return Parts(found["bytes"], found["sha256"])


def sha256(content: Any) -> str:
    """The checksum of bytes, or of a buffer of them."""
    return hashlib.sha256(content).hexdigest()


def _read(folder: Location) -> dict:
    try:
        if _kind(folder / NAME) is None:
            return parse((folder / NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{NAME} is missing") from None
    raise ValueError(f"{NAME} is {_kind(folder / NAME)}")


def _kind(path: Location) -> str | None:
    """The kind of a path that is not a regular file: a pipe or a device may be read for ever."""
    if path.is_dir():
        return "a folder"
    return None if is_remote(path) or stat.S_ISREG(path.stat().st_mode) else "no regular file"


def parse(content: bytes) -> dict[str, dict]:
    """The size and the SHA-256 of each file, by name, that the content of `checksums.json` lists.

    Raises:
        ValueError: it is damaged.
    """
    try:
        values = json.loads(content)
        found = values["files"]
        if values["sha256"] == _digest(found) and all(
            type(x["bytes"]) is int for x in found.values()
        ):
            return found
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass  # no JSON, or of another form: damaged as well
    raise ValueError(f"{NAME} is damaged")


def _problem(folder: Location, name: str, wanted: dict) -> str | None:
    try:
        path = inside(folder, name, NAME)
        if (kind := _kind(path)) is not None:
            return f"{name} is {kind}"
        if not is_remote(path) and leaves(folder, path):
            return f"{name} is a link that leads out of the folder: put a copy of the file there"
        found = difference(wanted, path.stat().st_size, lambda: _sha256(path))
        return None if found is None else f"{name} {found}"
    except (FileNotFoundError, NotADirectoryError):  # the latter: its folder is a file
        return f"{name} is missing"
    except AddressError as error:
        return str(error)


def difference(wanted: Mapping[str, Any], size: int, sha256: Callable[[], str]) -> str | None:
    """The difference of a file from its entry's size and SHA-256, in words; None if it has both."""
    if size != wanted.get("bytes", size):
        return f"has {size} bytes instead of {wanted['bytes']}"
    if "sha256" in wanted and sha256() != wanted["sha256"]:
        return "is damaged: its SHA-256 is not the one written with it"
    return None


def _sha256(path: Location) -> str:
    if (kind := _kind(path)) is not None:
        raise OSError(errno.EINVAL, f"it is {kind}", str(path))
    with path.open("rb") as file:  # which may be at an address
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(files: dict) -> str:
    """The checksum of the checksums, by which a damaged or shortened list is found."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
