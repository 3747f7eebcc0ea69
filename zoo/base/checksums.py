"""Checksums of a folder: a file in it lists the size and the SHA-256 of the others."""

import hashlib
import json
from collections.abc import Collection
from pathlib import Path

from zoo.base import files
from zoo.base.addresses import Location

NAME = "checksums.json"


def write(folder: Path, *, skip: Collection[str] = ()) -> None:
    """Write `checksums.json`, atomically, for every file under `folder` but those in `skip`."""
    listed = of(folder, skip=skip)
    content = json.dumps({"files": listed, "sha256": _digest(listed)}, indent=1)
    files.replace(folder / NAME, lambda temporary: temporary.write_text(content))


def of(folder: Path, *, skip: Collection[str] = ()) -> dict[str, dict[str, int | str]]:
    """The size and the SHA-256 of every file under `folder` but those in `skip`, by name."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    return {
        name: _entry(path, None)
        for name, path in found.items()
        if path.is_file() and name not in (NAME, *skip)
    }


def digest(folder: Path, names: Collection[str]) -> str:
    """One checksum of some files of `folder`: by the list of it where that has them, else read."""
    try:
        known = _read(folder)
    except ValueError:
        known = {}
    return _digest({name: _entry(folder / name, known.get(name)) for name in names})


def joined(*sums: str) -> str:
    """One checksum of several."""
    return hashlib.sha256(" ".join(sums).encode()).hexdigest()


def _entry(path: Path, known: dict | None) -> dict[str, int | str]:
    return known or {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def problems(folder: Location, *, only: str | None = None) -> list[str]:
    """One line per missing or damaged file of `folder`, or of `only` that one.

    Files that are not listed are ignored.
    """
    try:
        found = _read(folder)
    except ValueError as error:
        return [str(error)]
    if only is not None and only not in found:
        return [f"{NAME} does not list {only}"]  # it belongs to another folder
    chosen = found if only is None else {only: found[only]}
    return [line for name, wanted in chosen.items() if (line := _problem(folder, name, wanted))]


def listed(folder: Location) -> set[str]:
    """The files that the checksums of `folder` list; none if the list is missing or damaged."""
    try:
        return set(_read(folder))
    except ValueError:
        return set()


def _read(folder: Location) -> dict:
    try:
        return parse((folder / NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{NAME} is missing") from None
    except IsADirectoryError:
        raise ValueError(f"{NAME} is a folder") from None


def parse(content: bytes) -> dict[str, dict]:
    """The size and the SHA-256 of each file, by name, that the content of `checksums.json` lists.

    Raises:
        ValueError: it is damaged.
    """
    try:
        values = json.loads(content)
        if values["sha256"] == _digest(values["files"]):
            return values["files"]
    except (ValueError, LookupError, TypeError):
        pass  # no JSON, or of another form: damaged as well
    raise ValueError(f"{NAME} is damaged")


def _problem(folder: Location, name: str, wanted: dict) -> str | None:
    path = folder / name
    try:
        if path.is_dir():
            return f"{name} is a folder"
        if (size := path.stat().st_size) != wanted["bytes"]:
            return f"{name} has {size} bytes instead of {wanted['bytes']}"
        if _sha256(path) != wanted["sha256"]:
            return f"{name} is damaged: its SHA-256 is not the one written with it"
    except (FileNotFoundError, NotADirectoryError):  # the latter: its folder is a file
        return f"{name} is missing"
    return None


def _sha256(path: Location) -> str:
    with path.open("rb") as file:  # which may be at an address
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(files: dict) -> str:
    """The checksum of the checksums, by which a damaged or shortened list is found."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
