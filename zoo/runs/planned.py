"""Plans of a run's step: in place of training (`--plan v5e:4x4`), or after it ran out of memory."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
from jax.sharding import Mesh

from zoo import sharding
from zoo.planning import report
from zoo.planning.job import Job, make_estimate, wanted_bytes
from zoo.planning.suggestions import show_suggestion
from zoo.planning.targets import parse, present
from zoo.runs.config import Config
from zoo.runs.processes import RunError
from zoo.runs.run import Run
from zoo.training.description import Training


def make_job(run: Run[Config], training: Training) -> Job:
    """The step that a run would take on its largest bucket."""
    config = run.config
    return Job(
        training=training,
        mesh=config.mesh or (sharding.storage_mesh(-1) if config.plan else ""),
        precision=run.precision,
        accumulate=config.accumulate,
        sequence_parallel=config.sequence_parallel,
        clip_norm=config.clip_norm,
        remat=training.remat,
    )


def show(job: Job, target: str) -> NoReturn:
    """Print the estimate of a job on a target, and end the program: nothing is trained."""
    estimate = make_estimate(job, parse(target))
    report.show(estimate)
    if not estimate.memory.fits:
        show_suggestion(estimate, _remat_flag(job))
    raise SystemExit(0)


def _remat_flag(job: Job) -> str | None:
    return None if job.training.remat is None else job.training.remat_flag


@contextlib.contextmanager
def explained(
    mesh: Mesh, make: Callable[[], Job], programs: Callable[[], list[Any]]
) -> Iterator[None]:
    """Within, running out of device memory prints an estimate of the step, and a change that fits.

    `make` describes the step then; `programs` are those compiled for it so far, the largest
    bucket's last.

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
        job, compiled = make(), next(reversed(programs()), None)
        estimate = make_estimate(job, present(mesh), compiled=compiled)
        report.show(estimate)
        found = show_suggestion(estimate, _remat_flag(job))
    advice = "take more devices (--mesh), --accumulate or a smaller batch"
    if found is not None:
        advice = f"this fits: {found.flags}"
    wanted = wanted_bytes(str(failure))
    size = "" if wanted is None else f" at an allocation of {report.gigabytes(wanted)}"
    raise RunError(f"the step ran out of device memory{size}; {advice}") from failure
