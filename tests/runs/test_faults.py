"""Runs that are killed, told to stop, or find a damaged checkpoint, end as if nothing had been."""

import functools
import json
import random
import signal
import time
from pathlib import Path

import pytest
from recipe_cases import (
    STEPS,
    Program,
    Recipe,
    assert_same_result,
    finish,
    metrics,
    shared,
    wait_for,
)

__all__ = ["shared"]

MESHES = {"one device": ("", 1), "2x2x2": ("data=2,fsdp=2,tensor=2", 8)}


@functools.cache
def straight_run(name: str, shared: Path, mesh: str) -> Path:
    """A run from start to end, which the others are compared with."""
    flags, devices = MESHES[mesh]
    folder = shared / f"straight {name} {mesh}"
    Recipe(name, shared).run(
        folder, f"--mesh={flags}", devices=devices, record=shared / f"{folder.name}.batches"
    )
    return folder


def read_batches(path: Path) -> dict[str, str]:
    """The digest of each batch; a batch that was taken again after a kill has to be the same."""
    batches: dict[str, str] = {}
    for line in path.read_text().splitlines():
        name, digest = json.loads(line)
        assert batches.setdefault(name, digest) == digest
    assert batches, path
    return batches


def steps_done(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b'"loss"') if path.exists() else 0


def saving(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob("*.tmp"))


def kill_at_random(process: Program, run_dir: Path, choose: random.Random, where: str):
    """Kill a run inside a save, between two steps or in its start; whether it was inside a save."""
    behind = steps_done(run_dir)  # what was done after the last save is undone first
    if where == "save":
        wait_for(lambda: steps_done(run_dir) != behind, process)
        wait_for(lambda: saving(run_dir), process)
        time.sleep(choose.uniform(0, 0.01))
    elif where == "steps":
        at = behind + choose.randrange(12)
        wait_for(lambda: steps_done(run_dir) > at, process)
        time.sleep(choose.uniform(0, 0.05))
    else:
        time.sleep(choose.uniform(0, 4))
    process.kill()
    process.communicate()
    return saving(run_dir)


# tests/test_soak.py kills runs at each boundary.
KILLS = [("lm", "2x2x2"), ("rnn", "one device")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), KILLS)
def test_repeatedly_killed_runs_match_straight_runs(name, mesh, shared, tmp_path):
    straight = straight_run(name, shared, mesh)
    flags, devices = MESHES[mesh]
    recipe, run_dir, batches = Recipe(name, shared), tmp_path / "run", tmp_path / "batches"
    choose = random.Random(3)
    killed = killed_in_save = 0
    for number in range(3):
        process = recipe.start(run_dir, f"--mesh={flags}", devices=devices, record=batches)
        where = ("save", "steps", "start")[number % 3]
        killed_in_save += kill_at_random(process, run_dir, choose, where)
        killed += process.returncode == -signal.SIGKILL
    assert killed >= 2
    assert killed_in_save >= 1
    recipe.run(run_dir, f"--mesh={flags}", devices=devices, record=batches)
    assert_same_result(run_dir, straight)
    assert read_batches(batches) == read_batches(shared / f"{straight.name}.batches")


@pytest.mark.slow
def test_signals_save_and_set_exit_code(shared, tmp_path):
    recipe, run_dir = Recipe("lm", shared), tmp_path / "run"
    last = 0
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        process = recipe.start(run_dir, "--checkpoint-every=1000")
        wait_for(lambda: steps_done(run_dir) > last + 2, process)  # noqa: B023
        process.send_signal(number)
        output = finish(process, code)
        step = metrics(run_dir)[-1]["step"]
        assert last < step < STEPS
        assert f"{signal.Signals(number).name}: saved step {step} in {run_dir}" in output
        assert f"(exit code {code})" in output
        assert "Traceback" not in output
        assert (run_dir / "checkpoints" / str(step)).is_dir()
        last = step
    output = recipe.run(run_dir, "--checkpoint-every=1000")
    assert f"resumed {run_dir} at step {last}" in output
    assert_same_result(run_dir, straight_run("lm", shared, "one device"))
