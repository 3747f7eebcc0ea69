"""Prepare a generated corpus, killed once, and train on it: memory and time, at several sizes.

python -m benchmarks.corpus --gigabytes 1 10

For each size: text in one .jsonl file, `python -m zoo prepare` killed at a random moment and run
again, its peak memory (of all its processes) and seconds; then two starts of `recipes.lm` on the
folder, the first cold: the seconds to the first step, and the peak memory up to ten seconds later.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.harness import Table, main
from zoo.data.documents import standard_library

GIGABYTE = 10**9
TINY = ["--model.num-layers=1", "--model.d-model=64", "--model.num-heads=2", "--sample-tokens=0"]
TINY += ["--eval-batches=2", "--log-every=1", "--checkpoint-every=1000", "--eval-every=1000"]


def corpus(
    gigabytes: tuple[float, ...] = (1, 10),
    vocab_size: int = 2048,
    folder: Path | None = None,
    seed: int = 0,
) -> list[Table]:
    """Prepare a generated corpus and train on it.

    Args:
        gigabytes: sizes of the text.
        vocab_size: ids of the tokenizer, which is trained on a sample.
        folder: where the text and the corpora are written; a temporary folder if not given.
        seed: seed of the text, and of the moment of the kill.
    """
    table = Table("a corpus of one .jsonl file: prepared, killed, finished, trained on")
    for size in sorted(gigabytes):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            table.add(**_measure(Path(name), size, vocab_size, seed))
    return [table]


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


def _measure(folder: Path, size: float, vocab_size: int, seed: int) -> dict[str, float]:
    lines, out = folder / "text.jsonl", folder / "prepared"
    with lines.open("w") as file:
        for text in _texts(size * GIGABYTE, seed):
            file.write(json.dumps({"text": text}) + "\n")
    options = ["--tokenizer=bpe", f"--vocab-size={vocab_size}", f"--out={out}"]
    command = [sys.executable, "-m", "zoo", "prepare", str(lines), *options]
    # A random moment of a preparation of about 10 MB per second.
    killed_after = random.Random(seed).uniform(5, 60 * size)
    first = _watched(command, kill_after=killed_after)
    kept = len(list(out.glob("shards/*.tokens")))
    second = _watched(command)
    whole = first["seconds"] + second["seconds"]
    starts = {}
    for name in ("cold", "warm"):
        run, cache = folder / f"run-{name}", folder / "cache"
        options = [f"--run-dir={run}", f"--data={out}", f"--compilation-cache={cache}"]
        recipe = [sys.executable, "-m", "recipes.lm", *options, "--steps=100000", *TINY]
        starts[name] = _watched(recipe, until=run / "metrics.jsonl")
    bytes_on_disk = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return {
        "GB": size,
        "killed after, s": min(killed_after, first["seconds"]),
        "shards kept": kept,
        "all of it, s": whole,
        "MB/s": size * GIGABYTE / 1e6 / whole,
        "processor, s/GB": (first["processor"] + second["processor"]) / size,
        "peak, MB": max(first["megabytes"], second["megabytes"]),
        "prepared, MB": bytes_on_disk / 1e6,
        **{f"{name} start, s": start["until"] for name, start in starts.items()},
        "training peak, MB": starts["warm"]["megabytes"],
    }


def _watched(
    command: list[str], *, kill_after: float | None = None, until: Path | None = None
) -> dict[str, float]:
    """A command and its children; ten seconds after the file `until` has a line they are killed."""
    began, peak, reached = time.monotonic(), 0.0, 0.0
    ticks: dict[int, int] = {}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    while process.poll() is None:
        found = list(_processes(process.pid))
        peak = max(peak, sum(resident for _, _, resident in found))
        ticks.update({number: used for number, used, _ in found})
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


def _processes(session: int) -> Iterator[tuple[int, int, int]]:
    """A session's processes, their processor time, and bytes of memory that no file backs."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                lines = (path / "status").read_text().splitlines()
                kilobytes = sum(int(x.split()[1]) for x in lines if x.startswith("RssAnon"))
                ticks = int(fields[11]) + int(fields[12])
                yield int(path.name), ticks, kilobytes * 1024
        except (OSError, ValueError, IndexError):  # it has just ended
            continue


if __name__ == "__main__":
    main(corpus)
