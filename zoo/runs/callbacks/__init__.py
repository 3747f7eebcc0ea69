"""Callbacks of `zoo.fit`: the moments of a training loop, and what is built with them."""

from zoo.runs.callbacks.average import Average as Average
from zoo.runs.callbacks.best import BestCheckpoint as BestCheckpoint
from zoo.runs.callbacks.best import EarlyStopping as EarlyStopping
from zoo.runs.callbacks.callback import Callback as Callback
from zoo.runs.callbacks.callback import Loop as Loop
from zoo.runs.callbacks.evaluations import Evaluations as Evaluations
from zoo.runs.callbacks.evaluations import Samples as Samples
