"""Pipeline parallelism over slices beside data parallelism over them, on paper and by compiling.

    python -m benchmarks.stages
    python -m benchmarks.stages --compiled

The first prints a table of closed forms. Within a slice parameters are stored by FSDP either way;
between slices either gradients are added up (data), or each slice has some of the layers and hands
its activations on (a pipeline, GPipe's or 1F1B's: both wait for (stages - 1) / microbatches of the
compute). All times are least times, at the chips' peaks:

- network: bytes that a chip sends to other slices, by the network's speed. Of data
  2 (n - 1) / n of its part of the gradients, which other work can hide; of a pipeline its part of
  the activations and of their gradients at a boundary.
- links: bytes that a chip sends within its slice: parameters gathered forward and backward, and
  gradients scattered, of all layers once per step; or of a stage's layers per microbatch.

A microbatch has at least one row per chip of a slice, so that a step of r rows per chip has
n r microbatches at most.

The second compiles both for slices that are not there (`pip install 'zoo[plan]'`), and takes the
plan's bound by instruction: the step over all slices by data; and the step of the last stage, its
layers and the head, on a slice by itself with its microbatches one after the other. Layers are
dealt out so that stages have equal work, the head counted as the layers that have as many
parameters. To the stage's time come the bubble, (stages - 1) / microbatches of it, and what crosses
the network, by the closed form.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import tyro

from benchmarks.report import Table, provenance, save
from zoo.nn.parameters import cast
from zoo.planning import command, flops, published, targets
from zoo.planning.job import Estimate, make_estimate
from zoo.planning.roofline import roofline
from zoo.planning.schedule import Times
from zoo.sharding.axes import is_parameter
from zoo.transformer.model import Transformer

BYTES = 2  # of the compute dtype


@dataclass(frozen=True)
class Config:
    """Compare data and pipeline parallelism over slices."""

    models: tuple[str, ...] = ("llama3-8b", "llama3-70b")
    """Names of published sizes."""
    slices: tuple[str, ...] = ("v5e:16x16", "v5p:4x4x4")
    """Slices of TPUs."""
    counts: tuple[int, ...] = (2, 4, 8)
    """Numbers of slices."""
    rows: tuple[int, ...] = (1, 4)
    """Rows per chip and step."""
    seq_len: int = 8192
    """Tokens per row."""
    compiled: bool = False
    """Compile both instead."""
    compiled_on: tuple[str, ...] = ("2xv5e:4x4", "2xv5p:4x4x4")
    """Slices of TPUs to compile for."""
    compiled_rows: tuple[int, ...] = (1, 4)
    """Rows of 4,096 tokens per chip and step, each a microbatch."""
    quick: bool = False
    """Ask the compiler for less effort."""
    results: Path = Path(__file__).parent / "results"
    """Folder for the results."""


def main(config: Config) -> None:
    """Print and save the table."""
    if config.compiled:
        table, command_line = _compiled(config), "python -m benchmarks.stages --compiled"
    else:
        table, command_line = _on_paper(config), "python -m benchmarks.stages"
    table.print()
    source = {"command": command_line, "date": date.today().isoformat()}
    name = "stages-compiled" if config.compiled else "stages"
    save(name, [table], {**source, **provenance()}, config.results)


def _on_paper(config: Config) -> Table:
    table = Table(f"seconds per step, rows of {config.seq_len:,} tokens")
    for model in config.models:
        for slice_ in config.slices:
            for count in config.counts:
                for rows in config.rows:
                    table.rows.append(_compare(config, model, slice_, count, rows))
    table.notes.append(
        "A network's time below that of the compute can be hidden behind it; a bubble can not. "
        "Interleaved stages divide the bubble by their number per slice, and multiply the bytes of "
        "the network by it."
    )
    return table


def _compare(config: Config, model: str, slice_: str, count: int, rows: int) -> dict[str, object]:
    target = targets.parse(slice_)
    chip, chips = target.chip, target.num_devices
    assert chip.flops is not None
    assert chip.network is not None
    assert chip.interconnect is not None
    skeleton = published.skeleton(model)
    parameters = sum(x.size for x in jax.tree.leaves(skeleton) if is_parameter(x))
    per_token = flops.per_token(skeleton, config.seq_len)
    assert per_token is not None
    tokens = rows * config.seq_len  # of a chip's step
    compute = per_token * tokens / chip.flops
    gradients = BYTES * parameters / chips
    data = 2 * (count - 1) / count * gradients / chip.network
    links = 3 * BYTES * parameters * (chips - 1) / chips / chip.interconnect
    microbatches = count * rows
    bubble = (count - 1) / microbatches * compute
    # All tokens cross each boundary, forward and backward, over the chips of a slice.
    width = skeleton.config.d_model
    activations = 2 * BYTES * tokens * count * width / chip.network
    return {
        "model": model,
        "slices": f"{count} x {slice_}",
        "rows per chip": rows,
        "compute": compute,
        "data: network": data,
        "network / compute": data / compute,
        "data: links": links,
        "pipeline: bubble": bubble,
        "bubble / compute": bubble / compute,
        "pipeline: network": activations,
        "pipeline: links": links * microbatches / count,
    }


def _compiled(config: Config) -> Table:
    table = Table("seconds per step, rows of 4,096 tokens, bounds by instruction")
    for name in config.compiled_on:
        for rows in config.compiled_rows:
            try:
                table.rows.append(compare(config, config.models[0], name, rows))
            except NotFitting as error:
                table.notes.append(f"{name} with {rows} rows per chip: {error}.")
            else:
                print(table.rows[-1], flush=True)
    table.notes.append(
        "products, memory, links: of the bound. Pipeline: the stage's bound, times the bubble, and "
        "the network's time, none of which is hidden in this table."
    )
    return table


class NotFitting(ValueError):
    """A step that a chip's memory has no room for: there is no program to take a bound of."""


