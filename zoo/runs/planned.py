"""Plans of a recipe's run: instead of it (`--plan v5e:4x4`), or after it ran out of memory."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import optax
from jax.sharding import Mesh
from jaxtyping import PyTree

from zoo.data.plans import Plan as BatchPlan
from zoo.planning import report
from zoo.planning.job import Job, make_plan, wanted_bytes
from zoo.planning.suggestions import show_suggestion
from zoo.planning.targets import parse, present
from zoo.runs.run import Run, RunError
from zoo.training.state import Trainable
from zoo.training.step import LossFunction


def make_job(
    run: Run,
    make_model: Callable[..., PyTree],
    loss_fn: LossFunction,
    optimizer: optax.GradientTransformation,
    plan: BatchPlan,
    *,
    flops_per_token: float | None,
    clip: bool,
    trainable: Trainable | None,
    pretrained: PyTree,
) -> Job:
    """The step that a run would take on its largest bucket."""
    config, bucket = run.config, max(plan.buckets)
    return Job(
        make_model=make_model,
        optimizer=optimizer,
        loss_fn=loss_fn,
        batch=plan.shapes()[bucket],
        tokens=plan.batch_size * (bucket if plan.unit == "tokens" else 1),
        flops_per_token=flops_per_token,
        mesh=config.mesh or ("fsdp=-1" if config.plan else ""),
        precision=config.precision,
        accumulate=config.accumulate,
        sequence_parallel=config.sequence_parallel,
        remat=getattr(getattr(config, "model", None), "remat", None),
        clip_norm=config.clip_norm if clip else None,
        trainable=trainable,
        pretrained=pretrained,
    )


def show(run: Run, job: Job) -> NoReturn:
    """Print the plan of a run for `config.plan`, and end the program: nothing is trained."""
    plan = make_plan(job, parse(run.config.plan))
    report.show(plan)
    if not plan.memory.fits:
        show_suggestion(plan, _remat_flag(job))
    raise SystemExit(0)


def _remat_flag(job: Job) -> str | None:
    return None if job.remat is None else "--model.remat"


@contextlib.contextmanager
def explained(mesh: Mesh, job: Job, programs: Callable[[], list[Any]]) -> Iterator[None]:
    """Within, running out of device memory prints the plan of the step, and what would fit.

    `programs` are those of the step that there are so far, the largest bucket's last.

    Raises:
        RunError: in place of JAX's own error.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        failure = error
    else:
        return
    found = None
    if jax.process_count() == 1:
        compiled = next(reversed(programs()), None)
        plan = make_plan(job, present(mesh), compiled=compiled)
        report.show(plan)
        found = show_suggestion(plan, _remat_flag(job))
    advice = "take more devices (--mesh), --accumulate or a smaller batch"
    if found is not None:
        advice = f"this fits: {found.flags}"
    wanted = wanted_bytes(str(failure))
    size = "" if wanted is None else f" at an allocation of {report.gigabytes(wanted)}"
    raise RunError(f"the step ran out of device memory{size}; {advice}") from failure
