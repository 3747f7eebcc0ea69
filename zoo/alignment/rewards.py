"""Rewards of answers by a function of one's own, in processes of their own, with a limit of time.

The function, `MODULE:NAME`, is called with a prompt, an answer and the prompt's row, and returns a
number, or numbers by name, whose sum is the reward. An exception, a number that is not finite, a
call that takes too long or ends its process is a reward that the caller chooses, and is counted.

Nothing here makes untrusted code safe: a reward that runs answers has to run them in a sandbox.
"""

import contextlib
import importlib
import math
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

Row = Mapping[str, Any]
Item = tuple[str, str, Row]
_START = 120.0  # seconds in which a process has imported the function
_CHILD = "from zoo.alignment.rewards import serve; serve()"


class Reward(NamedTuple):
    """The reward of an answer: its parts by name, or why there are none."""

    parts: dict[str, float]
    problem: str = ""

    def value(self, on_error: float) -> float:
        """The sum of the parts; `on_error` where there are none."""
        return on_error if self.problem else sum(self.parts.values())


class Rewards:
    """A reward function in `workers` processes, each of whose calls may take `seconds`.

    A context; its end ends the processes.

    Raises:
        ValueError: the function cannot be imported, or is not a function.
    """

    def __init__(self, function: str, *, workers: int = 2, seconds: float = 10.0):
        self.function, self._seconds = function, seconds
        self._workers = [_Worker(function) for _ in range(workers)]

    def __enter__(self) -> "Rewards":
        try:
            for worker in self._workers:
                worker.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            worker.end()

    def __call__(self, items: Sequence[Item]) -> list[Reward]:
        """The rewards of (prompt, answer, row), in their order."""
        found: dict[int, Reward] = {}
        left, idle = deque(range(len(items))), [*self._workers]
        busy: dict[Connection, tuple[_Worker, int, float]] = {}
        while left or busy:
            while left and idle:
                worker, index = idle.pop(), left.popleft()
                worker.send(items[index])
                busy[worker.connection] = worker, index, time.monotonic() + self._seconds
            soonest = min(deadline for *_, deadline in busy.values())
            ready = wait([*busy], max(0.0, soonest - time.monotonic()))
            now = time.monotonic()
            for connection, (worker, index, deadline) in [*busy.items()]:
                if connection in ready:
                    found[index] = worker.receive()
                elif now >= deadline:
                    worker.restart()
                    found[index] = Reward({}, f"took longer than {self._seconds:g} s")
                else:
                    continue
                del busy[connection]
                idle.append(worker)
        return [found[index] for index in range(len(items))]


class _Worker:
    """A process that calls the function, started again where it has ended."""

    def __init__(self, function: str):
        self._function = function
        self.connection: Connection
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start it, and wait until it has imported the function."""
        self.connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(theirs.fileno()), self._function],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
            stdout=2,  # this process' own lines go to its standard output alone
            start_new_session=True,  # Ctrl-C is for the run, which ends it
        )
        theirs.close()
        try:
            problem = self.connection.recv() if self.connection.poll(_START) else "takes too long"
        except EOFError:
            problem = "ended its process"
        if problem:
            self.end()
            raise ValueError(f"reward={self._function!r}: its import {problem}")

    def send(self, item: Item) -> None:
        """Have the function called; a process that has ended is started again."""
        try:
            self.connection.send(item)
        except OSError:
            self.restart()
            self.connection.send(item)

    def receive(self) -> Reward:
        """Its result."""
        try:
            return Reward(*self.connection.recv())
        except (EOFError, OSError):
            self.restart()
            return Reward({}, "ended its process")

    def restart(self) -> None:
        """Kill it, and start another."""
        self.end()
        self.start()

    def end(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self.connection.close()
            self._process = None


def load(function: str) -> Callable[..., Any]:
    """The function of a `MODULE:NAME`.

    Raises:
        ValueError: another form, or a name that is no function.
        ImportError: the module cannot be imported.
    """
    module, _, name = function.partition(":")
    if not (module and name):
        raise ValueError(f"is of MODULE:NAME, and {function!r} is not")
    found = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise ValueError(f"finds no function {name!r} in {module}")
    return found


def parts(value: Any) -> dict[str, float]:
    """The numbers by name that a reward function has returned.

    Raises:
        ValueError: anything else than a finite number, or finite numbers by name.
    """
    named = value if isinstance(value, Mapping) else {"": value}
    try:
        found = {str(name): float(x) for name, x in named.items()}
    except (TypeError, ValueError):
        found = {}
    if not found or not all(map(math.isfinite, found.values())):
        raise ValueError(f"returned {value!r:.80}, and has to return a finite number, or several")
    return found


def serve() -> None:
    """Call the function for what comes through a pipe: the main program of a process."""
    connection = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, OSError):  # the run has ended, or was killed
        try:
            function = load(sys.argv[2])
        except BaseException as error:
            return connection.send(f"failed: {type(error).__name__}: {error}")
        connection.send("")
        while True:
            item = connection.recv()
            try:
                found = parts(function(*item)), ""
            except BaseException as error:  # SystemExit too
                found = {}, f"{type(error).__name__}: {error}"
            connection.send(found)
