"""XLA's flags for tests: devices of a CPU, and programs that compile quickly and run slowly."""

import importlib.metadata


def flags(devices: int) -> str:
    """The value of XLA_FLAGS, for this process before it imports JAX or for another one."""
    chosen = [
        f"--xla_force_host_platform_device_count={devices}",
        "--xla_backend_optimization_level=0",
    ]
    version = importlib.metadata.version("jaxlib").split(".")
    if tuple(map(int, version[:2])) < (0, 12):  # later ones have neither the flag nor the need
        chosen.append("--xla_cpu_use_fusion_emitters=false")  # a third of the time to compile
        chosen.append("--xla_cpu_parallel_codegen_split_count=1")  # small programs are one module
    return " ".join(chosen)
