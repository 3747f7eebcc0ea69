"""What a program does before JAX starts."""

import fnmatch
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from zoo.common import startup

BEGUN = """
import sys
from jax._src import xla_bridge
from zoo.common import startup
from zoo.runs.config import Config
from zoo.runs.run import Run

startup.keep_freed_memory = lambda: print(xla_bridge.backends_are_initialized())
with Run(Config(run_dir=sys.argv[1], steps=1)):
    print(xla_bridge.backends_are_initialized())
"""


def test_freed_memory_is_kept_before_jax_starts_its_threads(tmp_path):
    command = [sys.executable, "-c", BEGUN, tmp_path / "run"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.stdout.split() == ["False", "True"], run.stderr


@pytest.mark.parametrize(
    ("platforms", "found", "on_cpu"),
    [("", (), True), ("cpu", ("libtpu",), True), ("cuda,cpu", (), False), ("", ("libtpu",), False)],
)
def test_cpu_is_known_before_jax_starts(platforms, found, on_cpu, monkeypatch):
    monkeypatch.setattr(startup, "find_spec", lambda name: name if name in found else None)
    monkeypatch.setattr(startup, "may_have_tpus", lambda: "libtpu" in found)
    monkeypatch.setattr(startup, "entry_points", lambda group: ())
    monkeypatch.setattr(jax, "config", SimpleNamespace(jax_platforms=platforms))
    assert startup.is_on_cpu() is on_cpu


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("device", ["", "/dev/accel0", "/dev/vfio/0"])
def test_libtpu_is_told_that_there_is_no_tpu(device, installed, monkeypatch):
    monkeypatch.setattr(startup, "find_spec", lambda name: name if installed else None)
    # `/dev/vfio/vfio` is there without any device.
    there = [device or "/dev/vfio/vfio"]
    monkeypatch.setattr(startup.glob, "glob", lambda pattern: fnmatch.filter(there, pattern))
    monkeypatch.setattr(startup.os, "environ", environment := {"TPU_WORKER_HOSTNAMES": "mine"})
    startup.quieten_libtpu()
    assert environment["TPU_WORKER_HOSTNAMES"] == "mine"
    assert ("TPU_ACCELERATOR_TYPE" in environment) == (installed and not device)
    assert startup.may_have_tpus() == (installed and bool(device))


def test_a_start_with_libtpu_prints_nothing():
    pytest.importorskip("libtpu", reason="the compiler for TPUs is the extra `plan`")
    environment = {k: x for k, x in os.environ.items() if not k.startswith(("TPU", "JAX"))}
    command = [sys.executable, "-c", "import zoo; print(zoo.make_mesh().size)"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("1\n", "")
