"""Settings before JAX starts: Ctrl-C during imports, libtpu, the memory of a CPU."""

import contextlib
import ctypes
import glob
import os
import signal
import sys
import threading
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any


def _leave(number: int, frame: object) -> None:
    os.write(2, b"\nstopped\n")
    os._exit(128 + number)


def leave_at_once() -> None:
    """From here on Ctrl-C ends a program of ours at once, until `as_usual`.

    A KeyboardInterrupt in the midst of an import may be swallowed there, and the program goes on.
    Other programs that import the zoo keep their own handling.
    """
    module = sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] if "-m" in sys.orig_argv else []
    if module and module[0].partition(".")[0] in ("zoo", "recipes"):
        signal.signal(signal.SIGINT, _leave)


def as_usual() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt again, repeated where Python drops it."""
    if signal.getsignal(signal.SIGINT) is _leave:
        sys.unraisablehook = _repeat
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _repeat(dropped: Any) -> None:
    # Errors in callbacks of the garbage collector, of which JAX has one, are printed and dropped.
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        main = threading.main_thread().ident
        threading.Timer(0.01, signal.pthread_kill, (main, signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(dropped)


def may_have_tpus() -> bool:
    """Whether libtpu is installed, and this machine has a device that may be a TPU."""
    devices = (*glob.glob("/dev/accel*"), *glob.glob("/dev/vfio/[0-9]*"))
    return bool(devices) and find_spec("libtpu") is not None


def quieten_libtpu() -> None:
    """Tell libtpu, which plans need, what it would ask the cloud about a machine without TPUs.

    JAX tries libtpu at its start, which then says at length that nobody answers; with these
    variables it looks for a TPU as before, and finds none. What the environment has stays.
    """
    if find_spec("libtpu") is None or may_have_tpus():
        return
    for name, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("TPU_ACCELERATOR_TYPE", "v5e-1"),
    ):
        os.environ.setdefault(name, value)


def is_on_cpu() -> bool:
    """Whether JAX computes on this machine's CPU, as far as that is known before it starts."""
    import jax  # here, as the zoo imports this module before JAX

    if given := getattr(jax.config, "jax_platforms", None):
        return str(given).split(",")[0] == "cpu"
    has_plugins = entry_points(group="jax_plugins") or find_spec("jax_plugins")
    return not has_plugins and not may_have_tpus()


def keep_freed_memory() -> None:
    """Keep freed memory in this process: XLA for CPU allocates all temporaries anew in each step.

    Given back and faulted in again, they cost a small step over a quarter of its time. To be
    called before JAX starts its threads: a thread that has an arena of its own by then maps what
    does not fit into one, 64 MiB, again at each step, whatever is set later.
    """
    # mallopt's M_MMAP_MAX, M_TRIM_THRESHOLD and M_ARENA_MAX; other C libraries have none.
    with contextlib.suppress(AttributeError, OSError):
        for option, value in ((-4, 0), (-1, 2**31 - 1), (-8, 1)):
            ctypes.CDLL(None).mallopt(option, value)
