"""The environment for a bug report: versions, machine, devices, variables, a run."""

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from zoo.common.files import is_remote
from zoo.common.store import Store, location
from zoo.publishing.formats import version
from zoo.runs.checkpoint import local_steps
from zoo.runs.metrics import read_metrics
from zoo.runs.processes import RunError
from zoo.runs.remote import lease
from zoo.runs.remote.copies import stored_steps

PACKAGE = Path(__file__).resolve().parents[1]
# Variables by their beginnings; none of these holds a password or a token.
VARIABLES = ("JAX_", "XLA_", "ZOO_", "LIBTPU_", "TPU_", "NCCL_", "CUDA_", "OMP_")


def report(run: str = "") -> str:
    """The environment as text to paste into a bug report, with a run by its folder or address."""
    sections = {
        "": _machine(),
        "packages": _packages(),
        "devices": _devices(),
        "variables": _variables(),
    } | ({f"run {run}": _run(run)} if run else {})
    lines = []
    for title, found in sections.items():
        texts = [*found] or ["none"]
        lines += [title, *(f"  {text}" for text in texts)] if title else texts
    return "\n".join(lines)


def _machine() -> Iterator[str]:
    commit = f", commit {found}" if (found := _commit()) else ""
    yield f"zoo {version()} in {PACKAGE}{commit}"
    yield f"Python {platform.python_version()} on {platform.platform()}"
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    yield f"{os.cpu_count()} CPUs, {pages * page / 2**30:.1f} GiB of memory"


def _commit() -> str:
    """The commit of the checkout, with -dirty after changes; empty outside of one."""
    if not (PACKAGE.parent / ".git").exists():
        return ""
    command = ["git", "-C", str(PACKAGE.parent), "describe", "--always", "--dirty", "--match="]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown (git failed)"


def _packages() -> Iterator[str]:
    """The packages that the zoo and its extras name, and JAX's plugins."""
    named: set[str] = set()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        lines = importlib.metadata.requires("zoo") or []
        named = {_plain(re.split(r"[^\w.-]", line)[0]) for line in lines}
    installed = {_plain(x.name): x.version for x in importlib.metadata.distributions()}
    for name in sorted(named | {x for x in installed if re.match("jax|libtpu", x)}):
        yield f"{name} {installed.get(name, 'is missing')}"


def _plain(name: str) -> str:
    """A package's name as PyPI compares them."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _devices() -> Iterator[str]:
    try:
        devices = jax.devices()
    except RuntimeError as error:  # a driver that is missing or broken: the report is about it
        yield f"none: {error}"
        return
    processes = f"process {jax.process_index()} of {jax.process_count()}"
    yield f"backend {jax.default_backend()}, {processes}"
    for device in devices:
        is_local = device.process_index == jax.process_index()
        limit = (device.memory_stats() or {}).get("bytes_limit") if is_local else None
        memory = f", {limit / 2**30:.1f} GiB for JAX" if limit else ""
        yield f"{device.id}: {device.device_kind}{memory}"


def _variables() -> Iterator[str]:
    for name, value in sorted(os.environ.items()):
        if name.startswith(VARIABLES):
            yield f"{name}={value}"


def _run(run_dir: str) -> Iterator[str]:
    """Lines on a run: its checkpoints, its last numbers, and whether a process is at work.

    Raises:
        RunError: there is no run.
    """
    found: dict[str, Any] | None = None
    where = location(run_dir, "run_dir")
    if is_remote(where):
        store = Store(run_dir, "run_dir")
        steps, (_, found) = sorted(stored_steps(store)[0]), lease.newest(store)
    else:
        steps = local_steps(where / "checkpoints")
    path = where / "metrics.jsonl"
    records = read_metrics(path) if path.exists() else []
    if not steps and not records:
        raise RunError(f"run='{run_dir}': there is neither a checkpoint nor a metric of a run")
    yield f"checkpoints {', '.join(map(str, steps)) or 'none'}"
    last: dict[str, Any] = {}
    for record in records:
        last |= record
    yield ", ".join(f"{name} {value}" for name, value in last.items())
    if found is not None:
        yield (
            "no process is at work" if found["released"] else "a process is at work, or was killed"
        )
