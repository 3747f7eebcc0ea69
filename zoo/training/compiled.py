"""A step function, compiled once per bucket by a set of flags, and an error for anything else."""

import functools
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from zoo import sharding
from zoo.common.configuration import require
from zoo.data.loader import Accepted, check_values
from zoo.sharding.axes import is_parameter
from zoo.training.loss_checks import Checks

Metrics = dict[str, Any]  # scalars; of an evaluation also pairs of them

# One runs and one is queued behind it. Inputs of more would fill the device's memory, and on a CPU
# of several virtual devices collectives of more than 32 programs deadlock.
IN_FLIGHT = 2

Flags = Literal["default", "no_windows", "scatter_layouts", "gathers", "overlap", "native_bf16"]
Options = dict[str, bool | int | str]

# Sets of the compiler's flags per platform, which `python -m zoo plan` compares. One goes with the
# compile of a step, while LIBTPU_INIT_ARGS and XLA_FLAGS hold for a process.
#
# A product of a gathered matrix is by default a loop ("windowed"), which permutes parts of the
# matrix while it multiplies others, and reads its activations once per turn. On many chips, or with
# many tokens per chip, that costs more memory traffic than it hides of the links.
_NO_WINDOWS: Options = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}
FLAG_SETS: dict[str, dict[Flags, Options]] = {
    "tpu": {
        "no_windows": _NO_WINDOWS,
        # An all-reduce of gradients then keeps a part, which has to be contiguous in their layout;
        # else they are copied first. As in MaxText's recipes for v6e.
        "scatter_layouts": {
            **_NO_WINDOWS,
            "xla_tpu_use_minor_sharding_for_major_trivial_input": True,
            "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": 1,
            "xla_tpu_assign_all_reduce_scatter_layout": True,
        },
        # Else libtpu makes of a gather that runs beside products an all-reduce of arrays that are
        # zero but for a part, which sends twice as much: on tpu7x in every layer.
        "gathers": {"xla_tpu_prefer_async_allgather_to_allreduce": True},
    },
    "gpu": {
        # Collectives start as early, and end as late, as the memory allows, and run beside
        # products; those of neighbouring layers are joined, as a small one is bound by its latency.
        "overlap": {
            "xla_gpu_enable_latency_hiding_scheduler": True,
            "xla_gpu_enable_pipelined_all_gather": True,
            "xla_gpu_enable_pipelined_reduce_scatter": True,
            "xla_gpu_enable_pipelined_all_reduce": True,
            "xla_gpu_enable_while_loop_double_buffering": True,
            "xla_gpu_all_gather_combine_threshold_bytes": 2**28,
            "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**28,
        },
    },
    "cpu": {
        # A loop that writes a part of an array else converts all of it to fp32, and back; but XLA
        # then refuses convolutions, and products that return bf16, which no family has.
        "native_bf16": {"xla_disable_hlo_passes": "float-normalization-bf16"},
    },
}


class RecompilationError(RuntimeError):
    """A step was called with other shapes, dtypes or shardings than those it was compiled for."""


def _zeros(leaf: Any) -> Any:
    return np.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


