"""The callbacks that the flags of a run ask for."""

from collections.abc import Sequence

from zoo.runs.callbacks.average import Average
from zoo.runs.callbacks.best import BestCheckpoint, EarlyStopping, Save
from zoo.runs.callbacks.callback import Callback
from zoo.runs.callbacks.norms import Norms
from zoo.runs.callbacks.trackers import TRACKERS
from zoo.runs.config import Config


def with_flags(config: Config, given: Sequence[Callback], save: Save) -> list[Callback]:
    """The callbacks that are given among those of flags; `save` writes `best/`.

    They see the metrics of `--average`, and `--patience` and `--keep-best` see theirs. What changes
    nothing comes last: `--norms-every` and `--track`.
    """
    average = None if config.average is None else Average(config.average)
    found = [*given] if average is None else [average, *given]
    if config.patience is not None:
        metric = "eval_loss" if average is None else f"{average.name}/eval_loss"
        found.append(EarlyStopping(metric, config.patience))
    if config.keep_best is not None:
        is_averaged = average is not None and config.keep_best.startswith(f"{average.name}/")
        found.append(
            BestCheckpoint(
                config.keep_best,
                "max" if "accuracy" in config.keep_best else "min",
                model=lambda state: average.model if average and is_averaged else state.model,
                save=save,
            )
        )
    norms = [Norms(config.norms_every)] if config.norms_every else []
    return [*found, *norms, *(TRACKERS[name]() for name in config.trackers)]
