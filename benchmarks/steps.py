"""Train steps of peers, each in a process of its own, timed in turn."""

import contextlib
import importlib
import statistics
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    Process,
    SkippedError,
    Table,
    Timing,
    in_turn,
    median_ratio,
    memory,
)
from benchmarks.peak import find_peak, mfu_note
from benchmarks.peers.given import Built, Precision

WARMUP_STEPS = 5
# Relative differences allowed between the first losses: all peers compute the same.
TOLERANCE: dict[Precision, float] = {"fp32": 1e-4, "bf16": 2e-3}


@dataclass(frozen=True)
class Peer:
    """A function of benchmarks.peers, `module.function`, with its options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def given(self, **options: Any) -> "Peer":
        """The same peer with more options."""
        return Peer(self.name, {**self.options, **options})

    def build(self, shape: Any, precision: Precision) -> Built:
        """Build the peer in this process."""
        module, _, name = self.name.partition(".")
        function = getattr(importlib.import_module(f"benchmarks.peers.{module}"), name)
        return function(shape, precision, **self.options)


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
            arguments = (timed_steps, peer, shape, precision)
            try:
                workers[name] = stack.enter_context(
                    Process(*arguments, huge_pages=timing.huge_pages)
                )
            except SkippedError as reason:
                table.notes.append(f"{name} skipped: {reason}")

        def turn(worker: Process) -> dict[str, float]:
            steps = max(2, round(timing.turn_seconds / worker.setup["step_seconds"]))
            taken = worker.ask(steps)
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


# --- Within the process of a peer ---------------------------------------------------------------


def timed_steps(
    peer: Peer, shape: Any, precision: Precision
) -> Generator[dict[str, Any], int, None]:
    """What building a peer and its first steps say; then, for a number of steps, their seconds."""
    importlib.import_module(f"benchmarks.peers.{peer.name.partition('.')[0]}")
    before = memory("VmRSS")  # its imports are no part of its memory
    step, state, batch, compile_seconds, planned = peer.build(shape, precision)
    losses, seconds = [], []
    for index in range(WARMUP_STEPS):
        if index == 1:  # compiling has raised the peak
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")
        start = time.perf_counter()
        state, loss = step(state, batch)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - start)
    typical = statistics.median(seconds[1:])
    num_steps = yield {
        "losses": losses,
        "step_seconds": typical,
        "compile_seconds": seconds[0] - typical if compile_seconds is None else compile_seconds,
        "planned_bytes": planned,
        "peak_bytes": device_peak_bytes() or memory("VmHWM") - before,
        "published_peak": published_peak(precision),
    }
    while True:
        state, loss = step(state, batch)
        float(loss)  # untimed: caches and pages still hold another peer's data
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            state, loss = step(state, batch)
        float(loss)  # waits for the device
        num_steps = yield {
            "cpu_seconds": time.process_time() - cpu_start,
            "seconds": time.perf_counter() - start,
            "peak_bytes": device_peak_bytes(),
        }


def device_peak_bytes() -> int | None:
    """The peak of an accelerator's memory since the start; None on CPU."""
    if torch := sys.modules.get("torch"):
        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    device = sys.modules["jax"].devices()[0]
    return None if device.platform == "cpu" else device.memory_stats()["peak_bytes_in_use"]


def published_peak(precision: Precision) -> float | None:
    """The data sheet's FLOP/s of the device, if this is a JAX peer, which can identify it."""
    if "torch" in sys.modules:  # PyTorch has the GPU
        return None
    from zoo.training.chips import peak_flops

    return peak_flops(sys.modules["jax"].devices()[0], precision)
