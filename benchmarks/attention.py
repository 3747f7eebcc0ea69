"""Attention's memory, traffic and time to compile by the length of a row, from compiling alone.

    python -m benchmarks.attention

compiles the attention of one layer of Llama 3 8B (32 query and 8 key-value heads of 128, bf16, one
causal row), forward and backward, for a TPU v5e (`pip install 'zoo[plan]'`; no TPU is needed), by
each implementation; and that of a small one (8 and 2 heads of 64, fp32) for this machine's CPU.
"unrolled" is "chunked" with its chunks one after another, which a few of them still are. Each
compiles in a process of its own. Writes a table and the numbers to `benchmarks/results`.
"""

import dataclasses
import datetime
import json
import platform
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

from zoo import sharding
from zoo.nn.attention import attention, chunked
from zoo.planning import collectives, flops, hlo, targets

MiB, GiB = 2.0**20, 2.0**30
Kind = Literal["unrolled", "chunked", "splash"]


@dataclass(frozen=True)
class Case:
    """One compilation."""

    target: str
    """Chip to compile for, as of a plan."""
    kind: Kind
    """Implementation."""
    length: int
    """Positions of the row."""

    @property
    def sizes(self) -> tuple[int, int, int, Any]:
        """Query heads, key-value heads, their size, and the dtype."""
        return (8, 2, 64, jnp.float32) if self.target == "cpu:1" else (32, 8, 128, jnp.bfloat16)


@dataclass(frozen=True)
class Config:
    """Compile attention at increasing lengths."""

    target: str = "v5e:1x1"
    """TPU."""
    lengths: tuple[int, ...] = (4_096, 8_192, 32_768, 131_072)
    """Positions of a row there."""
    cpu_lengths: tuple[int, ...] = (4_096, 16_384, 65_536)
    """Positions of a row on the CPU."""
    limit: float = 600.0
    """Seconds after which a compilation is given up, with all that are longer."""
    out: Path = Path("benchmarks/results")
    """Folder of the results; those in the file of today are not compiled again."""
    case: Case | None = None
    """Compile this one alone, and print it as JSON."""


def main(config: Config) -> None:
    """Compile what the results lack, and write the table of all of them."""
    if config.case is not None:
        print(json.dumps(measure(config.case)))
        return
    stem = config.out / f"{datetime.date.today()}-attention"
    numbers = stem.with_suffix(".json")
    found = json.loads(numbers.read_text())["rows"] if numbers.exists() else []
    rows: list[dict[str, Any]] = []
    for case in cases(config):
        done = next((r for r in found if r["case"] == dataclasses.asdict(case)), None)
        same = [r for r in rows if (r["case"]["target"], r["case"]["kind"]) == _series(case)]
        if done is None and any("failure" in row for row in same):
            done = {"case": dataclasses.asdict(case), "failure": "not tried, as a shorter one"}
        rows.append(done or in_process(case, config.limit))
        print(rows[-1], flush=True)
        header = {"command": "python -m benchmarks.attention", **versions()}
        numbers.write_text(json.dumps({**header, "rows": rows}, indent=1) + "\n")
    stem.with_suffix(".md").write_text(table(rows))


def _series(case: Case) -> tuple[str, str]:
    return case.target, case.kind


def cases(config: Config) -> list[Case]:
    """All of them, each implementation by length."""
    kinds: tuple[Kind, ...] = ("splash", "chunked", "unrolled")
    on_tpu = [Case(config.target, kind, n) for kind in kinds for n in config.lengths]
    return on_tpu + [Case("cpu:1", kind, n) for kind in kinds[1:] for n in config.cpu_lengths]


def in_process(case: Case, limit: float) -> dict[str, Any]:
    """The numbers of one compilation, or why there are none."""
    flags = [f"--case.{name}={value}" for name, value in dataclasses.asdict(case).items()]
    # A subcommand of tyro's: the case is optional.
    command = [sys.executable, "-m", "benchmarks.attention", "case:case", *flags]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"case": dataclasses.asdict(case), "failure": f"not compiled in {limit:.0f} s"}
    if process.returncode:
        reason = (process.stderr.strip().splitlines() or ["no message"])[-1]
        return {"case": dataclasses.asdict(case), "failure": reason[:300]}
    return json.loads(process.stdout.splitlines()[-1])


def measure(case: Case) -> dict[str, Any]:
    """Compile one, and ask the compiler."""
    jax.config.update("jax_platforms", "cpu")
    mesh = sharding.make_mesh("", targets.parse(case.target).devices())
    heads, kv_heads, size, dtype = case.sizes
    whole = NamedSharding(mesh, PartitionSpec())
    q, k = (
        jax.ShapeDtypeStruct((1, case.length, n, size), dtype, sharding=whole)
        for n in (heads, kv_heads)
    )
    implementation = "splash" if case.kind == "splash" else "chunked"
    few = sys.maxsize if case.kind == "unrolled" else chunked.MOST_UNROLLED

    def step(q: Any, k: Any, v: Any, g: Any) -> Any:
        attend = lambda q, k, v: attention(q, k, v, causal=True, implementation=implementation)
        out, backward = jax.vjp(attend, q, k, v)
        return out, backward(g)

    with mock.patch.object(chunked, "MOST_UNROLLED", few), jax.set_mesh(mesh):
        began = time.monotonic()
        traced = jax.jit(step).trace(q, k, k, q)
        lowered = traced.lower()
        lowered_at = time.monotonic()
        compiled = lowered.compile()
        done = time.monotonic()
    stats = compiled.memory_analysis()
    return {
        "case": dataclasses.asdict(case),
        "temporaries": stats.temp_size_in_bytes,
        "accessed": compiled.cost_analysis().get("bytes accessed"),
        "flops": flops.count(traced.jaxpr),
        "program": len(compiled.as_text()),
        "trace_seconds": round(lowered_at - began, 1),
        "compile_seconds": round(done - lowered_at, 1),
    }
