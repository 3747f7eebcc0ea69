"""Processes that start in milliseconds: forked after all imports, before JAX has a backend."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import jax
import tyro

from recipes import lm
from zoo.runs.command_line import cli_errors

TIMEOUT = 300  # seconds; more than anything here takes, even on a busy machine
DEVICES = 4  # virtual devices per process, so that any mesh can follow any other
RAISED = "the exception was a"

_context = multiprocessing.get_context("forkserver")
# Including modules that a run imports late.
_context.set_forkserver_preload(
    [
        __name__,
        "benchmarks.soak.boundaries",
        "benchmarks.soak.restores",
        "recipes.distill",
        "recipes.finetune",
        "zoo.runs.planned",
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


def start_recipe(log: Path, flags: Sequence[str], programs: Path) -> BaseProcess:
    """`python -m recipes.lm` with flags; caches all that it compiles, however small."""
    return start(log, _recipe, tuple(flags), programs)


def finish(process: BaseProcess) -> int:
    """The exit code; minus a signal's number if it was killed."""
    process.join(TIMEOUT)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise HangError(f"it did not end in {TIMEOUT} s")
    return process.exitcode


def wait_for(moment: Callable[[], bool], process: BaseProcess) -> None:
    """Wait until `moment()` is true, or the process ends."""
    deadline = time.monotonic() + TIMEOUT
    while process.is_alive() and not moment():
        if time.monotonic() > deadline:
            finish(process)
        time.sleep(0.001)


def _run(log: Path, function: Callable[..., object], arguments: tuple) -> None:
    with open(log, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # Read when JAX first looks for devices. Without optimization, compiling takes half the time.
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={DEVICES} --xla_backend_optimization_level=0"
    )
    function(*arguments)


def _recipe(flags: tuple[str, ...], programs: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(programs))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    sys.argv = ["recipes.lm", *flags]
    with cli_errors():
        try:
            lm.main(tyro.cli(lm.Config, args=flags))
        except Exception as error:
            print(RAISED, type(error).__name__, flush=True)
            raise
