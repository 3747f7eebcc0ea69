"""zoo.callbacks' trackers, with the real packages, offline: what is stored, and what is resumed.

One run has all of them that are quick. It is killed, and resumed from an earlier checkpoint.
"""

import json
import os
import re
import shutil
import socket
import sqlite3
import struct
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from test_hooks import Kill
from test_loop import config, training

import zoo
from zoo import callbacks
from zoo.runs.callbacks.callback import Loop
from zoo.runs.callbacks.trackers import TRACKERS, Tracker
from zoo.runs.config import TRACKER_NAMES
from zoo.runs.metrics import read_metrics

Points = dict[tuple[str, int], float]


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


@pytest.fixture(scope="module", autouse=True)
def settings(tmp_path_factory):
    """An environment without trackers' settings, in which nothing asks for another machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_")):
                patch.delenv(name)
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        patch.setattr(zoo.runs.recorder, "plot_curves", lambda *paths: None)
        asked: list[Any] = []
        patch.setattr(socket, "getaddrinfo", lambda *to, **_: asked.append(to) or [])
        yield
        assert asked == []


def killed_and_resumed(folder: Path, *names: str) -> tuple[Path, dict[str, str]]:
    """The folder of a run with these trackers, killed in step 10, resumed at 8, and their ids."""
    given = {"steps": 12, "log_every": 2, "eval_every": 6, "checkpoint_every": 4, "norms_every": 6}
    run = config(folder, track=", ".join(names), **given)
    with pytest.raises(SystemExit):
        fit(run, Kill("on_step", 10, SystemExit(1)), evaluate=evaluate)
    ids = json.loads((run.run_dir / "trackers.json").read_text())
    fit(run, evaluate=evaluate)
    assert json.loads((run.run_dir / "trackers.json").read_text()) == ids
    assert ids.keys() == set(names)
    return run.run_dir, ids


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    names = [name for name in TRACKER_NAMES if name != "mlflow" and is_installed(name)]
    return killed_and_resumed(tmp_path_factory.mktemp("tracked"), *names)


def points_of(folder: Path) -> Points:
    """Name and step -> value of metrics.jsonl, without speeds, which differ."""
    records = read_metrics(folder / "metrics.jsonl")
    assert len(records) == 9
    assert any("norms/table" in record for record in records)
    return {
        (name, record["step"]): value
        for record in records
        for name, value in record.items()
        if name != "step" and not name.endswith("per_second")
    }


def without_speeds(points: Points) -> Points:
    return {key: x for key, x in points.items() if not key[0].endswith("per_second")}


# --- What they share -----------------------------------------------------------------------------


class Memory(Tracker):
    """A tracker that remembers what it is told."""

    name, package = "memory", "json"

    def __init__(self):
        super().__init__()
        self.told = []

    def open(self, run, id, start):
        self.told.append((id, start))

    def write(self, step, values):
        self.told += [(name, step, value) for name, value in values.items()]

    def close(self, status):
        self.told.append(status)


def test_trackers_are_given_no_line_without_numbers():
    tracker, loop = Memory(), Loop.__new__(Loop)
    tracker.write = lambda *given: tracker.told.append(given)
    tracker._is_open = True
    tracker.on_log(loop, 1, {"note": "none"})
    tracker.on_log(loop, 2, {"loss": 1.0, "note": "none"})
    assert tracker.told == [(2, {"loss": 1.0})]


def test_names_of_the_flag_are_the_trackers():
    assert tuple(TRACKERS) == TRACKER_NAMES


def test_unknown_trackers_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"track='wandb,neptune': .*'neptune'.*known are .*mlflow"):
        config(tmp_path, track="wandb,neptune")


@pytest.mark.parametrize("name", TRACKER_NAMES)
def test_missing_packages_are_named_before_any_compute(name: str, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, TRACKERS[name].package, None)
    with pytest.raises(ImportError, match=re.escape(f"pip install 'zoo[{name}]'")):
        TRACKERS[name]()
    monkeypatch.setattr(zoo.runs.loop, "_restore_or_init", None)
    with pytest.raises(ImportError, match=name):
        fit(config(tmp_path, track=name))


def test_extras_are_named_as_the_trackers():
    project = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    assert extras.keys() >= set(TRACKER_NAMES)


def test_failed_runs_are_told_so_and_with_nothing_saved_forget_the_id(tmp_path: Path):
    memory, path = Memory(), tmp_path / "run" / "trackers.json"
    with pytest.raises(ArithmeticError):
        fit(config(tmp_path, steps=4), memory, Kill("on_step", 2, ArithmeticError))
    assert memory.told[0][1] == 0
    assert memory.told[-1] == "failed"
    assert not path.exists()
    path.write_text('{"memory": "of a run whose config.json is gone"}')
    again = Memory()
    with pytest.raises(KeyboardInterrupt):
        fit(config(tmp_path, steps=4), again, Kill("on_step", 2, KeyboardInterrupt))
    assert again.told[0][1] == 0
    assert re.fullmatch("[0-9a-f]{8}", again.told[0][0])
    assert again.told[0][0] != memory.told[0][0]
    assert again.told[-1] == "killed"


class Left(callbacks.Callback):
    """Copies what a kill at step 2 would leave of a run's folder."""

    def on_step(self, loop, step, state, metrics):
        if step == 2:
            shutil.copytree(loop.run.folder, loop.run.folder.parent / "killed" / "run")


