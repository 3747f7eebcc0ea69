"""The callbacks that a run's configuration asks for."""

from zoo.runs.callbacks.callback import Callback
from zoo.runs.callbacks.norms import Norms
from zoo.runs.callbacks.trackers import TRACKERS
from zoo.runs.run import Config


def of_flags(config: Config) -> list[Callback]:
    """The callbacks that the flags of a recipe ask for, the trackers last."""
    norms = [Norms(config.norms_every)] if config.norms_every else []
    return [*norms, *(TRACKERS[name]() for name in config.trackers)]
