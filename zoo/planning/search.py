"""The fastest settings of a step: flags, remat, microbatches, the attention kernel, the mesh.

Of meshes all are compared by hand first. There a step takes its products at the chip's peak, beside
them the transfers of parameters and gradients, and after them those of activations, which the next
product waits for. Each has the links that its axis of the mesh has on the target.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zoo import sharding
from zoo.nn import remat
from zoo.nn.attention.context_parallel import Exchange
from zoo.nn.attention.masks import Mask
from zoo.planning import report
from zoo.planning.collectives import Collective, Kind, Topology, topology_of
from zoo.planning.job import Estimate, Job
from zoo.planning.planner import MOST, attempt, changes, describe, say
from zoo.planning.roofline import roofline
from zoo.planning.targets import Target
from zoo.sharding import MESH_AXES, ShardingError
from zoo.training import flags
from zoo.transformer.config import Config as Sizes

_BYTES = 2  # of the compute dtype


def _axes(name: str) -> tuple[str, ...]:
    """The mesh axes that split a logical axis."""
    found = sharding.RULES[name]
    axes = found.mesh if isinstance(found, sharding.Axis) else found
    return (axes,) if isinstance(axes, str) else axes or ()


_SPLIT, _ROWS, _TOKENS = _axes("heads"), _axes("batch"), _axes("seq")
_EXPERTS = tuple(axis for axis in _axes("experts") if axis not in _SPLIT)


@dataclass(frozen=True)
class Candidate:
    """A mesh, and its step by hand, in seconds."""

    mesh: str
    state: float
    """Bytes of parameters and optimizer per device."""
    compute: float
    parameters: float
    """Of the transfers of parameters and gradients."""
    activations: float
    """Of the transfers of activations, keys and tokens of experts."""

    @property
    def seconds(self) -> float:
        """The step."""
        return max(self.compute, self.parameters) + self.activations


def candidates(
    config: Sizes, num_parameters: int, flops: float, rows: int, seq_len: int, target: Target
) -> list[Candidate]:
    """Every mesh of a target that divides the model and the batch, the fastest by hand first.

    `flops` are those of a step, of all devices together.
    """
    found = []
    for sizes in _meshes(config, rows, seq_len, target):
        mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
        try:
            devices = sharding.make_mesh(mesh, target.devices()).devices
        except ShardingError:
            continue
        where = topology_of(target.chip, target.shape, tuple(devices.flat))
        seconds = functools.partial(_seconds, where, np.arange(devices.size).reshape(devices.shape))
        found.append(_by_hand(config, num_parameters, flops, rows * seq_len, sizes, seconds, where))
    return sorted(found, key=lambda each: (each.seconds, each.state, each.mesh))


def _meshes(config: Sizes, rows: int, seq_len: int, target: Target) -> Iterator[dict[str, int]]:
    """The sizes of axes that divide what they split."""
    divided = dict.fromkeys(_SPLIT, math.gcd(config.kv_heads, config.hidden_size))
    divided |= dict.fromkeys(_EXPERTS, config.experts.num_experts or 1)
    divided |= dict.fromkeys(_TOKENS, seq_len if rows < target.num_devices else 1)
    n = target.num_devices
    factors = [
        [size for size in range(1, n + 1) if n % size == 0 and divided.get(axis, size) % size == 0]
        for axis in MESH_AXES
    ]
    for sizes in itertools.product(*factors):
        named = dict(zip(MESH_AXES, sizes, strict=True))
        abstract = {axis: size for axis, size in named.items() if size > 1}
        if (config.experts.num_experts or 0) % math.prod(named[axis] for axis in _axes("experts")):
            continue
        if math.prod(sizes) == n and not (
            rows % sharding.num_batch_parts(sharding.abstract_mesh(abstract, n))
        ):
            yield named


def _seconds(where: Topology, ids: np.ndarray, kind: Kind, whole: float, axis: str) -> float:
    """Of one collective over an axis, by the bytes of its whole."""
    groups = np.moveaxis(ids, MESH_AXES.index(axis), -1)
    n = groups.shape[-1]
    if n == 1:
        return 0.0
    sent = whole * (n - 1) / n * (2 if kind == "all-reduce" else 1)
    members = tuple(map(tuple, groups.reshape(-1, n).tolist()))
    return where.transfer(Collective(kind, sent, 1, n, "bf16", "", members)).seconds


def _by_hand(
    config: Sizes,
    num_parameters: int,
    flops: float,
    tokens: int,
    sizes: dict[str, int],
    seconds: Callable[[Kind, float, str], float],
    where: Topology,
) -> Candidate:
    def parts(axes: Collection[str]) -> int:
        return math.prod(sizes[axis] for axis in axes)

    expert = (3 if config.gated else 2) * config.d_model * config.hidden_size
    experts = config.num_layers * (config.experts.num_experts or 0) * expert
    local = tokens / parts({*_ROWS, *_TOKENS})
    layers, width = config.num_layers, config.d_model
    heads, kv_heads = (n // parts(_SPLIT) for n in (config.num_heads, config.kv_heads))

    # Gathered forward and backward, gradients scattered; what is kept twice is summed.
    parameters, stored = 0.0, (num_parameters - experts) / parts(_SPLIT)
    for axis in _EXPERTS:  # over which all but the experts are gathered
        parameters += 3 * seconds("all-gather", stored * _BYTES, axis)
        stored /= sizes[axis]
    stored += experts / parts({*_EXPERTS, *_SPLIT})
    for axis in sorted(sharding.STORAGE_AXES):
        parameters += 3 * seconds("all-gather", stored * _BYTES, axis)
        stored /= sizes[axis]
    for axis in set(_ROWS) - sharding.STORAGE_AXES - set(_EXPERTS):
        parameters += seconds("all-reduce", stored * _BYTES, axis)
    activations = 0.0
    for axis in _SPLIT:  # behind attention and MLP, forward, backward, and attention again
        activations += (5 * layers + 2) * seconds("all-reduce", local * width * _BYTES, axis)
    for axis in _TOKENS:  # of attention: forward, again, and backward
        head = local * config.head_size * _BYTES
        exchange = Exchange((), sizes[axis], heads, kv_heads)
        if exchange.sends_less(1, Mask(config.causal, None), None):
            moved = 2 * (heads + exchange.copies * kv_heads) * head
            activations += 3 * layers * seconds("all-to-all", moved, axis)
        else:
            moved = 2 * kv_heads * sizes[axis] * head
            activations += 3 * layers * seconds("all-gather", moved, axis)
    for axis in _EXPERTS:  # to the experts and back: forward, again, and backward
        rows = local * config.experts.per_token * width * _BYTES
        activations += 6 * layers * seconds("all-to-all", rows, axis)
    return Candidate(
        mesh=",".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1),
        state=12 * stored,
        compute=flops / (where.chip.flops or math.inf) / math.prod(sizes.values()),
        parameters=parameters,
        activations=activations,
    )


def fastest(found: list[Candidate], job: Job, target: Target) -> tuple[Estimate, str]:
    """The fastest settings for a job, with the reason; each is compiled, as training compiles it.

    From the best mesh by hand whose step fits, or the first change of it that does, one kind of
    settings after another: those first that have been worth the most.

    Raises:
        ValueError: no mesh divides, or none fits.
    """
    fitting = [each for each in found if each.state < target.chip.memory]
    say(f"{len(found)} meshes divide the model and the batch; the state of {len(fitting)} fits")
    trial = _Search(job, target)
    trial.start([each.mesh for each in fitting])
    if trial.best is None:
        raise ValueError(
            f"mesh='search': none of the {len(trial.tried)} settings that were compiled, of "
            f"{len(found)} meshes of {target.name}, fits: take more devices, --accumulate, "
            "--remat full, or a --batch-size that they divide"
        )
    if target.chip.kind == "tpu":  # the estimate of a GPU is of a program for CPUs
        with trial.stage("flags of the compiler"):
            for name in flags.names("tpu"):
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


_OTHERS = 2  # meshes that are compiled beside the best one by hand


@dataclass
class _Search:
    """The fastest settings so far, and what was compiled to find them."""

    job: Job
    target: Target
    best: Estimate | None = None
    seconds: float = math.inf
    tried: list[str] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)

    def start(self, meshes: list[str]) -> None:
        """Find settings that fit: the first mesh, what needs less memory there, other meshes."""
        with self.stage("settings that fit"):
            jobs = [dataclasses.replace(self.job, mesh=mesh) for mesh in meshes]
            found = (each for first in jobs[:1] for each in changes(first, self.target))
            less = itertools.islice(found, MOST - 1 - _OTHERS)
            for each in itertools.islice(itertools.chain(jobs[:1], less, jobs[1:]), MOST):
                if self.offer(each):
                    return
                if len(self.tried) == 1:
                    say("looking for a change that fits, before any that is faster")

    def offer(self, changed: Job) -> bool:
        """Compile a job, take it if it is the fastest so far, and say whether it fits."""
        self.tried.append(describe(self.job, changed))
        say(f"{self.tried[-1]}: compiling …")
        estimate = attempt(changed, self.target)
        if estimate is None or not estimate.memory.fits:
            return False
        roof = roofline(estimate)
        assert roof is not None, "a target without peaks is refused before"
        by_op = roof.by_op
        ratio = f", {by_op.seconds / self.seconds:.3f} of the best so far" * (self.best is not None)
        say(
            f"  {by_op.seconds:.3f} s by instruction (products {by_op.compute:.3f}, memory "
            f"{by_op.memory:.3f}, links {by_op.links:.3f}){ratio}; "
            f"{report.gigabytes(estimate.memory.total)}; compiled in "
            f"{estimate.compile_seconds:.0f} s"
        )
        if by_op.seconds < self.seconds:
            self.best, self.seconds = estimate, by_op.seconds
        return True

    def change(self, **settings: Any) -> bool:
        """Offer the best job with other settings, unless they were tried or do not divide."""
        assert self.best is not None
        changed = dataclasses.replace(self.best.job, **settings)
        mesh = sharding.abstract_mesh(changed.mesh, self.target.num_devices)
        parts = sharding.num_batch_parts(mesh) * changed.accumulate
        if describe(self.job, changed) in self.tried or changed.training.data.batch_size % parts:
            return False
        return self.offer(changed)

    def keep_more(self) -> None:
        """Use the memory that is left: fewer microbatches, then policies that recompute less.

        One that does not fit is tried with twice the microbatches, and is the last if that neither.
        """
        assert self.best is not None
        accumulate, policies = self.best.job.accumulate, [*remat.POLICIES]
        while accumulate % 2 == 0 and self.change(accumulate=accumulate // 2):
            accumulate //= 2
        accumulate = self.best.job.accumulate
        for policy in reversed(policies[: policies.index(self.best.job.remat or "none")]):
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
