"""Run folders on servers of S3 and of GCS, with kills and faults between any two requests."""

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import equinox as eqx
import jax
import pytest
from recipe_cases import (
    STEPS,
    Program,
    Recipe,
    assert_same_result,
    finish,
    losses,
    shared,
    wait_for,
)
from stores import Store, gs, gs_port, s3, s3_port
from test_multiprocess import FLAGS, start_processes

import zoo
from zoo.common.store import Store as Objects
from zoo.runs.remote.lease import Lease, LeaseError

__all__ = ["gs", "gs_port", "s3", "s3_port", "shared"]
pytestmark = pytest.mark.slow
# What both stores show alike is shown on one: the lease on that which creates unconditionally.
# The recipe, with a lease of a few seconds.
DRIVER = """
import os, runpy, sys
from zoo.runs.remote.lease import Lease
Lease.__init__.__kwdefaults__["seconds"] = float(os.environ.get("LEASE", "4"))
sys.argv = ["lm", *sys.argv[1:]]
runpy.run_module("recipes.lm", run_name="__main__")
"""


@pytest.fixture(params=["s3", "gs"])
def store(request: pytest.FixtureRequest) -> Store:
    return request.getfixturevalue(request.param)


def start(address: str, work: Path, shared: Path, *more: str, **env: str) -> Program:
    driver = shared / "short_lease.py"
    driver.write_text(DRIVER)
    flags = Recipe("lm", shared).flags(address, f"--work-dir={work}", *more)
    return Program([driver, *flags], **env)


@pytest.fixture(scope="module")
def straight(shared) -> Path:
    """A run that nothing disturbs, in a local folder."""
    folder = shared / "straight of remote"
    Recipe("lm", shared).run(folder)
    return folder


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_kills_lose_nothing(store, shared, straight, tmp_path):
    requests, work = 0, tmp_path / "first"

    def count(number, method, path):
        nonlocal requests
        requests = number

    with store.proxied(count):
        output = finish(start(f"{store.address}/first", work, shared))
    assert f"the model is in {store.address}/first/model" in output
    assert_same_result(work, straight)

    address, choose, killed = f"{store.address}/again", random.Random(store.scheme), 0
    for index in range(4):
        process, last = None, choose.randrange(5, requests // 3)

        def kill(number, method, path, last=last):
            if number < last:
                return None
            process.kill()  # noqa: B023
            return "drop"

        if index == 2:  # on another machine
            shutil.rmtree(work)
        work = tmp_path / f"{index // 2}"
        with store.proxied(kill):
            process = start(address, work, shared)
            output, _ = process.communicate()
        assert process.returncode in (-signal.SIGKILL, 0), output
        killed += process.returncode != 0
    assert killed > 1
    finish(start(address, work, shared))
    assert_same_result(work, straight)
    output = finish(start(address, tmp_path / "other", shared))
    assert f"fetched step {STEPS} from {address}" in output
    assert f"{address} has finished {STEPS} steps" in output
    assert_same_result(tmp_path / "other", straight)
    command = [sys.executable, "-m", "zoo", "report", address]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(rf"\n  checkpoints (\d+, )*{STEPS}\n", output)
    assert json.dumps(losses(straight)[STEPS])[:6] in output
    model = zoo.load(f"{address}/model")
    assert jax.tree.all(jax.tree.map(same, model, zoo.load(straight / "model")))


def same(one, other):
    return not eqx.is_array(one) or bool((one == other).all())


@pytest.mark.parametrize("store", ["gs"], indirect=True)
def test_faults_are_survived(store, shared, straight, tmp_path):
    choose, faults = random.Random(0), []

    def fault(number, method, path):
        chosen = choose.choices((None, 500, 503, "drop", 1.0), (85, 4, 4, 4, 3))[0]
        faults.append(chosen)
        return chosen

    address = f"{store.address}/run"
    with store.proxied(fault):
        finish(start(address, tmp_path / "work", shared))
    assert {*faults} == {None, 500, 503, "drop", 1.0}
    finish(start(address, tmp_path / "other", shared))
    assert_same_result(tmp_path / "other", straight)


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_a_store_that_is_down_for_a_while_stops_nothing(store, shared, straight, tmp_path):
    address, began = f"{store.address}/run", time.monotonic()
    work = tmp_path / "work"

    def fault(number, method, path):
        nonlocal began
        if not (work / "metrics.jsonl").exists():
            began = time.monotonic()
        return "drop" if 1 < time.monotonic() - began < 20 else None

    with store.proxied(fault):
        finish(start(address, work, shared))
    assert time.monotonic() - began > 15
    assert_same_result(work, straight)
    finish(start(address, tmp_path / "other", shared))
    assert_same_result(tmp_path / "other", straight)


def test_bad_addresses_are_said_before_any_compute(store, shared, tmp_path):
    missing = f"{store.scheme}://no-such-bucket/run"
    output = finish(start(missing, tmp_path / "a", shared), 1)
    reason = "there is no such bucket: make it, or correct the address"
    assert f"error: {missing}: {reason}\n" in output
    assert "Traceback" not in output
    address = f"{store.address}/run"
    with store.proxied(lambda number, method, path: 403):
        output = finish(start(address, tmp_path / "b", shared), 1)
    assert f"error: {address}: the store refuses permission to these credentials" in output
    assert "Traceback" not in output
    if store.scheme == "s3":
        nothing = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "HOME": str(tmp_path)}
        nothing["AWS_EC2_METADATA_DISABLED"] = "true"
        output = finish(start(address, tmp_path / "c", shared, **nothing), 1)
        assert f"error: {address}: there are no credentials for this store" in output


