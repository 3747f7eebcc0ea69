"""The time of a train step by kind of operation, from a trace of the profiler."""

import collections
import re
import tempfile
from pathlib import Path
from typing import Any

import jax

from benchmarks.timing import Peer

# A kernel's or thunk's kind is the first whose pattern is in its name.
KINDS = {
    "attention": r"flash|fmha|cudnn.*(sdpa|attn|mha)|sdpa",
    "matrix products": r"gemm|nvjet|cublas|cutlass|dot|matmul",
    "copies, transposes": r"copy|memcpy|transpose|concatenate|dynamic.?update.?slice|memset",
    "reductions": r"reduce",
    "scatters, gathers": r"scatter|gather|select_and",
    "elementwise": r"fusion|loop_|wrapped|convert|broadcast|add|multiply|exp|tanh",
}
# Events that contain other operations.
CONTAINERS = re.compile(r"while|call|conditional|thunkexecutor|tfrt|pjit|jit_|^(train_)?step|pjrt")


def measure(peer: dict[str, Any], shape: dict[str, Any], precision: Any, steps: int) -> Any:
    """Seconds per step by kind of operation, averaged over a few steps."""
    built = Peer(**peer).build(shape, precision)
    state = built.state
    for _ in range(3):
        state, loss = built.step(state, built.batch)
    float(loss)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                state, loss = built.step(state, built.batch)
            float(loss)
        [file] = Path(folder).glob("plugins/profile/*/*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
    seconds = seconds_by_name(data)
    if not seconds:
        planes = [plane.name for plane in data.planes]
        raise ValueError(f"no operations in the trace; it has {planes}")
    kinds: dict[str, float] = collections.Counter()
    for name, value in seconds.items():
        kinds[kind_of(name)] += value / steps
    largest = sorted(seconds, key=lambda name: -seconds[name])[:10]
    return {
        "kinds": dict(kinds),
        "operations": {name: seconds[name] / steps for name in largest},
    }


def kind_of(name: str) -> str:
    """The kind of an operation, by its name."""
    found = (kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower()))
    return next(found, "other")


def seconds_by_name(data: Any) -> dict[str, float]:
    """Seconds of each operation: a GPU's kernels, or the thunks of XLA's CPU threads."""
    seconds: dict[str, float] = collections.Counter()
    gpus = [plane for plane in data.planes if plane.name.startswith("/device:GPU")]
    for plane in gpus or [plane for plane in data.planes if plane.name == "/host:CPU"]:
        for line in plane.lines:
            if gpus and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                name = event.name
                if not gpus and ("hlo_op" not in dict(event.stats) or CONTAINERS.search(name)):
                    continue
                seconds[name] += event.duration_ns / 1e9
    return seconds
