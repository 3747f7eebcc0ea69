"""A thread that copies a run to its address, and goes on trying while the store does not answer."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from zoo.runs.checkpoint import CheckpointError
from zoo.runs.remote.lease import LeaseError, boot_clock

MINUTES = 30  # without a success, after which a run stops at its next save
_PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0)  # seconds between one try and the next
_FINAL = (PermissionError, FileNotFoundError)  # no right to write, no bucket


class Copier:
    """Calls `copy` in the background, as often as `begin` asks for it and until it succeeds."""

    def __init__(self, copy: Callable[[], object], address: str, working_folder: Path):
        self._copy, self._address, self._working_folder = copy, address, working_folder
        self._wanted = self._busy = self._closed = False
        self._failure: Exception | None = None  # the last one, since then without a success
        self._failing_since = 0.0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="copies", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Ask for a copy of what has changed."""
        with self._changed:
            self._wanted = True
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what keeps the copies from being made, once it has lasted too long.

        Raises:
            CheckpointError: the store refuses them, or has not answered for `MINUTES`.
            LeaseError: the lease is lost.
        """
        failure = self._failure
        if isinstance(failure, LeaseError):
            raise failure
        is_final = isinstance(failure, _FINAL) or isinstance(
            getattr(failure, "__cause__", None), _FINAL
        )
        if failure is not None and (is_final or self._failing_seconds() > MINUTES * 60):
            raise CheckpointError(self._explanation(failure)) from failure

    def wait(self, say: Callable[[str], object], *, patient: bool = True) -> None:
        """Wait until nothing is left to copy, and `say` every 15 s what it waits for.

        Without patience no failure is waited for.

        Raises:
            CheckpointError, LeaseError: as `check`.
        """
        told = time.monotonic()
        with self._changed:
            while self._wanted or self._busy:
                self.check()
                if self._failure is not None and not patient:
                    raise CheckpointError(self._explanation(self._failure)) from self._failure
                self._changed.wait(0.2)
                if time.monotonic() - told > 15:
                    told = time.monotonic()
                    say(f"copying to {self._address}{'; ' * bool(self.note())}{self.note()}")

    def note(self) -> str:
        """How long the store has not taken a copy; empty if it does."""
        if self._failure is None:
            return ""
        return (
            f"no copy to {self._address} for {self._failing_seconds() / 60:.0f} of at most "
            f"{MINUTES} min ({self._reason(self._failure)})"
        )

    def close(self, seconds: float = 60.0) -> bool:
        """End the thread, after what it is at; whether it has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        tries = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._closed)
                if self._closed:
                    return
                self._wanted, self._busy = False, True
            failure: Exception | None = None
            try:
                self._copy()
            except Exception as error:
                failure = error
            with self._changed:
                if failure is not None and self._failure is None:
                    self._failing_since = boot_clock()
                self._failure, self._busy = failure, False
                if failure is not None:
                    self._wanted = True
                self._changed.notify_all()
                if isinstance(failure, LeaseError):
                    return
                if failure is not None:
                    pause = _PAUSES[min(tries, len(_PAUSES) - 1)]
                    self._changed.wait_for(lambda: self._closed, pause)
            tries = 0 if failure is None else tries + 1

    def _failing_seconds(self) -> float:
        return 0.0 if self._failure is None else boot_clock() - self._failing_since

    def _explanation(self, failure: Exception) -> str:
        minutes = int(self._failing_seconds() / 60)
        lasting = f" for {minutes} minutes" if minutes else ""
        return (
            f"nothing could be copied to {self._address}{lasting}: {self._reason(failure)}. "
            f"Nothing is lost: all of it is in {self._working_folder}, and the same command, on "
            "this machine, copies it and resumes the run"
        )

    def _reason(self, failure: Exception) -> str:
        return str(failure).removeprefix(f"{self._address}: ")
