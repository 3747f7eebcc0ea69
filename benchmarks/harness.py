"""The harness of all benchmarks: command lines, tables, provenance, saving, and timing in turn."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Self

import tyro
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.peers.given import ROOT, Built, Precision

RESULTS = ROOT / "benchmarks" / "results"
LIBRARIES = ("jax", "jaxlib", "equinox", "optax", "flax", "torch", "numpy")
PAUSE_SECONDS = 0.2  # for the previous peer's thread pool to fall asleep
# Relative differences allowed between the first losses: all peers compute the same.
TOLERANCE: dict[Precision, float] = {"fp32": 1e-4, "bf16": 2e-3}


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

    def print(self) -> None:
        grid = RichTable(title=self.title, title_justify="left")
        for column in self.rows[0] if self.rows else ():
            grid.add_column(column, justify="left" if column == "peer" else "right")
        for row in self.rows:
            grid.add_row(*map(_format, row.values()))
        failures = (f"[red]{failure}[/]" for failure in self.failures)
        Console(width=120).print(grid, *self.notes, *failures, sep="\n")

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
            table.print()
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


def in_process(function: Callable[..., Any], *arguments: Any, limit: float = 540.0) -> Any:
    """What a function of a module returns, as JSON, in a process of its own.

    Raises:
        RuntimeError: it failed, with its error's last line; or took more than `limit` seconds.
    """
    module = sys.modules[function.__module__]
    name = module.__spec__.name if module.__spec__ else function.__module__
    program = "import json; from benchmarks import stand_ins; stand_ins.install(); "
    program += f"from {name} import {function.__name__} as f; print(json.dumps(f(*{arguments!r})))"
    command = [sys.executable, "-c", program]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=limit, cwd=ROOT)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not finished in {limit:.0f} s") from None
    if process.returncode:
        lines = [line for line in process.stderr.splitlines() if "Error" in line]
        raise RuntimeError((lines or ["no message"])[-1][:300])
    return json.loads(process.stdout.splitlines()[-1])


def memory(field: str) -> int:
    """VmRSS, the bytes of this process's memory, or VmHWM, those at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


# --- Peers, each in its own process, timed in turn ----------------------------------------------


