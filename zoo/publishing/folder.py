"""The files of a model's folder: their names, their checksums, and replacing the folder."""

import contextlib
import importlib.metadata
import json
import reprlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from zoo.common import checksums, files
from zoo.common.addresses import is_remote
from zoo.publishing.errors import PublishError
from zoo.publishing.uploads import CACHE, check_replaceable, uploading

CONFIG, WEIGHTS, METRICS, README = "config.json", "model.safetensors", "metrics.json", "README.md"


@contextlib.contextmanager
def replacing(folder: Path | str) -> Iterator[Path | None]:
    """A new folder to fill, which then replaces `folder`; None except on process 0.

    What replaces a folder at an address is filled here, and copied there.

    Raises:
        PublishError: the folder has files that no earlier save wrote.
        AddressError: the store at an address cannot be reached, or refuses.
    """
    if is_remote(folder):
        check_replaceable(folder, (README,))
        making = uploading(folder, last=CONFIG)
    else:
        folder = files.local_path(folder, "folder").absolute()
        _check_replaceable(folder)
        making = _renaming(folder)
    if jax.process_index() == 0:
        with making as new:
            yield new
    else:
        yield None
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"zoo.save {folder}")


@contextlib.contextmanager
def _renaming(folder: Path) -> Iterator[Path]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with files.unfinished(folder) as temporary:
        new = temporary / "new"
        new.mkdir()
        yield new
        if folder.exists():
            folder.rename(temporary / "old")
        new.rename(folder)


def verify(folder: Path, *, by_parts: bool = False) -> None:
    """Raise a PublishError if a folder's files do not match their checksums.

    With `by_parts` files whose parts have checksums are left to who reads them.
    """
    if problems := checksums.problems(folder, by_parts=by_parts):
        raise damaged(folder, problems)


def damaged(folder: Path, problems: Sequence[str]) -> PublishError:
    """An error with a line per damaged file of a folder."""
    remedy = "Restore the files from a copy, or publish the model again."
    if CACHE.expanduser() in folder.parents:
        remedy = f"Remove {folder}, and it is fetched again."
    return PublishError(
        f"{folder} is damaged or not a model of the zoo:\n  "
        + "\n  ".join(problems)
        + f"\n{remedy}"
    )


def json_object(content: bytes) -> dict[str, Any]:
    """The object that JSON holds; empty if it holds none, or is damaged."""
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a PublishError if the file is missing, or holds none."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no regular file")
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError(f"it holds no object, but {reprlib.repr(values)}")
        return values
    except (OSError, ValueError, RecursionError) as error:
        raise PublishError(f"{path} is damaged: {error}") from error


def _check_replaceable(folder: Path) -> None:
    """Refuse to delete files that no earlier save wrote."""
    if folder.exists() and not folder.is_dir():
        raise PublishError(f"{folder} is a file: a model is a folder")
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if others := sorted(found - checksums.listed(folder) - {README, checksums.NAME}):
        raise PublishError(
            f"{folder} has files that are not part of a model: {', '.join(others)}. Move them "
            "away, or save elsewhere"
        )


def version() -> str:
    """The version of the zoo, which is stored with each model."""
    try:
        return importlib.metadata.version("zoo")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"
