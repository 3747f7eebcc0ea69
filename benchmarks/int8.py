"""Training in int8 beside bf16: loss over the default run, and a step's plan by compiling alone.

    python -m benchmarks.int8

runs `python -m recipes.lm` in both precisions (minutes each; a run that has ended is read from its
folder), and compiles a published size for TPUs (`pip install 'zoo[plan]'`; no TPU is needed).
Writes tables, the numbers and a plot of the losses to `benchmarks/results`.
"""

import datetime
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import tyro

from benchmarks.report import Table, provenance, save
from zoo.nn.precision import Precision
from zoo.planning import collectives, command, hlo, products, targets
from zoo.planning.job import Estimate, make_estimate
from zoo.planning.roofline import roofline

PRECISIONS: tuple[Precision, ...] = ("bf16", "int8")
MOST = 0.01  # bits per byte that int8 may have more than bf16
Curve = list[dict[str, float]]


@dataclass(frozen=True)
class Config:
    """Train and plan in int8 and bf16."""

    seeds: tuple[int, ...] = (0, 1)
    """Seeds of the runs; a pair of runs each."""
    runs: Path = Path("runs/int8")
    """Folder of the runs' folders."""
    sizes: tuple[tuple[str, str, str], ...] = (
        ("llama3-8b", "v5e:4x4", "fsdp=16"),
        ("llama3-8b", "v6e:4x4", "fsdp=8,tensor=2"),
    )
    """Published sizes, slices and meshes to compile for."""
    quick: bool = False
    """Ask the compiler for less effort, at the price of less overlap."""
    results: Path = Path(__file__).parent / "results"
    """Folder for the results."""


def main(config: Config) -> None:
    """Train, compile, print and save; exit with 1 if int8 loses more than it may."""
    curves = {
        (precision, seed): train(config.runs, precision, seed)
        for seed in config.seeds
        for precision in PRECISIONS
    }
    tables = [losses_table(curves), *plan_tables(config)]
    for table in tables:
        table.print()
    source = {"command": "python -m benchmarks.int8", "date": str(datetime.date.today())}
    stem = save("int8", tables, {**source, **provenance()}, config.results)
    plot(curves, stem.with_name(f"{stem.name}-losses.png"))
    sys.exit(any(table.failures for table in tables))


def train(runs: Path, precision: Precision, seed: int) -> Curve:
    """The lines of metrics of a default run, which is run if it has not ended."""
    folder = runs / f"{precision}-{seed}"
    if not (folder / "model").exists():
        flags = ["--run-dir", str(folder), "--precision", precision, "--seed", str(seed)]
        subprocess.run([sys.executable, "-m", "recipes.lm", *flags], check=True)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses_table(curves: dict[tuple[Precision, int], Curve]) -> Table:
    """The held-out bits per byte at the end of each run."""
    table = Table("the default run of recipes.lm: held-out bits per byte")
    for seed in dict.fromkeys(seed for _, seed in curves):
        plain, rounded = (curves[precision, seed][-1]["bits_per_byte"] for precision in PRECISIONS)
        apart = [
            abs(a["loss"] - b["loss"])
            for a, b in zip(*(training(curves[p, seed]) for p in PRECISIONS), strict=True)
        ]
        table.rows.append(
            {
                "seed": seed,
                "bf16": f"{plain:.4f}",
                "int8": f"{rounded:.4f}",
                "more": f"{rounded - plain:+.4f}",
                "at most": MOST,
                "training loss apart, mean": f"{sum(apart) / len(apart):.4f}",
            }
        )
        if rounded - plain > MOST:
            table.failures.append(f"seed {seed}: {rounded - plain:.4f} bits per byte more in int8")
    return table


def training(curve: Curve) -> Curve:
    """The lines of training steps."""
    return [line for line in curve if "loss" in line]


def plan_tables(config: Config) -> list[Table]:
    """A table for each size, slice and mesh."""
    jax.config.update("jax_platforms", "cpu")
    return [plan_table(config, *each) for each in config.sizes]


def plan_table(config: Config, size: str, slice_: str, mesh: str) -> Table:
    """What a compiled step multiplies, reads and sends, in both precisions."""
    table = Table(f"{size} on {slice_} ({mesh}), 4,096 tokens per row, remat full: a compiled step")
    for precision in PRECISIONS:
        wanted = command.Config(model=size, target=slice_, mesh=mesh, precision=precision)
        try:
            target = targets.parse(slice_)
            job = command.make_job(wanted, command.skeleton_of(wanted, None), target)
            table.rows.append(plan_row(make_estimate(job, target, quick=config.quick)))
        except ImportError as error:
            table.notes.append(str(error))
    table.notes.append(
        "of a device; bounds at the chip's peaks, of int8 for what is int8; MFU by the peak of bf16"
    )
    return table


def plan_row(estimate: Estimate) -> dict[str, Any]:
    """The numbers of one compiled step."""
    roof, sent = roofline(estimate), collectives.bytes_by_kind(estimate.collectives)
    assert roof is not None
    return {
        "precision": estimate.job.precision,
        "TFLOP": estimate.flops / estimate.num_devices / 1e12,
        "of int8": f"{compiled_flops(estimate, 's8') / compiled_flops(estimate):.0%}",
        "memory, GB": estimate.traffic / 1e9,
        "gathered, GB": sent.get("all-gather", 0.0) / 1e9,
        "reduced, GB": sum(sent.get(kind, 0.0) for kind in ("all-reduce", "reduce-scatter")) / 1e9,
        "sent, GB": sum(sent.values(), 0.0) / 1e9,
        "GiB of memory": estimate.memory.total / 2**30,
        "bound of full overlap, s": roof.seconds,
        "by instruction, s": roof.by_op.seconds,
        "MFU by instruction": f"{roof.utilization(roof.by_op.seconds):.0%}",
    }


def compiled_flops(estimate: Estimate, of: str = "") -> float:
    """FLOPs of the products in a device's compiled program, of operands of a type of HLO's."""
    program = hlo.read(estimate.text)
    return sum(
        visit.times * products.flops(program, visit.computation, instruction, of)
        for visit in hlo.visits(program)
        if not visit.is_fused
        for instruction in visit.computation.instructions.values()
    )


def plot(curves: dict[tuple[Precision, int], Curve], path: Path) -> None:
    """The training losses of both precisions by step, and their difference."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for (precision, seed), curve in curves.items():
        lines = training(curve)
        steps, values = ([line[name] for line in lines] for name in ("step", "loss"))
        style = {"color": f"C{PRECISIONS.index(precision)}", "ls": "-" if seed == 0 else ":"}
        above.plot(steps, values, label=f"{precision}, seed {seed}", **style)
        if precision != PRECISIONS[0]:
            plain = [line["loss"] for line in training(curves[PRECISIONS[0], seed])]
            gap = [a - b for a, b in zip(values, plain, strict=True)]
            below.plot(steps, gap, label=f"seed {seed}", **style)
    above.set_ylabel("training loss, nats per token")
    above.legend()
    below.axhline(0, color="black", lw=0.5)
    below.set_ylabel("int8 less bf16")
    below.set_xlabel("step")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main(tyro.cli(Config, description=Config.__doc__))
