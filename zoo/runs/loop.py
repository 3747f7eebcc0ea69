"""The training loop of every recipe: it resumes, evaluates, records, saves, stops on a signal."""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import equinox as eqx
import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from zoo import sharding
from zoo.common.configuration import require
from zoo.data.datasets import Dataset, batch_shapes, check_batch_size, check_dataset, check_memory
from zoo.data.loader import batches
from zoo.data.token_datasets import check_ids
from zoo.runs import evaluation, identity, monitor
from zoo.runs.callbacks.callback import Callback
from zoo.runs.callbacks.evaluations import (
    Average,
    BestCheckpoint,
    EarlyStopping,
    Save,
    check_metrics,
    save_somehow,
)
from zoo.runs.callbacks.hooks import Hooks, with_flags
from zoo.runs.checkpoint import DamagedExtras
from zoo.runs.config import Config, as_json
from zoo.runs.metrics import kept_records
from zoo.runs.processes import RunError, Stopped
from zoo.runs.recorder import Recorder
from zoo.runs.run import Run, versions
from zoo.training.compiled import CompiledStep
from zoo.training.description import Training
from zoo.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class Trained:
    """The result of `fit`; `state, metrics = zoo.fit(…)` takes two parts of it."""

    state: TrainState
    """The state after the last step."""
    metrics: dict[str, float]
    """The metrics of the last evaluation, of the whole held-out part."""
    model: PyTree
    """The model that the run is for: with `--average` the averaged one, else `state.model`."""
    model_metrics: dict[str, float]
    """The metrics of that model."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.state, self.metrics))


def fit(
    run: Run[Config],
    training: Training,
    callbacks: Sequence[Callback] = (),
    *,
    save: Save = save_somehow,
) -> Trained:
    """Train up to `config.steps`, from the newest good checkpoint if there is one.

    All flags of a run do here what they say. Where a save and an evaluation fall on one step, the
    save is first; an evaluation that was cut short is repeated at the next start. `callbacks` are
    called at the moments that `zoo.callbacks.Callback` lists, together with the callbacks of flags.
    `save(folder, model, metrics)` writes the model of `--keep-best`; see
    `zoo.callbacks.BestCheckpoint`.

    Raises:
        ValueError: a metric of `--keep-best` or `--patience` that no evaluation has, or one that is
            no number, before the first step.
        RunError: a loss, gradient or update that is not finite, other data than the checkpoint's,
            or too little device memory.
        SystemExit: after SIGTERM or SIGINT, with 128 + the signal's number, once saved; with 0,
            once `config.plan` is printed.
    """
    config = run.config
    require(
        config.epochs is None,
        f"epochs={config.epochs}: how many steps they are, run.steps_of(dataset) says; call it "
        "before the optimizer's schedule is made",
    )
    identity.check_base(run, training)
    check_dataset(training.data)
    check_batch_size(training.data.batch_size, run.mesh, config.accumulate)
    loop = Hooks(run, training, with_flags(config, callbacks, save))
    if config.plan:
        run.planner.show(run, training)
    check_memory(training.data)
    origin = identity.of_training(training)
    state, start = _restore_or_init(loop, origin)
    # The names of axes are for evaluations: a step has its own.
    with loop.running(start, state), sharding.use(sharding.Layout(axes=training.axes)):
        if start >= config.steps or loop.stopped:
            return _trained(loop, state, _finished(loop, state))
        if run.mesh.size > 1:
            table = dataclasses.replace(run.layout, axes=training.axes)
            run.say(sharding.placement_table(state.model, table))
        step_fn = training.step(
            mesh=run.layout,
            precision=run.precision,
            accumulate=config.accumulate,
            clip_norm=config.clip_norm,
            xla=config.xla,
        )
        try:
            _compile(run, step_fn, state, training.data)
            _check_evaluations(loop, state)
            state, result = _train(loop, step_fn, state, origin)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            reason = run.planner.explain(run, training, str(error), step_fn.programs)
            raise RunError(reason) from error
        return _trained(loop, state, result)


def _trained(loop: Hooks, state: TrainState, metrics: dict[str, float]) -> Trained:
    """The result, of the averaged model if `--average` asks for one."""
    average = next((x for x in loop.callbacks if isinstance(x, Average)), None)
    if loop.run.config.average is None or average is None:
        return Trained(state, metrics, state.model, metrics)
    loop.run.say(f"what is published is the average of the weights ({average.decay})")
    prefix = f"{average.name}/"
    of_model = {n.removeprefix(prefix): x for n, x in metrics.items() if n.startswith(prefix)}
    return Trained(state, metrics, average.model, of_model)


def _check_evaluations(loop: Hooks, state: TrainState) -> None:
    """Refuse what evaluations return, or do not, before the first step of a run."""
    if isinstance(loop.evaluator, evaluation.Evaluator):
        loop.evaluator.compile(state.model)
    chooses = any(isinstance(x, EarlyStopping | BestCheckpoint) for x in loop.callbacks)
    if chooses and loop.start == 0 and loop.training.pretrained is None:
        check_metrics(loop.callbacks, loop.evaluate(state.model))


def _train(
    loop: Hooks, step_fn: CompiledStep, state: TrainState, origin: dict[str, Any]
) -> tuple[TrainState, dict[str, float]]:
    """The steps from the first to the last one."""
    run, training, start = loop.run, loop.training, loop.start
    config = run.config
    meta = origin | {"config": as_json(config), "versions": versions()}
    written = _count_evaluations(run, start)
    data, accepted = training.data, step_fn.accepted(state)
    if config.on_nonfinite == "skip":  # then batches may hold nan, too
        accepted = {**dict.fromkeys(data.row(data.buckets[0])), **accepted}
    stream = batches(data, run.mesh, start=start, stop=config.steps, accepted=accepted)
    with run.signals, Recorder(loop, written) as recorder, contextlib.closing(stream):
        is_due = start % config.eval_every == 0 if start else training.pretrained is not None
        step, result = start, {}
        if loop.callbacks if written else is_due:  # callbacks have their state from before it
            result = _evaluate(run, recorder, start, state, whole=start == 0)
        for k, batch in () if loop.stopped else stream:
            with recorder.step(k):
                state, metrics = step_fn(state, batch)
            step = k + 1
            recorder.add(step, loop.on_step(step, state, metrics))
            last = loop.is_last(step)
            evaluates = last or step % config.eval_every == 0
            interrupted = run.signals.agreed(now=evaluates)
            saves = interrupted or last or step % config.checkpoint_every == 0
            if saves or evaluates:
                recorder.flush()
                snapshot = loop.snapshot()
            if saves:
                recorder.save(step, state, meta, snapshot)
            if evaluates and not interrupted:  # after the save: a kill within loses nothing
                with contextlib.suppress(Stopped):
                    result = recorder.evaluation(step, state, last)
                interrupted = run.signals.agreed(now=True)
                if (interrupted or loop.stopped) and not saves:
                    recorder.save(step, state, meta, snapshot)
            if interrupted:
                _leave(run, step)
            if loop.stopped:
                break
        if loop.stopped and step < config.steps:
            loop.say(loop.why_stopped(step))
            if not loop.whole:
                result = _evaluate(run, recorder, step, state, whole=True)
        run.checkpointer.wait()
        if run.signals.agreed(now=True):
            _leave(run, step)
    return state, result


def _compile(run: Run[Config], step_fn: CompiledStep, state: TrainState, dataset: Dataset) -> None:
    """Compile the step for each bucket; any other shape is an error from then on."""
    began, compiles = time.monotonic(), []
    buckets = [*batch_shapes(dataset, run.mesh).values()]
    step_fn.check_sums(state, buckets[0])
    with monitor.CompileCounter() as counter:
        for shapes in buckets:
            before = counter.compiles
            step_fn.compile(state, shapes)
            compiles.append(counter.compiles - before)
    run.say(
        f"compiled {len(dataset.buckets)} bucket(s) {list(dataset.buckets)} in "
        f"{time.monotonic() - began:.1f} s: {sum(compiles) / len(compiles):.3g} compile(s) per "
        f"bucket ({counter.cache_hits} from the cache)"
    )


def _restore_or_init(loop: Hooks, origin: dict[str, Any]) -> tuple[TrainState, int]:
    """The state to begin with, the callbacks' too, and the steps that it has behind it."""
    run, training = loop.run, loop.training
    key = jax.random.key(run.config.seed)
    blueprint = training.blueprint(key, mesh=run.layout)
    skeleton = blueprint.skeleton
    vocab_size = getattr(getattr(skeleton.model, "config", None), "vocab_size", None)
    if vocab_size is not None:
        check_ids(training.data, vocab_size)
    while True:
        restored = run.restore(training.saved(skeleton))
        if restored is None:
            state = blueprint.state()
            loop.begin(state, 0, {})
            return state, 0
        state, step, meta = restored
        identity.check(run, step, meta, origin)
        if training.base:
            state = eqx.combine(state, blueprint.frozen())
        try:
            loop.begin(state, step, meta)
            break
        except DamagedExtras:
            del state, restored  # makes room for another copy, or the step before
    run.say(f"resumed {run.address} at step {step}")
    steps_before = meta["config"]["steps"]
    if steps_before != run.config.steps and step < run.config.steps:
        continues = ""
        if training.schedule is not None:
            rate = float(training.schedule(step - int(state.skipped)))
            continues = f", and the learning rate continues at {rate:.2e}"
        run.say(
            f"--steps was {steps_before} and is {run.config.steps}: the schedule is laid out "
            f"anew over all of them{continues}"
        )
    return state, step


