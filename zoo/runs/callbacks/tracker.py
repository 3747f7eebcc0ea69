"""The base class of experiment trackers, which are callbacks."""

import importlib
import json
import secrets
import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal

from zoo.common import files
from zoo.runs.callbacks.callback import Callback, Loop
from zoo.runs.config import Config
from zoo.runs.metrics import read_metrics
from zoo.runs.run import TRACKED, Run
from zoo.training.state import TrainState

Status = Literal["finished", "failed", "killed"]


class Tracker(Callback):
    """A callback that gives a run's metrics to an experiment tracker, each number once.

    The id is in the run folder's trackers.json from the start on, and in the checkpoints, so that a
    resumed run continues the same run of the tracker. At a start the tracker is given what it lacks
    of metrics.jsonl, as of the time before there was a tracker. Steps that a killed run did after
    its last checkpoint are done again, with the same numbers: each tracker says how it treats them.

    Raises:
        ImportError: the tracker's package is missing; the message names the extra.
    """

    name = "tracker"
    package: str

    def __init__(self) -> None:
        self._module = self._imported(self.package)
        self._is_open = False
        self._last = all_up_to(-1)

    def new_id(self, run: Run[Config]) -> str:
        """The id of a new run of the tracker's."""
        return secrets.token_hex(4)

    def open(self, run: Run[Config], id: str, start: int, is_new: bool) -> defaultdict[str, int]:
        """Begin or resume the tracker's run; return the last step that it has of each metric."""
        raise NotImplementedError

    def write(self, step: int, values: dict[str, float]) -> None:
        """Take numbers of a step; more of the same step may follow."""
        raise NotImplementedError

    def close(self, status: Status) -> None:
        """End the tracker's run, once all of it is written."""
        raise NotImplementedError

    def on_start(self, loop: Loop, state: TrainState) -> None:
        """Begin or resume the tracker's run, and give it what it lacks of metrics.jsonl."""
        run = loop.run
        if not run.is_main:
            return
        id, is_new = self._kept_id(run)
        self._last = self.open(run, id, loop.start, is_new)
        self._is_open = True
        path = run.folder / "metrics.jsonl"
        for record in read_metrics(path) if loop.start and path.exists() else []:
            if (step := record.pop("step")) <= loop.start:
                self.on_log(loop, step, record)

    def on_log(self, loop: Loop, step: int, values: Mapping[str, Any]) -> None:
        """Give the tracker the numbers that it does not have yet."""
        new = {
            name: value
            for name, value in values.items()
            if isinstance(value, float | int) and step > self._last[name]
        }
        if new and self._is_open:
            self._last.update(dict.fromkeys(new, step))
            self.write(step, new)

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

    def _kept_id(self, run: Run[Config]) -> tuple[str, bool]:
        """The id of the tracker's run, and whether it is new."""
        path = run.folder / TRACKED
        ids = json.loads(path.read_text()) if path.exists() else {}
        known = ids.get(self.name) or self.values.get("id")
        ids[self.name] = self.values["id"] = known or self.new_id(run)
        files.replace(path, lambda temporary: temporary.write_text(json.dumps(ids) + "\n"))
        return ids[self.name], known is None


def all_up_to(step: int) -> defaultdict[str, int]:
    """This step for a metric of any name."""
    return defaultdict(lambda: step)
