"""The processes of a run: joining them, waiting for all of them, one per folder, stopping them.

SIGTERM and SIGINT ask a run to save and leave: all its processes at the same step.
"""

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from zoo.common import files

# Seconds between two times that the processes ask each other for signals.
SECONDS = 2.0


class RunError(RuntimeError):
    """A run that cannot start, or cannot continue, with what to do about it."""


def join_processes() -> None:
    """Join the other processes of a run, by JAX's variables or as members of a cluster.

    Raises:
        RunError: variables that are missing, or no cluster that JAX knows.
    """
    variables = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    given = [os.environ.get(name) for name in variables]
    if jax.distributed.is_initialized():
        return
    if not any(given):  # a cluster that JAX knows: Slurm, TPU pods, …
        try:
            return jax.distributed.initialize()
        except ValueError as error:
            raise RunError(
                f"--distributed: this is no cluster that JAX knows ({error}); set "
                f"{', '.join(variables)} in the environment of each process"
            ) from error
    missing = [name for name, value in zip(variables, given, strict=True) if value is None]
    if missing:
        raise RunError(f"--distributed: {', '.join(missing)} must be set in the environment")
    jax.distributed.initialize(given[0], int(str(given[1])), int(str(given[2])))


def barrier(name: str) -> None:
    """Wait until every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def from_first(content: dict[str, Any]) -> dict[str, Any]:
    """The content of process 0, which JSON can hold, in every process."""
    if jax.process_count() == 1:
        return content
    data = np.frombuffer(json.dumps(content).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    mine = data if jax.process_index() == 0 else np.zeros(size, np.uint8)
    sent = np.asarray(multihost_utils.broadcast_one_to_all(mine))
    return json.loads(sent.astype(np.uint8).tobytes())


def hand_on(folder: Path) -> None:
    """Copy a small folder of process 0 to the others' place for it."""
    found: dict[str, str] = {}
    if jax.process_index() == 0:
        paths = (path for path in folder.rglob("*") if path.is_file())
        found = {path.relative_to(folder).as_posix(): path.read_bytes().hex() for path in paths}
    for name, content in from_first(found).items():
        if jax.process_index() > 0:
            files.make_folder((folder / name).parent, "folder")
            files.replace(folder / name, bytes.fromhex(content))


@contextlib.contextmanager
def lock(folder: Path, address: str = "") -> Iterator[None]:
    """A context in which no other process trains in the folder; the folder is made.

    With an address, it is the working folder of that address.

    Raises:
        RunError: another process trains in it.
    """
    files.make_folder(folder, "run_dir")
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"another process is training in {address or folder}; use another --run-dir"
            ) from None
        yield


class Stopped(Exception):
    """The run was asked to stop in the midst of an evaluation, which ended between two batches."""


class Signals:
    """A context that notes SIGTERM and SIGINT for `agreed`; a second SIGINT leaves at once."""

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
        calls = int(self._calls * SECONDS / max(float(seconds), 1e-6))
        self._interval = 1 if now else max(1, min(2 * self._calls, calls))
        self._calls, self._asked = 0, self._clock()
        return bool(received)

    def check(self) -> None:
        """Raise Stopped if it is agreed to stop."""
        if self.agreed():
            raise Stopped
