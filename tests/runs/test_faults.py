"""Runs that are killed, told to stop, or find a damaged checkpoint, end as if nothing had been."""

import functools
import json
import os
import random
import signal
import time
from pathlib import Path

import forked
import grain
import numpy as np
import optax
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

import zoo
from zoo import losses, mlp
from zoo.runs import recorder
from zoo.runs.config import Config
from zoo.runs.metrics import read_metrics

__all__ = ["shared"]


@functools.cache
def straight_run(name: str, shared: Path) -> Path:
    """A run from start to end, which the others are compared with."""
    folder = shared / f"straight {name}"
    Recipe(name, shared).run(folder, record=shared / f"{folder.name}.batches")
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


@pytest.mark.slow
def test_a_repeatedly_killed_run_matches_a_straight_one(shared, tmp_path):
    """Its batches too; tests/test_soak.py kills runs of all kinds, at each boundary."""
    straight = straight_run("rnn", shared)
    recipe, run_dir, batches = Recipe("rnn", shared), tmp_path / "run", tmp_path / "batches"
    choose = random.Random(3)
    killed = killed_in_save = 0
    for where in ("save", "steps", "start"):
        process = recipe.start(run_dir, record=batches)
        killed_in_save += kill_at_random(process, run_dir, choose, where)
        killed += process.returncode == -signal.SIGKILL
    assert killed >= 2
    assert killed_in_save >= 1
    recipe.run(run_dir, record=batches)
    assert_same_result(run_dir, straight)
    assert read_batches(batches) == read_batches(shared / f"{straight.name}.batches")


@pytest.mark.slow
def test_a_signal_saves_and_sets_the_exit_code(shared, tmp_path):
    recipe, run_dir = Recipe("rnn", shared), tmp_path / "run"
    process = recipe.start(run_dir, "--checkpoint-every=1000")
    wait_for(lambda: steps_done(run_dir) > 2, process)
    process.send_signal(signal.SIGINT)
    output = finish(process, 130)
    step = metrics(run_dir)[-1]["step"]
    assert 0 < step < STEPS
    assert f"SIGINT: saved step {step} in {run_dir}" in output
    assert "(exit code 130)" in output
    assert "Traceback" not in output
    assert (run_dir / "checkpoints" / str(step)).is_dir()
    output = recipe.run(run_dir, "--checkpoint-every=1000")
    assert f"resumed {run_dir} at step {step}" in output
    assert_same_result(run_dir, straight_run("rnn", shared))


def fit_shuffled(folder, kill):
    """A run on what is left of shuffled rows, killed four steps after a checkpoint."""
    source, read = [(np.float32([i % 7, i % 5]), np.int32(i % 3)) for i in range(3000)], []
    rows = grain.MapDataset.source(source).shuffle(seed=1).to_iter_dataset()
    rows = rows.filter(lambda row: read.append(row) or row[0][0] != row[1])
    data = zoo.batches(rows, 64, shuffle=False, num_rows=2000, states=folder / "states.json")

    def evaluate(model, whole):
        if kill:
            while not (folder / "run" / "checkpoints" / "20").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return {"rows_read": float(len(read))}

    recorder.plot_curves = lambda *paths: None  # drawing would take most of the time
    every = {"log_every": 1, "eval_every": 24, "checkpoint_every": 10}
    options = {"run_dir": folder / "run", "precision": "fp32", "compilation_cache": None}
    with zoo.Run(Config(steps=36, **every, **options)) as run:
        training = zoo.Training(
            make_model=lambda key: mlp.MLP(mlp.Config(in_size=2, out_size=3), key=key),
            loss_fn=losses.classification,
            optimizer=optax.adam(1e-2),
            data=data,
            evaluate=evaluate,
        )
        zoo.fit(run, training)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_rows_it_would_have_read(tmp_path):
    def ended(name, kill=False):
        (tmp_path / name).mkdir(exist_ok=True)
        program = forked.start(tmp_path / "log", fit_shuffled, tmp_path / name, kill)
        code = forked.finish(program)
        assert code == -signal.SIGKILL * kill, (tmp_path / "log").read_text()
        return read_metrics(tmp_path / name / "run" / "metrics.jsonl")

    whole = ended("whole")
    assert len(ended("killed", kill=True)) == 24
    resumed = ended("killed")
    assert "1000" in json.loads((tmp_path / "killed" / "states.json").read_text())["states"]
    losses_of = lambda lines: [line["loss"] for line in lines if "loss" in line]
    assert len(losses_of(whole)) == 36
    assert losses_of(resumed) == losses_of(whole)
    read = [lines[-1]["rows_read"] for lines in (whole, resumed)]
    assert read[1] < 0.7 * read[0]  # from the state of row 1,000, for the checkpoint at row 1,280
