"""A training step to be compiled, and the memory and traffic of the compiled program."""

import math
import re
import time
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PyTree

from zoo import sharding
from zoo.data.datasets import batch_shapes
from zoo.nn import remat
from zoo.nn.attention.attention import Implementation, overridden_kernel
from zoo.nn.precision import Precision
from zoo.nn.remat import Policy
from zoo.planning import collectives, costs, flops, hlo
from zoo.planning.collectives import Topology
from zoo.planning.targets import Target
from zoo.publishing.tensors import num_parameters
from zoo.sharding.axes import is_parameter
from zoo.training.compiled import Flags, flag_options
from zoo.training.description import Training
from zoo.training.state import Trainable, TrainState, trained_leaves


class CompilerError(ValueError):
    """The compiler ended for another reason than too little memory."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training, and the choices that its step is compiled with."""

    training: Training
    mesh: str
    precision: Precision = "bf16"
    accumulate: int = 1
    sequence_parallel: bool = False
    clip_norm: float | None = 1.0
    remat: Policy | None = None
    """Takes the place of the policy that the model's configuration names."""
    kernel: Implementation | None = None
    """Takes the place of its attention kernel."""
    xla: Flags = "default"
    """Set of the compiler's flags."""

    @property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a batch of the largest bucket, of all devices together."""
        data = self.training.data
        return batch_shapes(data)[max(data.buckets)]

    @property
    def remat_flag(self) -> str | None:
        """The flag that chooses `remat`; None where there is no such flag."""
        return None if self.training.remat is None else self.training.remat_flag

    @property
    def row(self) -> int:
        """Tokens in its rows; 1 where they are examples."""
        data = self.training.data
        return max(data.buckets) if data.unit == "tokens" else 1

    @property
    def tokens(self) -> int:
        """Tokens (or examples) in that batch."""
        return self.training.data.batch_size * self.row


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device, while it trains."""

    parameters: float
    frozen: float = 0.0
    """The parameters that are not trained."""
    optimizer: float
    batch: float
    temporaries: float | None
    """Activations, gradients, gathered layers; None where the compiler gave up and did not say."""
    program: float
    total: float
    """All of these, and the results that reuse no argument's buffer."""
    limit: float
    """The device's memory."""
    is_refused: bool = False
    """The compiler gave up."""
    host: float = 0.0
    """Bytes that remat offloads to the memory of the device's host."""

    @property
    def fits(self) -> bool:
        """Whether it is within the limit."""
        return not self.is_refused and self.total <= self.limit


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The memory, compute and communication of a compiled step."""

    job: Job
    target: Target
    mesh: dict[str, int]
    num_parameters: int
    memory: Memory
    flops: float
    """FLOPs of a step's products, on all devices together."""
    int8_flops: float = 0.0
    """The int8 operations among them."""
    traffic: float
    """Bytes between a device and its memory."""
    collectives: list[collectives.Collective]
    compile_seconds: float
    text: str = ""
    """The compiled program."""
    devices: tuple[Any, ...] = ()
    """The mesh's devices, in the program's order."""
    kernels: dict[str, tuple[float, float]] = field(default_factory=dict)
    """FLOPs and bytes of a device's Pallas kernels in a step, by their names."""

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def topology(self) -> Topology:
        """The places of the devices, and the links between them."""
        return collectives.topology_of(self.target.chip, self.target.shape, self.devices)

    @property
    def model_flops(self) -> float | None:
        """FLOPs that a step's maths needs, of all devices together."""
        flops = self.job.training.flops_per_token
        return flops and flops * self.job.tokens

    def utilization(self, seconds: float) -> float | None:
        """Model FLOPs utilization of a step of so long: recomputation counts for nothing."""
        peak = self.target.chip.flops
        if self.model_flops is None or peak is None:
            return None
        return self.model_flops / (seconds * peak * self.num_devices)


