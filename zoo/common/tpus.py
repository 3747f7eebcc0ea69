"""Quiet starts with libtpu installed, as plans need it, on machines that have no TPU."""

import glob
import os
from importlib.util import find_spec


def may_have_tpus() -> bool:
    """Whether libtpu is installed, and this machine has a device that may be a TPU."""
    devices = (*glob.glob("/dev/accel*"), *glob.glob("/dev/vfio/[0-9]*"))
    return bool(devices) and find_spec("libtpu") is not None


def quieten() -> None:
    """Tell libtpu what it would ask the cloud about a machine, where there is no TPU.

    JAX tries libtpu at its start, which then says at length that nobody answers; with these it
    looks for a TPU as before, and finds none. What the environment has stays.
    """
    if find_spec("libtpu") is None or may_have_tpus():
        return
    for name, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("TPU_ACCELERATOR_TYPE", "v5e-1"),
    ):
        os.environ.setdefault(name, value)
