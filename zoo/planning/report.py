"""An estimate as a table."""

import jax
from rich.table import Table

from zoo.planning import collectives, targets
from zoo.planning.efficiency import efficiency
from zoo.planning.job import Estimate, Memory
from zoo.planning.roofline import Roofline, roofline
from zoo.runs.command_line import console
from zoo.training.compiled import flag_options

Rows = list[tuple[str, str, str]]

CONVENTION = (
    "Bytes of a collective are what a device sends around a ring: (n-1)/n of the whole for "
    "all-gather and reduce-scatter, twice that for all-reduce; a permute sends its own bytes."
)


def title(estimate: Estimate) -> str:
    """The model, the devices and the options, in one line."""
    job, chip = estimate.job, estimate.target.chip
    mesh = ",".join(f"{axis}={size}" for axis, size in estimate.mesh.items()) or "one device"
    parts = [
        f"{_number(estimate.num_parameters)} parameters",
        f"{estimate.num_devices} × {chip.name}{_slices(estimate)} ({mesh})",
        f"{job.tokens:,} {job.training.data.unit} per step",
        job.precision,
    ]
    if job.remat is not None:
        parts.append(f"remat {job.remat}")
    if job.accumulate > 1:
        parts.append(f"{job.accumulate} microbatches")
    if job.sequence_parallel:
        parts.append("sequence parallel")
    parts += [job.kernel] if job.kernel is not None else []
    parts += [f"--xla {job.xla}"] if job.xla != "default" else []
    return ", ".join(parts)


def _slices(estimate: Estimate) -> str:
    slices, kind = estimate.target.num_slices, estimate.target.chip.kind
    return f" in {slices} {'slices' if kind == 'tpu' else 'machines'}" if slices > 1 else ""


def sections(estimate: Estimate) -> dict[str, Rows]:
    """The table's sections: rows of a quantity, its amount, and a remark."""
    found = {"memory per device": _memory(estimate.memory)}
    found["compute per step"] = _compute(estimate)
    if estimate.text and estimate.num_devices > 1:
        found["bytes sent per device and step"] = _collectives(estimate)
    roof = roofline(estimate)
    if roof is not None:
        found["bound of full overlap, at the chip's peaks"] = _roofline(estimate, roof)
        found["bound by instruction, overlapped as compiled"] = _by_op(estimate, roof)
        if estimate.target.chip.kind == "tpu":
            found["bound by instruction, overlapped as compiled"] += [_expected(estimate, roof)]
    return found


def gigabytes(size: float) -> str:
    """Bytes as text, in powers of 1024."""
    for unit, name in ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size:,.0f} B"


