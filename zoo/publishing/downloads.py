"""Models at addresses, fetched into a cache on this machine: each file once, and verified."""

import contextlib
import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.common import checksums, files
from zoo.common.addresses import Location, explained
from zoo.common.files import inside
from zoo.common.store import Store, places
from zoo.publishing import PublishError, formats
from zoo.publishing.formats import README
from zoo.publishing.uploads import CACHE, SAVING

_TRIES = 3


class _ChangedError(Exception):
    """A file is not the one that the list names: damaged, or replaced meanwhile."""


@dataclass(frozen=True)
class _Listing:
    """The files of a model at an address: their sizes and, in a folder of `save`, checksums."""

    store: Store
    files: Mapping[str, dict[str, Any]]
    digest: str

    @property
    def cached(self) -> Path:
        """Its folder in the cache, which is keyed by the address and by the files' digest."""
        where = self.store.place
        key = hashlib.sha256(f"{where} {self.digest}".encode()).hexdigest()[:16]
        return inside(files.local_path(CACHE, "cache") / key, where.name or "model", where)


def fetched(address: object) -> Path:
    """The local copy of the model at an address, or of the model of a run there; made if missing.

    What is being replaced while it is read is read again, as it is then.

    Raises:
        PublishError: there is no model, or a part of one, or a damaged one.
        AddressError: the store cannot be reached, or refuses, or a name leads out of the folder.
    """
    for _ in range(_TRIES):
        listing = _listing(address)
        with contextlib.suppress(_ChangedError):
            return files.made_once(listing.cached, functools.partial(_fetch, listing), "cache")
    raise PublishError(
        f"{listing.store.address} is damaged, or was being replaced: its files are not those of "
        f"its {checksums.NAME}. `python -m zoo verify {address}` names them; publish the model "
        "again"
    )


def cached(address: object) -> Path | None:
    """The local copy of the model at an address, as it is there now; None if it is not fetched."""
    folder = _listing(address).cached
    return folder if folder.is_dir() else None


def model_at(address: object) -> Location:
    """The folder of the model at an address, or of the model of a run there."""
    return _listing(address).store.place


def _listing(address: object) -> _Listing:
    given = Store(address, "model")
    of_run = Store(given.place / "model", "model")
    for store in (given, of_run):
        if (content := store.read(checksums.NAME)) is not None:
            return _Listing(store, *_parsed(content, store.place))
    for store in (of_run, given):
        for name in formats.config_files():
            content = store.read(name)
            if content is not None and formats.needs_no_checksums(name, content):
                return _plain(store)
    _check_saved(given)
    with explained(given.place):
        if (given.place / "checkpoints").is_dir():
            raise PublishError(
                f"{given.address} is a run that has not finished: it has no model yet"
            )
    raise PublishError(f"{given.address} is not a model of the zoo: it has no {checksums.NAME}")


def _check_saved(store: Store) -> None:
    if store.read(SAVING) is not None:
        raise PublishError(
            f"{store.address} is being saved, or that was interrupted: wait, or save it again"
        )


def _parsed(content: bytes, where: Location) -> tuple[dict, str]:
    """The files that `checksums.json` lists, with the card, which it does not, and a digest."""
    try:
        listed = checksums.parse(content)
    except ValueError as error:
        raise PublishError(f"{where} is damaged: {error}; publish the model again") from None
    for name in listed:
        inside(where, name, where / checksums.NAME)
    return {README: {}} | listed, hashlib.sha256(content).hexdigest()


def _plain(store: Store) -> _Listing:
    """A folder without checksums: its files by their sizes and the store's own tags."""
    _check_saved(store)
    names = ("ETag", "etag", "md5Hash", "generation", "LastModified", "updated", "mtime", "created")
    tags = {
        name: [info["size"], next((str(info[x]) for x in names if info.get(x)), "")]
        for name, info in sorted(store.listing().items())
    }
    digest = hashlib.sha256(json.dumps(tags).encode()).hexdigest()
    return _Listing(store, {name: {"bytes": size} for name, (size, _) in tags.items()}, digest)


def _fetch(listing: _Listing, folder: Path) -> None:
    """Fetch the files that an earlier process, which was killed, has not fetched already."""
    store, targets = listing.store, places(folder, listing.files, listing.store.address)
    wanted = {name: listing.files[name] for name, at in targets.items() if not at.exists()}
    problems = store.get(folder, wanted, title=f"fetching {store.address}")
    if problems.keys() - {README}:
        raise _ChangedError
    content = store.read(checksums.NAME)
    if content is not None:
        if hashlib.sha256(content).hexdigest() != listing.digest:
            raise _ChangedError
        (folder / checksums.NAME).write_bytes(content)
