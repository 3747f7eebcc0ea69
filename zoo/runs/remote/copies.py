"""The copies at an address of a working folder's files and checkpoints.

Objects have the names of the files. A list of checksums goes last into its folder, and is removed
first: a checkpoint without it is incomplete. In a checkpoint's list large files have their SHA-256
too, by which what is fetched is compared. `run.json` has the id of the run; the record in the
working folder, `.remote.json`, has that id, and which files were copied.

Each process hashes, copies and fetches its own part of a checkpoint, from a working folder of its
own. It tells the checksums of its part in an object, and process 0 writes the list of all.
"""

import contextlib
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import jax

from zoo.common import checksums, files
from zoo.common.store import Store
from zoo.runs import processes
from zoo.runs.checkpoint import seal, set_aside
from zoo.runs.stored_arrays import anywhere, part_of

_log = logging.getLogger(__name__)
RECORD = ".remote.json"  # of the working folder
INDEX = "run.json"  # at the address
METRICS = "metrics.jsonl"
STEPS = "checkpoints"
_META = "meta.json"  # of a step
_ELSEWHERE = (STEPS, "lease")
_SECONDS = 0.5  # between two looks for another process' part

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

    Each `check` is called before anything is written that others can see: it raises to stop that.
    """

    def __init__(self, folder: Path, store: Store, record: Record, *, owner: str, keep: int):
        """`owner` is the lease's."""
        self._folder, self._store, self._record, self._keep = folder, store, record, keep
        self._owner, self._others = owner, range(1, jax.process_count())
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

    def copy_step(
        self,
        step: int,
        check: Callable[[], object],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Copy this process's part of a local step, and tell process 0 of it.

        Process 0 completes the step once all parts are there, for as long as it `is_wanted`, and
        removes the steps that are too many; see `prune`.
        """
        said = {number: f"{STEPS}/{step}/{self._owner}/{number}.json" for number in self._others}
        if index := jax.process_index():
            if entries := self._put_part(step, check):
                self._store.write(said[index], json.dumps(entries).encode())
            return
        if step not in self.good:
            self._forget(step, check)
            if not (entries := self._put_part(step, check)):
                return
            for name in said.values():
                while (content := self._store.read(name)) is None:
                    check()
                    if not is_wanted():
                        return
                    time.sleep(_SECONDS)
                entries |= json.loads(content)
            check()
            self._store.write(
                f"{STEPS}/{step}/{checksums.NAME}", checksums.as_text(entries).encode()
            )
            self.complete, self._damaged = self.complete | {step}, self._damaged - {step}
            self._store.remove(said.values())
        self.prune(check)

    def _put_part(self, step: int, check: Callable[[], object]) -> dict[str, dict]:
        """Copy this process's files of a step; their entries, or none if it is gone meanwhile."""
        within, prefix = self._folder / STEPS / str(step), f"{STEPS}/{step}/"
        index = jax.process_index()

        def is_mine(name: str) -> bool:
            """Whether a file is for this process to copy: for process 0, every one of no other."""
            return part_of(name) == index or (index == 0 and part_of(name) not in self._others)

        found = [x for x in self._store.names(prefix) if not x.startswith(self._owner)]
        check()
        self._store.remove(prefix + x for x in found if is_mine(x))  # of an earlier attempt
        entries: dict[str, dict] = {}
        for name in filter(is_mine, sorted(checksums.listed(within))):
            with contextlib.suppress(FileNotFoundError):
                entries[name] = checksums.entry(within / name)
        gone = self._store.put(within, entries, prefix)
        check()
        return {} if gone else entries

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
        """Copy the files at the address, or the ones of these names, into the folder."""
        names = self._names() if names is None else names
        if only_missing:
            names = [x for x in names if not (self._folder / x).exists()]
        absent = self._store.get(self._folder, names)
        now = self._signatures()
        self._record.copied |= {x: now[x] for x in names if x in now and x not in absent}

    def fetch_step(self, *, above: int) -> int | None:
        """Copy the newest undamaged step above a step into the folder; None without one.

        All processes call it, and each takes its part. A damaged one is reported. Steps above it
        that were fetched were damaged before they came here: they are removed, and may be copied
        again.
        """
        self._damaged = self._damaged | {fetched for fetched in self._fetched if fetched > above}
        while True:
            newest = max(self.complete - self._fetched, default=-1)
            step = processes.from_first({"step": newest})["step"]
            if step <= above:
                return None
            self._fetched.add(step)
            target = self._folder / STEPS / str(step)
            partial = target.with_name(f"{step}.tmp")
            files.remove(partial)
            partial.mkdir(parents=True)
            problems = self._fetch(step, partial, (None, jax.process_index()))
            if anywhere(bool(problems)):
                self._damaged = self._damaged | {step}
                _log.warning(
                    "Damaged checkpoint, step %d in %s: %s. An earlier one is used instead.",
                    step,
                    self._store.address,
                    "; ".join(problems) or "another process says why",
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

    def fetch_part(self, step: int, number: int) -> str:
        """Copy another process's part of a step in the folder; return the reason if it can't be."""
        folder = self._folder / STEPS / str(step)
        if problems := self._fetch(step, folder, (number,)):
            return f"{'; '.join(problems)}, in {self._store.address}"
        seal(folder)
        return ""

    def _fetch(self, step: int, folder: Path, parts: tuple[int | None, ...]) -> list[str]:
        """Copy these parts of a step; a line per file that is missing or damaged there."""
        prefix = f"{STEPS}/{step}/"
        try:
            listed = checksums.parse(self._store.read(prefix + checksums.NAME) or b"")
        except ValueError as error:
            if error.__cause__ is not None:  # the store's
                raise
            return [str(error)]
        if None not in parts:
            here, there = (folder / _META).read_bytes(), self._store.read(prefix + _META)
            savers = (json.loads(content or b"{}").get("saved_by") for content in (here, there))
            if len({*savers}) > 1:
                return [f"{_META} is that of another save"]
        chosen = {name: entry for name, entry in listed.items() if part_of(name) in parts}
        found = self._store.get(folder, chosen, prefix)
        return [f"{name} {problem}" for name, problem in found.items()]

    def _forget(self, step: int, check: Callable[[], object]) -> None:
        """Remove a step's list, without which it is incomplete."""
        if step in self.complete:
            check()
            self._store.remove([f"{STEPS}/{step}/{checksums.NAME}"])
            self.complete = self.complete - {step}
        self._begun = self._begun | {step}

    def _remove(self, step: int, check: Callable[[], object]) -> None:
        self._forget(step, check)
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
