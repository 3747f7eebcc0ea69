"""A plan as a table, and as a paragraph of markdown."""

from rich.console import Console
from rich.table import Table

from zoo.planning import collectives
from zoo.planning.job import Memory, Plan
from zoo.planning.roofline import Roofline, roofline

Rows = list[tuple[str, str, str]]

CONVENTION = (
    "Bytes of a collective are what a device sends around a ring: (n-1)/n of the whole for "
    "all-gather and reduce-scatter, twice that for all-reduce; a permute sends what it holds."
)


def title(plan: Plan) -> str:
    """What the plan is of, in a line."""
    job, chip = plan.job, plan.target.chip
    mesh = ",".join(f"{axis}={size}" for axis, size in plan.mesh.items()) or "one device"
    parts = [
        f"{plan.num_parameters / 1e9:.2f}B parameters"
        if plan.num_parameters > 1e8
        else f"{plan.num_parameters:,} parameters",
        f"{plan.num_devices} × {chip.name} ({mesh})",
        f"{job.tokens:,} tokens a step",
        job.precision,
    ]
    if job.remat is not None:
        parts.append(f"remat {job.remat}")
    if job.accumulate > 1:
        parts.append(f"{job.accumulate} microbatches")
    if job.sequence_parallel:
        parts.append("sequence parallel")
    return ", ".join(parts)


def sections(plan: Plan) -> dict[str, Rows]:
    """The table's sections: rows of what, how much, and a remark."""
    found = {"memory a device": _memory(plan.memory)}
    found["compute a step"] = _compute(plan)
    if plan.text and plan.num_devices > 1:
        found["bytes sent a device a step"] = _collectives(plan)
    roof = roofline(plan)
    if roof is not None:
        found["at the chip's peaks"] = _roofline(roof)
    return found


def gigabytes(size: float) -> str:
    """Bytes as text, in powers of 1024."""
    for unit, name in ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size:,.0f} B"


def _memory(memory: Memory) -> Rows:
    rows = [
        ("parameters", gigabytes(memory.parameters), "fp32 masters"),
        ("optimizer", gigabytes(memory.optimizer), ""),
        ("batch", gigabytes(memory.batch), ""),
    ]
    if memory.temporaries is not None:
        temporaries = gigabytes(memory.temporaries)
        rows.append(("temporaries", temporaries, "activations, gradients, gathered layers"))
    if memory.program:
        rows.append(("program", gigabytes(memory.program), ""))
    has = f"of {gigabytes(memory.limit)}"
    share = f"{memory.total / memory.limit:.0%}"
    verdict = f"{share}: {'fits' if memory.fits else 'does not fit'}"
    verdict += ", and the compiler gave up" if memory.is_refused else ""
    rows.append(("all", gigabytes(memory.total), f"{has}, {verdict}"))
    if memory.peak is not None:
        rows.append(("at the peak", gigabytes(memory.peak), "as parts of it take turns"))
    return rows


def _compute(plan: Plan) -> Rows:
    rows = [("FLOPs", f"{plan.flops:.3e}", "all devices, what is recomputed or masked too")]
    if plan.model_flops is not None:
        share = plan.model_flops / plan.flops if plan.flops else 0.0
        rows.append(
            ("useful FLOPs", f"{plan.model_flops:.3e}", f"{share:.0%}, what the maths needs")
        )
    return rows


def _collectives(plan: Plan) -> Rows:
    totals = collectives.bytes_by_kind(plan.collectives)
    rows: Rows = []
    for kind, total in totals.items():
        times = sum(c.times for c in plan.collectives if c.kind == kind)
        rows.append((kind, gigabytes(total), f"{times:,} times"))
    rows.append(("all", gigabytes(sum(totals.values(), 0.0)), ""))
    if plan.unknown_loops:
        names = ", ".join(plan.unknown_loops)
        rows.append(("", "", f"counted once, as their turns are not known: {names}"))
    return rows


def _roofline(roof: Roofline) -> Rows:
    def share(seconds: float) -> str:
        return "the bound" if seconds == roof.seconds else f"{seconds / roof.seconds:.0%} of it"

    rows = [
        ("compute", _seconds(roof.compute), share(roof.compute)),
        ("memory", _seconds(roof.memory), share(roof.memory)),
        ("interconnect", _seconds(roof.interconnect), share(roof.interconnect)),
        ("tokens/s, at most", f"{roof.tokens_per_second:,.0f}", "all devices, all else hidden"),
    ]
    if roof.mfu is not None:
        rows.append(("MFU, at most", f"{roof.mfu:.0%}", f"bound by {roof.bound}"))
    return rows


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{1e3 * seconds:.3f} ms"


def caveats(plan: Plan) -> list[str]:
    """What a reader has to know to trust the numbers."""
    chip, found = plan.target.chip, []
    if not plan.target.is_exact:
        found.append(
            f"An estimate: no compiler for {chip.name} without one, so this is XLA's program for "
            "as many virtual CPU devices, which fuses and keeps other things than a GPU's."
        )
    if chip.kind == "cpu":
        found.append("No peak to quote for a CPU, so no bound on the speed.")
    return found


def show(plan: Plan, console: Console | None = None) -> None:
    """Print a plan."""
    console = console or Console()
    console.print(title(plan), style="bold", highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for name, rows in sections(plan).items():
        table.add_row(name, "", "", style="bold")
        for what, amount, remark in rows:
            table.add_row(f"  {what}", amount, remark)
    console.print(table)
    for line in [*caveats(plan), CONVENTION]:
        console.print(line, style="dim", highlight=False)
    console.print(f"compiled in {plan.compile_seconds:.0f} s", style="dim", highlight=False)


def markdown(plan: Plan) -> str:
    """A plan as markdown."""
    lines = [title(plan) + ".", ""]
    lines += ["| | | |", "| --- | ---: | --- |"]
    for name, rows in sections(plan).items():
        lines.append(f"| **{name}** | | |")
        lines += [f"| {what} | {amount} | {remark} |" for what, amount, remark in rows]
    lines += ["", *caveats(plan), CONVENTION, f"Compiled in {plan.compile_seconds:.0f} s."]
    return "\n".join(lines) + "\n"