def _finished(loop: Hooks, state: TrainState) -> dict[str, float]:
    """The last evaluation of a run that has no step left."""
    run, step = loop.run, loop.start
    done = f"{run.address} has finished {step} steps; more --steps would continue it"
    run.say(loop.why_stopped(step) if loop.stopped else done)
    written = _count_evaluations(run, step)
    if written and not loop.callbacks:
        loop.whole = True
        return loop.evaluate(state.model)
    with run.signals, Recorder(loop, written) as recorder:
        return _evaluate(run, recorder, step, state, whole=True)


def _count_evaluations(run: Run[Config], step: int) -> int:
    """The lines of evaluations of a step that metrics.jsonl keeps: process 0 tells the others."""
    found = 0
    if run.is_main:
        lines = kept_records(run.folder / "metrics.jsonl", step)
        found = sum(line["step"] == step and "grad_norm" not in line for line in lines)
    return int(multihost_utils.broadcast_one_to_all(np.int32(found)))


def _evaluate(
    run: Run[Config], recorder: Recorder, step: int, state: TrainState, *, whole: bool
) -> dict[str, float]:
    """An evaluation beside the steps: of a pretrained model, one cut short, or the last one."""
    result: dict[str, float] = {}
    with contextlib.suppress(Stopped):
        result = recorder.evaluation(step, state, whole)
    if run.signals.agreed(now=True):
        _leave(run, step)
    return result


def _leave(run: Run[Config], step: int) -> NoReturn:
    """End after a signal, with the checkpoint complete."""
    run.settle()
    received = run.signals.received
    code = 128 + received
    saved = f"saved step {step} in {run.address}" if step else "left before the first step"
    run.say(
        f"{signal.Signals(received).name}: {saved}; the same command resumes the run "
        f"(exit code {code})"
    )
    raise SystemExit(code)