class CompiledStep:
    """A step function, compiled once per bucket (a set of batch shapes), and never by accident.

    `step(state, batch)` compiles at the first call if `compile` was not called before; from then
    on, anything other than what was compiled raises a RecompilationError that names the difference.
    A call returns before the device has finished, with `IN_FLIGHT` steps under way at most.
    """

    def __init__(
        self,
        function: Callable[[PyTree, PyTree], tuple[Any, Metrics]],
        *,
        mesh: Mesh | sharding.Layout | None,
        checks: Checks,
        accumulate: int = 1,
        donate: bool = False,
        options: dict[str, bool | int | str] | None = None,
    ):
        self._function = function
        self._layout = sharding.layout_of(mesh)
        self._accumulate, self._donate, self._options = accumulate, donate, options
        self._compiled: dict[tuple, Program] = {}
        self._checks = checks
        self._under_way: deque[Metrics] = deque()

    def compile(self, state: PyTree, *batches: PyTree) -> None:
        """Compile ahead of time for batches like these: arrays, or ShapeDtypeStructs.

        Raises:
            ValueError: rows that the mesh or the microbatches do not divide.
        """
        for batch in batches:
            placed = self._place(jax.tree.map(_zeros, batch))
            signature = _signature(*jax.tree.flatten((state, placed)))
            if signature not in self._compiled:
                self._compiled[signature] = self.lower(state, placed)
            self.check_sums(state, batch)

    def lower(self, state: PyTree, batch: PyTree) -> "Program":
        """The compiled program for one batch, for its `memory_analysis` or its text."""
        with sharding.use(self._layout):
            program = self._program(state, batch)
            program.compiled  # noqa: B018
        return program

    def _program(self, state: PyTree, batch: PyTree) -> "Program":
        batch = self._place(batch)
        return Program(self._function, state, batch, donate=self._donate, options=self._options)

    @property
    def programs(self) -> list[jax.stages.Compiled]:
        """The compiled programs so far, one per bucket."""
        return [each.compiled for each in self._compiled.values()]

    def trace(self, state: PyTree, batch: PyTree) -> jax.stages.Traced:
        """The program before it is compiled, from abstract arrays, such as a skeleton's.

        Nothing is allocated, and the mesh may be of devices that this machine does not have.
        """
        with sharding.use(self._layout):
            return self._program(state, batch).traced

    def __call__(self, state: PyTree, batch: PyTree) -> tuple[Any, Metrics]:
        """Run a step, asynchronously; where `IN_FLIGHT` are under way, wait for the oldest first.

        Raises:
            RecompilationError: a state or batch unlike those compiled for, before any compute.
            ValueError: a state whose buffers an earlier call took, or an array of numpy with a
                value that no step can use.
        """
        check_values(batch, self.accepted(state))
        batch = self._place(batch)
        leaves, structure = jax.tree.flatten((state, batch))
        self._check_not_donated(leaves)
        signature = _signature(leaves, structure)
        if not self._compiled:
            self._compiled[signature] = self.lower(state, batch)
            self.check_sums(state, batch)
        if signature not in self._compiled:
            raise RecompilationError(self._difference(signature))
        while len(self._under_way) >= IN_FLIGHT:
            metrics = self._under_way.popleft()
            jax.block_until_ready(jax.tree.leaves(metrics)[:1])  # all are ready at once
            self._checks.clipping(metrics)
        outputs = self._compiled[signature](leaves)
        self._under_way.append(outputs[1])
        return outputs

    def accepted(self, state: PyTree) -> Accepted:
        """The values that the entries of its batches may hold, for `zoo.data.loader.batches`."""
        return self._checks.accepted(state)

    def check_sums(self, state: PyTree, batch: PyTree) -> None:
        """Before the first step, warn of a loss that is no sum over rows; a batch may be shapes."""
        self._checks.sums(state, batch, self._layout)

    def _check_not_donated(self, leaves: list[Any]) -> None:
        """Refuse a state that was given before: on a mesh JAX itself may crash."""
        if self._donate and any(x.is_deleted() for x in leaves if isinstance(x, jax.Array)):
            raise ValueError(
                "this state was given to a step before, which took its buffers: continue with the "
                "state that the step returned, as in state, metrics = step(state, batch)"
            )

    def _place(self, batch: PyTree) -> PyTree:
        """The batch on the mesh; arrays that lie there already are not touched."""

        def place(path: tuple, x: Any) -> Any:
            if np.ndim(x) == 0:
                raise ValueError(
                    f"batch{jtu.keystr(path)} is {x!r}, and has no rows: each array of a batch has "
                    "them for its first axis"
                )
            rows = np.shape(x)[0]
            on_mesh = self._layout.mesh is not None
            target = sharding.batch_sharding(self._layout, np.ndim(x)) if on_mesh else None
            parts = sharding.num_batch_parts(self._layout)
            if rows == 0 or rows % (parts * self._accumulate):
                raise ValueError(
                    f"batch{jtu.keystr(path)} has {rows} rows: make the batch size a multiple of "
                    f"{parts} (parts that the mesh cuts it into) times accumulate="
                    f"{self._accumulate}"
                )
            if isinstance(x, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target)
            placed = isinstance(x, jax.Array) and (target is None or x.sharding == target)
            return x if placed else jax.device_put(x, target)

        return jtu.tree_map_with_path(place, batch)

    def _difference(self, signature: tuple) -> str:
        """The difference from the nearest compiled signature, in words."""

        def describe(x: Any) -> str:
            if not isinstance(x, tuple):
                return repr(x)
            shape, dtype, placed = x
            return f"{dtype}{list(shape)} sharded as {placed}"

        def entries(signature: tuple) -> dict[str, str]:
            structure, *leaves = signature
            paths = jtu.tree_leaves_with_path(jax.tree.unflatten(structure, range(len(leaves))))
            return {
                ("state", "batch")[path[0].idx] + jtu.keystr(path[1:]): describe(x)
                for (path, _), x in zip(paths, leaves, strict=True)
            }

        now, changes = entries(signature), list[list[str]]()
        for compiled in self._compiled:
            was = entries(compiled)
            changes.append(
                [
                    f"  {name}: was {was.get(name, 'absent')}, is {now.get(name, 'absent')}"
                    for name in {**was, **now}
                    if was.get(name) != now.get(name)
                ]
            )
        lines = min(changes, key=len)
        if not lines:  # what differs is no array
            [first, *_] = self._compiled
            lines = [f"  the structure: was {first[0]}, is {signature[0]}"]
        return "\n".join(
            [f"compiled for {len(self._compiled)} bucket(s); the nearest differs in"]
            + lines[:8]
            + [f"  … and {len(lines) - 8} more"] * (len(lines) > 8)
            + ["Pad to a bucket, or announce the shape first: step.compile(state, batch)"]
        )


