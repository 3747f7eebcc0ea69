"""The process of one peer: builds the peer, takes its first steps, then times steps on demand.

It reads one JSON request per line and answers each with one JSON line. `timing.Worker` starts it.
"""

import contextlib
import importlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.common import Built, Precision
from benchmarks.timing import Peer

WARMUP_STEPS = 5


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print, but not among the answers

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    requests = map(json.loads, sys.stdin)
    built, setup = _set_up(next(requests))
    answer(**setup)
    state = built.state
    for request in requests:
        state, loss = built.step(state, built.batch)
        float(loss)  # untimed: caches and pages still hold another peer's data
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(request["num_steps"]):
            state, loss = built.step(state, built.batch)
        float(loss)  # waits for the device
        answer(seconds=time.perf_counter() - start, cpu_seconds=time.process_time() - cpu_start)


def _set_up(request: dict[str, Any]) -> tuple[Built, dict[str, Any]]:
    peer = Peer(**request["peer"])
    importlib.import_module(f"benchmarks.peers.{peer.module}")  # before its memory is measured
    before = _resident_bytes("VmRSS")
    built = peer.build(request["shape"], request["precision"])
    state, losses, seconds = built.state, [], []
    for index in range(WARMUP_STEPS):
        if index == 1:
            _forget_peak()
        start = time.perf_counter()
        state, loss = built.step(state, built.batch)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - start)
    typical, compile_seconds = statistics.median(seconds[1:]), built.compile_seconds
    device_peak = device_peak_bytes()
    return built._replace(state=state), {
        "losses": losses,
        "step_seconds": typical,
        "compile_seconds": seconds[0] - typical if compile_seconds is None else compile_seconds,
        "planned_bytes": built.planned_bytes,
        "peak_bytes": device_peak or _resident_bytes("VmHWM") - before,
        "published_peak": published_peak(request["precision"]),
    }


def _resident_bytes(field: str) -> int:
    """VmRSS, the current memory of this process, or VmHWM, its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _forget_peak() -> None:
    """Reset the peak to the current memory, because compiling has raised it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def device_peak_bytes() -> int | None:
    """The peak of an accelerator's memory since the start; None on CPU."""
    if torch := sys.modules.get("torch"):
        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    device = sys.modules["jax"].devices()[0]
    return None if device.platform == "cpu" else device.memory_stats()["peak_bytes_in_use"]


def published_peak(precision: Precision) -> float | None:
    """The data sheet's FLOP/s of the device, if this is a JAX peer, which can identify it."""
    if "jax" not in sys.modules or "torch" in sys.modules:  # PyTorch has the GPU
        return None
    from zoo.planning.chips import peak_flops

    return peak_flops(sys.modules["jax"].devices()[0], precision)


if __name__ == "__main__":
    main()
