"""The progress of a long transfer of bytes, on the standard error."""

import sys
import threading
import time
from types import TracebackType

_SILENT = 1.0  # seconds, in which most are done


class Transfer:
    """One line of what is transferred, how much of it, how fast; from any number of threads.

    Nothing is shown of a transfer of less than a second. On a terminal the line is renewed;
    elsewhere there is one every 15 s, and one at the end.
    """

    def __init__(self, title: str, total: int):
        self._title, self._total, self._done = title, total, 0
        self._began = time.monotonic()
        self._is_live = sys.stderr.isatty()
        self._next = self._began + _SILENT
        self._shown = False
        self._lock = threading.Lock()

    def __enter__(self) -> "Transfer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None
    ) -> None:
        if self._shown:
            self._show(time.monotonic(), end="\n")

    def add(self, num_bytes: int) -> None:
        """Count bytes that are done."""
        with self._lock:
            self._done += num_bytes
            if (now := time.monotonic()) >= self._next:
                self._next = now + (0.2 if self._is_live else 15.0)
                self._show(now, end="" if self._is_live else "\n")
                self._shown = True

    def _show(self, now: float, end: str) -> None:
        seconds = now - self._began
        line = (
            f"{self._title}: {self._done / 1e6:,.0f} of {self._total / 1e6:,.0f} MB in "
            f"{seconds:.0f} s ({self._done / 1e6 / seconds:,.0f} MB/s)"
        )
        print(f"\r{line}" if self._is_live else line, end=end, file=sys.stderr, flush=True)
