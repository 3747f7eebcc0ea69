"""The base class of the callbacks of `zoo.fit`, and the view of the loop that they are given."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import Array, PyTree

from zoo.runs import evaluation
from zoo.runs.config import Config
from zoo.runs.processes import RunError
from zoo.runs.run import Run
from zoo.training.description import Training
from zoo.training.state import TrainState

Scalars = Mapping[str, Array]  # of a step, on the devices
Numbers = Mapping[str, float]


class Loop:
    """The training loop as its callbacks see it."""

    run: Run[Config]
    training: Training
    callbacks: tuple["Callback", ...]
    """All of them, in their order."""
    start: int
    """Steps that the run had behind it when it was started, 0 unless it resumes."""
    stopped: str
    """Why the run ends before `config.steps`; empty while it does not."""
    whole: bool
    """Whether the evaluation under way, or the last one, covers the whole held-out part."""

    def __init__(self, run: Run[Config], training: Training):
        self.run, self.training = run, training
        self.callbacks = ()
        self.start, self.stopped, self.whole = 0, "", False
        self.stopped_by = ""
        self.caller = ("", "")  # the callback and the moment under way
        self.evaluator = evaluation.as_evaluate(run, training.loss_fn, training.evaluate)
        self._evaluate = evaluation.named(self.evaluator)
        self.attach(run.say, contextlib.nullcontext)

    def attach(
        self, print: Callable[[str], None], pause: Callable[[], contextlib.AbstractContextManager]
    ) -> None:
        """Set the functions that `say` and `pause` call while the loop runs."""
        self._print, self._pause = print, pause

    def say(self, text: str) -> None:
        """Print a text, above the progress bar where there is one; on process 0 only."""
        self._print(text)

    def stop(self, reason: str) -> None:
        """End the run after this step as if it were its last: saved, evaluated whole, printed.

        When resumed, the run stays ended while it has this callback and this asks for it.

        Raises:
            RunError: at another moment than `on_start`, `on_step` and `on_evaluation`: the others
                come too late, or not in all processes.
        """
        name, moment = self.caller
        if moment not in ("on_start", "on_step", "on_evaluation"):
            raise RunError(
                f"loop.stop({reason!r}) in {moment}: call it in on_start, on_step or on_evaluation"
            )
        if not self.stopped:
            self.stopped, self.stopped_by = reason or "no reason given", name

    def why_stopped(self, step: int) -> str:
        """In words, why the run has ended at a step."""
        return f"the callback {self.stopped_by!r} has ended the run at step {step}: {self.stopped}"

    def evaluate(self, model: PyTree) -> dict[str, float]:
        """The training's evaluation, of another model; in `on_evaluation`, as whole as that one."""
        return self._evaluate(model, self.whole)

    def pause(self) -> contextlib.AbstractContextManager:
        """A context whose time is left out of the tokens per second, as an evaluation's is."""
        return self._pause()


class Callback:
    """Something that `zoo.fit(run, training, callbacks=[…])` calls: override the moments it needs.

    All processes call every moment, in the order of the list, but `on_log`, which process 0 calls
    alone: it may not compute with arrays of several processes. An exception ends the run, and what
    is saved is kept. Make one object for one run.

    Its state is in every checkpoint: `arrays`, a tree of JAX arrays, and `values`, a dict of JSON.
    Assign both, or fill `values`, at will. A checkpoint of step k holds them as they are after
    `on_step` k and all lines of metrics.jsonl up to then, and before the evaluation of step k,
    which a run that resumes there repeats. So a resumed run makes the calls that an unbroken one
    makes from there on. State of a callback that is not there any more is dropped if it is `values`
    alone, and refused if it has arrays.
    """

    name: str = ""
    """Its name in checkpoints and messages; by default its class's, in lower case."""
    arrays: PyTree = None
    """A tree of arrays: part of the checkpoint, sharded as they are, or else on all devices."""
    values: dict[str, Any]
    """JSON values: part of the checkpoint."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        moments = [name for name in vars(Callback) if name.startswith("on_")]
        for name, value in vars(cls).items():
            if callable(value) and name.startswith("on_") and name not in moments:
                raise TypeError(f"{cls.__name__}.{name} is never called: moments are {moments}")
        cls.name = cls.name or cls.__name__.lower()

    def __new__(cls, *_: Any, **__: Any) -> "Callback":
        """Give each object `values` of its own, without a call of `super().__init__`."""
        callback = super().__new__(cls)
        callback.values = {}
        return callback

    def initial_arrays(self, loop: Loop, state: TrainState) -> PyTree:
        """The arrays to begin with, or whose place restored ones take; by default `self.arrays`."""
        return self.arrays

    def on_start(self, loop: Loop, state: TrainState) -> None:
        """Before the first step of this start; both states, restored or initial, are there."""

    def on_step(
        self, loop: Loop, step: int, state: TrainState, metrics: Scalars
    ) -> Mapping[str, Any] | None:
        """After step `step` was dispatched: nothing has waited for it, and float(x) would.

        `metrics` are scalars on the devices. Returned scalars are read and logged with them. The
        next step takes the state's buffers: keep a copy of an array, never the array.
        """

    def on_log(self, loop: Loop, step: int, values: Numbers) -> None:
        """A line of metrics.jsonl is written, of a step or of an evaluation: on process 0 only."""

    def on_evaluation(
        self, loop: Loop, step: int, state: TrainState, values: Numbers
    ) -> Numbers | None:
        """After an evaluation, with the values of earlier callbacks; returned ones join."""

    def on_checkpoint(self, loop: Loop, step: int, state: TrainState) -> None:
        """A checkpoint of this step is handed over, to be written in the background."""

    def on_end(self, loop: Loop, step: int, state: TrainState | None) -> None:
        """The run ends: finished, stopped, by a signal, or (without a state) by an error."""
