"""Rows by their numbers of an iterator that saves and restores its state, such as Grain's.

Row i follows from the last state before it that is known, and from what the iterator gives behind
that: so batch k of an iterator is a function of k too, at the price of the rows in between.
"""

import hashlib
import json
import os
import pickle
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from zoo.common.configuration import require

EVERY, KEPT = 1000, 32  # rows from one saved state to the next; states of each distance
_LEVELS = 8


class IteratedRows(Sequence):
    """The first `num_rows` rows of an iterator, which each process reads in their order.

    Every 1,000 rows a state is written to the file `states`, which keeps the last 32, the last 32
    of every 32,000 rows, and so on, so that a resume reads again at most a 32nd of what lies before
    its checkpoint. Without the file it reads all of that. The last `window` rows stay in memory,
    for threads that are not in step.

    Raises:
        TypeError: an iterator without `get_state` and `set_state`.
        ValueError: at a row, states of other rows or of another number of workers; fewer rows than
            `num_rows`.
    """

    def __init__(self, source: Any, num_rows: int | None, states: str | Path | None, window: int):
        iterator: Any = iter(source) if hasattr(source, "__iter__") else None
        if not (hasattr(iterator, "get_state") and hasattr(iterator, "set_state")):
            raise TypeError(
                f"{type(source).__name__} has no row i, and no iterator that saves and restores "
                "its state (get_state, set_state): a run that resumes, and each of several "
                "processes, asks for rows by their numbers. Give a list of its rows, or an object "
                "with __len__() and __getitem__(i)"
            )
        if num_rows is None or num_rows < 1 or states is None:
            raise ValueError(
                f"num_rows={num_rows}, states={states!r}: an iterator needs the number of rows "
                "after which it begins again, and a file for its states, as in the run's folder"
            )
        self._iterator = iterator
        self._num_rows, self._window = num_rows, window
        self._lock, self._path = threading.Lock(), Path(states)
        self._states = {0: _stored(self._iterator.get_state())}
        self._passed: dict[int, Any] = {}
        self._next, self._first = 0, ""

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, i: Any) -> Any:
        return self.at_once([i])[i]

    def at_once(self, numbers: Sequence[int]) -> dict[int, Any]:
        """Rows by their numbers; no other thread sends the iterator elsewhere between two of them.

        It would be sent far between the last batch of an epoch and the first of the next one.
        """
        found = {}
        with self._lock:
            for i in numbers:
                if i not in self._passed:
                    self._go_to(i)
                found[i] = self._passed[i]
        return found

    def _go_to(self, i: int) -> None:
        if not self._first:
            self._begin()
        start = max(row for row in self._states if row <= i)
        if not start <= self._next <= i:
            self._iterator.set_state(self._states[start])
            self._next, self._passed = start, {}
        while self._next <= i:
            self._advance()

    def _begin(self) -> None:
        """Read the first row, which tells if saved states are of these rows, and the states."""
        self._advance()
        self._first = hashlib.sha256(pickle.dumps(self._passed[0])).hexdigest()
        if not self._path.is_file():
            return
        saved = json.loads(self._path.read_text())
        remedy = "remove the file, to read all rows before a checkpoint once more, or name another"
        require(
            saved["first"] == self._first,
            f"states={str(self._path)!r}: are of other rows; {remedy}",
        )
        require(
            all(_fits(state, self._states[0]) for state in saved["states"].values()),
            f"states={str(self._path)!r}: are of an iterator with another number of workers; give "
            f"that one, or {remedy}",
        )
        self._states |= {int(row): state for row, state in saved["states"].items()}

    def _advance(self) -> None:
        i = self._next
        if i % EVERY == 0 and i not in self._states:
            self._save(i)
        try:
            self._passed[i] = next(self._iterator)
        except StopIteration:
            raise ValueError(
                f"num_rows={self._num_rows}: the iterator ends after {i} rows; give that number"
            ) from None
        except Exception as error:
            raise ValueError(f"row {i} of the iterator: {type(error).__name__}: {error}") from error
        self._next += 1
        if len(self._passed) > self._window:
            del self._passed[next(iter(self._passed))]

    def _save(self, i: int) -> None:
        self._states[i] = _stored(self._iterator.get_state())
        distances = [EVERY * KEPT**level for level in range(_LEVELS)]
        of_each = ([x for x in sorted(self._states) if x % n == 0][-KEPT:] for n in distances)
        kept = {0}.union(*of_each)
        self._states = {row: self._states[row] for row in sorted(kept)}
        if jax.process_index() == 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_name(f"{self._path.name}.part")
            part.write_text(json.dumps({"first": self._first, "states": self._states}))
            os.replace(part, self._path)


def _stored(state: Any) -> Any:
    """A state as JSON gives it back."""
    return json.loads(json.dumps(state))


def _fits(state: Any, fresh: Any) -> bool:
    """Whether a state may be this iterator's: with other workers it has lists of other lengths.

    Grain's takes such a state in silence, and gives other rows.
    """
    if isinstance(state, dict) and isinstance(fresh, dict):
        return all(_fits(state[name], fresh[name]) for name in state.keys() & fresh.keys())
    if isinstance(state, list) and isinstance(fresh, list):
        same = len(state) == len(fresh)
        return same and all(_fits(*pair) for pair in zip(state, fresh, strict=True))
    return isinstance(state, list) == isinstance(fresh, list) or None in (state, fresh)
