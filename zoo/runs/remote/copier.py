"""A thread that copies a run to its address, and goes on trying while the store does not answer."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from zoo.base import files
from zoo.runs.checkpoint import CheckpointError
from zoo.runs.remote.lease import LeaseError, boot_clock

MINUTES = 30  # without a success, after which a run stops at its next save
_PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0)  # seconds between one try and the next
_FINAL = (PermissionError, FileNotFoundError)  # no right to write, no bucket


class Copier:
    """Copies in the background: what `begin` asks for, the newest waiting checkpoint first."""

    def __init__(
        self,
        copy: Callable[[tuple[int, Path] | None, bool], object],
        address: str,
        working_folder: Path,
    ):
        self._copy, self._address, self._working_folder = copy, address, working_folder
        self._step: tuple[int, Path] | None = None
        self._wanted = self._whole = self._busy = self._closed = False
        self._failure: Exception | None = None  # the last one, since then without a success
        self._failing_since: float | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="copies", daemon=True)
        self._thread.start()

    def begin(self, step: tuple[int, Path] | None = None, *, whole: bool = False) -> None:
        """Ask for a copy of what has changed, and of a checkpoint: (its step, a folder for it).

        The folder is removed once it is copied, or when a newer checkpoint takes its place.
        """
        with self._changed:
            if step is not None:
                if self._step is not None:
                    files.remove(self._step[1])
                self._step = step
            self._wanted, self._whole = True, self._whole or whole
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
        if failure is not None and (_is_final(failure) or self._failing_seconds() > MINUTES * 60):
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
                step, whole = self._step, self._whole
                self._step, self._wanted, self._whole, self._busy = None, False, False, True
            try:
                self._copy(step, whole)
            except Exception as error:
                with self._changed:
                    self._failing_since = self._failing_since or boot_clock()
                    self._failure, self._busy, self._wanted = error, False, True
                    self._whole = self._whole or whole
                    if self._step is None:
                        self._step = step
                    elif step is not None:
                        files.remove(step[1])
                    if isinstance(error, LeaseError):
                        return
                    pause = _PAUSES[min(tries, len(_PAUSES) - 1)]
                    self._changed.wait_for(lambda: self._closed, pause)
                tries += 1
            else:
                tries = 0
                if step is not None:
                    files.remove(step[1])
                with self._changed:
                    self._busy, self._failure, self._failing_since = False, None, None
                    self._changed.notify_all()

    def _failing_seconds(self) -> float:
        since = self._failing_since
        return 0.0 if since is None else boot_clock() - since

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


def _is_final(failure: Exception) -> bool:
    """Whether a failure does not mend itself."""
    return isinstance(failure, _FINAL) or isinstance(failure.__cause__, _FINAL)
