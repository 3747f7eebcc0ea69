"""Plans of steps, by compiling alone (`pip install 'zoo[plan]'`; no TPU is needed).

python -m benchmarks.plans calibration    # published step times beside a plan's bounds
python -m benchmarks.plans scaling        # memory and traffic per device by the number of devices
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from benchmarks.harness import Table, main
from zoo import sharding
from zoo.nn.attention.attention import Implementation
from zoo.nn.remat import Policy
from zoo.nn.stateful import cast
from zoo.planning import collectives, command, targets
from zoo.planning.job import Estimate, make_estimate
from zoo.planning.roofline import Times, roofline
from zoo.planning.sizes import SIZES
from zoo.sharding.axes import is_parameter
from zoo.training.compiled import Flags
from zoo.transformer.config import Config as Sizes
from zoo.transformer.flops import num_flops_per_token
from zoo.transformer.model import Transformer
from zoo.transformer.part_configs import AttentionConfig

BYTES = 2  # of the compute dtype


def skeleton(sizes: Sizes) -> Transformer:
    """A model of these sizes in bf16, without weights."""
    make = lambda key: cast(Transformer(sizes, key=key), jnp.bfloat16)  # noqa: E731
    return eqx.filter_eval_shape(make, jax.random.key(0))


def compiled(sizes: Sizes, target: str, **options: Any) -> Estimate:
    """The compiled step of a training; options are flags of `python -m zoo plan`."""
    where = targets.prepare(target)
    wanted = command.Config(model="", target=target, **options)
    return make_estimate(command.make_job(wanted, skeleton(sizes), where), where)


# --- Published step times -------------------------------------------------------------------------

_RECIPES = "https://github.com/AI-Hypercomputer/tpu-recipes/blob/c8cfe2f/training/trillium"
_MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext/blob/e591f30"
_LLAMA2_70B = dataclasses.replace(SIZES["llama3-70b"], vocab_size=32_000, max_seq_len=4096)
# MaxText's model of no name, by `global_parameter_scale`: gated MLP, as many heads of keys as of
# queries, 128 wide.
_MAXTEXT_16B = Sizes(
    vocab_size=32_000, d_model=4096, num_layers=32, num_heads=64, d_ff=28_672, max_seq_len=2048,
    attention=AttentionConfig(num_kv_heads=64, head_dim=128),
)  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A step of which somebody has published the time."""

    model: str
    sizes: Sizes
    target: str
    rows: float
    """Of each device."""
    seq_len: int
    seconds: float
    source: str
    remark: str
    """Where the published number comes from, or differs from the plan's step."""
    remat: Policy = "full"
    accumulate: int = 1
    """Microbatches of the plan's step, where its whole batch does not fit."""
    mesh: str = sharding.storage_mesh(-1)
    xla: Flags = "default"
    """Set of the compiler's flags, as the published run has them."""
    kernel: Implementation = "auto"


_OFFLOADS = "the published run keeps projections on the host, and recomputes the MLP"


def _llama_8b(
    chips: int, slice_: str, rows: int, seconds: float, xla: Flags = "default"
) -> Published:
    source = f"{_RECIPES}/Llama3.1-8B-MaxText/v6e-{chips}/README.md"
    remark = _OFFLOADS + (f"; compiled with its flags, --xla {xla}" if xla != "default" else "")
    sizes = SIZES["llama3-8b"]
    return Published(
        "Llama 3.1 8B", sizes, f"v6e:{slice_}", rows, 8192, seconds, source, remark, xla=xla
    )


