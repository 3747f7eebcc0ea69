"""The callbacks that a recipe's flags ask for, and the model that it publishes then."""

from typing import Any

from jaxtyping import PyTree

from zoo.runs.callbacks.average import Average
from zoo.runs.callbacks.best import BestCheckpoint, EarlyStopping, Save
from zoo.runs.callbacks.callback import Callback
from zoo.runs.callbacks.norms import Norms
from zoo.runs.callbacks.trackers import TRACKERS
from zoo.runs.config import Config
from zoo.runs.run import Run
from zoo.training.state import TrainState


class Chosen:
    """The callbacks of `--average`, `--patience` and `--keep-best`; `save` writes `best/`."""

    def __init__(self, run: Run[Config], *, save: Save):
        config = run.config
        self.callbacks: list[Callback] = []
        self._run, self._average = run, None
        if config.average is not None:
            self._average = Average(config.average)
            self.callbacks.append(self._average)
        if config.patience is not None:
            metric = "eval_loss" if self._average is None else f"{self._average.name}/eval_loss"
            self.callbacks.append(EarlyStopping(metric, config.patience))
        if config.keep_best is not None:
            is_averaged = config.keep_best.startswith(f"{Average.name}/")
            self.callbacks.append(
                BestCheckpoint(
                    config.keep_best,
                    "max" if "accuracy" in config.keep_best else "min",
                    model=self.published if is_averaged else lambda state: state.model,
                    save=save,
                )
            )

    def published(self, state: TrainState) -> PyTree:
        """The model that the run is for: the averaged one if there is one."""
        return state.model if self._average is None else self._average.model

    def metrics(self, result: dict[str, Any]) -> dict[str, Any]:
        """The metrics of that model, of those of the last evaluation; says which model it is."""
        if self._average is None:
            return result
        self._run.say(f"what is published is the average of the weights ({self._average.decay})")
        prefix = f"{self._average.name}/"
        return {n.removeprefix(prefix): x for n, x in result.items() if n.startswith(prefix)}


def observers(config: Config) -> list[Callback]:
    """The callbacks of `--norms-every` and `--track`, which change nothing; the trackers last."""
    norms = [Norms(config.norms_every)] if config.norms_every else []
    return [*norms, *(TRACKERS[name]() for name in config.trackers)]
