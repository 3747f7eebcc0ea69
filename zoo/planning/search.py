"""The fastest settings of a step, or the first that fit: each is compiled, as training compiles it.

Settings are flags of the compiler, remat, microbatches, the attention kernel and the mesh.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import AbstractMesh

from zoo import sharding
from zoo.planning import report
from zoo.planning.job import Estimate, Job, make_estimate
from zoo.planning.meshes import Candidate
from zoo.planning.roofline import roofline
from zoo.planning.targets import Target
from zoo.training.compiled import flag_sets

MOST = 6  # changes that are compiled to find one that fits: each may take a minute
_POLICIES = ["full", "save:query,key,value", "dots_no_batch", "dots", "none"]
_OTHERS = 2  # meshes that are compiled beside the best one by hand
say = functools.partial(print, flush=True)  # into a pipe too, as it takes minutes


def suggest(estimate: Estimate, others: Iterable[tuple[str, Job]] = ()) -> str | None:
    """The flags of a change that fits; prints each attempt, and the estimate of the one that fits.

    None if none of the first few does, nor one of `others`, jobs by the flags that make them. A
    change whose state alone does not fit is not compiled.
    """
    job, target, memory = estimate.job, estimate.target, estimate.memory

    def parts(job: Job) -> int:
        """All storage axes divide the state, and about no others."""
        mesh = sharding.abstract_mesh(job.mesh, target.num_devices)
        return sharding.max_parameter_parts(mesh)

    least = (memory.parameters + memory.optimizer) * parts(job)
    may_fit = (each for each in changes(job, target) if least / parts(each) <= memory.limit)
    few = ((describe(job, each), each) for each in itertools.islice(may_fit, MOST))
    say("\nlooking for a change that fits; each is compiled")
    # A run may be out of memory although its step would fit: others have some of it.
    found = Search(job, target).first(itertools.chain(few, others), memory.total)
    if found is None:
        say("Nothing that was tried fits: take more devices, or larger ones.")
        return None
    given, estimate = found
    say(f"This fits: {given}\n")
    report.show(estimate)
    return given


def fastest(found: list[Candidate], job: Job, target: Target) -> tuple[Estimate, str]:
    """The fastest settings for a job, with the reason; each is compiled, as training compiles it.

    It begins with the best mesh by hand whose step fits, or with its first change that does, and
    tries one kind of settings after another, the kinds first that have been worth the most.

    Raises:
        ValueError: no mesh divides, or none fits.
    """
    fitting = [each for each in found if each.state < target.chip.memory]
    say(f"{len(found)} meshes divide the model and the batch; the state of {len(fitting)} fits")
    trial = Search(job, target)
    jobs = [dataclasses.replace(job, mesh=each.mesh) for each in fitting]
    with trial.stage("settings that fit"):  # what needs less memory on the first mesh, or others
        less = (each for first in jobs[:1] for each in changes(first, target))
        few = [*jobs[:1], *itertools.islice(less, MOST - 1 - _OTHERS), *jobs[1:]][:MOST]
        trial.first((describe(job, each), each) for each in few)
    if trial.best is None:
        raise ValueError(
            f"mesh='search': none of the {len(trial.tried)} settings that were compiled, of "
            f"{len(found)} meshes of {target.name}, fits: take more devices, --accumulate, "
            "--remat full, or a --batch-size that they divide"
        )
    if target.chip.kind == "tpu":  # the estimate of a GPU is of a program for CPUs
        with trial.stage("flags of the compiler"):
            for name in flag_sets("tpu"):
                trial.change(xla=name)
    with trial.stage("remat and microbatches"):
        trial.keep_more()
    if target.chip.kind == "tpu":
        with trial.stage("attention kernel"):
            trial.change(kernel="splash_fused")
    with trial.stage("mesh"):
        for each in fitting[1 : _OTHERS + 1]:
            trial.change(mesh=each.mesh, sequence_parallel=job.sequence_parallel)
    return trial.best, trial.reason()


@dataclass
class Search:
    """The fastest settings so far, and what was compiled to find them."""

    job: Job
    target: Target
    best: Estimate | None = None
    seconds: float = math.inf
    tried: list[str] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)

    def first(
        self, jobs: Iterable[tuple[str, Job]], limit: float = math.inf
    ) -> tuple[str, Estimate] | None:
        """The first of some jobs, by their flags, that fits and takes less memory than `limit`."""
        for given, job in jobs:
            found = self.offer(given, job)
            if found is not None and found.memory.total < limit:
                return given, found
        return None

    def offer(self, given: str, job: Job) -> Estimate | None:
        """The estimate of a job if it fits; the best one from now on if it is the fastest so far.

        Prints its flags, how fast it is, or why it cannot be.
        """
        self.tried.append(given)
        say(f"{given}: compiling …")
        try:
            estimate = make_estimate(job, self.target)
        except ValueError as error:  # of sizes, a kernel, the compiler
            say(f"  it cannot be: {error}")
            return None
        total = report.gigabytes(estimate.memory.total)
        if not estimate.memory.fits:
            say(f"  {total}: does not fit")
            return None
        roof = roofline(estimate)
        seconds, speed = math.inf, ""
        if roof is not None:
            by_op, seconds = roof.by_op, roof.by_op.seconds
            ratio = f", {seconds / self.seconds:.3f} of the best so far" * (self.best is not None)
            speed = (
                f"{seconds:.3f} s by instruction (products {by_op.compute:.3f}, memory "
                f"{by_op.memory:.3f}, links {by_op.links:.3f}){ratio}; "
            )
        say(f"  {speed}{total}; compiled in {estimate.compile_seconds:.0f} s")
        if self.best is None or seconds < self.seconds:
            self.best, self.seconds = estimate, seconds
        return estimate

    def change(self, **settings: Any) -> bool:
        """Offer the best job with other settings, unless they were tried or do not divide."""
        assert self.best is not None
        changed = dataclasses.replace(self.best.job, **settings)
        mesh = sharding.abstract_mesh(changed.mesh, self.target.num_devices)
        parts = sharding.num_batch_parts(mesh) * changed.accumulate
        if describe(self.job, changed) in self.tried or changed.training.data.batch_size % parts:
            return False
        return self.offer(describe(self.job, changed), changed) is not None

    def keep_more(self) -> None:
        """Use the memory that is left: fewer microbatches, then policies that recompute less.

        One that does not fit is tried with twice the microbatches, and is the last if that fails
        too.
        """
        assert self.best is not None
        accumulate = self.best.job.accumulate
        while accumulate % 2 == 0 and self.change(accumulate=accumulate // 2):
            accumulate //= 2
        accumulate, now = self.best.job.accumulate, self.best.job.remat or "none"
        for policy in _POLICIES[_POLICIES.index(now) + 1 if now in _POLICIES else 1 :]:
            if not self.change(remat=policy, accumulate=accumulate):
                accumulate *= 2
                if not self.change(remat=policy, accumulate=accumulate):
                    break

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Note the time that a part of the search takes, and what it gains."""
        began, before, tried = time.monotonic(), self.seconds, len(self.tried)
        yield
        gain = f"{self.seconds:.3f} s" if self.seconds < before else "no gain"
        count, seconds = len(self.tried) - tried, time.monotonic() - began
        self.stages.append(f"  {name}: {gain}; {count} compiled in {seconds:.0f} s")

    def reason(self) -> str:
        """The settings as flags, the parts of the search, and the memory that is left over."""
        assert self.best is not None
        memory = self.best.memory
        left, limit = (report.gigabytes(x) for x in (memory.limit - memory.total, memory.limit))
        head = f"{describe(self.job, self.best.job)}: {self.seconds:.3f} s by instruction"
        return "\n".join([head, *self.stages, f"{left} of {limit} are left over"])


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
    named = {"remat": job.remat_flag, "mesh": "--mesh", "sequence_parallel": "--sequence-parallel"}
    named |= {"accumulate": "--accumulate", "kernel": "--kernel", "xla": "--xla"}
    found = []
    for name, flag in named.items():
        value = getattr(changed, name)
        if value != getattr(job, name):
            found.append(str(flag) if value is True else f"{flag} {value}")
    return " ".join(found)
