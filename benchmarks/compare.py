"""The train steps of one model's peers, compared in a table."""

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peak import Peak, find_peak
from benchmarks.peers.common import Precision
from benchmarks.report import Table
from benchmarks.timing import Peer, SkippedError, Timing, Worker, interleave, median_ratio

# Relative differences allowed between the first losses: all peers compute the same.
TOLERANCE: dict[Precision, float] = {"fp32": 1e-4, "bf16": 2e-3}


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
        workers: dict[str, Worker] = {}
        for name, peer in peers.items():
            try:
                workers[name] = stack.enter_context(Worker(peer, shape, precision, timing))
            except SkippedError as reason:
                table.notes.append(f"{name} skipped: {reason}")
        turns = interleave(workers, timing)
    baseline = next(iter(workers), "")
    peak = find_peak(precision, [worker.setup["published_peak"] for worker in workers.values()])
    for name, worker in workers.items():
        step_seconds = statistics.median(turns[name].seconds)
        planned = worker.setup["planned_bytes"]
        table.rows.append(
            {
                "peer": name,
                "steps/s": 1 / step_seconds,
                **{f"{unit}/s": number / step_seconds for unit, number in units.items()},
                "MFU %": 100 * flops / step_seconds / peak.flops,
                f"time / {baseline}": median_ratio(turns[name].seconds, turns[baseline].seconds),
                "CPU s/step": min(turns[name].cpu_seconds),
                "compile s": worker.setup["compile_seconds"],
                "peak MiB": worker.setup["peak_bytes"] / 2**20,
                "XLA plan MiB": planned and planned / 2**20,
            }
        )
    table.notes.append(mfu_note(flops, peak))
    losses = {name: worker.setup["losses"] for name, worker in workers.items()}
    table.failures += disagreements(losses, TOLERANCE[precision])
    table.print()
    return table


def mfu_note(flops: float, peak: Peak, unit: str = "step") -> str:
    """The definition of the column MFU."""
    return (
        f"MFU = model FLOPs per {unit} ({flops / 1e9:,.4g} GFLOP, forward and backward, without "
        f"recomputation) / seconds per {unit} / peak; peak {peak.flops / 1e12:,.3g} TFLOP/s: "
        f"{peak.source}"
    )


def disagreements(losses: Mapping[str, Sequence[float]], tolerance: float) -> list[str]:
    """One line per peer whose losses differ from the first peer's."""
    failures = []
    expected = next(iter(losses.values()), ())
    for name, values in losses.items():
        near = [abs(a / b - 1) <= tolerance for a, b in zip(values, expected, strict=True)]
        if not all(near):  # NaN is near nothing
            failures.append(f"{name} has other losses: {values} instead of {expected}")
    return failures
