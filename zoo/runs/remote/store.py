"""The objects under an address, by their names below it, through fsspec."""

import contextlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

from zoo.common import files
from zoo.common.addresses import AddressError, explained, inside, location

_AT_ONCE = 4  # transfers of files; each holds a part of its file in memory


class Store:
    """The objects under an address: reads that say None of what is missing, and whole writes.

    What the store refuses, or fails at after the library's own retries, is an error in one
    sentence (`zoo.common.addresses.explained`).
    """

    def __init__(self, address: str):
        self.address = address.rstrip("/")
        self._place = location(self.address, "run_dir")
        self._fs, self._root = self._place.fs, self._place.path.rstrip("/")

    def read(self, name: str) -> bytes | None:
        """The bytes of an object; None if it does not exist."""
        with explained(self._place):
            try:
                return self._fs.cat_file(self._path(name))
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Write an object whole, over the one that is there."""
        with self._in_bucket():
            self._fs.pipe_file(self._path(name), content)

    def create(self, name: str, content: bytes) -> bool:
        """Write an object unless there is one; False if there is.

        A store that does not know such a write replaces the object, and it is True.
        """
        with self._in_bucket():
            try:
                self._fs.pipe_file(self._path(name), content, mode="create")
            except FileExistsError:
                return False
            return True

    def put(self, folder: Path, names: Iterable[str], prefix: str = "") -> list[str]:
        """Copy files of a local folder to the objects of their names after `prefix`.

        Returns the names of files that are gone.
        """

        def copy(name: str) -> str | None:
            try:
                self._fs.put_file(str(folder / name), self._path(prefix + name))
            except FileNotFoundError:
                if (folder / name).exists():  # it is the bucket that is missing
                    raise
                return name
            return None

        with self._in_bucket(), ThreadPoolExecutor(_AT_ONCE) as pool:
            return [name for name in pool.map(copy, names) if name is not None]

    def get(self, folder: Path, names: Iterable[str], prefix: str = "") -> list[str]:
        """Copy objects to files of a local folder; the names of the missing ones.

        Each file appears whole.
        """

        def copy(name: str) -> str | None:
            path = inside(folder, name, self.address)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                files.replace(
                    path, lambda to: self._fs.get_file(self._path(prefix + name), str(to))
                )
            except FileNotFoundError:
                path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)
                return name
            return None

        with explained(self._place), ThreadPoolExecutor(_AT_ONCE) as pool:
            return [name for name in pool.map(copy, names) if name is not None]

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; a missing one is no error."""

        def remove(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))

        with explained(self._place), ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(remove, names))

    def names(self, prefix: str) -> list[str]:
        """The sorted names below a folder `prefix`, without it."""
        with self._in_bucket():
            self._fs.invalidate_cache()
            folder = self._path(prefix)
            return sorted(path.removeprefix(f"{folder}/") for path in self._fs.find(folder))

    def modified(self, name: str) -> datetime | None:
        """The time of an object's writing, by the store's clock; None if there is no object."""
        with explained(self._place):
            self._fs.invalidate_cache()
            try:
                return self._fs.modified(self._path(name))
            except FileNotFoundError:
                return None

    @contextlib.contextmanager
    def _in_bucket(self) -> Iterator[None]:
        """A context of requests that need nothing but the bucket to be there."""
        with explained(self._place):
            try:
                yield
            except FileNotFoundError as error:
                raise AddressError(
                    f"{self.address}: there is no such bucket: make it, or correct the address"
                ) from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
