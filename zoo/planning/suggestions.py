"""Changes that make a step fit, the cheapest first, each verified by compiling it."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from jax.sharding import AbstractMesh

from zoo import sharding
from zoo.planning import report
from zoo.planning.compiler import CompilerError
from zoo.planning.job import Estimate, Job, make_estimate
from zoo.planning.targets import Target
from zoo.sharding import ShardingError

_MOST = 6  # compiled changes: each may take a minute


_say = functools.partial(print, flush=True)  # into a pipe too, as it takes minutes


@dataclass(frozen=True)
class Attempt:
    """A changed job, and its estimate."""

    flags: str
    """The change on the command line."""
    estimate: Estimate


def attempt(
    job: Job, target: Target, quick: bool, say: Callable[[str], None], make: Callable[..., Estimate]
) -> Estimate | None:
    """Compile a job, and say why where it cannot be, or how much it takes where it does not fit."""
    try:
        estimate = make(job, target, quick=quick)
    except (ShardingError, CompilerError) as error:
        say(f"  it cannot be: {error}")
        return None
    if not estimate.memory.fits:
        say(f"  {report.gigabytes(estimate.memory.total)}: does not fit")
    return estimate


def changes(job: Job, target: Target, rows: int) -> Iterator[Job]:
    """Jobs that need less memory: recompute, cut the batch, spread the state, split the layers."""
    best, num_devices, num_slices = job, target.num_devices, target.num_slices
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


def suggest(
    estimate: Estimate,
    others: Iterable[tuple[str, Job]] = (),
    *,
    quick: bool = False,
    say: Callable[[str], None] = _say,
    make: Callable[..., Estimate] = make_estimate,
) -> Attempt | None:
    """The first change that fits, by its own compiled program.

    None if none of the first few does, nor one of `others`, jobs by the flags that make them. A
    change whose state alone does not fit is not compiled.
    """
    job, target = estimate.job, estimate.target
    rows = next(iter(job.batch.values())).shape[0]

    def changed_jobs() -> Iterator[tuple[str, Job]]:
        count = 0
        for changed in changes(job, target, rows):
            if _state_alone(changed, estimate, target) > estimate.memory.limit:
                continue
            if count == _MOST:
                say(f"no more than {_MOST} changes are tried")
                return
            count += 1
            yield describe(job, changed), changed

    for flags, changed in itertools.chain(changed_jobs(), others):
        say(f"trying {flags} …")
        found = attempt(changed, target, quick, say, make)
        # A run may be out of memory although its step would fit: others have some of it.
        if found is not None and found.memory.fits:
            say(f"  {report.gigabytes(found.memory.total)}: fits")
            if found.memory.total < estimate.memory.total:
                return Attempt(flags, found)
    return None


def describe(job: Job, changed: Job) -> str:
    """The flags that make the one job the other."""
    flags = []
    if changed.remat != job.remat:
        flags.append(f"{job.remat_flag} {changed.remat}")
    if changed.mesh != job.mesh:
        flags.append(f"--mesh {changed.mesh}")
    if changed.sequence_parallel != job.sequence_parallel:
        flags.append("--sequence-parallel")
    if changed.accumulate != job.accumulate:
        flags.append(f"--accumulate {changed.accumulate}")
    return " ".join(flags)


def _state_alone(job: Job, estimate: Estimate, target: Target) -> float:
    """The approximate bytes of state per device: all storage axes divide it, and no others."""
    kept = (estimate.memory.parameters + estimate.memory.optimizer) * _storage_parts(
        estimate.job.mesh, target.num_devices
    )
    return kept / _storage_parts(job.mesh, target.num_devices)


def _storage_parts(mesh: str, num_devices: int) -> int:
    return sharding.max_parameter_parts(sharding.abstract_mesh(mesh, num_devices))


def show_suggestion(
    estimate: Estimate,
    others: Iterable[tuple[str, Job]] = (),
    *,
    quick: bool = False,
) -> Attempt | None:
    """Look for a change that fits; print each attempt, and the estimate of the one that fits."""
    print("\nlooking for a change that fits; each is compiled", flush=True)
    found = suggest(estimate, others, quick=quick)
    if found is None:
        print("Nothing that was tried fits: take more devices, or larger ones.")
    else:
        print(f"This fits: {found.flags}\n")
        report.show(found.estimate)
    return found
