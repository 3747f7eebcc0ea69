"""Published step times beside the bounds of a plan, by compiling alone.

    python -m benchmarks.calibration

compiles the train steps whose times MaxText publishes for slices of TPUs (`pip install
'zoo[plan]'`; no TPU is needed), and sets the plan's bounds beside them. Writes a table and the
numbers; what the numbers have is not compiled again.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import tyro

from zoo.nn.parameters import cast
from zoo.nn.remat import Policy
from zoo.planning import command, published
from zoo.planning.job import make_estimate
from zoo.planning.roofline import roofline
from zoo.planning.targets import prepare
from zoo.transformer.config import Config as Sizes
from zoo.transformer.model import Transformer

_RECIPES = "https://github.com/AI-Hypercomputer/tpu-recipes/blob/c8cfe2f/training/trillium"
_MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext/blob/e591f30"
_LLAMA2_70B = dataclasses.replace(
    published.named("llama3-70b"), vocab_size=32_000, max_seq_len=4096
)
# MaxText's model of no name, by `global_parameter_scale`: gated MLP, as many heads of keys as of
# queries, 128 wide.
_MAXTEXT_16B = Sizes(
    vocab_size=32_000, d_model=4096, num_layers=32, num_heads=64, num_kv_heads=64, head_dim=128,
    d_ff=28_672, max_seq_len=2048,
)  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A step of which somebody has published the time."""

    model: str
    sizes: Sizes
    target: str
    rows: int
    """Of each device."""
    seq_len: int
    seconds: float
    source: str
    remark: str = ""
    """Where the published number comes from, or differs from the plan's step."""
    remat: Policy = "full"
    accumulate: int = 1
    """Microbatches of the plan's step, where its whole batch does not fit."""


