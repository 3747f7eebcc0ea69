"""SIGTERM and SIGINT, which ask a run to save and leave: all its processes at the same step."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

SECONDS = 2.0  # between two times that the processes ask each other


class Stopped(Exception):
    """The run was asked to stop in the midst of an evaluation, which ended between two batches."""


class Signals:
    """Within, SIGTERM and SIGINT are taken down for `agreed`; a second SIGINT leaves at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.received = 0
        self._clock = clock
        self._previous: dict[signal.Signals, Any] = {}
        self._interval, self._calls, self._asked = 1, 0, clock()

    def __enter__(self) -> "Signals":
        self.received = 0
        self._previous = {s: signal.signal(s, self._take) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        received, self.received = self.received, 0
        if received and error is None:  # too late to be heeded here
            signal.raise_signal(received)

    def _take(self, number: int, frame: object) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
        name = signal.Signals(number).name
        # Not by way of sys.stderr, in the midst of whose writing the signal may have come.
        os.write(2, f"\n{name}: saving and leaving (Ctrl-C again: leave at once)\n".encode())

    def agreed(self, *, now: bool = False) -> bool:
        """Whether to stop, after a step or before a batch of an evaluation, in all processes alike.

        Several processes have to ask each other, which waits for the devices. They do so `now`,
        and otherwise at about every `SECONDS`, whatever a step takes.
        """
        if jax.process_count() == 1:
            return bool(self.received)
        self._calls += 1
        if self._calls < self._interval and not now:
            return False
        mine = np.array([self.received, self._clock() - self._asked], np.float32)
        received, seconds = multihost_utils.process_allgather(mine).max(0)
        self.received = int(received) or self.received  # one may have come just now
        # All have the same numbers, and so ask again at the same step.
        self._interval = 1 if now else calls_within(SECONDS, self._calls, float(seconds))
        self._calls, self._asked = 0, self._clock()
        return bool(received)

    def check(self) -> None:
        """Raise Stopped if it is agreed to stop."""
        if self.agreed():
            raise Stopped


def calls_within(wanted: float, calls: int, seconds: float) -> int:
    """How many calls take the wanted seconds, as the last ones took those: not more than double."""
    return max(1, min(2 * calls, int(calls * wanted / max(seconds, 1e-6))))
