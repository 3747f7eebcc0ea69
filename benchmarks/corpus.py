"""Prepare a generated corpus and train on it: memory, time, a kill, workers; at several sizes.

python -m benchmarks.corpus --gigabytes 1 10

For each size: text in one .jsonl file, `python -m zoo prepare` killed at a random moment and run
again, its peak memory (of all its processes) and seconds; then two starts of `recipes.lm` on the
folder, the first cold: the seconds to the first step, and the peak memory up to ten seconds later.
At the smallest size also many files, and one worker against two, whose folders have to be equal bit
for bit.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro

from benchmarks.report import Table, provenance, save
from zoo.data.documents import standard_library

GIGABYTE = 10**9
TINY = ["--model.num-layers=1", "--model.d-model=64", "--model.num-heads=2", "--sample-tokens=0"]
TINY += ["--eval-batches=2", "--log-every=1", "--checkpoint-every=1000", "--eval-every=1000"]


@dataclass(frozen=True)
class Config:
    """Prepare a generated corpus and train on it."""

    gigabytes: tuple[float, ...] = (1, 10)
    """Sizes of the text."""
    vocab_size: int = 2048
    """Ids of the tokenizer, which is trained on a sample."""
    folder: Path | None = None
    """Where the text and the corpora are written; a temporary folder if not given."""
    results: Path = Path(__file__).parent / "results"
    """Where the tables are saved."""
    seed: int = 0
    """Seed of the text, and of the moment of the kill."""


def main(config: Config) -> None:
    """Measure, print and save the tables."""
    table = Table("a corpus of one .jsonl file: prepared, killed, finished, trained on")
    same = Table("the same text in many files, and by one worker: equal folders")
    with tempfile.TemporaryDirectory(dir=config.folder) as name:
        folder = Path(name)
        for size in sorted(config.gigabytes):
            table.rows.append(_measure(config, folder, size))
            table.print()
            if size == min(config.gigabytes):
                same.rows += _compare(config, folder, size)
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    same.print()
    command = " ".join(["python -m benchmarks.corpus", *sys.argv[1:]])
    source = {"date": date.today().isoformat(), "command": command, **provenance()}
    save("corpus", [table, same], source, config.results)


def _texts(num_bytes: float, seed: int) -> Iterator[str]:
    """Pieces of Python's source with numbers between them: like text, and never twice the same."""
    source = "\n".join(document.text for document in standard_library())
    source = source.encode("ascii", "replace").decode()
    rng, made = np.random.default_rng(seed), 0
    while made < num_bytes:
        length = int(np.clip(rng.lognormal(8, 1), 100, 200_000))
        begin = int(rng.integers(len(source) - length))
        text = f"# {rng.integers(10**12)}\n{source[begin : begin + length]}"
        made += len(text)
        yield text


def _measure(config: Config, folder: Path, size: float) -> dict[str, float]:
    lines = folder / "text.jsonl"
    with lines.open("w") as file:
        for text in _texts(size * GIGABYTE, config.seed):
            file.write(json.dumps({"text": text}) + "\n")
    out = folder / "prepared"
    command = _prepare(config, str(lines), out)
    began = time.monotonic()
    # A random moment of a preparation of about 10 MB per second.
    killed_after = random.Random(config.seed).uniform(5, 60 * size)
    first = _watched(command, kill_after=killed_after)
    done = len(list((out / "shards").glob("*.tokens"))) if (out / "shards").is_dir() else 0
    second = _watched(command)
    whole = time.monotonic() - began
    starts = [_start(folder, out, name) for name in ("cold", "warm")]
    bytes_on_disk = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return {
        "GB": size,
        "killed after, s": min(killed_after, first["seconds"]),
        "shards kept": done,
        "all of it, s": whole,
        "MB/s": size * GIGABYTE / 1e6 / whole,
        "processor, s/GB": (first["processor"] + second["processor"]) / size,
        "peak, MB": max(first["megabytes"], second["megabytes"]),
        "prepared, MB": bytes_on_disk / 1e6,
        **{f"{name} start, s": start["first"] for name, start in zip(("cold", "warm"), starts)},  # noqa: B905
        "training peak, MB": starts[1]["megabytes"],
    }


