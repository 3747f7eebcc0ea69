"""The train step of one peer at the largest batch that fits, timed in this process."""

import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.timing import Peer
from benchmarks.worker import WARMUP_STEPS, device_peak_bytes, published_peak


def measure(
    peer: dict[str, Any],
    shape: dict[str, Any],
    precision: str,
    batch_sizes: list[int],
    steps: int,
    progress: str,
) -> Any:
    """The measurements at the first of `batch_sizes`, largest first, that fits in memory.

    The file `progress` names the batch that is being tried, in case the time runs out.
    """
    tried = []
    for batch_size in batch_sizes:
        Path(progress).write_text(json.dumps({"trying batch": batch_size, "too large": tried}))
        try:
            return _measure(Peer(**peer), {**shape, "batch_size": batch_size}, precision, steps) | {
                "batch": batch_size,
                "too large": tried,
            }
        except Exception as error:
            if not out_of_memory(error):
                raise
        tried.append(batch_size)
        gc.collect()
        if torch := sys.modules.get("torch"):
            torch.compiler.reset()
            torch.cuda.empty_cache()
    raise MemoryError(f"no batch of {batch_sizes} fits")


def out_of_memory(error: Exception) -> bool:
    """Whether an error of JAX or PyTorch means that memory ran out."""
    text = str(error).lower()
    return "resource_exhausted" in text or "out of memory" in text


def _measure(peer: Peer, shape: dict[str, Any], precision: Any, steps: int) -> dict[str, Any]:
    start = time.perf_counter()
    built = peer.build(shape, precision)
    ready = time.perf_counter() - start
    state, step, batch = built.state, built.step, built.batch
    compile_seconds, planned = built.compile_seconds, built.planned_bytes
    del built  # frees its state, so that only the trained one is in memory
    losses, seconds = [], []
    for _ in range(WARMUP_STEPS):
        start = time.perf_counter()
        state, loss = step(state, batch)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - start)
    typical = statistics.median(seconds[1:])
    times = []
    for _ in range(3):  # for the median
        start = time.perf_counter()
        for _ in range(steps):
            state, loss = step(state, batch)
        float(loss)  # waits for the device
        times.append((time.perf_counter() - start) / steps)
    return {
        "losses": losses,
        "seconds": statistics.median(times),
        "build seconds": ready,
        "compile seconds": seconds[0] - typical if compile_seconds is None else compile_seconds,
        "planned bytes": planned,
        "peak bytes": device_peak_bytes(),
        "published peak": published_peak(precision),
    }
