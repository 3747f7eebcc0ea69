"""Callbacks of `zoo.fit`: the moments of a training loop, and what is built with them."""

from zoo.runs.callbacks.callback import Callback as Callback
from zoo.runs.callbacks.callback import Loop as Loop
