"""Processes that start in milliseconds: forked after all imports, before JAX has a backend."""

import atexit
import faulthandler
import multiprocessing
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import xla

TIMEOUT = 300  # seconds; more than anything here takes, even on a busy machine

_context = multiprocessing.get_context("forkserver")
# Including modules that a run imports late.
_context.set_forkserver_preload(
    [
        __name__,
        "recipes.distill",
        "recipes.finetune",
        "recipes.lm",
        "recipes.mlp",
        "recipes.reinforce",
        "recipes.rnn",
        "zoo.planning.planner",
        "zoo.decoding.sampling",
        "grain",
        "matplotlib.backends.backend_agg",
    ]
)


class HangError(Exception):
    """A process that does not end."""


def start(
    log: Path, function: Callable[..., object], *arguments: Any, devices: int = 4, **env: str
) -> BaseProcess:
    """A process that runs a function of a module, with its output in a file.

    By default it has four devices, so that any mesh can follow any other.
    """
    variables = {**os.environ, "XLA_FLAGS": xla.flags(devices), **env}
    parts = (log, os.getcwd(), variables, function, arguments)
    process = _context.Process(target=_run, args=parts, daemon=True)
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


def run_program(arguments: Sequence[str]) -> None:
    """What `python` does with these arguments: of a module after -m, or of a file."""
    sys.argv = [*arguments[1:]] if arguments[0] == "-m" else [*arguments]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the module is imported already
            if arguments[0] == "-m":
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


def _run(
    log: Path,
    folder: str,
    variables: Mapping[str, str],
    function: Callable[..., object],
    arguments: tuple,
) -> None:
    with open(log, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()  # a crash of native code names its place
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)  # before JAX looks for devices
    function(*arguments)