def _compare(config: Config, folder: Path, size: float) -> list[dict[str, object]]:
    """One worker and two, with a kill and without, on the same files; and many files."""
    rows = []
    lines, out = folder / "text.jsonl", folder / "prepared"
    once = folder / "one-worker"
    _watched([*_prepare(config, str(lines), once), "--workers=1"])
    rows.append({"folders": "2 workers, killed; 1 worker", "equal": str(_equal(out, once))})
    many = folder / "many"
    for number, text in enumerate(_texts(size * GIGABYTE, config.seed)):
        path = many / f"{number // 1000:05}" / f"{number:07}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = []
    for workers in (1, 2):
        target = folder / f"many-{workers}"
        pattern = str(many / "**" / "*.txt")
        found.append(_watched([*_prepare(config, pattern, target), f"--workers={workers}"]))
    equal = _equal(folder / "many-1", folder / "many-2")
    kinds = f"{number + 1:,} files: 1 worker; 2 workers"
    peaks = ", ".join(f"{one['megabytes']:,.0f} MB, {one['seconds']:,.0f} s" for one in found)
    rows.append({"folders": f"{kinds} ({peaks})", "equal": str(equal)})
    return rows


def _prepare(config: Config, data: str, out: Path) -> list[str]:
    options = ["--tokenizer=bpe", f"--vocab-size={config.vocab_size}", f"--out={out}"]
    return [sys.executable, "-m", "zoo", "prepare", data, *options]


def _start(folder: Path, data: Path, name: str) -> dict[str, float]:
    """Seconds to the first step of a run, and its peak memory up to ten seconds later."""
    run, cache = folder / f"run-{name}", folder / "cache"
    options = [f"--run-dir={run}", f"--data={data}", f"--compilation-cache={cache}"]
    command = [sys.executable, "-m", "recipes.lm", *options, "--steps=100000", *TINY]
    result = _watched(command, until=run / "metrics.jsonl")
    return {"first": result["until"], "megabytes": result["megabytes"]}


def _watched(
    command: list[str], *, kill_after: float | None = None, until: Path | None = None
) -> dict[str, float]:
    """Seconds, peak memory and processor seconds of a command and its children.

    `until` is the seconds until that file has a line; ten seconds later the command is killed.
    """
    began, peak, reached = time.monotonic(), 0.0, 0.0
    ticks: dict[int, int] = {}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    while process.poll() is None:
        found = list(_processes(process.pid))
        peak = max(peak, sum(use.resident for use in found))
        ticks.update({use.process: use.ticks for use in found})
        now = time.monotonic() - began
        if until is not None and not reached and until.exists() and until.stat().st_size:
            reached = now
            kill_after = now + 10
        if kill_after is not None and now > kill_after:
            os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.02)
    assert process.stderr is not None
    errors = process.stderr.read().decode()
    if process.returncode not in (0, -signal.SIGKILL):
        raise RuntimeError(f"{' '.join(command)}: {errors}")
    return {
        "seconds": time.monotonic() - began,
        "processor": sum(ticks.values()) / os.sysconf("SC_CLK_TCK"),
        "megabytes": peak / 1e6,
        "until": reached,
    }


class _Use(NamedTuple):
    """A process, its processor time, and the bytes of memory that it shares with no file."""

    process: int
    ticks: int
    resident: int


def _processes(session: int) -> Iterator[_Use]:
    """The processes of a session, by Linux' /proc."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                lines = (path / "status").read_text().splitlines()
                kilobytes = sum(int(x.split()[1]) for x in lines if x.startswith("RssAnon"))
                ticks = int(fields[11]) + int(fields[12])
                yield _Use(int(path.name), ticks, kilobytes * 1024)
        except (OSError, ValueError, IndexError):  # it has just ended
            continue


def _equal(one: Path, other: Path) -> bool:
    """Whether two folders have the same files with the same bytes."""
    return not subprocess.run(["diff", "-rq", one, other], stdout=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    main(tyro.cli(Config))
