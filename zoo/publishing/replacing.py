"""A model's folder replaced as a whole, here or at an address.

Stores rename nothing. So a folder at an address is replaced with `saving.json` first, which lists
what it will have and had; then the two files by which a model is known, its configuration and its
checksums, are removed; all others are copied, then the configuration, then the checksums, and
`saving.json` is removed. A save that was interrupted leaves that file: readers are told so, and the
next save may replace the folder.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from zoo.common import checksums, files
from zoo.common.files import AddressError, is_remote, scheme_of
from zoo.common.store import Store, sizes
from zoo.publishing import PublishError
from zoo.publishing.formats import CACHE, CONFIG, README

SAVING = "saving.json"


@contextlib.contextmanager
def replacing(folder: Path | str) -> Iterator[Path | None]:
    """A new folder to fill, which then replaces `folder`; None except on process 0.

    For a folder at an address, the new one is filled here, and copied there.

    Raises:
        PublishError: the folder has files that no earlier save wrote; or the new one could not be
            copied, and is kept here, as the message says.
        AddressError: the store at an address cannot be reached, or refuses.
    """
    making: contextlib.AbstractContextManager[Path]
    if is_remote(folder):
        store = Store(folder, "folder")
        if scheme_of(store.address) in ("http", "https"):
            raise PublishError(
                f"folder='{store.address}': a web server is only read; save to s3:// or gs://"
            )
        found = {*store.names()}
        known = {SAVING, *json.loads(store.read(SAVING) or "[]")}
        content = store.read(checksums.NAME) or b""  # an AddressError is a ValueError too
        with contextlib.suppress(ValueError):  # a damaged list
            known |= checksums.parse(content).keys()
        where, making = store.address, _uploading(store)
    else:
        local = files.local_path(folder, "folder").absolute()
        if local.exists() and not local.is_dir():
            raise PublishError(f"{local} is a file: a model is a folder")
        found = {path.relative_to(local).as_posix() for path in local.rglob("*") if path.is_file()}
        where, known, making = str(local), checksums.listed(local), _renaming(local)
    if others := sorted(found - known - {README, checksums.NAME}):
        raise PublishError(
            f"{where} has files that are not part of a model: {', '.join(others)}. Move them "
            "away, or save elsewhere"
        )
    if jax.process_index() == 0:
        with making as new:
            yield new
    else:
        yield None
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("zoo.save")  # whose folders may differ


@contextlib.contextmanager
def _renaming(folder: Path) -> Iterator[Path]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with files.unfinished(folder) as temporary:
        new = temporary / "new"
        new.mkdir()
        yield new
        files.sync_all(new)
        if folder.exists():
            folder.rename(temporary / "old")
        new.rename(folder)
        files.sync(folder.parent)


@contextlib.contextmanager
def _uploading(store: Store) -> Iterator[Path]:
    staging = files.local_path(CACHE, "cache") / "saving"
    files.make_folder(staging, "cache")
    with files.unfinished(staging / store.place.name) as temporary:
        new = temporary / "new"
        new.mkdir()
        yield new
        try:
            _copy(new, store)
        except (AddressError, OSError) as error:
            kept = new.rename(Path(tempfile.mkdtemp(dir=staging)) / store.place.name)
            raise PublishError(
                f"{error}\nThe model could not be copied there. Nothing is lost: all of it is in "
                f"{kept}"
            ) from error


def _copy(folder: Path, store: Store) -> None:
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    old, last = {*store.names()}, (CONFIG, checksums.NAME)
    store.write(SAVING, json.dumps(sorted(names | old)).encode())
    for name in reversed(last):
        store.remove([name])
    title = f"copying to {store.address}"
    store.put(folder, sizes(folder, sorted(names - {*last})), title=title)
    store.remove(old - names - {SAVING, *last})
    for name in last:
        store.put(folder, sizes(folder, names & {name}))
    store.remove([SAVING])