def compare(
    config: Config,
    model: str,
    slices: str,
    rows: int,
    make: Callable[..., Estimate] = make_estimate,
) -> dict[str, object]:
    """The bounds of a step of so many rows per chip, by data over all slices and by stages."""
    target = targets.prepare(slices)
    count, chips = target.num_slices, target.num_devices // target.num_slices
    alone = targets.prepare(slices.partition("x")[2])
    sizes = published.named(model)
    layer, head = _parameters(model)
    last = round((sizes.num_layers + head / layer) / count - head / layer)

    def bound(layers: int, where: targets.Target, mesh: str, accumulate: int) -> Times:
        wanted = command.Config(
            model=model,
            target=where.name,
            mesh=mesh,
            batch_size=rows * target.num_devices,
            accumulate=accumulate,
        )
        made = dataclasses.replace(sizes, num_layers=layers)
        skeleton = eqx.filter_eval_shape(
            lambda key: cast(Transformer(made, key=key), jnp.bfloat16), jax.random.key(0)
        )
        estimate = make(command.make_job(wanted, skeleton, where), where, quick=config.quick)
        memory, roof = estimate.memory, roofline(estimate)
        if not memory.fits or roof is None:
            room = f"{memory.total / 2**30:.1f} of {memory.limit / 2**30:.1f} GiB"
            raise NotFitting(f"{layers} layers on {where.name}, {mesh}, take {room}")
        return roof.by_op

    microbatches = rows * count
    data = bound(sizes.num_layers, target, f"data={count},fsdp={chips}", rows)
    stage = bound(last, alone, f"fsdp={chips}", microbatches)
    bubble = (count - 1) / microbatches
    assert target.chip.network is not None
    # All tokens cross each boundary, forward and backward, over the chips of a slice.
    network = 2 * BYTES * rows * 4096 * count * sizes.d_model / target.chip.network
    pipeline = stage.seconds * (1 + bubble) + network
    return {
        "model": model,
        "slices": slices,
        "rows per chip": rows,
        "by data": data.seconds,
        "products, memory, links": _parts(data),
        "layers of the last stage": last,
        "microbatches": microbatches,
        "stage": stage.seconds,
        "its products, memory, links": _parts(stage),
        "bubble": stage.seconds * bubble,
        "network": network,
        "by pipeline": pipeline,
        "over data": pipeline / data.seconds,
    }


def _parameters(model: str) -> tuple[float, float]:
    """Of a layer, and of the head."""
    sizes = published.named(model)
    leaves = jax.tree.leaves(published.skeleton(model))
    head = sizes.vocab_size * sizes.d_model
    whole = sum(x.size for x in leaves if is_parameter(x))
    return (whole - 2 * head) / sizes.num_layers, head


def _parts(times: Times) -> str:
    return ", ".join(f"{x:.2f}" for x in (times.compute, times.memory, times.links))


if __name__ == "__main__":
    main(tyro.cli(Config, prog="python -m benchmarks.stages"))
