"""The files of a working folder and their copies at an address, but for checkpoints and metrics.

`run.json` at the address has the id of the run, and the names of the files that may be there; the
record in the working folder, `.remote.json`, has that id, and what was copied when.
"""

import contextlib
import json
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo.base import files
from zoo.base.addresses import inside
from zoo.runs.remote.store import Store

RECORD = ".remote.json"  # of the working folder
INDEX = "run.json"  # at the address
METRICS = "metrics.jsonl"  # copied by parts, and whole at the end
_ELSEWHERE = ("checkpoints", "metrics", "lease")

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
        text = json.dumps(vars(self))
        files.replace(folder / RECORD, lambda temporary: temporary.write_text(text))


class Mirror:
    """Copies what has changed in a folder to an address."""

    def __init__(self, folder: Path, store: Store, record: Record):
        self._folder, self._store, self._record = folder, store, record
        index = store.read(INDEX)
        content: dict[str, Any] = json.loads(index) if index else {"id": "", "files": []}
        self.id: str = content["id"]
        """The id of the run at the address; empty if no run is there."""
        for name in content["files"]:
            inside(folder, name, f"{store.address}/{INDEX}")
        self._listed = set(content["files"])

    def begin(self) -> None:
        """Give the run its id, if it has none."""
        if not self.id:
            self.id = uuid.uuid4().hex
            self._write_index()
        self._record.id = self.id

    def copy(self, check: Callable[[], object], *, whole: bool = False) -> None:
        """Copy what has changed and remove what is gone, until nothing changes any more.

        `whole` copies metrics.jsonl too.
        """
        for _ in range(10):  # what changes all the time is copied again the next time
            found = self._signatures(whole)
            changed = [x for x, seen in found.items() if seen != self._record.copied.get(x)]
            kept = found.keys() | ({METRICS} if not whole else set())
            gone = sorted((self._listed | self._record.copied.keys()) - kept)
            if not changed and not gone:
                return
            check()
            if not self._listed.issuperset(changed):
                self._listed |= {*changed}
                self._write_index()
            # A list of checksums makes its folder whole.
            vanished = [
                name
                for names in _checksums_last(changed)
                for name in self._store.put(self._folder, names)
            ]
            self._store.remove(gone)
            for name in gone:
                self._record.copied.pop(name, None)
            if gone:
                self._listed -= {*gone}
                self._write_index()
            self._record.copied |= {x: found[x] for x in changed if x not in vanished}
            self._record.write(self._folder)

    def fetch(self, *, only_missing: bool) -> None:
        """Copy the files that are at the address into the folder."""
        names = [x for x in sorted(self._listed) if x != METRICS]
        if only_missing:
            names = [x for x in names if not (self._folder / x).exists()]
        absent = self._store.get(self._folder, names)
        now = self._signatures(whole=False)
        self._record.copied |= {x: now[x] for x in names if x in now and x not in absent}

    def fetch_one(self, name: str) -> None:
        """Copy a file into the folder, if it is at the address and not in the folder."""
        if not (self._folder / name).exists():
            self._store.get(self._folder, [name])

    def _write_index(self) -> None:
        content = {"id": self.id, "files": sorted(self._listed)}
        self._store.write(INDEX, json.dumps(content, indent=1).encode())

    def _signatures(self, whole: bool) -> dict[str, Signature]:
        """Name -> size, time and number of each file that is copied."""
        found = {}
        for folder, folders, names in os.walk(self._folder):  # which leaves out what vanishes
            if Path(folder) == self._folder:
                folders[:] = [x for x in folders if x not in _ELSEWHERE]
                names = [x for x in names if x != INDEX and (whole or x != METRICS)]
            folders[:] = [x for x in folders if not _is_passing(x)]
            for path in (Path(folder, x) for x in names if not _is_passing(x)):
                with contextlib.suppress(FileNotFoundError):
                    stat = path.stat()
                    name = path.relative_to(self._folder).as_posix()
                    found[name] = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        return dict(sorted(found.items()))


def _is_passing(name: str) -> bool:
    return name.startswith(".") or name.endswith(".tmp")


def _checksums_last(names: list[str]) -> tuple[list[str], list[str]]:
    last = [name for name in names if name.endswith("checksums.json")]
    return [name for name in names if name not in last], last
