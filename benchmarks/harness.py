"""The harness of all benchmarks: command lines, tables, provenance, processes, timing in turn."""

import contextlib
import importlib.metadata
import inspect
import json
import multiprocessing
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
import traceback
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self
from unittest import mock

import tyro
from rich.console import Console
from rich.markdown import Markdown

from benchmarks.peers.given import ROOT

RESULTS = ROOT / "benchmarks" / "results"
LIBRARIES = ("jax", "jaxlib", "equinox", "optax", "flax", "torch", "numpy")
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
PAUSE_SECONDS = 0.2  # for the previous peer's thread pool to fall asleep


# --- Tables -------------------------------------------------------------------------------------


@dataclass
class Table:
    """Rows of the same columns, with notes such as skipped peers, and failures."""

    title: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, **row: Any) -> None:
        """Append a row, and print it: a table may take an hour."""
        self.rows.append(row)
        print({name: _format(value) for name, value in row.items()}, file=sys.stderr, flush=True)

    def markdown(self) -> str:
        columns = list(self.rows[0]) if self.rows else []
        lines = [columns, [":--", *["--:"] * (len(columns) - 1)]]
        lines += [[*map(_format, row.values())] for row in self.rows]
        grid = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join([f"## {self.title}", grid, *self.notes, *self.failures]) + "\n"


