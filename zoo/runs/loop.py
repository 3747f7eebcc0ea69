"""The training loop of every recipe: it resumes, evaluates, records, saves, stops on a signal."""

import contextlib
import functools
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from zoo import sharding
from zoo.data.loader import load
from zoo.data.plans import Plan
from zoo.runs import monitor
from zoo.runs.metrics import MetricsLog, TensorBoard, plot_curves, read_metrics
from zoo.runs.run import Run, RunError, as_json, versions
from zoo.runs.signals import Stopped
from zoo.training.state import Trainable, TrainState, abstract_state, init_state
from zoo.training.step import CompiledStep, LossFunction, make_train_step


def fit(
    run: Run,
    make_model: Callable[..., PyTree],
    loss_fn: LossFunction,
    optimizer: optax.GradientTransformation,
    plan: Plan,
    *,
    fingerprint: str = "",
    evaluate: Callable[[PyTree, bool], dict[str, float]],
    schedule: optax.Schedule | None = None,
    flops_per_token: float | None = None,
    clip: bool = True,
    trainable: Trainable | None = None,
    pretrained: PyTree = None,
) -> tuple[TrainState, dict[str, float]]:
    """Train up to `config.steps`, from the newest good checkpoint if there is one.

    `evaluate(model, whole)` gives the held-out metrics, with `whole` on all of that part, as
    at the end: those are returned beside the state. `fingerprint` says what data the plan is
    of, and a run refuses to go on with other data. `flops_per_token` is of a unit of the plan.
    Without `clip` the optimizer clips, as that of an ensemble does, a member at a time. A
    `pretrained` model, which `make_model(key, pretrained)` takes, is evaluated before the first
    step; what is not `trainable` stays as it is.

    Where a save and an evaluation fall on one step, the save is first; an evaluation that was cut
    short is made up for at the next start.

    Raises:
        RunError: a loss, gradient or update that is not finite, or other data than the
            checkpoint's.
        SystemExit: after SIGTERM or SIGINT, with 128 + the signal's number, once saved.
    """
    from zoo.runs import planned as planning  # here: `import zoo` need not wait for it

    config = run.config
    job = planning.make_job(
        run,
        make_model,
        loss_fn,
        optimizer,
        plan,
        flops_per_token=flops_per_token,
        clip=clip,
        trainable=trainable,
        pretrained=pretrained,
    )
    if config.plan:
        planning.show(run, job)
    state, start = _restore_or_init(
        run, make_model, optimizer, fingerprint, schedule, trainable, pretrained
    )
    make_recorder = functools.partial(_Recorder, run, start, schedule, flops_per_token, plan.unit)
    if start >= config.steps:
        run.say(f"{run.folder} has finished {start} steps; more --steps would continue it")
        if _is_evaluated(run, start):
            return state, evaluate(state.model, True)
        with run.signals, make_recorder() as recorder:
            return state, _evaluate_first(run, recorder, start, evaluate, state.model)
    if run.mesh.size > 1:
        run.say(sharding.placement_table(state.model, run.mesh, run.rules))
    step_fn = make_train_step(
        loss_fn,
        optimizer,
        mesh=run.mesh,
        rules=run.rules,
        precision=config.precision,
        accumulate=config.accumulate,
        clip_norm=config.clip_norm if clip else None,
        trainable=trainable,
    )
    with planning.explained(run.mesh, job, lambda: step_fn.programs):
        _compile(run, step_fn, state, plan)
    meta = {"fingerprint": fingerprint, "config": as_json(config), "versions": versions()}
    with (
        run.signals,
        make_recorder() as recorder,
        contextlib.closing(load(plan, run.mesh, start=start, stop=config.steps)) as batches,
        planning.explained(run.mesh, job, lambda: step_fn.programs),
    ):
        is_due = start % config.eval_every == 0 if start else pretrained is not None
        if is_due and not _is_evaluated(run, start):
            _evaluate_first(run, recorder, start, evaluate, state.model)
        for k, batch in batches:
            with recorder.step(k):
                state, metrics = step_fn(state, batch)
            step, last = k + 1, k + 1 == config.steps
            recorder.add(step, metrics)
            evaluates = last or step % config.eval_every == 0
            stopped = run.signals.agreed(now=evaluates)
            saves = stopped or last or step % config.checkpoint_every == 0
            if saves:
                recorder.save(step, state, meta)
            if evaluates and not stopped:  # after the save: a kill within loses nothing
                with contextlib.suppress(Stopped):
                    result = recorder.evaluation(step, evaluate, state.model, last)
                stopped = run.signals.agreed(now=True)
                if stopped and not saves:
                    recorder.save(step, state, meta)
            if stopped:
                _leave(run, step)
        run.checkpointer.wait()
        if run.signals.agreed(now=True):
            _leave(run, step)
    return state, result


