"""Further evaluations, and samples, during a training."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array, PyTree

from zoo.common.configuration import require
from zoo.data.plans import Plan
from zoo.runs import evaluation
from zoo.runs.callbacks.callback import Callback, Loop
from zoo.runs.metrics import MetricsLog
from zoo.training.description import Evaluate
from zoo.training.state import TrainState


class Evaluations(Callback):
    """Several evaluations by name: `{"name": evaluate}` adds `name/eval_loss` to the lines.

    An `evaluate` is as that of a `Training`: a plan, the result of `zoo.evaluator`, or a function.
    They run with the run's own evaluation: at the end, and before it every `every` steps (None:
    each time).

    Raises:
        ValueError: at the start, an `every` that is no multiple of `--eval-every`.
    """

    name = "evaluations"

    def __init__(self, evaluations: Mapping[str, Evaluate | Plan], *, every: int | None = None):
        self._given, self._every = dict(evaluations), every
        self._evaluations: dict[str, Evaluate] = {}

    def on_start(self, loop: Loop, state: TrainState) -> None:
        """Check the cadence, and make the evaluations."""
        for name, given in self._given.items():
            evaluate = evaluation.as_evaluate(loop.run, loop.training.loss_fn, given)
            self._evaluations[name] = evaluation.named(evaluate)
        between = loop.run.config.eval_every
        self._every = self._every or between
        require(
            self._every > 0 and self._every % between == 0,
            f"the callback {self.name!r}: every={self._every} must be a multiple of "
            f"eval_every={between}",
        )

    def on_evaluation(
        self, loop: Loop, step: int, state: TrainState, values: Mapping[str, float]
    ) -> dict[str, float]:
        """The metrics of all of them."""
        found: dict[str, float] = {}
        if loop.whole or step % (self._every or 1) == 0:
            for name, evaluate in self._evaluations.items():
                for metric, value in evaluate(state.model, loop.whole).items():
                    found[f"{name}/{metric}"] = value
        return found


class Samples(Callback):
    """Show a sample of the model every `every` steps, and keep it in `samples.jsonl`.

    `make_text` is from the model to a text. All processes call it; process 0 prints and writes.

    Raises:
        ValueError: an `every` below 1.
    """

    name = "samples"

    def __init__(self, make_text: Callable[[PyTree], str], *, every: int):
        require(every >= 1, f"every={every}: must be at least 1")
        self._make_text, self._every = make_text, every
        self._log: MetricsLog | None = None

    def on_start(self, loop: Loop, state: TrainState) -> None:
        """Open the file; what a killed run wrote after its checkpoint is dropped."""
        if loop.run.is_main:
            path = loop.run.folder / "samples.jsonl"
            self._log = MetricsLog(path, resume_step=loop.start)

    def on_step(
        self, loop: Loop, step: int, state: TrainState, metrics: Mapping[str, Array]
    ) -> None:
        """Sample where it is time to."""
        if step % self._every:
            return
        jax.block_until_ready(metrics)  # the time of the step itself counts
        with loop.pause():
            text = self._make_text(state.model)
        loop.say(f"--- a sample of step {step} ---\n{text}\n---")
        if self._log is not None:
            self._log.write(step, text=text)

    def on_end(self, loop: Loop, step: int, state: Any) -> None:
        """Close the file."""
        if self._log is not None:
            self._log.close()
