"""The copies at an address of a working folder's files and checkpoints.

Objects have the names of the files. A list of checksums goes last into its folder, and is removed
first: a checkpoint without it is incomplete. In a checkpoint's list large files have their SHA-256
too, by which what is fetched is compared. `run.json` has the id of the run; the record in the
working folder, `.remote.json`, has that id, and which files were copied.
"""

import contextlib
import json
import logging
import os
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from zoo.common import checksums, files
from zoo.common.store import Store
from zoo.runs.checkpoint import seal, set_aside
from zoo.runs.remote.shares import Shares

_log = logging.getLogger(__name__)
RECORD = ".remote.json"  # of the working folder
INDEX = "run.json"  # at the address
METRICS = "metrics.jsonl"
STEPS = "checkpoints"
_ELSEWHERE = (STEPS, "lease")

Signature = list[int]


@dataclass
class Record:
    """A working folder's record of the address."""

    id: str = ""
    host: str = ""
    owners: list[str] = field(default_factory=list)
    """The owners of the lease that have worked in the folder: the last one, and a next."""
    copied: dict[str, Signature] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Record":
        """The record of a folder; an empty one if it is missing or damaged."""
        try:
            return cls(**json.loads((folder / RECORD).read_bytes()))
        except (OSError, ValueError, TypeError):
            return cls()

    def write(self, folder: Path) -> None:
        """Write the record, atomically."""
        files.replace(folder / RECORD, json.dumps(vars(self)))