def _number(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count > 1e8 else f"{count:,}"


def _memory(memory: Memory) -> Rows:
    trained = "trained parameters" if memory.frozen else "parameters"
    rows = [(trained, gigabytes(memory.parameters - memory.frozen), "fp32 masters")]
    rows += [("frozen parameters", gigabytes(memory.frozen), "")] * bool(memory.frozen)
    rows += [
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
    if memory.host:
        rows.append(("of its host", gigabytes(memory.host), "no time there and back is counted"))
    return rows


def _compute(estimate: Estimate) -> Rows:
    rows = [("FLOPs", f"{estimate.flops:.3e}", "all devices, with recomputed and masked ones")]
    if estimate.job.precision == "int8":
        rows.append(("of int8", f"{estimate.int8_flops:.3e}", _int8(estimate)))
    if estimate.model_flops is not None:
        share = estimate.model_flops / estimate.flops if estimate.flops else 0.0
        rows.append(
            ("useful FLOPs", f"{estimate.model_flops:.3e}", f"{share:.0%}, needed by the maths")
        )
    return rows


def _int8(estimate: Estimate) -> str:
    chip = estimate.target.chip
    if not estimate.int8_flops:
        return "compiled for virtual CPU devices, which multiply codes in bf16: counted as that"
    rate = "bf16's rate" if chip.int8 is None else f"{chip.int8 / 1e12:,.0f} TOP/s"
    return f"{estimate.int8_flops / estimate.flops:.0%}, at {rate}; MFU is by the peak of bf16"


def _collectives(estimate: Estimate) -> Rows:
    totals = collectives.bytes_by_kind(estimate.collectives)
    rows: Rows = []
    for kind, total in totals.items():
        times = sum(c.times for c in estimate.collectives if c.kind == kind)
        rows.append((kind, gigabytes(total), f"{times:,} times"))
    everything = sum(totals.values(), 0.0)
    rows.append(("all", gigabytes(everything), ""))
    topology = estimate.topology
    if topology.num_slices > 1:
        outside = collectives.bytes_by_kind(estimate.collectives, topology.between)
        crossing = {kind: size for kind, size in outside.items() if size}
        total = sum(crossing.values(), 0.0)
        remark = ", ".join(f"{kind} {gigabytes(size)}" for kind, size in crossing.items())
        rows.append(("of it, within a slice", gigabytes(everything - total), ""))
        rows.append(("between slices", gigabytes(total), remark))
    return rows


def _roofline(estimate: Estimate, roof: Roofline) -> Rows:
    def share(seconds: float) -> str:
        return "the bound" if seconds == roof.seconds else f"{seconds / roof.seconds:.0%} of it"

    return [
        ("compute", _seconds(roof.compute), share(roof.compute)),
        ("memory", _seconds(roof.memory), share(roof.memory)),
        ("interconnect", _seconds(roof.interconnect), share(roof.interconnect)),
        *_speed(estimate, roof.seconds, f"bound by {roof.bound}, all else hidden"),
    ]


def _by_op(estimate: Estimate, roof: Roofline) -> Rows:
    by_op = roof.by_op

    def share(seconds: float) -> str:
        return f"{seconds / by_op.seconds:.0%}"

    shares = efficiency(estimate.target.chip).best_flash
    flash = min((shares.of_kernel(name, estimate.job.row) for name in estimate.kernels), default=1)
    at = f", flash kernels at {flash:.0%} of the peak" if flash < 1 else ""
    return [
        ("bound by products", _seconds(by_op.compute), share(by_op.compute) + at),
        ("bound by memory", _seconds(by_op.memory), share(by_op.memory)),
        ("waiting for links", _seconds(by_op.links), share(by_op.links)),
        *_speed(estimate, by_op.seconds, "no overlap but the compiler's"),
    ]


# The least and the most of published times over what is expected, and of how many runs:
# benchmarks/results/2026-11-27-calibration.md, by `python -m benchmarks.plans calibration`.
PUBLISHED = {"dense models": (0.95, 1.09, 8), "models with experts": (0.85, 1.14, 3)}


def _expected(estimate: Estimate, roof: Roofline) -> tuple[str, str, str]:
    has_experts = any("gmm" in name for name in estimate.kernels)
    kind = "models with experts" if has_experts else "dense models"
    least, most, runs = PUBLISHED[kind]
    least_s, most_s = (_seconds(each * roof.expected.seconds) for each in (least, most))
    basis = f"at measured shares of the peaks, {least} to {most} of that: {runs} runs of {kind}"
    return ("step, by published runs", f"{least_s} to {most_s}", basis)


def _speed(estimate: Estimate, seconds: float, remark: str) -> Rows:
    unit, mfu = estimate.job.training.data.unit, estimate.utilization(seconds)
    rows = [
        ("step, at least", _seconds(seconds), remark),
        (f"{unit}/s, at most", f"{estimate.job.tokens / seconds:,.0f}", "all devices"),
    ]
    return rows if mfu is None else [*rows, ("MFU, at most", f"{mfu:.0%}", "")]


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{1e3 * seconds:.3f} ms"


def caveats(estimate: Estimate) -> list[str]:
    """The limits of the numbers."""
    chip, found = estimate.target.chip, []
    if not estimate.target.is_exact:
        found.append(
            f"An estimate: no compiler for {chip.name} without one, so this is XLA's program for "
            "as many virtual CPU devices, which fuses less and keeps more arrays than a GPU's."
        )
    if given := flag_options(estimate.job.xla, chip.kind):
        listed = " ".join(f"{name}={value}" for name, value in given.items())
        left_out = "" if estimate.target.is_exact else ", which this estimate leaves out"
        found.append(f"--xla {estimate.job.xla} is {listed}{left_out}.")
    if chip.kind == "gpu" and not estimate.target.present:
        found.append(
            "JAX takes 75% of a GPU's memory, unless XLA_PYTHON_CLIENT_MEM_FRACTION says more."
        )
    if chip.kind == "tpu" and not estimate.target.present:
        found += [f"Warning: {warning}." for warning in targets.compiler_mismatch()]
    if chip.flops is None:
        found.append(f"No peak to quote for {chip.name}, so no bound on the speed.")
    return found


def show(estimate: Estimate) -> None:
    """Print an estimate."""
    out = console()
    out.print(title(estimate), style="bold", highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for name, rows in sections(estimate).items():
        table.add_row(name, "", "", style="bold")
        for what, amount, remark in rows:
            table.add_row(f"  {what}", amount, remark)
    out.print(table)
    for line in [*caveats(estimate), CONVENTION]:
        out.print(line, style="dim", highlight=False)
    by = ""
    if estimate.target.chip.kind == "tpu":
        by = f" by libtpu {targets.compiler_version()} with jax {jax.__version__}"
    seconds = f"compiled in {estimate.compile_seconds:.0f} s{by}"
    out.print(seconds, style="dim", highlight=False)