def test_runs_killed_before_their_first_checkpoint_keep_the_ids(tmp_path: Path):
    one, other = Memory(), Memory()
    fit(config(tmp_path, steps=4, checkpoint_every=4), one, Left())
    assert not list((tmp_path / "killed" / "run" / "checkpoints").glob("[0-9]*"))
    fit(config(tmp_path / "killed", steps=4), other)
    assert other.told[0] == one.told[0] == (one.told[0][0], 0)


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


def test_tensorboard_has_the_run(tracked):
    shown = without_speeds(tensorboard_points(tracked[0]))
    assert shown == pytest.approx(points_of(tracked[0]), rel=1e-6)  # float32


# --- Weights & Biases -------------------------------------------------------------------------


def wandb_records(path: Path) -> list[Any]:
    """The records of an offline run: protocol buffers in blocks, as LevelDB logs are."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, parts, records = path.read_bytes(), 7, [], []
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts.append(content[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(b"".join(parts)))
            parts = []
    return records


def wandb_points(records: list[Any]) -> Points:
    points = {}
    for record in records:
        if record.HasField("history"):
            row = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            step = row.pop("_step")
            assert record.history.step.num == step
            points |= {(k, step): float(x) for k, x in row.items() if not k.startswith("_")}
    return points


def test_wandb_has_the_run(tracked):
    folder, ids = tracked
    if "wandb" not in ids:
        pytest.skip("wandb is not installed")
    parts = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=str)
    assert [path.name for path in parts] == [f"run-{ids['wandb']}.wandb"] * 2
    first, second = (wandb_records(path) for path in parts)
    metrics = points_of(folder)
    before, after = wandb_points(first), wandb_points(second)
    assert without_speeds(before) == {key: x for key, x in metrics.items() if key[1] <= 8}
    assert without_speeds(after) == {key: x for key, x in metrics.items() if key[1] > 8}
    for records, status in ((first, "killed"), (second, "finished")):
        [run] = [record.run for record in records if record.HasField("run")]
        given = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert given["log_every"] == 2
        assert given["run_dir"] == str(folder)
        updates = [item for r in records if r.HasField("summary") for item in r.summary.update]
        assert json.loads({item.key: item.value_json for item in updates}["status"]) == status
        [end] = [record.exit for record in records if record.HasField("exit")]
        assert (end.exit_code == 0) == (status == "finished")


# --- MLflow ------------------------------------------------------------------------------------


@pytest.mark.slow  # it makes a database, and is slow to import
def test_mlflow_has_the_run(tmp_path: Path):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    folder, ids = killed_and_resumed(tmp_path, "mlflow")

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    [experiment] = [x for x in client.search_experiments() if x.name == "zoo"]
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == ids["mlflow"]
    assert run.info.status == "FINISHED"
    assert run.data.params["checkpoint_every"] == "4"
    points: Points = {}
    for name in run.data.metrics:
        history = client.get_metric_history(ids["mlflow"], name)
        points |= {(name, point.step): point.value for point in history}
    assert without_speeds(points) == points_of(folder)


# --- trackio -----------------------------------------------------------------------------------


def test_trackio_has_the_run(tracked):
    folder, ids = tracked
    if "trackio" not in ids:
        pytest.skip("trackio is not installed")
    with sqlite3.connect(Path(os.environ["TRACKIO_DIR"]) / "zoo.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
        [config] = database.execute(
            "select config from configs where run_name = ?", [ids["trackio"]]
        )
    assert {name for name, _, _ in rows} == {ids["trackio"]}
    points: Points = {}
    for _, step, text in rows:
        for name, value in json.loads(text).items():
            points[name, step] = value
    assert without_speeds(points) == points_of(folder)
    assert json.loads(config[0])["checkpoint_every"] == 4
