"""Models at addresses, fetched into a cache on this machine: each file once, and verified."""

import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.common import checksums, files
from zoo.common.addresses import (
    Location,
    explained,
    files_below,
    inside,
    location,
    read_if_there,
)
from zoo.common.progress import Transfer
from zoo.publishing import PublishError, formats
from zoo.publishing.formats import README
from zoo.publishing.uploads import CACHE, SAVING

_FILES_AT_ONCE = 4
_PART = 2**22  # bytes
_TRIES = 3


class _ChangedError(Exception):
    """A file is not the one that the list names: damaged, or replaced meanwhile."""


@dataclass(frozen=True)
class _Listing:
    """The files of a model at an address: their sizes and, in a folder of `save`, checksums."""

    where: Location
    files: dict[str, dict[str, Any]]
    digest: str

    @property
    def cached(self) -> Path:
        """Its folder in the cache, which is keyed by the address and by the files' digest."""
        key = hashlib.sha256(f"{self.where} {self.digest}".encode()).hexdigest()[:16]
        return inside(
            files.local_path(CACHE, "cache") / key, self.where.name or "model", self.where
        )


def fetched(address: object) -> Path:
    """The local copy of the model at an address, or of the model of a run there; made if missing.

    What is being replaced while it is read is read again, as it is then.

    Raises:
        PublishError: there is no model, or a part of one, or a damaged one.
        AddressError: the store cannot be reached, or refuses, or a name leads out of the folder.
    """
    for _ in range(_TRIES):
        listing = _listing(address)
        with contextlib.suppress(_ChangedError), explained(listing.where):
            return _fetch(listing)
    raise PublishError(
        f"{listing.where} is damaged, or was being replaced: its files are not those of its "
        f"{checksums.NAME}. `python -m zoo verify {address}` names them; publish the model again"
    )


def cached(address: object) -> Path | None:
    """The local copy of the model at an address, as it is there now; None if it is not fetched."""
    folder = _listing(address).cached
    return folder if folder.is_dir() else None


def model_at(address: object) -> Location:
    """The folder of the model at an address, or of the model of a run there."""
    return _listing(address).where


def _listing(address: object) -> _Listing:
    given = location(str(address), "model")
    for where in (given, given / "model"):
        if (content := read_if_there(where / checksums.NAME)) is not None:
            return _Listing(where, *_parsed(content, where))
    for where in (given / "model", given):
        for name in formats.config_files():
            content = read_if_there(where / name)
            if content is not None and formats.needs_no_checksums(name, content):
                return _plain(where)
    if read_if_there(given / SAVING) is not None:
        raise PublishError(
            f"{given} is being saved, or that was interrupted: wait, or save it again"
        )
    with explained(given):
        if (given / "checkpoints").is_dir():
            raise PublishError(f"{given} is a run that has not finished: it has no model yet")
    raise PublishError(f"{given} is not a model of the zoo: it has no {checksums.NAME}")


def _parsed(content: bytes, where: Location) -> tuple[dict, str]:
    """The files that `checksums.json` lists, with the card, which it does not, and a digest."""
    try:
        listed = checksums.parse(content)
    except ValueError as error:
        raise PublishError(f"{where} is damaged: {error}; publish the model again") from None
    for name in listed:
        inside(where, name, where / checksums.NAME)
    return {README: {}} | listed, hashlib.sha256(content).hexdigest()


def _plain(where: Location) -> _Listing:
    """A folder without checksums: its files by their sizes and the store's own tags."""
    if read_if_there(where / SAVING) is not None:
        raise PublishError(
            f"{where} is being saved, or that was interrupted: wait, or save it again"
        )
    with explained(where):
        found = files_below(where)
    tags = {name: [info["size"], _tag(info)] for name, info in sorted(found.items())}
    digest = hashlib.sha256(json.dumps(tags).encode()).hexdigest()
    return _Listing(where, {name: {"bytes": size} for name, (size, _) in tags.items()}, digest)


def _tag(info: dict) -> str:
    names = ("ETag", "etag", "md5Hash", "generation", "LastModified", "updated", "mtime", "created")
    return next((str(info[name]) for name in names if info.get(name)), "")


def _fetch(listing: _Listing) -> Path:
    folder = listing.cached
    files.make_folder(folder.parent, "cache")
    with _locked(folder.parent / "lock"):
        if folder.is_dir():
            return folder
        partial = folder.with_name(folder.name + ".part")
        targets = {name: inside(partial, name, listing.where) for name in listing.files}
        total = sum(entry.get("bytes", 0) for entry in listing.files.values())
        with (
            Transfer(f"fetching {listing.where}", total) as transfer,
            concurrent.futures.ThreadPoolExecutor(_FILES_AT_ONCE) as pool,
        ):
            begun = [
                pool.submit(
                    _fetch_file, listing.where / name, target, listing.files[name], transfer
                )
                for name, target in targets.items()
            ]
            try:
                for one in begun:
                    one.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        content = read_if_there(listing.where / checksums.NAME)
        if content is not None:
            if hashlib.sha256(content).hexdigest() != listing.digest:
                raise _ChangedError
            (partial / checksums.NAME).write_bytes(content)
        files.sync_all(partial)
        partial.rename(folder)
        files.sync(folder.parent)
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Within, no other process of this machine is: one fetches, the others wait for it."""
    with open(path, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_file(source: Location, target: Path, entry: dict, transfer: Transfer) -> None:
    """Fetch a file, if an earlier process that was killed has not done so already."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary, digest, size = target.with_name(target.name + ".tmp"), hashlib.sha256(), 0
    try:
        with source.open("rb") as remote, open(temporary, "wb") as local, files.named(temporary):
            while part := remote.read(_PART):
                local.write(part)
                digest.update(part)
                size += len(part)
                transfer.add(len(part))
    except FileNotFoundError:
        if not entry:  # the card, which is not listed
            return
        raise _ChangedError from None
    wanted = entry.get("bytes", size), entry.get("sha256", digest.hexdigest())
    if (size, digest.hexdigest()) != wanted:
        raise _ChangedError
    os.replace(temporary, target)
