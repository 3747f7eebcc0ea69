"""The planner of runs.

A plan of a run's step takes the place of training (`--plan v5e:4x4`), or explains a lack of memory.
"""

from typing import Any, NoReturn

import jax

from zoo import sharding
from zoo.nn.precision import Precision
from zoo.planning import report, targets
from zoo.planning.job import Job, make_estimate, wanted_bytes
from zoo.planning.search import suggest
from zoo.runs.config import Config
from zoo.runs.run import Run
from zoo.training.description import Training


def prepare(target: str) -> Precision:
    """Check a target, and leave JAX this machine's CPU alone; the precision of recipes there.

    Raises:
        ValueError, ImportError: as `zoo.planning.targets.prepare`.
    """
    return targets.prepare(target).precision


def show(run: Run[Config], training: Training) -> NoReturn:
    """Print the estimate of a run's step on `config.plan`, and end the program: nothing trains."""
    job = make_job(run, training)
    estimate = make_estimate(job, targets.parse(run.config.plan))
    report.show(estimate)
    if not estimate.memory.fits:
        suggest(estimate)
    raise SystemExit(0)


def explain(run: Run[Config], training: Training, message: str, programs: list[Any]) -> str:
    """A sentence on a step that ran out of device memory, with a change that fits.

    An estimate of the step is printed. `message` is JAX's; `programs` are those compiled for the
    step so far, the largest bucket's last.
    """
    advice = "take more devices (--mesh), --accumulate or a smaller batch"
    if jax.process_count() == 1:
        job, compiled = make_job(run, training), next(reversed(programs), None)
        estimate = make_estimate(job, targets.present(run.mesh), compiled=compiled)
        report.show(estimate)
        if flags := suggest(estimate):
            advice = f"this fits: {flags}"
    wanted = wanted_bytes(message)
    size = "" if wanted is None else f" at an allocation of {report.gigabytes(wanted)}"
    return f"the step ran out of device memory{size}; {advice}"


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
        xla=config.xla,
    )
