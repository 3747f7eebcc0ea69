"""Small jobs and estimates for the tests of planning."""

import functools
from pathlib import Path

from helpers import small_config

import zoo
from zoo import losses, optimizers, transformer
from zoo.planning import (
    command,
    flops,
    targets,
)
from zoo.planning.job import Job, make_estimate


def job(rows=8, seq=16, mesh="fsdp=8", **changes):
    sizes = small_config(**changes.pop("model", {}))
    training = zoo.Training(
        make_model=lambda key: transformer.Transformer(sizes, key=key),
        optimizer=optimizers.make_optimizer(optimizers.Config(), 100),
        loss_fn=losses.next_token,
        data=command.TokenRows(rows, seq),
        evaluate=lambda model, whole: {},
        flops_per_token=transformer.num_flops_per_token(sizes, seq),
        remat=changes.get("remat"),
        remat_flag="--remat",
    )
    return Job(**{"training": training, "mesh": mesh, "precision": "fp32", **changes})


@functools.cache
def small_estimate():
    """One plan for the tests that read it alone."""
    return make_estimate(job(), targets.parse("cpu:8"))


def moved(jaxpr):
    return sum(size for _, size in flops.of_kernels(jaxpr).values())


QUOTED = Path(__file__).parents[2] / "docs" / "tutorials" / "plan.md"
