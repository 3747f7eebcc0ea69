"""`python -m zoo plan`: will it fit, how fast can it be, and what bounds it."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import tyro

from zoo import sharding, transformer
from zoo.base.files import local_path
from zoo.data.plans import check_batch_size
from zoo.nn.precision import Precision
from zoo.nn.remat import Policy
from zoo.planning import published, report
from zoo.planning.job import Job, Plan, make_plan
from zoo.planning.suggestions import Attempt, show_suggestion
from zoo.planning.targets import Target, prepare
from zoo.training import losses, optimizers


@dataclass(frozen=True, kw_only=True)
class Config:
    """Compile a train step for devices you need not have: will it fit, and what bounds it?"""

    model: tyro.conf.Positional[str]
    """Published size: llama3-8b, llama3-70b, or qwen3- and 0.6b, 1.7b, 4b, 8b, 14b or 32b."""
    target: str
    """TPU slice, such as v5e:4x4, v5p:4x4x4 or v6e:16x16 (v4 too); or a number of GPUs or virtual
    CPU devices, such as h200:8, h100:8, a100:8 or cpu:8."""
    mesh: str = "fsdp=-1"
    """Devices by axis, such as fsdp=8,tensor=2; -1 takes what is left."""
    batch_size: int | None = None
    """Rows of a batch, on all devices together; one for each part of it if not given."""
    seq_len: int = 4096
    """Tokens of a row."""
    remat: Policy = "full"
    """What the backward pass recomputes: none, dots, dots_no_batch, full."""
    precision: Precision = "bf16"
    """Dtype of activations and products; master weights are fp32."""
    accumulate: int = 1
    """Microbatches that a batch is cut into, one after the other."""
    sequence_parallel: bool = False
    """Split activations along the sequence between the tensor-parallel parts."""
    optimizer: Literal["adamw", "adam", "lion", "adafactor", "muon"] = "adamw"
    """Update rule."""
    suggest: bool = True
    """Where it does not fit, look for a change that does, by compiling it."""
    quick: bool = False
    """Ask the compiler for less effort: quicker, and the memory is less exact."""
    save: Path | None = None
    """File to write the result to, as markdown."""


def main(config: Config) -> None:
    """Compile, print, and look for what fits."""
    save = None if config.save is None else local_path(config.save, "save")
    target = prepare(config.target)
    plan = make_plan(make_job(config, target), target, quick=config.quick)
    report.show(plan)
    found = None
    if config.suggest and not plan.memory.fits:
        found = show_suggestion(plan, "--remat", quick=config.quick)
    if save is not None:
        save.parent.mkdir(parents=True, exist_ok=True)
        save.write_text(_markdown(config, plan, found))


def make_job(config: Config, target: Target) -> Job:
    """The job of a published size."""
    model = published.named(config.model)
    mesh = sharding.make_mesh(config.mesh, target.devices())
    rows = sharding.num_batch_parts(mesh) * config.accumulate
    shape = (config.batch_size or rows, config.seq_len)
    check_batch_size(shape[0], mesh, config.accumulate)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32)
    return Job(
        make_model=lambda key: transformer.Transformer(model, key=key),
        optimizer=optimizers.make_optimizer(optimizers.Config(name=config.optimizer), steps=10_000),
        loss_fn=losses.next_token,
        batch={
            "tokens": ids,
            "targets": ids,
            "weights": jax.ShapeDtypeStruct(shape, jnp.float32),
        },
        tokens=shape[0] * shape[1],
        flops_per_token=transformer.num_flops_per_token(model, config.seq_len),
        mesh=config.mesh,
        precision=config.precision,
        accumulate=config.accumulate,
        sequence_parallel=config.sequence_parallel,
        remat=config.remat,
    )


def _markdown(config: Config, plan: Plan, found: Attempt | None) -> str:
    given = [flag for flag in sys.argv[1:] if flag not in ("--save", str(config.save))]
    command = shlex.join(["python", "-m", "zoo", *given])
    text = f"`{command}`\n\n{report.markdown(plan)}"
    if found is not None:
        text += f"\nWith `{found.flags}` it fits:\n\n{report.markdown(found.plan)}"
    return text