def _format(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def main(*functions: Callable[..., list[Table]]) -> None:
    """Run a benchmark with the flags of the command line, and print and save its tables.

    Of several functions the first word names one. Flags are its arguments, and `--results`, the
    folder for the results. The exit code is 1 if a table has a failure, as where peers disagree.
    """
    named = {function.__name__.replace("_", "-"): _command(function) for function in functions}
    if len(named) > 1:
        tyro.extras.subcommand_cli_from_dict(named, prog=_program())
    else:
        tyro.cli(*named.values(), prog=_program())


def _command(function: Callable[..., list[Table]]) -> Callable[..., None]:
    def run(*arguments: Any, **named: Any) -> None:
        folder = named.pop("results")
        tables = function(*arguments, **named)
        for table in tables:
            Console(width=120).print(Markdown(table.markdown()))
        save(function.__name__.replace("_", "-"), tables, provenance(), folder)
        sys.exit(any(table.failures for table in tables))

    signature = inspect.signature(function)
    kind = inspect.Parameter.KEYWORD_ONLY
    results = inspect.Parameter("results", kind, default=RESULTS, annotation=Path)
    parameters = [*signature.parameters.values(), results]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    hints = typing.get_type_hints(function, include_extras=True)
    run.__annotations__, run.__doc__ = hints | {"results": Path}, function.__doc__
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the peers share a GPU
    return run


def save(name: str, tables: Sequence[Table], source: dict[str, str], folder: Path) -> Path:
    """Write <date>-<name>-<hardware>.json and .md; returns that path without a suffix."""
    hardware = re.sub(r"\W+", "-", re.sub(r"\(.*?\)", "", source["hardware"])).strip("-").lower()
    stem = folder / f"{source['date']}-{name}-{hardware}"
    folder.mkdir(parents=True, exist_ok=True)
    record = {**source, "tables": [asdict(table) for table in tables]}
    stem.with_name(stem.name + ".json").write_text(json.dumps(record, indent=1) + "\n")
    header = "\n".join(f"- {key}: {value}" for key, value in source.items())
    body = "\n".join(table.markdown() for table in tables)
    stem.with_name(stem.name + ".md").write_text(f"# {name}\n\n{header}\n\n{body}")
    return stem


def provenance() -> dict[str, str]:
    """The command, the date, the hardware and the software versions of a measurement."""
    versions = {}
    for library in LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            versions[library] = "not installed"
    return {
        "command": shlex.join([*_program().split(), *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **versions,
    }


def _program() -> str:
    path = Path(sys.argv[0])
    return f"python -m benchmarks.{path.parent.name if path.stem == '__main__' else path.stem}"


def hardware() -> str:
    """The GPUs, if any, and the processor with its number of cores."""
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        gpus = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError):
        gpus = []
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    fields = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    name = fields.get("model name", platform.machine())
    wanted = {"avx2", "avx512f", "avx512_bf16", "amx_bf16"}
    if features := sorted(wanted & set(fields.get("flags", "").split())):
        name += f" ({', '.join(features)})"
    return ", ".join([*filter(None, gpus), f"{name}, {os.cpu_count()} cores"])


# --- Processes ----------------------------------------------------------------------------------


class SkippedError(Exception):
    """A process cannot do its work here; the message gives the reason."""


class Process:
    """A function of a module in a process of its own; its first answer is `setup`.

    A generator answers further requests (`answer = process.ask(request)`), each by a `yield`.

    Raises:
        SkippedError: it failed, with its error; or was killed after `limit` seconds.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        huge_pages: bool = False,
        limit: float = 86400.0,
    ):
        context = multiprocessing.get_context("spawn")
        self._answers, theirs = context.Pipe()
        self._limit, self._end = limit, time.monotonic() + limit
        self._process = context.Process(target=_serve, args=(theirs, function, arguments))
        # Without them the environment stays: threads may start processes at one time.
        with mock.patch.dict(os.environ, HUGE_PAGES) if huge_pages else contextlib.nullcontext():
            self._process.start()
        theirs.close()
        try:
            self.setup = self._answer()
        except SkippedError:
            self.__exit__()
            raise

    def ask(self, request: Any) -> Any:
        """The answer to a request."""
        with contextlib.suppress(BrokenPipeError):
            self._answers.send(request)
        return self._answer()

    def _answer(self) -> Any:
        if not self._answers.poll(max(self._end - time.monotonic(), 0.0)):
            self._process.kill()
            raise SkippedError(f"not finished in {self._limit:.0f} s")
        try:
            answer, error = self._answers.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise SkippedError(f"exit code {self._process.exitcode}") from None
        if error:
            raise SkippedError(error)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._answers.close()  # at the end of its requests it exits
        self._process.join()


def _serve(answers: Connection, function: Callable[..., Any], arguments: tuple) -> None:
    try:
        answer = function(*arguments)
        if not inspect.isgenerator(answer):
            answers.send((answer, ""))
            return
        answers.send((next(answer), ""))
        while True:
            try:
                request = answers.recv()
            except EOFError:
                return
            answers.send((answer.send(request), ""))
    except Exception as error:
        if not isinstance(error, ImportError):
            traceback.print_exc()
        answers.send((None, f"{type(error).__name__}: {error}"))


def in_process(function: Callable[..., Any], *arguments: Any, limit: float = 540.0) -> Any:
    """What a function of a module returns in a process of its own, which `limit` seconds end."""
    with Process(function, *arguments, limit=limit) as process:
        return process.setup


def memory(field: str) -> int:
    """VmRSS, the bytes of this process's memory, or VmHWM, those at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


# --- Timing in turn -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """How calls, or peers, are timed in turn."""

    rounds: int = 4
    """Rounds; every peer has one turn per round."""
    turn_seconds: float = 1.5
    """Length of a turn in seconds, rounded to whole steps."""
    huge_pages: bool = True
    """Let malloc use transparent huge pages, for all peers (Linux)."""


def in_turn(
    calls: Mapping[str, Callable[[], Any]], rounds: int, pause: float = PAUSE_SECONDS
) -> dict[str, list[Any]]:
    """What each call returns, once per round; the seconds that it took, if it returns None."""
    found: dict[str, list[Any]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            time.sleep(pause)
            start = time.perf_counter()
            result = call()
            found[name].append(time.perf_counter() - start if result is None else result)
    return found


def median_ratio(seconds: Sequence[float], baseline: Sequence[float]) -> float:
    """The median of the ratios within each round, since a slow round slows both."""
    return statistics.median(a / b for a, b in zip(seconds, baseline, strict=True))
