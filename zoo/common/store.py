"""Object stores: files and folders at addresses, read, written, listed, and copied.

`location` gives a `Path` for a local path, and a `upath.UPath`, which is used like one, for an
address `scheme://…`; a new kind of store is a line of `SCHEMES`. Endpoints and credentials are read
by the stores' own libraries (s3fs, gcsfs, huggingface_hub), and so are their environment variables:
AWS_ENDPOINT_URL, AWS_PROFILE, GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN.

All that the zoo has at addresses, runs, models and corpora, is copied by a `Store`. A file that is
fetched appears whole, and one whose size or SHA-256 is known is compared with it. Stores rename
nothing: a writer of a folder writes the file that lists the others last, such as its
`checksums.json`. The libraries of the stores try a request again by themselves; a failure that
lasts longer is an error in one sentence (`explained`).
"""

import contextlib
import functools
import glob
import hashlib
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from zoo.common import checksums, files
from zoo.common.files import AddressError, Location, Transfer, inside, is_remote, scheme_of
from zoo.common.store_errors import NO_BUCKET, reason_of


class Scheme(NamedTuple):
    """A kind of store, by what its addresses begin with."""

    module: str
    """The package that reads it."""
    extra: str
    """The zoo's extra that brings the package."""
    holds_runs: bool = False
    """Whether a run can be written there: object by object, some only where there is none yet."""
    uncached: Mapping[str, Any] = MappingProxyType({})
    """Options that keep no listing: other processes write to the same folders."""


SCHEMES = {
    "s3": Scheme("s3fs", "s3", True, {"use_listings_cache": False}),
    "gs": Scheme("gcsfs", "gs", True, {"use_listings_cache": False, "cache_timeout": 0}),
    "hf": Scheme("huggingface_hub", "hf"),
    "http": Scheme("aiohttp", "s3"),
    "https": Scheme("aiohttp", "s3"),
    "memory": Scheme("fsspec", "s3", True),  # for tests
}
_WEB = ("http", "https")
_AT_ONCE = 4  # transfers of files; each holds a part of its file in memory
_PART = 2**22  # bytes


def location(path: str | os.PathLike[str], name: str) -> Location:
    """The path with `~` as the home folder, or the file or folder at an address.

    Raises:
        ValueError: a scheme that is not known, or a bucket that is missing from the address; the
            message names the field `name`.
        ImportError: the scheme needs an extra that is not installed.
    """
    text = os.fspath(path) if isinstance(path, Path) else str(path)
    scheme = scheme_of(text)
    if scheme is None:
        return Path(os.path.expanduser(text))
    if scheme == "file":
        return Path("/" + _rest(text).lstrip("/"))
    # `Path` makes one slash of the two.
    address = f"{scheme}://{_rest(text)}"
    if scheme not in SCHEMES:
        known = ", ".join(f"{known}://" for known in SCHEMES if known != "memory")
        raise ValueError(f"{name}='{address}': unknown scheme {scheme}://; known are {known}")
    kind = SCHEMES[scheme]
    if any(importlib.util.find_spec(needed) is None for needed in (kind.module, "upath")):
        raise ImportError(f"{name}='{address}' needs an extra: pip install 'zoo[{kind.extra}]'")
    if not _rest(text).strip("/"):
        raise ValueError(f"{name}='{address}': there is no bucket or host in this address")
    _silence()
    from upath import UPath

    return UPath(address.rstrip("/"), **kind.uncached)


def _rest(address: str) -> str:
    return re.sub(r"^[A-Za-z][\w+.-]+:/+", "", address)


