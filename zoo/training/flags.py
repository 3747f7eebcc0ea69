"""The compiler's flags in named sets per platform, which `python -m zoo plan` compares.

A set goes with the compile of a train step; LIBTPU_INIT_ARGS and XLA_FLAGS hold for a process.
"""

from typing import Literal

import jax
from jax.sharding import Mesh

from zoo.common.configuration import require

Flags = Literal["default", "no_windows", "scatter_layouts", "gathers", "overlap", "native_bf16"]
Options = dict[str, bool | int | str]

# A product of a gathered matrix is by default a loop ("windowed"), which permutes parts of the
# matrix while it multiplies others, and reads its activations once per turn. On many chips, or with
# many tokens per chip, that costs more memory traffic than it hides of the links.
_NO_WINDOWS: Options = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}
SETS: dict[str, dict[Flags, Options]] = {
    "tpu": {
        "no_windows": _NO_WINDOWS,
        # Gradients are then an all-reduce that keeps a part, which needs them in a layout of which
        # the part is contiguous; else they are copied first. As MaxText's recipes for v6e.
        "scatter_layouts": {
            **_NO_WINDOWS,
            "xla_tpu_use_minor_sharding_for_major_trivial_input": True,
            "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": 1,
            "xla_tpu_assign_all_reduce_scatter_layout": True,
        },
        # Else libtpu writes a gather that runs beside products as the all-reduce of what is zero
        # but for a part, which sends twice as much: on tpu7x those of all layers.
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


def names(platform: str) -> list[Flags]:
    """The sets of a platform, "tpu", "gpu" or "cpu", the compiler's own defaults first."""
    return ["default", *SETS.get(platform, {})]


def options(name: Flags, devices: Mesh | str | None) -> Options:
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
    known = names(platform)
    require(name in known, f"xla={name!r}: compilers for {platform} take one of {known}")
    return SETS[platform][name]
