"""The peak FLOP/s that model FLOPs utilization (MFU) is relative to: published, or measured here.

`python -m benchmarks.peak fp32` measures it, in a process of its own.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from benchmarks import stand_ins
from benchmarks.peers.common import Precision

SIZE, REPEATS = 2048, 8


class Peak(NamedTuple):
    """FLOP/s of a device, and the source of the number."""

    flops: float
    source: str


def worthwhile() -> tuple[Precision, ...]:
    """The precisions that this machine has instructions for; timing emulated bf16 is no use."""
    from zoo.nn.precision import native_precision  # after the stand-ins

    return ("fp32", "bf16") if native_precision() == "bf16" else ("fp32",)


def find_peak(precision: Precision, published: Sequence[float | None]) -> Peak:
    """The first published peak; else, as on a CPU, the speed of the fastest matrix product."""
    for flops in published:
        if flops is not None:
            return Peak(flops, f"published for {precision}")
    return _measured(precision)


@functools.cache
def _measured(precision: Precision) -> Peak:
    command = [sys.executable, "-m", "benchmarks.peak", precision]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    output = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Peak(**json.loads(output.stdout.splitlines()[-1]))


def measure(precision: Precision) -> Peak:
    """The fastest matrix product by JAX, NumPy and, if installed, PyTorch.

    Only in fp32 if the machine has no bf16 instructions: emulated bf16 is slower by far.
    """
    candidates = {"NumPy, fp32": _numpy_product()}
    for each in {"fp32", precision} & {*worthwhile()}:
        candidates |= {f"JAX, {each}": _jax_product(each)}
        if importlib.util.find_spec("torch"):
            candidates |= {f"PyTorch, {each}": _torch_product(each)}
    speeds = {name: 2 * SIZE**3 / _seconds(call) for name, call in candidates.items()}
    best = max(speeds, key=lambda name: speeds[name])
    return Peak(speeds[best], f"measured here, the fastest product of {SIZE} × {SIZE} ({best})")


def _seconds(call: Callable[[], Any]) -> float:
    """The shortest of several times, without the first."""
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _numpy_product() -> Callable[[], Any]:
    import numpy as np

    x = np.random.default_rng(0).random((SIZE, SIZE), np.float32)
    return lambda: x @ x


def _jax_product(precision: Precision) -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    x = jax.random.uniform(jax.random.key(0), (SIZE, SIZE))
    x = x.astype(jnp.bfloat16 if precision == "bf16" else jnp.float32)
    exact = "highest" if precision == "fp32" else None
    # On CPU, XLA uses the bf16 instructions only for products that return fp32.
    multiply = jax.jit(
        lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32, precision=exact)
    )
    return lambda: multiply(x).block_until_ready()


def _torch_product(precision: Precision) -> Callable[[], Any]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.rand(SIZE, SIZE, device=device)
    x = x.bfloat16() if precision == "bf16" else x

    return lambda: (x @ x)[0, 0].item()  # waits for the device


if __name__ == "__main__":
    stand_ins.install()
    [name] = [x for x in get_args(Precision) if x == sys.argv[1]]
    print(json.dumps(measure(name)._asdict()))