@pytest.mark.parametrize("store", ["gs"], indirect=True)
def test_a_signal_waits_for_the_copy(store, shared, straight, tmp_path):
    address, work, flag = f"{store.address}/run", tmp_path / "work", "--checkpoint-every=1000"
    with store.proxied(lambda number, method, path: 0.1):
        process = start(address, work, shared, flag)
        path, deadline = work / "metrics.jsonl", time.monotonic() + 200
        while not (path.exists() and path.read_text().count("\n") > 3):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
        output = finish(process, 128 + signal.SIGTERM)
    step = losses(work).popitem()[0]
    assert f"saved step {step} in {address}; the same command resumes the run" in output
    output = finish(start(address, tmp_path / "other", shared, flag))
    assert f"resumed {address} at step {step}" in output
    assert_same_result(tmp_path / "other", straight)


@pytest.mark.parametrize("store", ["gs"], indirect=True)
def test_two_starters_and_a_crash(store, shared, straight, tmp_path):
    address = f"{store.address}/run"
    both = [start(address, tmp_path / f"{i}", shared, "--steps=400") for i in range(2)]
    while all(process.poll() is None for process in both):
        time.sleep(0.1)
    loser, winner = sorted(both, key=lambda process: process.poll() is None)
    # Which sentence it is depends on whether the first was at work for longer than its lease.
    said = rf"error: another process (is training|has taken over the run) in {address}\b"
    assert re.search(said, finish(loser, 1))
    work = tmp_path / str(both.index(winner))
    deadline = time.monotonic() + 200
    while not (work / "checkpoints" / "4").exists():
        assert winner.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    winner.kill()
    winner.wait()
    again = f"--steps={STEPS}"
    patient = start(address, tmp_path / "other", shared, again, LEASE="15")  # starts within that
    output = finish(patient)
    assert "another process is at work, or was killed there; waiting for up to" in output
    began = time.monotonic()
    output = finish(start(address, work, shared, again, "--seed=1"), 1)
    assert "seed: was 0, is 1" in output
    assert time.monotonic() - began < 60


def test_a_starter_waits_by_the_clock_of_the_store(store):
    place = Objects(f"{store.address}/run")
    crashed = Lease(place, seconds=8.0, settle=0.5)
    crashed._released.set()  # it renews nothing
    crashed.acquire()
    time.sleep(6)
    began = time.monotonic()
    other = Lease(place, seconds=8.0, settle=0.5)
    other.acquire()
    assert time.monotonic() - began < 6
    with pytest.raises(LeaseError, match=f"taken over the run in {store.address}/run"):
        crashed.check()
    other.release()


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_processes_without_a_shared_disk_lose_nothing(store, shared, tmp_path):
    """Both are killed, one machine is another one then, and at last both are one."""
    recipe, address = Recipe("lm", shared), f"{store.address}/run"
    flags = ("--mesh=fsdp=2", "--steps=24")

    def begin(*machines: str) -> list[Program]:
        own = [[f"--work-dir={tmp_path / machine}"] for machine in machines]
        return start_processes(recipe, address, *flags, own=own, devices=1)

    both, log = begin("a", "b"), tmp_path / "a" / "metrics.jsonl"
    wait_for(lambda: log.exists() and b'"step": 16,' in log.read_bytes(), both[0])
    for process in both:
        process.kill()
        process.communicate()
    first, second = (finish(process) for process in begin("a", "c"))
    assert f"resumed {address} at step " in first
    assert "Traceback" not in second
    folder = lambda machine: tmp_path / machine / "checkpoints" / "24"
    parts = lambda machine: [x.name for x in (folder(machine) / "arrays").iterdir()]
    assert parts("a") == ["0"]
    assert [x.name for x in tmp_path.glob("c/.process_1/checkpoints/24/arrays/*")] == ["1"]
    alone = tmp_path / "alone"
    recipe.run(alone, *FLAGS, *flags, devices=2)
    output = recipe.run(address, *FLAGS, *flags, "--mesh=", f"--work-dir={tmp_path / 'd'}")
    assert f"fetched step 24 from {address}" in output
    assert sorted(parts("d")) == ["0", "1"]
    assert_same_result(tmp_path / "d", alone, 24)
