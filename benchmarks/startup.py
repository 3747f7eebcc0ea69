"""Time the start of the default recipe, phase by phase, to the end of its first step.

python -m benchmarks.startup

With empty caches, with warm ones in a new run folder, and resuming; and `--help`. A process is
timed from its creation, and ends after its first step, which writes nothing.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import tyro

from benchmarks.report import Table, provenance, save

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Config:
    """Time the start of the default recipe, phase by phase."""

    rounds: int = 3
    """Repetitions of the warm starts; the table has the fastest one."""
    results: Path = ROOT / "benchmarks" / "results"
    """Where the tables are saved."""


def main(config: Config) -> None:
    """Measure, print and save the table."""
    tables = measure(config.rounds)
    command = " ".join(["python -m benchmarks.startup", *sys.argv[1:]])
    source = {"date": date.today().isoformat(), "command": command, **provenance()}
    save("startup", tables, source, config.results)


def measure(rounds: int = 3) -> list[Table]:
    """Seconds of each phase, from the start of the process to the end of the first step."""
    table = Table("python -m recipes.lm: seconds from the command to the end of the first step")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table.rows.append({"start": "cold: caches empty", **_start(folder, "cold")})
        warm = [_start(folder, f"warm-{i}") for i in range(rounds)]
        table.rows.append({"start": "warm: a new run", **_fastest(warm)})
        command = [sys.executable, "-m", "recipes.lm", f"--run-dir={folder / 'whole'}", "--steps=1"]
        subprocess.run(
            [*command, *_caches(folder)], cwd=ROOT, stdout=subprocess.DEVNULL, check=True
        )
        resumed = [_start(folder, "whole", steps=2) for _ in range(rounds)]
        table.rows.append({"start": "warm: a run resumed", **_fastest(resumed)})
    table.notes.append(f"python -m recipes.lm --help: {_help(rounds):.2f} s")
    table.notes.append(
        "imports: until the recipe's main begins; run: devices, folder and lock; data: the text, "
        "its tokenizer and tokens; state: initialised or restored; program: traced, and compiled or"
        " taken from the cache; CPU: processor time of all threads until then"
    )
    table.print()
    return [table]


def _caches(folder: Path) -> list[str]:
    return [f"--data.cache={folder / 'corpus'}", f"--compilation-cache={folder / 'jax'}"]


def _start(folder: Path, run: str, steps: int = 1) -> dict[str, float]:
    flags = [f"--run-dir={folder / run}", f"--steps={steps}", *_caches(folder)]
    command = [sys.executable, "-m", "benchmarks.startup", "worker", str(time.time()), *flags]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _fastest(found: list[dict[str, float]]) -> dict[str, float]:
    return min(found, key=lambda one: one["all"])


def _help(rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        command = [sys.executable, "-m", "recipes.lm", "--help"]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def worker(begin: float) -> None:
    """The recipe with a clock in it: prints the seconds of each phase, and ends after a step."""
    from recipes import lm
    from zoo.runs import loop
    from zoo.runs.command_line import cli
    from zoo.runs.run import Run
    from zoo.tasks import language
    from zoo.training.compiled import CompiledStep

    stamps = {"begin": begin}

    def stamped(owner: Any, name: str, phase: str) -> None:
        function: Callable = getattr(owner, name)

        def timed(*args: Any, **named: Any) -> Any:
            result = function(*args, **named)
            stamps[phase] = time.time()
            return result

        setattr(owner, name, timed)

    stamped(Run, "__enter__", "run")
    stamped(language, "read_text", "data")
    stamped(loop, "_restore_or_init", "state")
    stamped(loop, "_compile", "program")
    call = CompiledStep.__call__

    def first(step: CompiledStep, *args: Any) -> None:
        import jax

        jax.block_until_ready(call(step, *args))
        stamps["first step"] = time.time()
        names = [*stamps]
        seconds = {b: stamps[b] - stamps[a] for a, b in itertools.pairwise(names)}
        cpu = time.process_time()
        print(json.dumps({**seconds, "all": stamps["first step"] - begin, "CPU": cpu}), flush=True)
        os._exit(0)

    CompiledStep.__call__ = first  # type: ignore[method-assign]

    def run(config: lm.Config) -> None:
        stamps["imports"] = time.time()
        lm.main(config)

    cli(lm.Config, run, "recipes.lm")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        began = float(sys.argv.pop(2))
        sys.argv.pop(1)
        worker(began)
    else:
        main(tyro.cli(Config))
