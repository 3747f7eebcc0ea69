"""Weights & Biases, MLflow, TensorBoard and trackio as callbacks, and by name.

Each is given the configuration, the numbers of each line of metrics.jsonl, and how the run ended.
All write local files, unless their own settings, in the environment or here, say otherwise.
"""

import importlib
import json
import os
import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from zoo.common import files
from zoo.common.configuration import flat
from zoo.runs.callbacks.callback import Callback, Loop
from zoo.runs.config import Config, as_json
from zoo.runs.processes import RunError
from zoo.runs.run import TRACKED, Run
from zoo.training.state import TrainState

Status = Literal["finished", "failed", "killed"]


class Tracker(Callback):
    """A callback that gives a run's metrics to an experiment tracker.

    The tracker's id of the run is in the run folder's trackers.json, so that a resumed run
    continues there. Steps that a killed run did after its last checkpoint are done again, with the
    same numbers, and given again.

    Raises:
        ImportError: the tracker's package is missing; the message names the extra.
    """

    name = "tracker"
    package: str

    def __init__(self) -> None:
        self._module = self._imported(self.package)
        self._is_open = False

    def new_id(self, run: Run[Config]) -> str:
        """The id of a new run of the tracker's."""
        return secrets.token_hex(4)

    def open(self, run: Run[Config], id: str, start: int) -> None:
        """Begin or resume the tracker's run, which has `start` steps behind it."""
        raise NotImplementedError

    def write(self, step: int, values: dict[str, float]) -> None:
        """Take numbers of a step; more of the same step may follow."""
        raise NotImplementedError

    def close(self, status: Status) -> None:
        """End the tracker's run, once all of it is written."""
        raise NotImplementedError

    def on_start(self, loop: Loop, state: TrainState) -> None:
        """Begin the tracker's run, or resume the one whose id is kept."""
        run = loop.run
        if run.is_main:
            path = run.folder / TRACKED
            ids = json.loads(path.read_text()) if path.exists() else {}
            if self.name not in ids:
                ids[self.name] = self.new_id(run)
                files.replace(path, json.dumps(ids) + "\n")
            self.open(run, ids[self.name], loop.start)
            self._is_open = True

    def on_log(self, loop: Loop, step: int, values: Mapping[str, Any]) -> None:
        """Give the tracker the numbers."""
        numbers = {k: x for k, x in values.items() if isinstance(x, float | int)}
        if self._is_open and numbers:
            self.write(step, numbers)

    def on_end(self, loop: Loop, step: int, state: TrainState | None) -> None:
        """End the tracker's run as this one ended."""
        if self._is_open:
            self._is_open = False
            is_killed = isinstance(sys.exception(), SystemExit | KeyboardInterrupt)
            self.close("failed" if state is None else "killed" if is_killed else "finished")

    def _imported(self, package: str) -> Any:
        try:
            return importlib.import_module(package)
        except ImportError as error:
            raise ImportError(
                f"the tracker {self.name!r} needs the package {package}: "
                f"pip install 'zoo[{self.name}]' ({error})"
            ) from error