_OFFLOADS = "the published run keeps projections on the host, and recomputes the MLP"
RUNS = {
    "8b-v6e-16": Published(
        "Llama 3.1 8B", published.named("llama3-8b"), "v6e:4x4", 3, 8192, 3.393,
        f"{_RECIPES}/Llama3.1-8B-MaxText/v6e-16/README.md", _OFFLOADS,
    ),
    "16b-v5e-256": Published(
        "MaxText 16B", _MAXTEXT_16B, "v5e:16x16", 6, 2048, 10.31,
        f"{_MAXTEXT}/src/maxtext/configs/tpu/v5e/README.md",
        "the time is that of the published 120 TFLOP/s per chip, attention without its mask",
    ),
    "llama2-70b-v5p-64": Published(
        "Llama 2 70B", _LLAMA2_70B, "v5p:4x4x4", 2, 4096, 8192 / 692,
        f"{_MAXTEXT}/docs/reference/models/tiering.md",
        "of the published 692 tokens/s per chip; that run recomputes one product of the MLP alone",
    ),
    "mixtral-v6e-256": Published(
        "Mixtral 8x7B", published.named("mixtral-8x7b"), "v6e:16x16", 8, 4096, 8.409,
        f"{_RECIPES}/Mixtral-8x7B-MaxText/README.md",
        "the published run drops tokens beyond 1.25 of an expert's even share, and keeps "
        "projections on the host; without that the batch takes 33.8 GiB of a chip's 32, so the "
        "plan's step has two microbatches, and gathers twice",
        accumulate=2,
    ),
    "mixtral-v5p-256": Published(
        "Mixtral 8x7B", published.named("mixtral-8x7b"), "v5p:4x4x8", 36, 4096, 36 * 4096 / 2909,
        f"{_MAXTEXT}/docs/reference/models/tiering.md",
        "of the published 2,909 tokens/s per chip, with weights of bf16; with fp32 masters the "
        "batch takes 122 GiB of a chip's 95, so the plan's step has two microbatches, and gathers "
        "twice",
        accumulate=2,
    ),
    "8b-v6e-32": Published(
        "Llama 3.1 8B", published.named("llama3-8b"), "v6e:4x8", 3, 8192, 3.495,
        f"{_RECIPES}/Llama3.1-8B-MaxText/v6e-32/README.md", _OFFLOADS,
    ),
    "llama2-70b-v6e-256": Published(
        "Llama 2 70B", _LLAMA2_70B, "v6e:16x16", 2, 4096, 9.052,
        f"{_RECIPES}/Llama2-70B-MaxText/README.md", _OFFLOADS,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Compile the steps whose times are published."""

    runs: tuple[str, ...] = tuple(RUNS)
    """Names of the runs to compile."""
    out: Path = Path("benchmarks/results/2026-11-23-calibration")
    """Files to write, without their suffixes."""


def main(config: Config) -> None:
    """Compile what the results lack, and write the table of all of them."""
    numbers = config.out.with_suffix(".json")
    found: dict[str, Any] = json.loads(numbers.read_text()) if numbers.exists() else {}
    for name in config.runs:
        if name not in found:
            print(f"{name} …", flush=True)
            found[name] = measure(RUNS[name])
            print(found[name], flush=True)
            numbers.write_text(json.dumps(found, indent=1) + "\n")
    config.out.with_suffix(".md").write_text(table(found))


def measure(run: Published, make: Callable[..., Any] = make_estimate) -> dict[str, Any]:
    """The bounds of a run's step, and their parts, in seconds."""
    target = prepare(run.target)
    wanted = command.Config(
        model=run.model,
        target=run.target,
        batch_size=run.rows * target.num_devices,
        seq_len=run.seq_len,
        remat=run.remat,
        accumulate=run.accumulate,
    )
    model = eqx.filter_eval_shape(
        lambda key: cast(Transformer(run.sizes, key=key), jnp.bfloat16), jax.random.key(0)
    )
    estimate = make(command.make_job(wanted, model, target), target)
    roof = roofline(estimate)
    if roof is None:
        return {"refused": estimate.memory.total / 2**30, "compile": estimate.compile_seconds}
    return {
        "overlapped": roof.seconds,
        "bound": roof.bound,
        "by_op": roof.by_op.seconds,
        "products": roof.by_op.compute,
        "memory": roof.by_op.memory,
        "links": roof.by_op.links,
        "mfu": roof.utilization(roof.by_op.seconds),
        "peak": (estimate.memory.peak or estimate.memory.total) / 2**30,
        "compile": estimate.compile_seconds,
    }


def table(found: dict[str, Any]) -> str:
    """The results as markdown, followed by the remarks in calibration.md."""
    lines = [
        "# Published step times beside the plan's bounds",
        "",
        "`python -m benchmarks.calibration`: the same model, slice, rows and tokens per row, FSDP "
        "over all chips, rematerialisation as the plan has it. Seconds per step; the ratio is the "
        "published time over the bound by instruction.",
        "",
        "| model | slice | tokens per chip | bound of full overlap | by instruction | products, "
        "memory, links | published | ratio | MFU: bound, published |",
        "| --- | --- | ---: | ---: | ---: | --- | ---: | ---: | --- |",
    ]
    notes = []
    for name, run in RUNS.items():
        if name not in found:
            continue
        row = found[name]
        cells = [run.model, run.target, f"{run.rows * run.seq_len:,}"]
        if "refused" in row:
            refused = f"does not fit: {row['refused']:.1f} GiB"
            cells += [refused, "", "", f"[{run.seconds:.2f}]({run.source})", "", ""]
        else:
            parts = ", ".join(f"{row[part]:.2f}" for part in ("products", "memory", "links"))
            mfu = row["mfu"] * row["by_op"] / run.seconds
            cells += [
                f"{row['overlapped']:.2f} ({row['bound']})",
                f"{row['by_op']:.2f}",
                parts,
                f"[{run.seconds:.2f}]({run.source})",
                f"**{run.seconds / row['by_op']:.2f}**",
                f"{row['mfu']:.0%}, {mfu:.0%}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
        if run.remark:
            notes.append(f"- {run.model} on {run.target}: {run.remark}.")
    remarks = Path(__file__).with_name("calibration.md")
    return "\n".join([*lines, "", *notes, "", remarks.read_text()])


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.calibration"))
