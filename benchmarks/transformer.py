"""The train step of a transformer against its peers: fp32 and bf16, with and without remat."""

import contextlib
import statistics
from dataclasses import dataclass, field
from typing import Literal, get_args

from benchmarks.peers.common import Precision, Remat, Shape
from benchmarks.report import Table
from benchmarks.timing import Peer, SkippedError, Timing, Worker, interleave, median_ratio

Name = Literal["handwritten", "zoo", "zoo-scan", "equinox", "pytorch", "pytorch-compiled"]
PEERS: dict[str, Peer] = {
    "handwritten": Peer("handwritten"),
    "zoo": Peer("zoo_step", {"scan": False}),
    "zoo-scan": Peer("zoo_step", {"scan": True}),
    "equinox": Peer("equinox_documented"),
    "pytorch": Peer("pytorch", {"compiled": False}),
    "pytorch-compiled": Peer("pytorch", {"compiled": True}),
}
# How far apart the losses of the first steps may be, relatively: all peers compute the same.
TOLERANCE: dict[Precision, float] = {"fp32": 1e-4, "bf16": 2e-3}


@dataclass(frozen=True)
class Options:
    """The train step of a transformer."""

    peers: tuple[Name, ...] = get_args(Name)
    """Peers; the first that runs is the baseline of the ratios."""
    precision: tuple[Precision, ...] = ("fp32", "bf16")
    """Precisions of the compute, over fp32 weights."""
    remat: tuple[Remat, ...] = ("none", "full")
    """What the backward pass recomputes: nothing, or every layer."""
    shape: Shape = field(default_factory=Shape)


def measure(options: Options, timing: Timing) -> list[Table]:
    """A table for each precision and remat."""
    tables = []
    for precision in options.precision:
        for remat in options.remat:
            tables.append(_compare(options, timing, precision, remat))
            tables[-1].print()
    return tables


def _compare(options: Options, timing: Timing, precision: Precision, remat: Remat) -> Table:
    table = Table(f"transformer train step, {precision}, remat {remat}")
    with contextlib.ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for peer in options.peers:
            try:
                worker = Worker(PEERS[peer], options.shape, precision, remat, timing)
                workers[peer] = stack.enter_context(worker)
            except SkippedError as reason:
                table.notes.append(f"{peer} skipped: {reason}")
        turns = interleave(workers, timing)
    baseline = next(iter(workers), "")
    tokens = options.shape.batch_size * options.shape.seq_len
    for name, worker in workers.items():
        step_seconds = statistics.median(turns[name].seconds)
        planned = worker.setup["planned_bytes"]
        table.rows.append(
            {
                "peer": name,
                "steps/s": 1 / step_seconds,
                "tokens/s": tokens / step_seconds,
                f"time / {baseline}": median_ratio(turns[name].seconds, turns[baseline].seconds),
                "CPU s/step": min(turns[name].cpu_seconds),
                "compile s": worker.setup["compile_seconds"],
                "peak MiB": worker.setup["peak_bytes"] / 2**20,
                "XLA plan MiB": planned and planned / 2**20,
            }
        )
        losses, expected = worker.setup["losses"], workers[baseline].setup["losses"]
        far = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
        if not far <= TOLERANCE[precision]:
            table.failures.append(f"{name} computes something else: {losses}, not {expected}")
    return table
