"""Attention's memory, traffic and time to compile by the length of a row, from compiling alone.

    python -m benchmarks.attention

compiles the attention of one layer of Llama 3 8B (32 query and 8 key-value heads of 128, bf16, one
causal row), forward and backward, for a TPU v5e (`pip install 'zoo[plan]'`; no TPU is needed), by
each implementation; and that of a small one (8 and 2 heads of 64, fp32) for this machine's CPU.
"unrolled" is "chunked" with its chunks one after another, which a few of them still are. Each
compiles in a process of its own. Writes a table and the numbers to `benchmarks/results`.
"""

import datetime
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.report import Table, provenance, save
from zoo import sharding
from zoo.nn.attention import attention, chunked
from zoo.planning import flops, hlo, targets, traffic

MiB, GiB = 2.0**20, 2.0**30
Kind = Literal["unrolled", "chunked", "splash"]


@dataclass(frozen=True)
class Config:
    """Compile attention at increasing lengths."""

    target: str = "v5e:1x1"
    """TPU."""
    lengths: tuple[int, ...] = (4_096, 8_192, 32_768)
    """Positions of a row there."""
    cpu_lengths: tuple[int, ...] = (4_096, 16_384, 65_536)
    """Positions of a row on the CPU."""
    limit: float = 540.0
    """Seconds after which a compilation is given up, and all that are longer."""
    out: Path = Path("benchmarks/results")
    """Folder of the results."""


def main(config: Config) -> None:
    """Compile all, and write the tables."""
    on_tpu = "one layer of Llama 3 8B (32 and 8 heads of 128, bf16), causal, forward and backward"
    on_cpu = "8 and 2 heads of 64, fp32, causal, forward and backward"
    tables = [
        table(config.target, on_tpu, ("unrolled", "chunked", "splash"), config.lengths, config),
        table("cpu:1", on_cpu, ("unrolled", "chunked"), config.cpu_lengths, config),
    ]
    source = {"command": "python -m benchmarks.attention", "date": str(datetime.date.today())}
    save("attention", tables, {**source, **provenance()}, config.out)


def table(
    target: str, title: str, kinds: tuple[Kind, ...], lengths: tuple[int, ...], config: Config
) -> Table:
    """The implementations by length."""
    found = Table(f"{target}: {title}")
    for kind in kinds:
        for length in lengths:
            row, failure = in_process(target, kind, length, config.limit)
            if failure:
                found.notes.append(f"{kind} at {length:,} and more: {failure}")
                break
            found.rows.append(row)
            print(row, flush=True)
    found.notes.append(
        "temporaries and accessed: the compiler's own; moved: between the chip and its memory, as "
        "a plan counts them, a kernel's block by block (a loop's body as often as it runs)"
    )
    return found


def in_process(target: str, kind: Kind, length: int, limit: float) -> tuple[dict[str, Any], str]:
    """The numbers of one compilation, or why there are none."""
    program = f"from benchmarks.attention import measure; measure({target!r}, {kind!r}, {length})"
    command = [sys.executable, "-c", program]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {}, f"not compiled in {limit:.0f} s"
    if process.returncode:
        lines = [line for line in process.stderr.splitlines() if "Error" in line]
        return {}, (lines or ["no message"])[-1][:200]
    return json.loads(process.stdout.splitlines()[-1]), ""


def measure(target: str, kind: Kind, length: int) -> None:
    """Compile one, and print what the compiler says of it."""
    jax.config.update("jax_platforms", "cpu")
    mesh = sharding.make_mesh("", targets.parse(target).devices())
    few = sys.maxsize if kind == "unrolled" else chunked.MOST_UNROLLED
    with mock.patch.object(chunked, "MOST_UNROLLED", few), jax.set_mesh(mesh):
        began = time.monotonic()
        inputs = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec()))
            for x in shapes(target, length)
        ]
        traced = jax.jit(step("splash" if kind == "splash" else "chunked")).trace(*inputs)
        lowered = traced.lower()
        lowered_at = time.monotonic()
        compiled = lowered.compile()
        done = time.monotonic()
    program = hlo.read(compiled.as_text())
    moved = traffic.memory_traffic(program) + flops.kernel_bytes(traced.jaxpr)
    row = {
        "implementation": kind,
        "length": f"{length:,}",
        "temporaries MiB": compiled.memory_analysis().temp_size_in_bytes / MiB,
        "accessed GiB": compiled.cost_analysis()["bytes accessed"] / GiB,
        "moved GiB": moved / GiB,
        "TFLOP": flops.count(traced.jaxpr) / 1e12,
        "program kB": len(compiled.as_text()) // 1000,
        "trace s": round(lowered_at - began, 1),
        "compile s": round(done - lowered_at, 1),
    }
    print(json.dumps(row))


def shapes(target: str, length: int) -> list[jax.ShapeDtypeStruct]:
    """Queries, keys, values, and the gradient of the output."""
    small = target == "cpu:1"
    heads, kv_heads, size = (8, 2, 64) if small else (32, 8, 128)
    dtype = jnp.float32 if small else jnp.bfloat16
    q, k = (jax.ShapeDtypeStruct((1, length, n, size), dtype) for n in (heads, kv_heads))
    return [q, k, k, q]


def step(implementation: Any) -> Any:
    """The output and the gradients of causal attention."""

    def run(q: Any, k: Any, v: Any, g: Any) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            return attention(q, k, v, causal=True, implementation=implementation)

        out, backward = jax.vjp(attend, q, k, v)
        return out, backward(g)

    return run


if __name__ == "__main__":
    main(tyro.cli(Config, description=Config.__doc__))
