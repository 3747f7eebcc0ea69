"""The planner of runs: changes that make a step fit, each of which is compiled.

A plan of a run's step takes the place of training (`--plan v5e:4x4`), or explains a lack of memory.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import jax
from jax.sharding import AbstractMesh

from zoo import sharding
from zoo.nn.precision import Precision
from zoo.planning import report, targets
from zoo.planning.job import Estimate, Job, make_estimate, wanted_bytes
from zoo.planning.targets import Target
from zoo.runs.config import Config
from zoo.runs.run import Run
from zoo.training.description import Training

MOST = 6  # changes that are compiled to find one that fits: each may take a minute
say = functools.partial(print, flush=True)  # into a pipe too, as it takes minutes


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


def suggest(estimate: Estimate, others: Iterable[tuple[str, Job]] = ()) -> str | None:
    """The flags of a change that fits; prints each attempt, and the estimate of the one that fits.

    None if none of the first few does, nor one of `others`, jobs by the flags that make them. A
    change whose state alone does not fit is not compiled.
    """
    job, target = estimate.job, estimate.target
    state = estimate.memory.parameters + estimate.memory.optimizer

    def parts(job: Job) -> int:
        """All storage axes divide the state, and about no others."""
        mesh = sharding.abstract_mesh(job.mesh, target.num_devices)
        return sharding.max_parameter_parts(mesh)

    least, limit = state * parts(job), estimate.memory.limit
    may_fit = (each for each in changes(job, target) if least / parts(each) <= limit)
    few = ((describe(job, each), each) for each in itertools.islice(may_fit, MOST))
    say("\nlooking for a change that fits; each is compiled")
    for given, changed in itertools.chain(few, others):
        say(f"trying {given} …")
        found = attempt(changed, target)
        if found is None or not found.memory.fits:
            continue
        say(f"  {report.gigabytes(found.memory.total)}: fits")
        # A run may be out of memory although its step would fit: others have some of it.
        if found.memory.total < estimate.memory.total:
            say(f"This fits: {given}\n")
            report.show(found)
            return given
    say("Nothing that was tried fits: take more devices, or larger ones.")
    return None


def attempt(job: Job, target: Target) -> Estimate | None:
    """Compile a job, and say why where it cannot be, or how much it takes where it does not fit."""
    try:
        estimate = make_estimate(job, target)
    except ValueError as error:  # of sizes, a kernel, the compiler
        say(f"  it cannot be: {error}")
        return None
    if not estimate.memory.fits:
        say(f"  {report.gigabytes(estimate.memory.total)}: does not fit")
    return estimate


def changes(job: Job, target: Target) -> Iterator[Job]:
    """Jobs that need less memory: recompute, cut the batch, spread the state, split the layers."""
    best, rows = job, job.training.data.batch_size
    num_devices, num_slices = target.num_devices, target.num_slices
    if job.remat_flag is not None and job.remat != "full":
        best = dataclasses.replace(best, remat="full")
        yield best

    def sizes(mesh: str) -> AbstractMesh:
        return sharding.abstract_mesh(mesh, num_devices)

    sharded = dataclasses.replace(best, mesh=sharding.storage_mesh(num_devices, 1, num_slices))
    meshes = [best] if sizes(job.mesh) == sizes(sharded.mesh) else [best, sharded]
    for start in meshes:
        if start is not best:
            yield start
        parts = sharding.num_batch_parts(sizes(start.mesh))
        accumulate = job.accumulate * 2
        while rows % (parts * accumulate) == 0:
            yield dataclasses.replace(start, accumulate=accumulate)
            accumulate *= 2
    for split in (2, 4, 8):
        in_slice = num_devices // num_slices
        if in_slice % split == 0 and in_slice > split:
            mesh = sharding.storage_mesh(num_devices, split, num_slices)
            parts = sharding.num_batch_parts(sizes(mesh))
            accumulate = max(1, rows // parts)
            if rows % (parts * accumulate) == 0:
                yield dataclasses.replace(
                    best, mesh=mesh, accumulate=accumulate, sequence_parallel=True
                )


def describe(job: Job, changed: Job) -> str:
    """The flags that make the one job the other."""
    found = []
    if changed.remat != job.remat:
        found.append(f"{job.remat_flag} {changed.remat}")
    if changed.mesh != job.mesh:
        found.append(f"--mesh {changed.mesh}")
    if changed.sequence_parallel != job.sequence_parallel:
        found.append("--sequence-parallel")
    if changed.accumulate != job.accumulate:
        found.append(f"--accumulate {changed.accumulate}")
    if changed.kernel != job.kernel:
        found.append(f"--kernel {changed.kernel}")
    if changed.xla != job.xla:
        found.append(f"--xla {changed.xla}")
    return " ".join(found)
