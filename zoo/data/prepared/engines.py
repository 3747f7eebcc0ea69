"""Engines: what runs the pure functions of a preparation side by side."""

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Engine = Literal["processes", "ray"]


def run_processes(
    function: Callable[..., T], tasks: Sequence[tuple[Any, ...]], workers: int
) -> Iterator[T]:
    """The results of `function(*task)` in processes, in the order in which they end.

    Raises:
        ChildProcessError: a worker was killed.
    """
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads of JAX
    executor = ProcessPoolExecutor(workers, context, initializer=_begin)
    try:
        with _without_main():
            futures = [executor.submit(function, *task) for task in tasks]
        for future in as_completed(futures):
            yield future.result()
    except BrokenProcessPool:
        raise ChildProcessError(
            "a worker was killed, perhaps for want of memory: the same command keeps the "
            "finished shards; fewer --workers need less"
        ) from None
    finally:
        executor.shutdown(cancel_futures=True)


def _begin() -> None:
    """A worker's first call."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a worker per core
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent process has the words
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """A context in which spawned processes do not import the program, which may import JAX."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def run_ray(
    function: Callable[..., T], tasks: Sequence[tuple[Any, ...]], workers: int
) -> Iterator[T]:
    """The same in a Ray cluster, whose machines share the folder; in a local one if none runs.

    Raises:
        ImportError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError("--engine ray needs an extra: pip install 'zoo[ray]'") from error
    started = not ray.is_initialized()
    if started:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if not os.environ.get("RAY_ADDRESS"):
            options |= {"num_cpus": workers, "include_dashboard": False}
        ray.init(**options)
    try:
        environment = {"env_vars": {"TOKENIZERS_PARALLELISM": "false"}}
        remote = ray.remote(function).options(runtime_env=environment)
        left = [remote.remote(*task) for task in tasks]
        while left:
            [done], left = ray.wait(left)
            try:
                result = ray.get(done)
            except ray.exceptions.RayTaskError as error:
                raise (error.cause or error) from None  # the sentence without Ray's traceback
            yield result
    finally:
        if started:
            ray.shutdown()
