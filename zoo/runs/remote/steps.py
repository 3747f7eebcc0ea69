"""Checkpoints at an address: a step is there once its marker is, which is written last.

`checkpoints/<step>/` has the files of the local folder, and `checkpoints/<step>.json`, the marker,
their names, sizes and xxh3 digests. A step is removed marker first.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import xxhash

from zoo.base import checksums, files
from zoo.base.addresses import AddressError, inside
from zoo.runs.checkpoint import set_aside
from zoo.runs.remote.store import Store

_log = logging.getLogger(__name__)
FOLDER = "checkpoints"


class RemoteSteps:
    """The checkpoints of a run at its address."""

    def __init__(self, store: Store, *, keep: int):
        self._store, self._keep = store, keep
        names = store.names(FOLDER)
        self.committed = {int(x[1]) for name in names if (x := re.fullmatch(r"(\d+)\.json", name))}
        """The steps that are there."""
        self._begun = {int(x[1]) for name in names if (x := re.match(r"(\d+)/", name))}
        self._fetched: set[int] = set()
        self._damaged: set[int] = set()

    @property
    def good(self) -> set[int]:
        """The steps at the address, without the ones found to be damaged."""
        return self.committed - self._damaged

    def copy(self, step: int, folder: Path, check: Callable[[], object]) -> None:
        """Copy a local step's folder, then `prune`.

        `check` is called before what others can see is written: it raises to stop it.
        """
        self._remove(step, check)
        self._begun.add(step)
        names = sorted(_files(folder), key=lambda name: (name == checksums.NAME, name))
        self._store.put(folder, [x for x in names if x != checksums.NAME], f"{FOLDER}/{step}/")
        self._store.put(folder, [x for x in names if x == checksums.NAME], f"{FOLDER}/{step}/")
        listed = {name: _describe(folder / name) for name in names}
        check()
        marker = json.dumps({"step": step, "files": listed}, indent=1).encode()
        self._store.write(_marker(step), marker)
        self.committed.add(step)
        self._damaged.discard(step)
        self.prune(check)

    def prune(self, check: Callable[[], object]) -> None:
        """Remove the steps that are too many, damaged, or half there."""
        kept = sorted(self.good)[-self._keep :]
        for old in sorted((self.committed | self._begun) - {*kept}):
            self._remove(old, check)

    def fetch(self, folder: Path, *, above: int) -> int | None:
        """Copy the newest undamaged step above a step into a local folder; None without one.

        A damaged one is reported. `<folder>/<step>` is there once it is whole.
        """
        for step in sorted(self.committed - self._fetched, reverse=True):
            if step <= above:
                return None
            self._fetched.add(step)
            partial = folder / f"{step}.tmp"
            files.remove(partial)
            if problems := self._fetch(step, partial):
                self._damaged.add(step)
                _log.warning(
                    "Damaged checkpoint, step %d in %s: %s. An earlier one is used instead.",
                    step,
                    self._store.address,
                    "; ".join(problems),
                )
                files.remove(partial)
                continue
            files.sync_all(partial)
            if (folder / str(step)).exists():
                set_aside(folder / str(step))
            partial.rename(folder / str(step))
            files.sync(folder)
            return step
        return None

    def _fetch(self, step: int, folder: Path) -> list[str]:
        """Copy a step into a new folder; the problems with it."""
        try:
            listed = dict(json.loads(self._store.read(_marker(step)) or b"")["files"])
            for name in listed:
                inside(folder, name, "its marker")
        except AddressError as error:
            return [str(error)]
        except (ValueError, LookupError, TypeError):
            return ["its marker is damaged"]
        folder.mkdir(parents=True)
        missing = self._store.get(folder, listed, f"{FOLDER}/{step}/")
        return [f"{name} is missing" for name in missing] + [
            f"{name} is damaged"
            for name, wanted in listed.items()
            if name not in missing and _describe(folder / name) != wanted
        ]

    def _remove(self, step: int, check: Callable[[], object]) -> None:
        if step in self.committed:
            check()
            self._store.remove([_marker(step)])
            self.committed.discard(step)
        if step in self._begun or step in self._fetched:
            names = self._store.names(f"{FOLDER}/{step}")
            check()
            self._store.remove(f"{FOLDER}/{step}/{name}" for name in names)
            self._begun.discard(step)


def link(source: Path, target: Path) -> None:
    """A second folder of a finished step's files, which stays when the first is removed."""
    files.remove(target)
    target.parent.mkdir(exist_ok=True)
    try:
        shutil.copytree(source, target, copy_function=os.link)
    except OSError:  # a file system without links
        files.remove(target)
        shutil.copytree(source, target)


def local_steps(folder: Path) -> list[int]:
    """The steps of a local folder of checkpoints, oldest first."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(path.name) for path in found if path.name.isdecimal())


def _files(folder: Path) -> list[str]:
    return [x.relative_to(folder).as_posix() for x in folder.rglob("*") if x.is_file()]


def _describe(path: Path) -> list[int | str]:
    """The size and the digest of a file."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return [path.stat().st_size, digest.hexdigest()]


def _marker(step: int) -> str:
    return f"{FOLDER}/{step}.json"