class RemoteCopies:
    """Copies what has changed in a working folder to an address, and from there to the folder.

    Each `check` is called before what others can see is written: it raises to stop it.
    """

    def __init__(self, folder: Path, store: Store, record: Record, *, keep: int):
        self._folder, self._store, self._record, self._keep = folder, store, record, keep
        self._shares = Shares(folder, store, record.owners)
        index = store.read(INDEX)
        self.id: str = json.loads(index)["id"] if index else ""
        """The id of the run at the address; empty if no run is there."""
        self.complete, self._begun = stored_steps(store)
        self._fetched: set[int] = set()
        self._damaged: set[int] = set()

    @property
    def good(self) -> set[int]:
        """The steps at the address, without the ones found to be damaged."""
        return self.complete - self._damaged

    def begin(self) -> None:
        """Give the run its id, if it has none."""
        if not self.id:
            self.id = uuid.uuid4().hex
            self._store.write(INDEX, json.dumps({"id": self.id}).encode())
        self._record.id = self.id

    def copy_files(self, check: Callable[[], object]) -> None:
        """Copy what has changed and remove what is gone, until nothing changes any more."""
        # An evaluation's line says that its files are there: they are copied in between.
        seen, path = self._signatures(), self._folder / METRICS
        content = path.read_bytes() if path.exists() else b""
        lines = content[: content.rfind(b"\n") + 1]  # whole ones
        for _ in range(10):  # what changes all the time is copied again the next time
            found = self._signatures()
            metrics = found.pop(METRICS, None)
            changed = [x for x, at in found.items() if at != self._record.copied.get(x)]
            gone = sorted(self._record.copied.keys() - found.keys())
            gone = [x for x in gone if metrics is None or x != METRICS]
            if not changed and not gone:
                break
            check()
            folders = [x for x in changed if not x.endswith(checksums.NAME)]
            vanished = self._store.put(self._folder, folders)
            vanished += self._store.put(self._folder, [x for x in changed if x not in folders])
            self._store.remove(x for x in gone if x.endswith(checksums.NAME))
            self._store.remove(gone)
            for name in gone:
                self._record.copied.pop(name, None)
            self._record.copied |= {x: found[x] for x in changed if x not in vanished}
            self._record.write(self._folder)
        if METRICS in seen and seen[METRICS] != self._record.copied.get(METRICS):
            check()
            self._store.write(METRICS, lines)
            self._record.copied[METRICS] = seen[METRICS]
            self._record.write(self._folder)

    def copy_step(self, step: int, check: Callable[[], object]) -> None:
        """Copy a local step, if it is not there, then remove steps: see `prune`."""
        if step not in self.good:
            self._remove(step, check)
            self._begun = self._begun | {step}
            within, prefix = f"{STEPS}/{step}", f"{STEPS}/{step}/"
            names: dict[str, dict] = {x: {} for x in checksums.listed(self._folder / within)}
            listed = self._shares.copy("put", within, names, prefix, check)
            check()
            if listed.keys() != names.keys() or not names:
                return  # it was removed meanwhile, as a newer one is there
            self._store.write(prefix + checksums.NAME, checksums.as_text(listed).encode())
            self.complete = self.complete | {step}
            self._damaged = self._damaged - {step}
        self.prune(check)

    def prune(self, check: Callable[[], object]) -> None:
        """Remove the steps that are too many, damaged, or half there."""
        kept = sorted(self.good)[-self._keep :]
        for old in sorted((self.complete | self._begun) - {*kept}):
            self._remove(old, check)

    def whole(self) -> list[str]:
        """The files at the address, without folders whose lists of checksums are missing.

        An attempt that was killed before its first checkpoint may have copied these in part.
        """
        names = {*self._names()}
        if "config.json" not in names:  # of a run that failed, and takes other flags
            return [METRICS] if METRICS in names else []
        folders = {x.partition("/")[0] for x in names}
        whole = {x for x in folders if f"{x}/{checksums.NAME}" in names}
        return sorted(x for x in names if "/" not in x or x.partition("/")[0] in whole)

    def _names(self) -> list[str]:
        return [x for x in self._store.names() if x != INDEX and not _is_elsewhere(x)]

    def fetch(self, names: list[str] | None = None, *, only_missing: bool = False) -> None:
        """Copy the files that are at the address, or these of them, into the folder."""
        names = self._names() if names is None else names
        if only_missing:
            names = [x for x in names if not (self._folder / x).exists()]
        absent = self._store.get(self._folder, names)
        now = self._signatures()
        self._record.copied |= {x: now[x] for x in names if x in now and x not in absent}

    def fetch_step(self, *, above: int) -> int | None:
        """Copy the newest undamaged step above a step into the folder; None without one.

        A damaged one is reported. Ones that were fetched and are above it were damaged before they
        came here: they are removed, and may be copied again.
        """
        self._damaged = self._damaged | {fetched for fetched in self._fetched if fetched > above}
        for step in sorted(self.complete - self._fetched, reverse=True):
            if step <= above:
                return None
            self._fetched.add(step)
            target = self._folder / STEPS / str(step)
            partial = target.with_name(f"{step}.tmp")
            files.remove(partial)
            partial.mkdir(parents=True)
            try:
                prefix = f"{STEPS}/{step}/"
                listed = checksums.parse(self._store.read(prefix + checksums.NAME) or b"")
                found = self._shares.copy("get", f"{STEPS}/{step}.tmp", listed, prefix)
                problems = [f"{name} {problem}" for name, problem in found.items()]
            except ValueError as error:
                if error.__cause__ is not None:  # the store's
                    raise
                problems = [str(error)]
            if problems:
                self._damaged = self._damaged | {step}
                _log.warning(
                    "Damaged checkpoint, step %d in %s: %s. An earlier one is used instead.",
                    step,
                    self._store.address,
                    "; ".join(problems),
                )
                files.remove(partial)
                continue
            seal(partial)  # as it was: reading its arrays verifies their own checksums
            files.sync_all(partial)
            if target.exists():
                set_aside(target)
            partial.rename(target)
            files.sync(target.parent)
            return step
        return None

    def _remove(self, step: int, check: Callable[[], object]) -> None:
        if step in self.complete:
            check()
            self._store.remove([f"{STEPS}/{step}/{checksums.NAME}"])
            self.complete = self.complete - {step}
            self._begun = self._begun | {step}
        if step in self._begun:
            names = self._store.names(f"{STEPS}/{step}")
            check()
            self._store.remove(f"{STEPS}/{step}/{name}" for name in names)
            self._begun = self._begun - {step}

    def _signatures(self) -> dict[str, Signature]:
        """Name -> size, time and number of each file that is copied."""
        found = {}
        for folder, folders, names in os.walk(self._folder):  # which leaves out what vanishes
            if Path(folder) == self._folder:
                folders[:] = [x for x in folders if x not in _ELSEWHERE]
                names = [x for x in names if x != INDEX]
            folders[:] = [x for x in folders if not _is_passing(x)]
            for path in (Path(folder, x) for x in names if not _is_passing(x)):
                with contextlib.suppress(FileNotFoundError):
                    stat = path.stat()
                    name = path.relative_to(self._folder).as_posix()
                    found[name] = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        return dict(sorted(found.items()))


def stored_steps(store: Store) -> tuple[set[int], set[int]]:
    """(the steps that are complete at an address, the ones that are half there)."""
    names = {*store.names(STEPS)}
    begun = {int(found[1]) for name in names if (found := re.match(r"(\d+)/", name))}
    complete = {step for step in begun if f"{step}/{checksums.NAME}" in names}
    return complete, begun - complete


def _is_elsewhere(name: str) -> bool:
    """Whether an object is not one of the run's copied files."""
    first, *_ = parts = name.split("/")
    return first in _ELSEWHERE or any(map(_is_passing, parts))


def _is_passing(name: str) -> bool:
    return name.startswith(".") or name.endswith(".tmp")