@functools.cache
def _silence() -> None:
    """Keep what these libraries log of errors, which they also raise, from the terminal."""
    # gcsfs asks for the kind of each bucket, by other credentials, and warns where it cannot.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    for name in ("gcsfs", "fsspec", "s3fs", "aiobotocore", "botocore", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def files_matching(pattern: str, name: str) -> dict[Location, str]:
    """The files that a glob matches, sorted, with their names.

    `**` works, and so does the path or address of a single file. A name is the path relative to
    the pattern's fixed folder, with forward slashes.

    Raises:
        FileNotFoundError: no such file.
        AddressError: the store cannot be read.
    """
    where = location(pattern, name)
    text = str(where)
    parts = text.split("/")  # of an address, the empty one between its slashes too
    magic = [i for i, part in enumerate(parts) if glob.has_magic(part)]
    root = "/".join(parts[: magic[0] if magic else len(parts) - 1])
    with explained(where):
        if is_remote(where):
            scheme, fs = scheme_of(where), where.fs
            names = sorted(fs.glob(text if scheme in _WEB else where.path)) if magic else [text]
            # A name is an address without its scheme, except on the web.
            addresses = [n if is_remote(n) else f"{scheme}://{n.lstrip('/')}" for n in names]
            paths = [location(address, name) for address in addresses]
        else:
            paths = sorted(map(Path, glob.glob(text, recursive=True)))
        files = [path for path in paths if path.is_file()]
        is_folder = bool(paths) and not files and paths[0].is_dir()
    if not files:
        here = "" if is_remote(where) else f" in {Path.cwd()}"
        folder = f"; {pattern!r} is a folder: add '/**/*.txt' or the like" if is_folder else ""
        raise FileNotFoundError(f"no file matches {pattern!r}{here}{folder}")
    return {path: str(path)[len(root) :].lstrip("/") for path in files}


@contextlib.contextmanager
def explained(where: object) -> Iterator[None]:
    """A context in which the errors of a store's library become an `AddressError`: one sentence.

    Local paths keep their own errors.
    """
    try:
        yield
    except AddressError:
        raise
    except Exception as error:
        if not is_remote(where) or (reason := reason_of(error)) is None:
            raise
        raise AddressError(f"{where}: {reason}") from error