class Program:
    """A step, traced and compiled for arguments of one structure; called with their leaves.

    Trees are taken apart and put together once per call. For a model of many small arrays that
    takes as long as the step itself, and `eqx.filter_jit` does it several times.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        state: PyTree,
        batch: PyTree,
        *,
        donate: bool,
        options: dict[str, bool | int | str] | None = None,
    ):
        self._options = options or None  # JAX keeps a program compiled without any
        leaves, structure = jax.tree.flatten((state, batch))
        num_state = len(jax.tree.leaves(state))
        arrays = [i for i, x in enumerate(leaves) if is_parameter(x)]
        self._of_state = [i for i in arrays if i < num_state]
        self._of_batch = [i for i in arrays if i >= num_state]
        rest = [None if is_parameter(x) else x for x in leaves]

        # The state's first: JAX names a result's placement like the first argument's with the same.
        def flat(of_state: list[Array], of_batch: list[Array]) -> list[Array]:
            given = list(rest)
            for places, values in ((self._of_state, of_state), (self._of_batch, of_batch)):
                for place, value in zip(places, values, strict=True):
                    given[place] = value
            state, batch = jax.tree.unflatten(structure, given)
            outputs, self._structure = jax.tree.flatten(function(batch, state))
            self._outputs = [None if eqx.is_array(x) else x for x in outputs]
            return [x for x in outputs if eqx.is_array(x)]

        flat.__name__ = flat.__qualname__ = function.__name__  # the program's, in profiles
        jitted = jax.jit(flat, donate_argnums=(0,) if donate else ())
        self.traced: jax.stages.Traced = jitted.trace(*self._arguments(leaves))

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The program, compiled at the first use."""
        return self.traced.lower().compile(compiler_options=self._options)

    def __call__(self, leaves: list[Any]) -> Any:
        """The step's outputs, for the leaves of a state and a batch."""
        arrays = iter(self.compiled(*self._arguments(leaves)))
        outputs = [next(arrays) if x is None else x for x in self._outputs]
        return jax.tree.unflatten(self._structure, outputs)

    def _arguments(self, leaves: list[Any]) -> tuple[list[Any], list[Any]]:
        return [leaves[i] for i in self._of_state], [leaves[i] for i in self._of_batch]


def _signature(leaves: list[Any], structure: Any) -> tuple:
    """Equal for arguments that one program takes."""
    described = (
        (x.shape, x.dtype, sharding.canonical(x.sharding)) if isinstance(x, jax.Array) else x
        for x in leaves
    )
    return (structure, *described)


def flag_sets(platform: str) -> list[Flags]:
    """The sets of a platform, "tpu", "gpu" or "cpu", the compiler's own defaults first."""
    return ["default", *FLAG_SETS.get(platform, {})]


def flag_options(name: Flags, devices: Mesh | str | None) -> Options:
    """The flags of a set, for `jax.stages.Lowered.compile`.

    `devices` are a mesh, or JAX's own, or a platform.

    Raises:
        ValueError: a set that their platform does not have.
    """
    if name == "default":
        return {}
    if isinstance(devices, Mesh):
        devices = str(devices.devices.flat[0].platform)
    platform = devices or jax.default_backend()
    known = flag_sets(platform)
    require(name in known, f"xla={name!r}: compilers for {platform} take one of {known}")
    return FLAG_SETS[platform][name]