def _compile(run: Run, step_fn: CompiledStep, state: TrainState, plan: Plan) -> None:
    """Compile the step for each bucket; any other shape is an error from then on."""
    began = time.monotonic()
    compiles = []
    with monitor.CompileCounter() as counter:
        for shapes in plan.shapes(run.mesh).values():
            before = counter.compiles
            step_fn.compile(state, shapes)
            compiles.append(counter.compiles - before)
    run.say(
        f"compiled {len(plan.buckets)} bucket(s) {list(plan.buckets)} in "
        f"{time.monotonic() - began:.1f} s: {sum(compiles) / len(compiles):.3g} compile a bucket "
        f"({counter.cache_hits} from the cache)"
    )


def _restore_or_init(
    run: Run,
    make_model: Any,
    optimizer: Any,
    fingerprint: str,
    schedule: optax.Schedule | None,
    trainable: Trainable | None,
    pretrained: PyTree,
) -> tuple[TrainState, int]:
    where: dict[str, Any] = {
        "key": jax.random.key(run.config.seed),
        "mesh": run.mesh,
        "rules": run.rules,
        "trainable": trainable,
        "pretrained": pretrained,
    }
    restored = run.checkpointer.restore(abstract_state(make_model, optimizer, **where))
    if restored is None:
        return init_state(make_model, optimizer, **where), 0
    state, step, meta = restored
    if meta["fingerprint"] != fingerprint:
        raise RunError(
            f"the data of {run.folder} has changed since step {step}: the same batches can't "
            "be made again. Put the files back, or start anew with another --run-dir."
        )
    run.say(f"resumed {run.folder} at step {step}")
    steps_before = meta["config"]["steps"]
    if steps_before != run.config.steps and step < run.config.steps:
        run.say(
            f"--steps was {steps_before} and is {run.config.steps}: the schedule is laid out "
            "anew over all of them" + _learning_rate_at(schedule, step - int(state.skipped))
        )
    return state, step


def _is_evaluated(run: Run, step: int) -> bool:
    """Whether metrics.jsonl has a line of the evaluation of a step: process 0 tells the others."""
    found, path = False, run.folder / "metrics.jsonl"
    if run.is_main and path.exists():
        lines = read_metrics(path)
        found = any(line["step"] == step and "grad_norm" not in line for line in lines)
    return bool(multihost_utils.broadcast_one_to_all(np.int32(found)))


def _evaluate_first(
    run: Run, recorder: "_Recorder", step: int, evaluate: Callable[..., Any], model: PyTree
) -> dict[str, float]:
    """The evaluation before any further step: of a pretrained model, or one that was cut short."""
    result: dict[str, float] = {}
    with contextlib.suppress(Stopped):
        whole = step == 0 or step >= run.config.steps
        result = recorder.evaluation(step, evaluate, model, whole)
    if run.signals.agreed(now=True):
        _leave(run, step)
    return result


def _leave(run: Run, step: int) -> NoReturn:
    """End after a signal, with the checkpoint complete."""
    run.checkpointer.wait()
    received = run.signals.received
    code = 128 + received
    what = f"saved step {step} in {run.folder}" if step else "left before the first step"
    run.say(
        f"{signal.Signals(received).name}: {what}; the same command goes on from there "
        f"(exit code {code})"
    )
    raise SystemExit(code)


def _learning_rate_at(schedule: optax.Schedule | None, updates: int) -> str:
    return f", and the learning rate goes on at {float(schedule(updates)):.2e}" if schedule else ""


