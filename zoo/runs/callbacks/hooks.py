"""The callbacks of one run, called together: their moments, and their state in checkpoints."""

import contextlib
import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from zoo import sharding
from zoo.runs.callbacks.callback import Callback, Loop, Numbers, Scalars
from zoo.runs.callbacks.evaluations import Average, BestCheckpoint, EarlyStopping, Save
from zoo.runs.callbacks.norms import Norms
from zoo.runs.callbacks.trackers import TRACKERS
from zoo.runs.config import Config
from zoo.runs.processes import RunError, Stopped
from zoo.runs.run import Run
from zoo.sharding.axes import keystr
from zoo.training.description import Training
from zoo.training.state import TrainState

_HIGH_IS_GOOD = ("accuracy", "reward", "pass@")  # in the names of metrics


Snapshot = tuple[dict[str, PyTree], dict[str, Any]]  # the arrays of callbacks, and their JSON


class Hooks(Loop):
    """The loop of a run with its callbacks: each moment, for all of them in order.

    Raises:
        TypeError: something that is no callback.
        ValueError: two of one name.
    """

    def __init__(self, run: Run[Config], training: Training, callbacks: Sequence[Callback]):
        super().__init__(run, training)
        named: dict[str, Callback] = {}
        self._started: list[Callback] = []
        self._last: tuple[int, TrainState | None] = (0, None)
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(f"callbacks: {callback!r} is no zoo.callbacks.Callback")
            if not re.fullmatch(r"[\w-]+", callback.name):
                raise ValueError(
                    f"callbacks: the name {callback.name!r} may have letters, digits, _ and - only"
                )
            if callback.name in named:
                raise ValueError(
                    f"callbacks: two have the name {callback.name!r}, by which checkpoints know "
                    "them: set the attribute `name` of one, or leave out the flag that asks for it"
                )
            named[callback.name] = callback
        self._named, self.callbacks = named, tuple(named.values())
        self._given = {name: callback.arrays for name, callback in named.items()}

    def is_last(self, step: int) -> bool:
        """Whether the run ends after this step, by what is known so far."""
        ends = bool(self.stopped) and step == self._last[0]
        return ends or step == self.run.config.steps

    # --- Moments ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self, start: int, state: TrainState) -> Iterator[None]:
        """Within, the callbacks are started; then they are ended, whatever happened."""
        self.start, self._last = start, (start, state)
        try:
            for callback in self.callbacks:
                self._call(callback, "on_start", state)
                self._started.append(callback)
            yield
        except Exception:
            self._end(None, raises=False)
            raise
        except BaseException:  # a signal
            self._end(self._last[1], raises=False)
            raise
        self._end(self._last[1], raises=True)

    def on_step(self, step: int, state: TrainState, metrics: Scalars) -> Mapping[str, Any]:
        """The metrics, and the ones that the callbacks add."""
        self._last = (step, state)
        return self._joined("on_step", step, state, metrics)

    def on_evaluation(self, step: int, state: TrainState, values: Numbers) -> dict[str, float]:
        """The values, and the ones that the callbacks add."""
        return dict(self._joined("on_evaluation", step, state, values))

    def on_log(self, step: int, values: Mapping[str, Any]) -> None:
        """To be called on process 0."""
        for callback in self.callbacks:
            self._call(callback, "on_log", step, values)

    def on_checkpoint(self, step: int, state: TrainState) -> None:
        """A checkpoint has been handed over."""
        for callback in self.callbacks:
            self._call(callback, "on_checkpoint", step, state)

    def _joined(
        self, moment: str, step: int, state: TrainState, metrics: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        for callback in self.callbacks:
            added = self._call(callback, moment, step, state, metrics)
            if added is not None and not isinstance(added, Mapping):
                raise TypeError(
                    f"{moment} of the callback {callback.name!r} returned a "
                    f"{type(added).__name__}: return a dict of scalars by name, or None"
                )
            if added:
                if both := sorted(added.keys() & {"step", *metrics}):
                    raise ValueError(
                        f"the callback {callback.name!r} returned a metric {both[0]!r}, which "
                        "there is already: rename it"
                    )
                metrics = {**metrics, **added}
        return metrics

    def _call(self, callback: Callback, moment: str, *arguments: Any) -> Any:
        self.caller = (callback.name, moment)
        try:
            return getattr(callback, moment)(self, *arguments)
        except Stopped:  # an evaluation of its own, cut short by a signal
            raise
        except Exception as error:
            error.add_note(f"in {moment} of the callback {callback.name!r}")
            self._started = [other for other in self._started if other is not callback]
            raise

    def _end(self, state: TrainState | None, *, raises: bool) -> None:
        failure = None
        for callback in list(self._started):
            try:
                self._call(callback, "on_end", self._last[0], state)
            except Exception as error:
                failure = failure or error
        if failure is None:
            return
        if raises:
            raise failure
        self.run.say(f"{failure!r} {' '.join(failure.__notes__)}")

    # --- State --------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The present state, for a checkpoint: later changes of the callbacks do not change it."""
        arrays, values = {}, {}
        for name, callback in self._named.items():
            if callback.arrays is not None:
                _check_arrays(callback)
                arrays[name] = callback.arrays
            try:
                json.dumps(callback.values)
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"the callback {name!r}: `values` has to be JSON, and is not: {error}"
                ) from error
            values[name] = copy.deepcopy(callback.values)
        meta: dict[str, Any] = {"callbacks": values} if values else {}
        if self.stopped:
            meta["stopped"] = {"callback": self.stopped_by, "reason": self.stopped}
        return ({"callbacks": arrays} if arrays else {}), meta

    def begin(self, state: TrainState, step: int, meta: dict[str, Any]) -> None:
        """Give each callback its initial state, or the one that a restored checkpoint has for it.

        Without a checkpoint, `step` is 0 and `meta` is empty.

        Raises:
            RunError: the checkpoint has arrays of a callback that is not there.
            CheckpointError: it has other arrays than a callback that is there.
            DamagedExtras: it has damaged arrays: call again with the step before.
        """
        for name, callback in self._named.items():
            callback.arrays = self._given[name]
            initial = self._call(callback, "initial_arrays", state)
            callback.arrays = jax.tree.map(self._placed, initial)
            _check_arrays(callback)
        if not meta:
            self._given.clear()
            return
        found = meta.get("callbacks", {})
        extras = self.run.checkpointer.extras
        of_checkpoint = f"the checkpoint of step {step} in {self.run.address}"
        for name in found.keys() - self._named.keys():
            if any(_belongs(array, name) for array in extras):
                raise RunError(
                    f"{of_checkpoint} has arrays of the callback {name!r}, which would be lost: "
                    "give it to zoo.fit again, or start anew with another --run-dir"
                )
            self.say(f"the callback {name!r} is not there any more; its state is dropped")
        # All arrays before any values: where arrays are damaged, values stay as they were given.
        arrays = {name: self._restored(name, x) for name, x in self._named.items() if name in found}
        self._given.clear()
        for name, callback in self._named.items():
            if name in found:
                callback.values, callback.arrays = found[name], arrays[name]
            elif callback.values or callback.arrays is not None:
                self.say(f"{of_checkpoint} has no state of the callback {name!r}: it starts anew")
        if (stopped := meta.get("stopped")) is None:
            return
        if stopped["callback"] in self._named:
            self.stopped, self.stopped_by = stopped["reason"], stopped["callback"]
        else:
            self.say(
                f"the callback {stopped['callback']!r}, which ended the run at step {step}, is not "
                "there any more: it continues"
            )

    def _restored(self, name: str, callback: Callback) -> PyTree:
        """The arrays of a callback, in place of its initial ones."""
        checkpointer = self.run.checkpointer
        like = {"callbacks": {name: jax.tree.map(_struct, callback.arrays)}}
        callback.arrays = None  # the room of the initial ones
        names = [each for each in checkpointer.extras if _belongs(each, name)]
        return checkpointer.restore_extras(like, names)["callbacks"][name]

    def _placed(self, x: Any) -> Any:
        mesh = self.run.mesh
        if not hasattr(x, "dtype"):
            return x  # `_check_arrays` names it
        on_mesh = isinstance(x, jax.Array) and x.sharding.device_set == {*mesh.devices.flat}
        return x if on_mesh else jax.device_put(x, sharding.replicated(mesh))


def _check_arrays(callback: Callback) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(callback.arrays):
        if not isinstance(leaf, jax.Array):
            raise TypeError(
                f"the callback {callback.name!r}: arrays{'.' * bool(path)}{keystr(path)} is a "
                f"{type(leaf).__name__}, and no array: keep it in `values`"
            )


def _struct(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _belongs(array: str, name: str) -> bool:
    return f"{array}.".startswith(f"callbacks.{name}.")


def with_flags(config: Config, given: Sequence[Callback], save: Save) -> list[Callback]:
    """The given callbacks among the ones that flags ask for; `save` writes `best/`.

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
                "max" if any(x in config.keep_best for x in _HIGH_IS_GOOD) else "min",
                model=lambda state: average.model if average and is_averaged else state.model,
                save=save,
            )
        )
    norms = [Norms(config.norms_every)] if config.norms_every else []
    return [*found, *norms, *(TRACKERS[name]() for name in config.trackers)]
