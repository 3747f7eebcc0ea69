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
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

Item = tuple[str, str, Mapping[str, Any]]  # a prompt, an answer, the prompt's row
_START = 120.0  # seconds in which a process has imported the function
_CHILD = "from zoo.alignment.rewards import serve; serve()"


class Reward(NamedTuple):
    """The reward of an answer: its parts by name, or why there are none."""

    parts: dict[str, float]
    problem: str = ""

    def value(self, on_error: float) -> float:
        """The sum of the parts; `on_error` where there are none."""
        return on_error if self.problem else sum(self.parts.values())


@contextlib.contextmanager
def rewarding(
    function: str, *, workers: int = 2, seconds: float = 10.0
) -> Iterator[Callable[[Sequence[Item]], list[Reward]]]:
    """A context with the rewards of (prompt, answer, row), in their order, by a function.

    It is called in `workers` processes, which the context ends, each time for `seconds` at most.

    Raises:
        ValueError: the function cannot be imported, or is not a function.
    """
    idle = queue.SimpleQueue[_Worker]()

    def reward(item: Item) -> Reward:
        worker = idle.get()
        try:
            return worker.call(item, seconds)
        finally:
            idle.put(worker)

    with ThreadPoolExecutor(workers) as threads, contextlib.ExitStack() as stack:
        for worker in [_Worker(function) for _ in range(workers)]:
            stack.callback(worker.end)
            worker.start()
            idle.put(worker)
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        yield lambda items: list(threads.map(reward, items))


class _Worker:
    """A process that calls the function, started again for a call once it has ended."""

    def __init__(self, function: str):
        self._function = function
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start it, and wait until it has imported the function."""
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(theirs.fileno()), self._function],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
            stdout=2,  # this process' own lines go to its standard output alone
            start_new_session=True,  # Ctrl-C is for the run, which ends it
        )
        theirs.close()
        try:
            problem = self._connection.recv() if self._connection.poll(_START) else "takes too long"
        except EOFError:
            problem = "ended its process"
        if problem:
            self.end()
            raise ValueError(f"reward={self._function!r}: its import {problem}")

    def call(self, item: Item, seconds: float) -> Reward:
        """The reward that the function gives."""
        if self._process is None or self._process.poll() is not None:
            self.start()
        try:
            self._connection.send(item)
            if self._connection.poll(seconds):
                return Reward(*self._connection.recv())
            problem = f"took longer than {seconds:g} s"
        except (EOFError, OSError):
            problem = "ended its process"
        self.end()
        return Reward({}, problem)

    def end(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._connection.close()
            self._process = None


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
    connection, (module, _, name) = Connection(int(sys.argv[1])), sys.argv[2].partition(":")
    with contextlib.suppress(EOFError, OSError):  # the run has ended, or was killed
        try:
            function = getattr(importlib.import_module(module), name, None) if name else None
        except BaseException as error:
            return connection.send(f"failed: {type(error).__name__}: {error}")
        if not callable(function):
            return connection.send(f"finds no function {name!r} in {module!r}: give MODULE:NAME")
        connection.send("")
        while True:
            item = connection.recv()
            try:
                found = parts(function(*item)), ""
            except BaseException as error:  # SystemExit too
                found = {}, f"{type(error).__name__}: {error}"
            connection.send(found)
