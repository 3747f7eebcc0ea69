"""Collectives per network of a step over two slices of TPUs, by replica groups, by compiling alone.

    python -m benchmarks.slices

compiles the train step of Llama 3 8B for two slices (`pip install 'zoo[plan]'`; no TPU is needed),
as one batch and as microbatches, and lists what crosses the network between the slices, and what
stays on the links within each, with the dtype of it. Writes tables and the numbers to
`benchmarks/results`.
"""

import datetime
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.report import Table, provenance, save
from zoo.planning import command, published
from zoo.planning.collectives import Collective
from zoo.planning.job import Estimate, make_estimate
from zoo.planning.targets import prepare


@dataclass(frozen=True)
class Config:
    """Compile a step over slices."""

    model: str = "llama3-8b"
    """Published size."""
    target: str = "2xv5e:4x4"
    """Slices of TPUs."""
    mesh: str = "data=2,fsdp=16"
    """Devices by axis."""
    accumulate: tuple[int, ...] = (1, 2)
    """Numbers of microbatches, each compiled."""
    quick: bool = False
    """Ask the compiler for less effort."""
    out: Path = Path("benchmarks/results")
    """Folder of the results."""


def main(config: Config) -> None:
    """Compile, and write the tables."""
    tables = [measure(config, accumulate) for accumulate in config.accumulate]
    for table in tables:
        table.print()
    source = {"command": "python -m benchmarks.slices", "date": str(datetime.date.today())}
    save("slices", tables, {**source, **provenance()}, config.out)


def measure(
    config: Config, accumulate: int, make: Callable[..., Estimate] = make_estimate
) -> Table:
    """The collectives of a step of so many microbatches, alike ones in one row."""
    target = prepare(config.target)
    wanted = command.Config(
        model=config.model, target=config.target, mesh=config.mesh, accumulate=accumulate
    )
    job = command.make_job(wanted, published.skeleton(config.model), target)
    estimate = make(job, target, quick=config.quick)
    found = Table(
        f"{config.model} on {config.target}, --mesh {config.mesh}, {job.tokens:,} tokens per step, "
        f"microbatches: {accumulate}"
    )
    alike: dict[tuple[Any, ...], list[Collective]] = defaultdict(list)
    for each in estimate.collectives:
        crosses = estimate.topology.between(each) > 0
        alike[not crosses, each.kind, each.dtype, each.group_size].append(each)
    for (inside, kind, dtype, size), group in sorted(alike.items()):
        total = sum(each.total for each in group)
        if inside and total < 2**20:
            continue
        crossing = sum(estimate.topology.between(each) * each.times for each in group)
        found.rows.append(
            {
                "network": "within a slice" if inside else "between slices",
                "collective": kind,
                "dtype": dtype,
                "devices": size,
                "first replica group": _group(group[0]),
                "times per step": sum(each.times for each in group),
                "MiB sent per device and step": total / 2**20,
                "of it between slices": crossing / 2**20,
            }
        )
    slices, parts = target.num_slices, target.num_devices // target.num_slices
    part = 2 * estimate.parameters.count / parts / 2**20
    found.notes.append(
        f"Closed form of what crosses: {2 * (slices - 1) / slices:.3g} · 2 bytes of each of a "
        f"chip's {estimate.parameters.count / parts / 1e6:,.0f} million parameters, "
        f"{2 * (slices - 1) / slices * part:,.0f} MiB, for each reduction. Within a slice, "
        "collectives of less than 1 MiB are left out."
    )
    return found


def _group(collective: Collective) -> str:
    """The devices of the first group, of many the first and the last few."""
    group = [str(device) for device in (collective.groups or ((),))[0]]
    shown = group if len(group) <= 4 else [*group[:2], "…", group[-1]]
    return f"{{{', '.join(shown)}}}"


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.slices"))