@dataclass(frozen=True)
class Peer:
    """A function of benchmarks.peers, `module.function`, with its options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def given(self, **options: Any) -> "Peer":
        """The same peer with more options."""
        return Peer(self.name, {**self.options, **options})

    def build(self, shape: Any, precision: Precision) -> Built:
        """Build the peer in this process; `shape` is its shape, or its fields as a dictionary."""
        module, _, name = self.name.partition(".")
        function = getattr(importlib.import_module(f"benchmarks.peers.{module}"), name)
        if isinstance(shape, dict):
            shape = typing.get_type_hints(function)["shape"](**shape)
        return function(shape, precision, **self.options)


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
        SkippedError: it failed, with its error's last line; or was killed after `limit` seconds.
    """

    def __init__(
        self, module: str, *, first: dict[str, Any], huge_pages: bool = True, limit: float = 86400.0
    ):
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ  # peers share a GPU
        if huge_pages:
            environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed on exit
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._timer = threading.Timer(max(limit, 0.0), self._process.kill)
        self._timer.daemon = True
        self._timer.start()
        try:
            self.setup = self.ask(first)
        except SkippedError:
            self.__exit__()
            raise

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)
        if answer := self._process.stdout.readline():
            return json.loads(answer)
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        errors = [line for line in lines if "Error" in line] or lines
        raise SkippedError(errors[-1] if errors else f"exit code {self._process.returncode}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # at the end of its requests it exits
        self._process.wait()
        self._timer.cancel()
        self._errors.close()


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer the requests of a `Process`, in that process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print, but not among the answers
    for request in map(json.loads, sys.stdin):
        print(json.dumps(answer(request)), file=answers, flush=True)


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


def compare(
    title: str,
    peers: Mapping[str, Peer],
    shape: Any,
    precision: Precision,
    timing: Timing,
    *,
    flops: float,
    **units: int,
) -> Table:
    """Time the steps of all peers in turn; the first that runs is the baseline of the ratios.

    `flops` are the floating-point operations per step, forward and backward, and `units` are the
    counts per step to report as rates, such as tokens=2048.
    """
    table = Table(title)
    with contextlib.ExitStack() as stack:
        workers: dict[str, Process] = {}
        for name, peer in peers.items():
            request = {"peer": asdict(peer), "shape": asdict(shape), "precision": precision}
            try:
                worker = Process("benchmarks.worker", first=request, huge_pages=timing.huge_pages)
                workers[name] = stack.enter_context(worker)
            except SkippedError as reason:
                table.notes.append(f"{name} skipped: {reason}")

        def turn(worker: Process) -> dict[str, float]:
            steps = max(2, round(timing.turn_seconds / worker.setup["step_seconds"]))
            taken = worker.ask({"num_steps": steps})
            return {name: taken[name] / steps for name in ("seconds", "cpu_seconds")}

        calls = {name: lambda worker=worker: turn(worker) for name, worker in workers.items()}
        turns = in_turn(calls, timing.rounds)
    baseline = next(iter(workers), "")
    peak = find_peak(precision, [worker.setup["published_peak"] for worker in workers.values()])
    seconds = {name: [each["seconds"] for each in mine] for name, mine in turns.items()}
    for name, setup in {name: worker.setup for name, worker in workers.items()}.items():
        step_seconds = statistics.median(seconds[name])
        planned = setup["planned_bytes"]
        table.rows.append(
            {
                "peer": name,
                "steps/s": 1 / step_seconds,
                **{f"{unit}/s": number / step_seconds for unit, number in units.items()},
                "MFU %": 100 * flops / step_seconds / peak["flops"],
                f"time / {baseline}": median_ratio(seconds[name], seconds[baseline]),
                "CPU s/step": min(each["cpu_seconds"] for each in turns[name]),
                "compile s": setup["compile_seconds"],
                "peak MiB": setup["peak_bytes"] / 2**20,
                "XLA plan MiB": planned and planned / 2**20,
            }
        )
    table.notes.append(mfu_note(flops, peak))
    losses = {name: worker.setup["losses"] for name, worker in workers.items()}
    table.failures += disagreements(losses, TOLERANCE[precision])
    return table


def disagreements(losses: Mapping[str, Sequence[float]], tolerance: float) -> list[str]:
    """One line per peer whose losses differ from the first peer's."""
    failures = []
    expected = next(iter(losses.values()), ())
    for name, values in losses.items():
        near = [abs(a / b - 1) <= tolerance for a, b in zip(values, expected, strict=True)]
        if not all(near):  # NaN is near nothing
            failures.append(f"{name} has other losses: {values} instead of {expected}")
    return failures


# --- The peak that model FLOPs utilization (MFU) is relative to ---------------------------------


def worthwhile() -> tuple[Precision, ...]:
    """The precisions that this machine has instructions for; timing emulated bf16 is no use."""
    from zoo.nn.precision import native_precision  # after the stand-ins of benchmarks.gpu

    return ("fp32", "bf16") if native_precision() == "bf16" else ("fp32",)


def mfu_note(flops: float, peak: dict[str, Any], unit: str = "step") -> str:
    """The definition of the column MFU."""
    return (
        f"MFU = model FLOPs per {unit} ({flops / 1e9:,.4g} GFLOP, forward and backward, without "
        f"recomputation) / seconds per {unit} / peak; peak {peak['flops'] / 1e12:,.3g} TFLOP/s: "
        f"{peak['source']}"
    )


def find_peak(precision: Precision, published: Sequence[float | None]) -> dict[str, Any]:
    """FLOP/s and their source: the first published; else the fastest matrix product's."""
    for flops in published:
        if flops is not None:
            return {"flops": flops, "source": f"published for {precision}"}
    return in_process(measured_peak, precision)


def measured_peak(precision: Precision) -> dict[str, Any]:
    """The fastest matrix product by JAX, NumPy and, if installed, PyTorch.

    Only in fp32 if the machine has no bf16 instructions: emulated bf16 is slower by far.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    def seconds(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(9):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times[1:])

    size = 2048
    x = np.random.default_rng(0).random((size, size), np.float32)
    products: dict[str, Callable[[], Any]] = {"NumPy, fp32": lambda: x @ x}
    for each in {"fp32", precision} & {*worthwhile()}:
        exact = "highest" if each == "fp32" else None
        # On CPU, XLA uses the bf16 instructions only for products that return fp32.
        options = {"preferred_element_type": jnp.float32, "precision": exact}
        multiply = jax.jit(lambda x, options=options: jnp.matmul(x, x, **options))
        ours = jnp.asarray(x, jnp.bfloat16 if each == "bf16" else jnp.float32)
        products[f"JAX, {each}"] = lambda f=multiply, x=ours: f(x).block_until_ready()
        if importlib.util.find_spec("torch"):
            import torch

            theirs = torch.rand(size, size, device="cuda" if torch.cuda.is_available() else "cpu")
            theirs = theirs.bfloat16() if each == "bf16" else theirs
            products[f"PyTorch, {each}"] = lambda x=theirs: (x @ x)[0, 0].item()  # waits for it
    speeds = {name: 2 * size**3 / seconds(call) for name, call in products.items()}
    best = max(speeds, key=lambda name: speeds[name])
    source = f"measured here, the fastest product of {size} × {size} ({best})"
    return {"flops": speeds[best], "source": source}