class Store:
    """The objects under an address, by their names below it."""

    def __init__(self, address: object, field: str = "address"):
        """`field` is the field that has the address, for errors."""
        self.place = location(str(address), field)
        self.address = str(self.place)
        self._fs, self._root = self.place.fs, self.place.path.rstrip("/")

    def read(self, name: str) -> bytes | None:
        """The bytes of an object; None if its bucket has no such object.

        Raises:
            AddressError: the store cannot be read, or has no such bucket.
        """
        with explained(self.place):
            try:
                return self._fs.cat_file(self._path(name))
            except (FileNotFoundError, NotADirectoryError) as error:
                if reason_of(error) == NO_BUCKET:
                    raise
                return None

    def write(self, name: str, content: bytes) -> None:
        """Write an object whole, over the one that is there."""
        with self._in_bucket():
            self._fs.pipe_file(self._path(name), content)

    def create(self, name: str, content: bytes) -> bool:
        """Write an object unless there is one; False if there is.

        A store that lacks such a write replaces the object, and the result is True.
        """
        with self._in_bucket():
            try:
                self._fs.pipe_file(self._path(name), content, mode="create")
            except FileExistsError:
                return False
            return True

    def put(
        self, folder: Path, names: Iterable[str], prefix: str = "", *, title: str = ""
    ) -> list[str]:
        """Copy files of a local folder to the objects of their names after `prefix`.

        Where `names` has the entries of checksums, the objects have to have their sizes. With a
        title the progress is shown. Returns the names of files that are gone.

        Raises:
            AddressError: an object has another size than its file.
        """
        entries = _entries(names)
        total = sum(entry.get("bytes", 0) for entry in entries.values())

        def copy(name: str) -> bool:
            path = self._path(prefix + name)
            try:
                self._fs.put_file(str(folder / name), path)
            except FileNotFoundError:
                if (folder / name).exists():  # it is the bucket that is missing
                    raise
                return False
            if (size := entries[name].get("bytes")) is not None:
                if (found := self._fs.info(path)["size"]) != size:
                    where = f"{self.address}/{prefix}{name}"
                    raise AddressError(f"{where} has {found} bytes instead of {size}")
                transfer.add(size)
            return True

        with self._in_bucket(), Transfer(title, total) as transfer:
            return [name for name, done in _at_once(copy, entries).items() if not done]

    def get(
        self, folder: Path, names: Iterable[str], prefix: str = "", *, title: str = ""
    ) -> dict[str, str]:
        """Copy objects to files of a local folder, each of which appears whole.

        With a title the progress is shown. Returns a text for each file that was not fetched: it is
        missing or, where `names` has the entries of checksums, has other bytes.

        Raises:
            AddressError: a name leads out of the folder, or names both a file and a folder.
        """
        entries = _entries(names)
        targets = places(folder, entries, self.address)
        total = sum(entry.get("bytes", 0) for entry in entries.values())

        def copy(name: str) -> str | None:
            target = targets[name]
            files.make_folder(target.parent, "folder")

            def fetch(temporary: Path) -> None:
                digest, size = hashlib.sha256(), 0
                with (
                    explained(self.place),  # before `replace` names the file here
                    self._fs.open(self._path(prefix + name), "rb") as there,
                    open(temporary, "wb") as here,
                ):
                    while part := there.read(_PART):
                        here.write(part)
                        digest.update(part)
                        size += len(part)
                        transfer.add(len(part))
                if line := checksums.difference(entries[name], size, digest.hexdigest):
                    raise _OtherBytesError(line)

            try:
                files.replace(target, fetch)
            except (AddressError, _OtherBytesError) as error:
                is_missing = isinstance(error.__cause__, FileNotFoundError)
                if not (is_missing or isinstance(error, _OtherBytesError)):
                    raise
                target.with_name(f"{target.name}.tmp").unlink(missing_ok=True)
                return "is missing" if is_missing else str(error)
            return None

        with Transfer(title, total) as transfer:
            return {name: x for name, x in _at_once(copy, entries).items() if x is not None}

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; a missing one is no error."""

        def remove(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))

        with explained(self.place):
            _at_once(remove, names)

    def names(self, prefix: str = "") -> list[str]:
        """The sorted names below a folder `prefix`, without it."""
        return sorted(self.listing(prefix))

    def listing(self, prefix: str = "") -> dict[str, dict[str, Any]]:
        """The store's record of each object below a folder `prefix`, by name in the folder.

        Raises:
            AddressError: a name that leads out of the folder.
        """
        with self._in_bucket():
            self._fs.invalidate_cache()
            folder = self._path(prefix).rstrip("/")
            infos = self._fs.find(folder, detail=True).items()
        start = folder.strip("/") + "/"
        found = {name.lstrip("/").removeprefix(start): x for name, x in infos if name[-1:] != "/"}
        where = f"{self.address}/{prefix}".rstrip("/")
        for name in found:
            inside(self.place, name, where)
        return found

    def modified(self, name: str) -> datetime | None:
        """The time of an object's writing, by the store's clock; None if there is no object."""
        with explained(self.place):
            self._fs.invalidate_cache()
            try:
                return self._fs.modified(self._path(name))
            except FileNotFoundError:
                return None

    @contextlib.contextmanager
    def _in_bucket(self) -> Iterator[None]:
        """A context of requests that need nothing but the bucket to be there."""
        with explained(self.place):
            try:
                yield
            except FileNotFoundError as error:
                raise AddressError(f"{self.address}: {NO_BUCKET}") from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class _OtherBytesError(Exception):
    """A file is not the one that a list of checksums names."""


def places(folder: Path, names: Iterable[str], listing: object) -> dict[str, Path]:
    """The place in a local folder of each name of a listing; see `zoo.common.files.inside`.

    Raises:
        AddressError: a name leads out of the folder, or names both a file and a folder.
    """
    found = {name: inside(folder, name, listing) for name in names}
    for name in found:
        for above in (parent.as_posix() for parent in Path(name).parents):
            if above in found:
                raise AddressError(
                    f"{listing} lists {above!r} and {name!r}: a file here cannot be a folder too; "
                    "remove one of the two there"
                )
    return found


def sizes(folder: Path, names: Iterable[str]) -> dict[str, dict[str, int]]:
    """The entries, for `Store.put`, of files that are all there."""
    return {name: {"bytes": (folder / name).stat().st_size} for name in names}


def _entries(names: Iterable[str]) -> Mapping[str, Mapping[str, Any]]:
    return names if isinstance(names, Mapping) else {name: {} for name in names}


def _at_once(call: Callable[[str], Any], names: Iterable[str]) -> dict[str, Any]:
    """The result of a call for each name, some at once; after an error no other one is begun."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        begun = {name: pool.submit(call, name) for name in names}
        try:
            return {name: one.result() for name, one in begun.items()}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
