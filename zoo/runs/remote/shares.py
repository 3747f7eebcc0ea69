"""Each process copies its own files of a checkpoint: what it wrote is read, hashed and sent by it.

Process 0 orders a copy by a file in the working folder, which all processes see, and each other
process answers by one of its own. The share of a process that has ended, or does not answer, is
left to process 0: any process can copy any file.
"""

import contextlib
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax

from zoo.common import checksums, files
from zoo.common.store import Store, places
from zoo.runs.remote.lease import LeaseError, newest

FOLDER = ".shares"  # of the working folder
_SECONDS = 0.5  # between two looks at a file
_PATIENCE = 30.0  # seconds in which a process takes an order
_ENDED = "ended"
Files = Mapping[str, Mapping[str, Any]]


def copy(work: str, folder: Path, store: Store, names: Files, prefix: str) -> dict[str, Any]:
    """Copy files of a folder to the objects of their names after `prefix`, or these to the files.

    Work is `put`, which returns the entries in `checksums.json` of the files that are still there;
    or `get`, which returns a text for each object that is missing or differs from its entry.
    """
    if work == "get":
        return store.get(folder, names, prefix)
    entries = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            entries[name] = checksums.entry(folder / name)
    gone = store.put(folder, entries, prefix)
    return {name: entry for name, entry in entries.items() if name not in gone}


def share_of(name: str) -> int:
    """The process that wrote a checkpoint's file."""
    found = re.match(r"arrays/(\d+)/", name)
    return int(found[1]) if found else 0


def begin(folder: Path) -> None:
    """Forget what an earlier run ordered and answered in a working folder."""
    files.remove(folder / FOLDER)
    if jax.process_count() > 1:
        (folder / FOLDER).mkdir()


class Shares:
    """Process 0's way to have files copied by all processes."""

    def __init__(self, folder: Path, store: Store, owners: Collection[str]):
        """`folder` is the working folder; the lease has to be of one of these owners."""
        self._folder, self._store, self._owners = folder, store, owners

    def copy(
        self,
        work: str,
        within: str,
        names: Files,
        prefix: str,
        check: Callable[[], object] = lambda: None,
    ) -> dict[str, Any]:
        """Have files `within` a folder of the working folder copied; see `copy`.

        `check` is called while others are waited for, which its error ends.

        Raises:
            OSError: another process could not copy its share; the message is its own.
        """
        places(self._folder / within, names, self._store.address)  # refuses what leads out of it
        shares: dict[int, Files] = {}
        for name, entry in names.items():
            index = share_of(name) % jax.process_count()
            shares[index] = {**shares.get(index, {}), name: entry}
        mine = shares.pop(0, {})
        order = uuid.uuid4().hex
        if shares:
            content = {"id": order, "work": work, "within": within, "prefix": prefix}
            more = {"owners": [*self._owners], "shares": shares}
            files.replace(self._folder / FOLDER / "order.json", json.dumps({**content, **more}))
        folder = self._folder / within
        found = copy(work, folder, self._store, mine, prefix)
        for index, share in shares.items():
            answer = self._answer(index, order, check)
            if answer is None:
                found |= copy(work, folder, self._store, share, prefix)
            elif "problem" in answer:
                raise OSError(f"process {index}: {answer['problem']}")
            else:
                found |= answer["found"]
        return found

    def _answer(self, index: int, order: str, check: Callable[[], object]) -> dict | None:
        """The answer of a process to an order, or None if it does not work at it."""
        path, deadline = _answer_of(self._folder, index), time.monotonic() + _PATIENCE
        while True:
            answer = _read(path)
            if answer.get("id") == order and ("found" in answer or "problem" in answer):
                return answer
            if answer.get("id") == _ENDED:
                return None
            if answer.get("id") != order and time.monotonic() > deadline:
                return None
            check()
            time.sleep(_SECONDS)


class Sharer:
    """A context in which a process other than 0 copies its shares, in the background."""

    def __init__(self, folder: Path, store: Store):
        self._folder, self._store, self._index = folder, store, jax.process_index()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="shares", daemon=True)

    def __enter__(self) -> "Sharer":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._left.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            self._say({"id": _ENDED})

    def _serve(self) -> None:
        done = ""
        while not self._left.wait(_SECONDS):
            order = _read(self._folder / FOLDER / "order.json")
            share = order.get("shares", {}).get(str(self._index))
            if share is None or order["id"] == done:
                continue
            done = order["id"]
            try:
                self._say({"id": done})
                self._say({"id": done, "found": self._copy(order, share)})
            except Exception as error:
                with contextlib.suppress(OSError):  # then its share is left to process 0
                    self._say({"id": done, "problem": str(error)})

    def _copy(self, order: dict[str, Any], share: Files) -> dict[str, Any]:
        _, lease = newest(self._store)
        if lease is None or lease["owner"] not in order["owners"]:
            raise LeaseError(f"another process has taken over the run in {self._store.address}")
        within = self._folder / order["within"]
        return copy(order["work"], within, self._store, share, order["prefix"])

    def _say(self, answer: dict[str, Any]) -> None:
        files.replace(_answer_of(self._folder, self._index), json.dumps(answer))


def _answer_of(folder: Path, index: int) -> Path:
    return folder / FOLDER / f"{index}.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
