"""Processes that start in milliseconds: forked after all imports, before JAX has a backend."""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

TIMEOUT = 300  # seconds; more than anything here takes, even on a busy machine
DEVICES = 4  # virtual devices per process, so that any mesh can follow any other

_context = multiprocessing.get_context("forkserver")
# Including modules that a run imports late.
_context.set_forkserver_preload(
    [
        __name__,
        "benchmarks.soak.boundaries",
        "recipes.distill",
        "recipes.finetune",
        "recipes.lm",
        "zoo.planning.planner",
        "zoo.decoding.sampling",
        "grain",
        "matplotlib.backends.backend_agg",
    ]
)


class HangError(Exception):
    """A process that does not end."""


def start(log: Path, function: Callable[..., object], *arguments: Any) -> BaseProcess:
    """A process that runs a function of a module, with its output in a file."""
    process = _context.Process(target=_run, args=(log, function, arguments), daemon=True)
    process.start()
    return process


def finish(process: BaseProcess) -> int:
    """The exit code; minus a signal's number if it was killed."""
    process.join(TIMEOUT)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise HangError(f"it did not end in {TIMEOUT} s")
    return process.exitcode


def _run(log: Path, function: Callable[..., object], arguments: tuple) -> None:
    with open(log, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # Read when JAX first looks for devices. Without optimization, compiling takes half the time.
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={DEVICES} --xla_backend_optimization_level=0"
    )
    function(*arguments)