class _Recorder:
    """What a training loop says of itself: progress, metrics.jsonl, curves, a trace."""

    def __init__(
        self,
        run: Run,
        start: int,
        schedule: optax.Schedule | None,
        flops_per_token: float | None,
        unit: str,
    ):
        self._run, self._start, self._unit = run, start, unit
        self._pending: list[tuple[int, dict[str, Any]]] = []
        self._logs: list[MetricsLog | TensorBoard] = []
        self._stack = contextlib.ExitStack()
        self._throughput = monitor.Throughput(
            flops_per_token=flops_per_token,
            peak=monitor.peak_flops(run.mesh.devices.flat[0], run.config.precision),
            devices=run.mesh.size,
        )
        # All of them at once: eager operations would be compiled one by one, in the loop.
        self._learning_rates = schedule and np.asarray(
            jax.jit(jax.vmap(schedule))(np.arange(run.config.steps, dtype=np.float32))
        )
        self.bar = monitor.ProgressBar(run.config.steps, start=start)
        self._trace = contextlib.ExitStack()

    def __enter__(self) -> "_Recorder":
        run = self._run
        if jax.process_index() == 0:
            path = run.folder / "metrics.jsonl"
            self._logs.append(MetricsLog(path, resume_step=self._start))
            if run.config.tensorboard:
                folder = run.folder / "tensorboard"
                self._logs.append(TensorBoard(folder, resume_step=self._start))
        for log in self._logs:
            self._stack.callback(log.close)
        self._stack.enter_context(self.bar)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Where the run failed, as on a full disk, the curves must not fail in its place.
        with contextlib.suppress(OSError) if kind else contextlib.nullcontext():
            self._trace.close()
            self._stack.close()
            self.plot()

    @contextlib.contextmanager
    def step(self, k: int) -> Iterator[None]:
        """Around the dispatch of step k."""
        if self._run.config.profile and k == self._start + 10:
            folder = self._run.folder / "profile"
            self._trace.enter_context(monitor.profile(folder, say=self.bar.print))
        with monitor.step_annotation(k):
            yield

    def add(self, step: int, metrics: dict[str, Any]) -> None:
        """Take the metrics of a step under way; they are read when the next one is under way."""
        if self._pending:
            before, result = self._pending[-1]
            jax.block_until_ready(result)
            if self._is_due(before):
                self.flush()
            else:
                self.bar.update(before)
            if before == self._start + 15:
                self._trace.close()
        self._pending.append((step, metrics))

    def flush(self) -> None:
        """Wait for the steps under way, check them all, and write the last one if it is due.

        Before a save too: a resumed run would not see again what is not finite.
        """
        if not self._pending:
            return
        steps = [step for step, _ in self._pending]
        values = [
            {name: float(x) for name, x in metrics.items()}
            for metrics in jax.device_get([metrics for _, metrics in self._pending])
        ]
        self._pending.clear()
        self._throughput.update(sum(v["tokens"] for v in values))
        if self._is_due(steps[-1]):
            self._show(steps[-1], values[-1])
        for step, value in zip(steps, values, strict=True):
            self._check_finite(step, value)

    def _is_due(self, step: int) -> bool:
        config = self._run.config
        return step == 1 or step % config.log_every == 0 or step == config.steps

    def _show(self, step: int, values: dict[str, float]) -> None:
        values[self._unit] = values.pop("tokens")
        speeds = {
            f"{self._unit}_per_second": self._throughput.tokens_per_second,
            "mfu": self._throughput.mfu,
        }
        values |= {name: speed for name, speed in speeds.items() if speed is not None}
        if self._learning_rates is not None:
            updates = step - int(values["skipped"])  # a skipped step does not advance the schedule
            values["learning_rate"] = float(self._learning_rates[max(updates - 1, 0)])
        self._write(step, **values)
        self.bar.update(step, **values)

    def _check_finite(self, step: int, value: dict[str, float]) -> None:
        gradient = bool(np.isfinite(value["loss"] + value["grad_norm"]))
        # In fp16 a skipped step is how the loss scale finds its level, until it is at the bottom.
        if (
            (gradient and np.isfinite(value["param_norm"]))
            or self._run.config.on_nonfinite == "skip"
            or (not gradient and value.get("loss_scale", 1.0) > 1)
        ):
            return
        self._run.checkpointer.wait()
        good = self._run.checkpointer.good_steps()
        raise RunError(
            f"step {step}: the loss is {value['loss']} and the norms of the gradient and the new "
            f"parameters {value['grad_norm']} and {value['param_norm']}. The step changed nothing; "
            f"the last good checkpoint is {f'of step {good[-1]}' if good else 'none yet'}. Try "
            "--on-nonfinite skip, which leaves such steps out, or"
            f"{' in another --run-dir' if good else ''} a lower "
            "--optimizer.learning-rate, a longer --optimizer.warmup-steps, or --precision fp32."
        )

    def evaluation(
        self, step: int, evaluate: Callable[..., dict[str, float]], model: PyTree, whole: bool
    ) -> dict[str, float]:
        """Evaluate, and write, show and return the result."""
        self.flush()
        with self.pause():
            values = evaluate(model, whole)
            self._write(step, **values)
            shown = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
            self.bar.print(f"step {step}: {shown}")
            if not whole:  # the end draws it once more
                self.plot()
        return values

    def save(self, step: int, state: TrainState, meta: dict[str, Any]) -> None:
        """Save a checkpoint, once all steps are checked."""
        self.flush()
        with self.pause():
            self._run.checkpointer.save(step, state, meta | {"data_position": step})

    def pause(self) -> contextlib.AbstractContextManager:
        """Leave the time within out of the tokens a second."""
        return self._throughput.pause()

    def plot(self) -> None:
        """Draw curves.png."""
        if jax.process_index() == 0:
            plot_curves(self._run.folder / "metrics.jsonl", self._run.folder / "curves.png")

    def _write(self, step: int, **values: Any) -> None:
        for log in self._logs:
            log.write(step, **values)
