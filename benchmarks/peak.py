"""The peak that model FLOPs utilization (MFU) is relative to."""

import importlib.util
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import in_process
from benchmarks.peers.given import Precision
from zoo.nn.precision import native_precision


def worthwhile() -> tuple[Precision, ...]:
    """The precisions that this machine has instructions for; timing emulated bf16 is no use."""
    return ("fp32", "bf16") if native_precision() == "bf16" else ("fp32",)


def mfu_note(flops: float, peak: dict[str, Any], unit: str = "step") -> str:
    """The definition of the column MFU."""
    return (
        f"MFU = model FLOPs per {unit} ({flops / 1e9:,.4g} GFLOP, forward and backward, without "
        f"recomputation) / seconds per {unit} / peak; peak {peak['flops'] / 1e12:,.3g} TFLOP/s: "
        f"{peak['source']}"
    )


def find_peak(precision: Precision, published: Sequence[float | None]) -> dict[str, Any]:
    """FLOP/s and their source: the first published; else the fastest matrix product's."""
    for flops in published:
        if flops is not None:
            return {"flops": flops, "source": f"published for {precision}"}
    return in_process(measured_peak, precision)


def measured_peak(precision: Precision) -> dict[str, Any]:
    """The fastest matrix product by JAX, NumPy and, if installed, PyTorch.

    Only in fp32 if the machine has no bf16 instructions: emulated bf16 is slower by far.
    """

    def seconds(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(9):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times[1:])

    size = 2048
    x = np.random.default_rng(0).random((size, size), np.float32)
    products: dict[str, Callable[[], Any]] = {"NumPy, fp32": lambda: x @ x}
    for each in {"fp32", precision} & {*worthwhile()}:
        exact = "highest" if each == "fp32" else None
        # On CPU, XLA uses the bf16 instructions only for products that return fp32.
        options = {"preferred_element_type": jnp.float32, "precision": exact}
        multiply = jax.jit(lambda x, options=options: jnp.matmul(x, x, **options))
        ours = jnp.asarray(x, jnp.bfloat16 if each == "bf16" else jnp.float32)
        products[f"JAX, {each}"] = lambda f=multiply, x=ours: f(x).block_until_ready()
        if importlib.util.find_spec("torch"):
            import torch

            theirs = torch.rand(size, size, device="cuda" if torch.cuda.is_available() else "cpu")
            theirs = theirs.bfloat16() if each == "bf16" else theirs
            products[f"PyTorch, {each}"] = lambda x=theirs: (x @ x)[0, 0].item()  # waits for it
    speeds = {name: 2 * size**3 / seconds(call) for name, call in products.items()}
    best = max(speeds, key=lambda name: speeds[name])
    source = f"measured here, the fastest product of {size} × {size} ({best})"
    return {"flops": speeds[best], "source": source}
