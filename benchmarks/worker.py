"""The process of one peer: builds the peer, takes its first steps, then times steps on demand.

It reads one JSON request per line and answers each with one JSON line; `harness.compare` starts it.
"""

import contextlib
import importlib
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import stand_ins

stand_ins.install()

from benchmarks.harness import Peer, memory, serve  # noqa: E402
from benchmarks.peers.given import Built, Precision  # noqa: E402

WARMUP_STEPS = 5


class Worker:
    """A peer, once the first request has said which."""

    built: Built | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Build the peer, or time some of its steps."""
        if self.built is None:
            return self._set_up(**request)
        state, step, batch = self.built.state, self.built.step, self.built.batch
        state, loss = step(state, batch)
        float(loss)  # untimed: caches and pages still hold another peer's data
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(request["num_steps"]):
            state, loss = step(state, batch)
        float(loss)  # waits for the device
        cpu_seconds = time.process_time() - cpu_start
        self.built = self.built._replace(state=state)
        return {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": cpu_seconds,
            "peak_bytes": device_peak_bytes(),
        }

    def _set_up(self, peer: dict[str, Any], shape: Any, precision: Precision) -> dict[str, Any]:
        made = Peer(**peer)
        importlib.import_module(f"benchmarks.peers.{made.name.partition('.')[0]}")
        before = memory("VmRSS")  # its imports are no part of its memory
        self.built = made.build(shape, precision)
        step, batch, state = self.built.step, self.built.batch, self.built.state
        planned, compile_seconds = self.built.planned_bytes, self.built.compile_seconds
        self.built = None  # frees its state, so that only the trained one is in memory
        losses, seconds = [], []
        for index in range(WARMUP_STEPS):
            if index == 1:
                _forget_peak()
            start = time.perf_counter()
            state, loss = step(state, batch)
            losses.append(float(loss))
            seconds.append(time.perf_counter() - start)
        self.built = Built(step, state, batch)
        typical = statistics.median(seconds[1:])
        return {
            "losses": losses,
            "step_seconds": typical,
            "compile_seconds": seconds[0] - typical if compile_seconds is None else compile_seconds,
            "planned_bytes": planned,
            "peak_bytes": device_peak_bytes() or memory("VmHWM") - before,
            "published_peak": published_peak(precision),
        }


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
    from zoo.training.chips import peak_flops

    return peak_flops(sys.modules["jax"].devices()[0], precision)


if __name__ == "__main__":
    serve(Worker().answer)
