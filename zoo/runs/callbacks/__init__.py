"""Callbacks of `zoo.fit`: the moments of a training loop, and what is built with them."""

from zoo.runs.callbacks.callback import Callback as Callback
from zoo.runs.callbacks.callback import Loop as Loop
from zoo.runs.callbacks.evaluations import Average as Average
from zoo.runs.callbacks.evaluations import BestCheckpoint as BestCheckpoint
from zoo.runs.callbacks.evaluations import EarlyStopping as EarlyStopping
from zoo.runs.callbacks.evaluations import Evaluations as Evaluations
from zoo.runs.callbacks.evaluations import Samples as Samples
from zoo.runs.callbacks.norms import Norms as Norms
from zoo.runs.callbacks.trackers import MLflow as MLflow
from zoo.runs.callbacks.trackers import TensorBoard as TensorBoard
from zoo.runs.callbacks.trackers import Tracker as Tracker
from zoo.runs.callbacks.trackers import Trackio as Trackio
from zoo.runs.callbacks.trackers import Wandb as Wandb
