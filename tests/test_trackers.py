"""zoo.callbacks' trackers, with the real packages, offline: what they store, and what a resume does.

One run has all of them that are installed. It is killed, and resumed from an earlier checkpoint.
"""

import importlib
import json
import math
import os
import re
import socket
import sqlite3
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import test_loop
from test_loop import config, training

import zoo
from zoo import callbacks
from zoo.runs.callbacks.trackers import TRACKERS
from zoo.runs.metrics import read_metrics
from zoo.runs.run import TRACKER_NAMES

Points = dict[tuple[str, int], float]


class Kill(callbacks.Callback):
    """Ends the program at a step, as a signal does that nobody heeds."""

    def __init__(self, step: int, error: BaseException):
        self.step, self.error = step, error

    def on_step(self, loop, step, state, metrics):
        if step == self.step:
            raise self.error


def fit(config, *given, **options):
    with zoo.Run(config) as run:
        return zoo.fit(run, training(**options), callbacks=given)


def evaluate(model, whole):
    return {"eval_loss": float(model.table[0, 0])}


def is_installed(name: str) -> bool:
    try:
        TRACKERS[name]()
    except ImportError:
        return False
    return True


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """An environment without trackers' settings; a connection to elsewhere is an error."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_")):
                patch.delenv(name)
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        patch.setattr(zoo.runs.recorder, "plot_curves", lambda *paths: None)
        asked: list[Any] = []
        patch.setattr(socket, "getaddrinfo", lambda *to, **_: asked.append(to) or [])
        connect = socket.socket.connect

        def connect_locally(self, address):
            if self.family != socket.AF_UNIX:
                asked.append(address)
            return connect(self, address)

        patch.setattr(socket.socket, "connect", connect_locally)
        yield
        assert asked == []


@pytest.fixture(scope="module")
def runs(settings, tmp_path_factory):
    """The run folder, the ids after the kill, and those after the resume."""
    names = [name for name in TRACKER_NAMES if is_installed(name)]
    assert "tensorboard" in names
    settings = config(
        tmp_path_factory.mktemp("runs"),
        steps=12,
        log_every=2,
        eval_every=6,
        checkpoint_every=4,
        track=", ".join(names),
        norms_every=3,
    )
    with pytest.raises(SystemExit):
        fit(settings, Kill(8, SystemExit(1)), evaluate=evaluate)
    ids = [json.loads((settings.run_dir / "trackers.json").read_text())]
    fit(settings, evaluate=evaluate)
    ids += [json.loads((settings.run_dir / "trackers.json").read_text())]
    return settings.run_dir, *ids


def points_of(folder: Path) -> Points:
    """Name and step -> value of metrics.jsonl and norms.jsonl, without speeds, which differ."""
    records = read_metrics(folder / "metrics.jsonl") + read_metrics(folder / "norms.jsonl")
    assert len(records) > 12
    return {
        (name, record["step"]): value
        for record in records
        for name, value in record.items()
        if name != "step" and not name.endswith("per_second")
    }


def without_speeds(points: Points) -> Points:
    return {key: x for key, x in points.items() if not key[0].endswith("per_second")}


def test_ids_are_kept_over_a_resume(runs):
    folder, killed, resumed = runs
    assert killed == resumed
    assert set(killed) >= {"tensorboard"}
    meta = json.loads((folder / "checkpoints" / "12" / "meta.json").read_text())["meta"]
    kept = {name: values.get("id") for name, values in meta["callbacks"].items() if values}
    assert kept == killed


# --- TensorBoard --------------------------------------------------------------------------------


def tensorboard_points(folder: Path) -> Points:
    """The scalars that TensorBoard shows: a file hides those of steps from its first one on."""
    from tensorboardX.proto import event_pb2

    points: Points = {}
    for path in sorted((folder / "tensorboard").glob("events.*")):
        content, position = path.read_bytes(), 0
        while position < len(content):
            (length,) = struct.unpack_from("<Q", content, position)
            event = event_pb2.Event.FromString(content[position + 12 : position + 12 + length])
            position += length + 16
            if event.session_log.status:
                points = {key: x for key, x in points.items() if key[1] < event.step}
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    assert (value.tag, event.step) not in points
                    points[value.tag, event.step] = value.simple_value
    return points


def test_tensorboard_has_the_run(runs):
    shown = without_speeds(tensorboard_points(runs[0]))
    assert shown == pytest.approx(points_of(runs[0]), rel=1e-6)  # float32
