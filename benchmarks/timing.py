"""Peers, each in its own process, timed in turn."""

import contextlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from benchmarks.peers.common import Built, Precision

PAUSE_SECONDS = 0.2  # for the previous peer's thread pool to fall asleep


@dataclass(frozen=True)
class Peer:
    """A module of benchmarks.peers, with its options for `build` besides shape and precision.

    The module's package has a module `given` with the class `Shape`.
    """

    module: str
    options: dict[str, Any] = field(default_factory=dict)

    def given(self, **options: Any) -> "Peer":
        """The same peer with more options."""
        return Peer(self.module, {**self.options, **options})

    def build(self, shape: Any, precision: Precision) -> Built:
        """Build the peer in this process; `shape` is a `Shape` or its fields as a dictionary."""
        package, _, _ = self.module.rpartition(".")
        if isinstance(shape, dict):
            shape = importlib.import_module(f"benchmarks.peers.{package}.given").Shape(**shape)
        module = importlib.import_module(f"benchmarks.peers.{self.module}")
        return module.build(shape, precision, **self.options)


@dataclass(frozen=True)
class Timing:
    """How peers are timed in turn."""

    rounds: int = 4
    """Rounds; every peer has one turn per round."""
    turn_seconds: float = 1.5
    """Length of a turn in seconds, rounded to whole steps."""
    huge_pages: bool = True
    """Let malloc use transparent huge pages, for all peers (Linux)."""


class SkippedError(Exception):
    """A peer cannot run here; the message gives the reason."""


class Process:
    """A module of benchmarks in a process of its own, which answers JSON lines with JSON lines.

    Raises:
        SkippedError: it has failed; with its error's last line.
    """

    def __init__(self, module: str, *arguments: str, huge_pages: bool = True):
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # peers share a GPU
        if huge_pages:
            environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed on exit
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=Path(__file__).parents[1],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if answer:
            return json.loads(answer)
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        raise SkippedError(lines[-1] if lines else f"exit code {self._process.returncode}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # at the end of its requests it exits
        self._process.wait()
        self._errors.close()


class Worker(Process):
    """The process of a peer, which is built and warmed up on construction.

    Raises:
        SkippedError: the peer's library is missing, or it failed; with its error's last line.
    """

    def __init__(self, peer: Peer, shape: Any, precision: Precision, timing: Timing):
        super().__init__("benchmarks.worker", huge_pages=timing.huge_pages)
        request = {"peer": asdict(peer), "shape": asdict(shape), "precision": precision}
        try:
            self.setup = self.ask(request)
        except SkippedError:
            self.__exit__(None, None, None)
            raise

    def run(self, num_steps: int) -> tuple[float, float]:
        """Seconds per step, and processor seconds per step of all threads, over that many steps."""
        answer = self.ask({"num_steps": num_steps})
        return answer["seconds"] / num_steps, answer["cpu_seconds"] / num_steps


class Turns(NamedTuple):
    """A peer's seconds per step in each round."""

    seconds: list[float]
    cpu_seconds: list[float]


def interleave(workers: Mapping[str, Worker], timing: Timing) -> dict[str, Turns]:
    """Time each worker once per round, in turn."""
    turns = {name: Turns([], []) for name in workers}
    for _ in range(timing.rounds):
        for name, worker in workers.items():
            time.sleep(PAUSE_SECONDS)
            num_steps = max(2, round(timing.turn_seconds / worker.setup["step_seconds"]))
            seconds, cpu_seconds = worker.run(num_steps)
            turns[name].seconds.append(seconds)
            turns[name].cpu_seconds.append(cpu_seconds)
    return turns


def median_ratio(seconds: Sequence[float], baseline: Sequence[float]) -> float:
    """The median of the ratios within each round, since a slow round slows both."""
    return statistics.median(a / b for a, b in zip(seconds, baseline, strict=True))