class Wandb(Tracker):
    """Weights & Biases; `options` are further arguments of `wandb.init`.

    `project` and `mode` default to WANDB_PROJECT and WANDB_MODE, then to "zoo" and "offline".
    Offline, each start writes a folder of its own in `<run folder>/wandb`, all of one id, which
    `wandb sync` sends in their order. Online, a step that the server has is not taken again.
    """

    name, package = "wandb", "wandb"

    def __init__(self, project: str | None = None, *, mode: str | None = None, **options: Any):
        self._project = project or os.environ.get("WANDB_PROJECT") or "zoo"
        self._mode = mode or os.environ.get("WANDB_MODE") or "offline"
        self._options = options
        if self._mode == "offline":  # or it looks up a server to report its own errors to
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        super().__init__()

    def open(self, run: Run[Config], id: str, start: int) -> None:
        """Begin or resume the run of this id."""
        given = {
            "project": self._project,
            "mode": self._mode,
            "id": id,
            "resume": "allow",
            "name": _title(run),
            "dir": str(run.folder),
            "config": _configuration(run),
            "settings": self._module.Settings(console="off"),  # a progress bar is no log
        }
        self._run = self._module.init(**given | self._options)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Add to the row of this step, which is stored once there is one of a later step."""
        self._run.log(values, step=step)

    def close(self, status: Status) -> None:
        """Finish, as failed unless it is finished, with the status in the summary."""
        self._run.summary["status"] = status
        self._run.finish(exit_code=int(status != "finished"))


class MLflow(Tracker):
    """MLflow: the parameters, metrics and status of a run.

    `experiment` and `tracking_uri` default to MLFLOW_EXPERIMENT_NAME and MLFLOW_TRACKING_URI, then
    to "zoo" and a database in the run folder, which this shows:
    `mlflow ui --backend-store-uri sqlite:///<run folder>/mlflow.db`. Parameters stay as at
    the first start, as MLflow changes none.
    """

    name, package = "mlflow", "mlflow"

    def __init__(self, experiment: str | None = None, *, tracking_uri: str | None = None):
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "zoo"
        self._uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or ""
        if not self._uri:  # or it reports over the network that it is used
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
            self._imported("sqlalchemy")
        super().__init__()

    def new_id(self, run: Run[Config]) -> str:
        """The id that MLflow gives to a new run."""
        client, name = self._connect(run), self._experiment
        if found := client.get_experiment_by_name(name):
            experiment = found.experiment_id
        else:
            place = None if self._uri else (run.folder / "mlflow").absolute().as_uri()
            experiment = client.create_experiment(name, artifact_location=place)
        return client.create_run(experiment, run_name=_title(run)).info.run_id

    def open(self, run: Run[Config], id: str, start: int) -> None:
        """Give the run of this id the parameters that it lacks."""
        self._id, self._client = id, self._connect(run)
        try:
            data = self._client.get_run(id).data
        except self._module.MlflowException as error:
            raise RunError(
                f"{run.folder / TRACKED} has the MLflow run {id}, which can't be read there "
                f"({error}): put it back, or remove the entry for a new one"
            ) from error
        self._client.update_run(id, status="RUNNING")
        configuration = _configuration(run)
        params = [
            self._module.entities.Param(name, str(configuration[name])[:6000])
            for name in configuration.keys() - data.params.keys()
        ]
        for first in range(0, len(params), 100):  # the most that MLflow takes
            self._client.log_batch(id, params=params[first : first + 100])

    def write(self, step: int, values: dict[str, float]) -> None:
        """Add a point to each metric."""
        now = int(time.time() * 1000)
        points = [self._module.entities.Metric(k, float(x), now, step) for k, x in values.items()]
        for first in range(0, len(points), 1000):  # the most that MLflow takes
            self._client.log_batch(self._id, metrics=points[first : first + 1000])

    def close(self, status: Status) -> None:
        """Set the status."""
        self._client.set_terminated(self._id, status.upper())

    def _connect(self, run: Run[Config]) -> Any:
        local = f"sqlite:///{(run.folder / 'mlflow.db').absolute()}"
        return self._module.MlflowClient(tracking_uri=self._uri or local)


class TensorBoard(Tracker):
    """TensorBoard: scalars, in `<run folder>/tensorboard`, and the configuration as a text.

    The points of steps that are done again are hidden by the new ones.
    """

    name, package = "tensorboard", "tensorboardX"

    def open(self, run: Run[Config], id: str, start: int) -> None:
        """Open another file of events."""
        self._writer = self._module.SummaryWriter(
            str(run.folder / "tensorboard"),
            purge_step=start + 1,
            filename_suffix=f".{start:09d}",  # its own names tell seconds apart
        )
        text = json.dumps(_configuration(run), indent=2)
        self._writer.add_text("configuration", f"```\n{text}\n```", start)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Add a scalar for each number."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, status: Status) -> None:
        """Close the file of events, which has no place for a status."""
        self._writer.close()


class Trackio(Tracker):
    """trackio; `options` are further arguments of `trackio.init`, such as `space_id`.

    Its files are in its own folder, TRACKIO_DIR, where `trackio show` finds the runs of all
    folders. The run's name is its id.
    """

    name, package = "trackio", "trackio"

    def __init__(self, project: str = "zoo", **options: Any):
        self._project, self._options = project, options
        super().__init__()

    def new_id(self, run: Run[Config]) -> str:
        """A name that tells runs of folders of one name apart."""
        return f"{_title(run)}-{super().new_id(run)}"

    def open(self, run: Run[Config], id: str, start: int) -> None:
        """Begin or resume the run of this name."""
        given = {"project": self._project, "name": id, "resume": "allow"}
        self._run = self._module.init(**given, config=_configuration(run), **self._options)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Add a row."""
        self._run.log(values, step=step)

    def close(self, status: Status) -> None:
        """Wait for what is under way; trackio has no place for a status."""
        self._module.finish()


TRACKERS: dict[str, type[Tracker]] = {
    cls.name: cls for cls in (Wandb, MLflow, TensorBoard, Trackio)
}


def _title(run: Run[Config]) -> str:
    return Path(run.address).absolute().name


def _configuration(run: Run[Config]) -> dict[str, Any]:
    """The run's configuration by dotted names."""
    return flat(as_json(run.config))