def make_estimate(job: Job, target: Target, *, compiled: Any = None) -> Estimate:
    """Compile a job for a target, without the hardware and without allocating an array of it.

    A program that has been compiled already may be given as `compiled`.

    Raises:
        ValueError, ImportError: as `Target.devices`; sizes that the mesh does not divide; flags
            that the target lacks; a loop or a kernel of which it is not known how often it runs.
        JaxRuntimeError: the compiler gave up for another reason than the memory.
    """
    mesh = sharding.make_mesh(job.mesh, target.devices())
    rules = sharding.SEQUENCE_PARALLEL if job.sequence_parallel else sharding.RULES
    layout = sharding.Layout(mesh, rules)
    options = flag_options(job.xla, target.chip.kind)
    options = options if target.is_exact else {}  # the CPU's compiler has none of a GPU's
    began = time.monotonic()
    state, traced = _trace(job, layout)
    refusal = ""
    try:
        compiled = compiled or traced.lower().compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise CompilerError(f"target={target.name!r}: the compiler gave up: {error}") from error
        refusal = str(error)
    text = "" if refusal else compiled.as_text()
    program = None if refusal else hlo.read(text)
    parts = sharding.num_batch_parts(layout)
    batch = sum(math.prod(x.shape) * x.dtype.itemsize for x in job.batch.values()) / parts
    kernels = {
        name: (products / mesh.size, moved / mesh.size)
        for name, (products, moved) in flops.of_kernels(traced.jaxpr).items()
    }
    return Estimate(
        job=job,
        target=target,
        mesh={axis: size for axis, size in mesh.shape.items() if size > 1},
        num_parameters=num_parameters(state.model),
        memory=_memory(state, job.training.trainable, batch, compiled, refusal, target.chip.memory),
        flops=flops.count(traced.jaxpr),
        int8_flops=flops.count(traced.jaxpr, of=jnp.int8),
        traffic=_traffic(program, kernels) if program else 0.0,
        collectives=collectives.collectives(program) if program else [],
        compile_seconds=time.monotonic() - began,
        text=text,
        devices=tuple(mesh.devices.flat),
        kernels=kernels,
    )


def _trace(job: Job, mesh: Mesh | sharding.Layout) -> tuple[TrainState, Any]:
    """The skeleton of the state, and the step on it."""
    with remat.overridden(job.remat), overridden_kernel(job.kernel):
        state = job.training.blueprint(jax.random.key(0), mesh=mesh).skeleton
        step = job.training.step(
            mesh=mesh,
            precision=job.precision,
            accumulate=job.accumulate,
            clip_norm=job.clip_norm,
        )
        return state, step.trace(state, job.batch)


def _traffic(program: hlo.Program, kernels: dict[str, tuple[float, float]]) -> float:
    """Bytes between a device and its memory in a step."""
    if unknown := hlo.unknown_loops(program):
        raise hlo.HLOError(
            f"loops of which the compiled program does not say how often they run: {unknown}; "
            "what is in them would count once: write them as jax.lax.scan"
        )
    return costs.memory_traffic(program) + sum(moved for _, moved in kernels.values())


_UNITS = {"": 1.0, "B": 1.0, "K": 2.0**10, "M": 2.0**20, "G": 2.0**30, "T": 2.0**40}


def wanted_bytes(message: str) -> float | None:
    """The bytes that a compiler or an allocator which ran out of memory says it wanted."""
    number = r"([\d.]+) ?([KMGT]?)(?:i?B|bytes)?\b"
    forms = (r"[Uu]sed {} of", r"temporaries \({}\)", r"allocat(?:e|ing) {}")
    for form in forms:
        match = re.search(form.format(number), message)
        if match:
            return float(match.group(1)) * _UNITS[match.group(2)]
    return None


def _memory(
    state: TrainState,
    trainable: Trainable | None,
    batch: float,
    compiled: Any,
    refusal: str,
    limit: float,
) -> Memory:
    chosen = eqx.filter_eval_shape(lambda model: trained_leaves(model, trainable), state.model)
    kept: dict[str, Any] = {
        "parameters": device_bytes(state.model),
        "frozen": device_bytes(eqx.partition(state.model, chosen)[1]),
        "optimizer": device_bytes(state.opt_state),
        "batch": batch,
    }
    if compiled is None:
        wanted, arguments = wanted_bytes(refusal), sum(kept.values()) - kept["frozen"]
        alone = wanted is not None and "temporaries" in refusal
        total = max(wanted + arguments if wanted and alone else wanted or 0.0, arguments)
        temporaries = wanted if alone else None
        return Memory(
            **kept, temporaries=temporaries, program=0.0, total=total, limit=limit, is_refused=True
        )
    stats = compiled.memory_analysis()
    program = float(stats.generated_code_size_in_bytes)
    made = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return Memory(
        **kept,
        temporaries=float(stats.temp_size_in_bytes),
        program=program,
        total=float(stats.argument_size_in_bytes + made + stats.temp_size_in_bytes) + program,
        limit=limit,
        host=float(stats.host_temp_size_in_bytes),
    )


def device_bytes(tree: PyTree) -> float:
    """The bytes that one device keeps of a tree of arrays, or of its skeleton."""

    def each(x: Any) -> float:
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        return float(math.prod(shape) * x.dtype.itemsize)

    return sum((each(x) for x in jax.tree.leaves(tree) if is_parameter(x)), 0.0)
