"""Where the time of a train step goes: a trace of the profiler, reduced to kinds of operations."""

import collections
import re
import tempfile
from pathlib import Path
from typing import Any

import jax

from benchmarks.timing import Peer

# In turn: what a kernel's or thunk's name holds, and the kind it is then. XLA's own names first.
KINDS = {
    "attention": r"flash|fmha|cudnn.*(sdpa|attn|mha)|sdpa",
    "matrix products": r"gemm|nvjet|cublas|cutlass|dot|matmul",
    "copies, transposes": r"copy|memcpy|transpose|concatenate|dynamic.?update.?slice|memset",
    "reductions": r"reduce",
    "scatters, gathers": r"scatter|gather|select_and",
    "elementwise": r"fusion|loop_|wrapped|convert|broadcast|add|multiply|exp|tanh",
}
# Lines of time that are not one operation at a time.
CONTAINERS = re.compile(r"while|call|conditional|thunkexecutor|tfrt|pjit|jit_|^(train_)?step|pjrt")


def measure(peer: dict[str, Any], shape: dict[str, Any], precision: Any, steps: int) -> Any:
    """Seconds a step by kind of operation, of a few steps."""
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
    """Seconds of each operation: a GPU's kernels, or on CPU what XLA's threads ran."""
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
