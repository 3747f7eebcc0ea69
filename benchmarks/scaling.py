"""Memory and traffic per device by the number of devices, from compiling alone.

    python -m benchmarks.scaling

compiles the train step of Llama 3 8B for 8 to 256 TPU v6e chips, with FSDP and with FSDP and
four-fold tensor parallelism (`pip install 'zoo[plan]'`; no TPU is needed), and compares the bytes
that each device sends with the method's minimum. Writes a table, a plot and the numbers.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import tyro

from zoo import sharding, transformer
from zoo.planning import collectives, command, published
from zoo.planning.job import Estimate, make_estimate
from zoo.planning.targets import prepare
from zoo.sharding.axes import is_parameter

SLICES = {8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
BYTES = 2  # of the compute dtype


@dataclass(frozen=True)
class Config:
    """Compile a model for increasing numbers of devices."""

    model: str = "llama3-8b"
    """Name of a published model."""
    chip: str = "v6e"
    """Chip with two-dimensional slices: v5e or v6e."""
    devices: tuple[int, ...] = tuple(SLICES)
    """Numbers of devices."""
    tensor: tuple[int, ...] = (1, 4)
    """Sizes of the tensor axis; fsdp is the rest."""
    seq_len: int = 2048
    """Tokens per row; a step has one row per device."""
    quick: bool = True
    """Compile with less effort."""
    out: Path = Path("benchmarks/results/2026-11-23-scaling-llama3-8b-v6e")
    """Files to write, without their suffixes."""


def main(config: Config) -> None:
    """Compile what the results lack, and write the table and the plot of all of them."""
    numbers = config.out.with_suffix(".json")
    rows = json.loads(numbers.read_text()) if numbers.exists() else []
    for tensor in config.tensor:
        for devices in config.devices:
            if any((r["devices"], r["tensor"]) == (devices, tensor) for r in rows):
                continue
            row = measure(config, devices, tensor)
            print(row, flush=True)
            rows.append(row)
            rows.sort(key=lambda r: (r["tensor"], r["devices"]))
            numbers.write_text(json.dumps(rows, indent=1) + "\n")
    config.out.with_suffix(".md").write_text(table(config, rows))
    plot(rows, config.out.with_suffix(".png"))


def measure(config: Config, devices: int, tensor: int) -> dict[str, Any]:
    """One compilation: memory and collectives per device, and the minimum of bytes."""
    mesh = f"fsdp={devices // tensor},tensor={tensor}"
    wanted = command.Config(
        model=config.model,
        target=f"{config.chip}:{SLICES[devices]}",
        mesh=mesh,
        batch_size=devices,
        seq_len=config.seq_len,
    )
    target = prepare(wanted.target)
    estimate = make_estimate(
        command.make_job(wanted, command.skeleton_of(wanted, None), target),
        target,
        quick=config.quick,
    )
    by_op: dict[str, float] = {}
    for each in estimate.collectives:
        name = f"{each.kind} {each.dtype} over {each.group_size}: {each.op_name}"
        by_op[name] = by_op.get(name, 0.0) + each.total
    largest = sorted(by_op.items(), key=lambda item: -item[1])[:12]
    return {
        "devices": devices,
        "tensor": tensor,
        "seconds": round(estimate.compile_seconds),
        "memory": dataclasses.asdict(estimate.memory),
        "collectives": collectives.bytes_by_kind(estimate.collectives),
        "minimum": minimum(estimate, config),
        "largest": dict(largest),
    }


def minimum(estimate: Estimate, config: Config) -> dict[str, float]:
    """The minimum of bytes that a device sends, by the cause.

    A layer's parameters are gathered forward and backward, the embedding's and the head's once; all
    gradients are reduced and scattered once. On the tensor axis, activations are all-reduced after
    attention and MLP, forward and backward, after the embedding's look-up, and before the head,
    backward.
    """
    mesh = sharding.make_mesh(estimate.job.mesh, estimate.target.devices())
    fsdp, tensor = mesh.shape["fsdp"], mesh.shape["tensor"]
    sizes = published.named(config.model)
    model = eqx.filter_eval_shape(
        lambda key: transformer.Transformer(sizes, key=key), jax.random.key(0)
    )

    def whole(part: Any) -> float:
        placed = sharding.shardings(part, mesh)
        pairs = zip(jax.tree.leaves(part), jax.tree.leaves(placed), strict=True)
        return sum(
            math.prod(where.shard_shape(x.shape)) * fsdp * BYTES
            for x, where in pairs
            if is_parameter(x) and "fsdp" in where.spec
        )

    ring = (fsdp - 1) / fsdp
    layers, everything = whole(model.blocks), whole(model)
    activations = estimate.job.tokens / fsdp * sizes.d_model * BYTES
    reductions = 4 * sizes.num_layers + 2
    return {
        "gathers": ring * (layers + everything),
        "gradients": ring * everything,
        "activations": reductions * activations * 2 * (tensor - 1) / tensor,
    }


def table(config: Config, rows: list[dict[str, Any]]) -> str:
    """The results as markdown; of the default model, followed by the remarks in scaling.md."""
    is_default = config.model == Config.model
    command_line = "python -m benchmarks.scaling" + f" --model {config.model}" * (not is_default)
    lines = [
        f"# {config.model} on TPU {config.chip}, by compiling alone",
        "",
        f"`{command_line}`: one row of {config.seq_len} tokens per device and step, remat full, "
        "AdamW, bf16 over fp32 masters; GiB per device.",
        "",
        "| devices | mesh | state | temporaries | sent | minimum | ratio | compile time |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        memory, sent = row["memory"], sum(row["collectives"].values())
        least = sum(row["minimum"].values())
        mesh = f"fsdp={row['devices'] // row['tensor']}"
        mesh += f", tensor={row['tensor']}" if row["tensor"] > 1 else ""
        cells = [
            f"{row['devices']}",
            mesh,
            f"{(memory['parameters'] + memory['optimizer']) / 2**30:.2f}",
            f"{memory['temporaries'] / 2**30:.2f}",
            f"{sent / 2**30:.2f}",
            f"{least / 2**30:.2f}",
            f"{sent / least:.2f}",
            f"{row['seconds']} s",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    remarks = Path(__file__).with_name("scaling.md").read_text() if is_default else ""
    return "\n".join([*lines, "", f"![scaling]({config.out.name}.png)", "", remarks])


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot the memory and the bytes sent by the number of devices."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, tensor in enumerate(sorted({row["tensor"] for row in rows})):
        mine = [row for row in rows if row["tensor"] == tensor]
        x, color = [row["devices"] for row in mine], f"C{index}"
        label = "FSDP" if tensor == 1 else f"FSDP × {tensor} TP"
        state = [(r["memory"]["parameters"] + r["memory"]["optimizer"]) / 2**30 for r in mine]
        left.plot(x, [r["memory"]["total"] / 2**30 for r in mine], "o-", color=color, label=label)
        left.plot(x, state, ":", color=color, label=f"{label}: parameters and optimizer")
        sent = [sum(r["collectives"].values()) / 2**30 for r in mine]
        least = [sum(r["minimum"].values()) / 2**30 for r in mine]
        right.plot(x, sent, "o-", color=color, label=label)
        right.plot(x, least, ":", color=color, label=f"{label}: minimum")
    left.set_ylabel("memory per device, GiB")
    right.set_ylabel("sent per device and step, GiB")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks([row["devices"] for row in rows], [str(row["devices"]) for row in rows])
        axes.set_xlabel("devices")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.scaling"))