RUNS = {
    "8b-v6e-16": _llama_8b(16, "4x4", 3, 3.393),
    "8b-v6e-32": _llama_8b(32, "4x8", 3, 3.495),
    "8b-v6e-32-flags": _llama_8b(32, "4x8", 3, 3.495, "scatter_layouts"),
    "8b-v6e-128": _llama_8b(128, "8x16", 4, 4.602),
    "8b-v6e-256": _llama_8b(256, "16x16", 4, 4.546),
    "8b-context-v5p-64": Published(
        "Llama 3.1 8B", SIZES["llama3-8b"], "v5p:4x4x4", 0.5, 65_536,
        32_768 * num_flops_per_token(SIZES["llama3-8b"], 65_536) / 243.3e12,
        "https://github.com/AI-Hypercomputer/maxtext/pull/4687",
        "rows of 65,536 tokens, heads exchanged over 4 chips; the time is that of the published "
        "243.3 TFLOP/s per chip, and that run keeps the output of attention",
        mesh="fsdp=16,context=4",
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
    "70b-tpu7x-64": Published(
        "Llama 3.1 70B", SIZES["llama3-70b"], "tpu7x:4x4x4", 2, 8192, 12.20,
        _RECIPES.replace("trillium", "ironwood/README.md"),
        "the published run has moments partly in bf16; ours, in fp32, take 97.0 of 94.75 GiB",
        remat="save:query,key,value", xla="gathers", kernel="splash_fused",
    ),
    "mixtral-v6e-256": Published(
        "Mixtral 8x7B", SIZES["mixtral-8x7b"], "v6e:16x16", 12, 4096, 13.484,
        f"{_RECIPES}/Mixtral-8x7B-MaxText/README.md",
        "the published run drops tokens beyond 1.25 of an expert's even share, and keeps "
        "projections on the host; without that 8 of its 12 rows take 33.8 GiB of a chip's 32, so "
        "the plan's step has three microbatches, and gathers three times",
        accumulate=3,
    ),
    "mixtral-v5p-256": Published(
        "Mixtral 8x7B", SIZES["mixtral-8x7b"], "v5p:4x4x8", 36, 4096, 36 * 4096 / 2909,
        f"{_MAXTEXT}/docs/reference/models/tiering.md",
        "of the published 2,909 tokens/s per chip, with weights of bf16; with fp32 masters the "
        "batch takes 122 GiB of a chip's 95, so the plan's step has two microbatches, and gathers "
        "twice",
        accumulate=2,
    ),
    "llama2-70b-v6e-256": Published(
        "Llama 2 70B", _LLAMA2_70B, "v6e:16x16", 2, 4096, 9.052,
        f"{_RECIPES}/Llama2-70B-MaxText/README.md", _OFFLOADS,
    ),
}  # fmt: skip


def calibration(runs: tuple[str, ...] = tuple(RUNS)) -> list[Table]:
    """Set the times that MaxText publishes beside the bounds of a plan of the same step: an hour.

    Args:
        runs: names of the runs to compile.
    """
    table = Table("published step times beside the plan's bounds, seconds")
    for run in (RUNS[name] for name in runs):
        devices = targets.parse(run.target).num_devices
        step = compiled(
            run.sizes,
            run.target,
            mesh=run.mesh,
            batch_size=int(run.rows * devices),
            seq_len=run.seq_len,
            remat=run.remat,
            accumulate=run.accumulate,
            xla=run.xla,
            kernel=run.kernel,
        )
        tokens = f"{run.rows * run.seq_len:,.0f}"
        row = {"model": run.model, "slice": run.target, "tokens per chip": tokens}
        if (roof := roofline(step)) is None:
            table.notes.append(f"{run.model}: {step.memory.total / 2**30:.1f} GiB do not fit")
            continue
        bound = roof.by_op.seconds
        reached = step.utilization(bound) * bound / run.seconds
        row |= {
            "bound of full overlap": f"{roof.seconds:.2f} ({roof.bound})",
            "by instruction": f"{bound:.2f}",
            "products, memory, links": _parts(roof.by_op),
            "expected": f"{roof.expected.seconds:.2f}",
            "published": f"{run.seconds:.2f}",
            "ratio": f"{run.seconds / roof.expected.seconds:.2f}",
            "MFU: bound, published": f"{step.utilization(bound):.0%}, {reached:.0%}",
        }
        table.add(**row)
        table.notes.append(f"{run.model} on {run.target}: {run.remark}. {run.source}")
    return [table]


def _parts(times: Times) -> str:
    return ", ".join(f"{x:.2f}" for x in (times.compute, times.memory, times.links))


# --- Scaling --------------------------------------------------------------------------------------

SLICES = {8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}


def scaling(
    model: str = "llama3-8b",
    chip: str = "v6e",
    devices: tuple[int, ...] = tuple(SLICES),
    tensor: tuple[int, ...] = (1, 4),
    seq_len: int = 2048,
) -> list[Table]:
    """Compile a step for more and more devices, and set the bytes sent beside the fewest.

    Args:
        model: name of a published model.
        chip: chip with two-dimensional slices: v5e or v6e.
        devices: numbers of devices.
        tensor: sizes of the tensor axis; fsdp is the rest.
        seq_len: tokens per row; a step has one row per device.
    """
    sizes = SIZES[model]
    table = Table(f"{model} on TPU {chip}: one row of {seq_len} tokens per device; GiB per device")
    for size in tensor:
        for count in devices:
            mesh, target = f"fsdp={count // size},tensor={size}", f"{chip}:{SLICES[count]}"
            options = {"mesh": mesh, "batch_size": count, "seq_len": seq_len}
            step = compiled(sizes, target, **options)
            sent = sum(collectives.bytes_by_kind(step.collectives).values())
            least = minimum(step, sizes)
            table.add(
                **{
                    "devices": count,
                    "mesh": mesh,
                    "state": (step.memory.parameters + step.memory.optimizer) / 2**30,
                    "temporaries": step.memory.temporaries / 2**30,
                    "sent": sent / 2**30,
                    "minimum": least / 2**30,
                    "ratio": sent / least,
                    "compile s": round(step.compile_seconds),
                }
            )
    return [table]


def minimum(estimate: Estimate, sizes: Sizes) -> float:
    """The minimum of bytes that a device sends.

    A layer's parameters are gathered forward and backward, the embedding's and the head's once; all
    gradients are reduced and scattered once. On the tensor axis, activations are all-reduced after
    attention and MLP, forward and backward, after the embedding's look-up, and before the head,
    backward.
    """
    mesh = sharding.make_mesh(estimate.job.mesh, estimate.target.devices())
    fsdp, tensor = mesh.shape["fsdp"], mesh.shape["tensor"]
    model = skeleton(sizes)

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
    sums = reductions * activations * 2 * (tensor - 1) / tensor
    return ring * (layers + 2 * everything) + sums


if __name__ == "__main__":
    main(calibration, scaling)
