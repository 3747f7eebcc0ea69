"""The record of a training loop: progress, metrics.jsonl, curves, a trace."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from zoo.runs import monitor
from zoo.runs.callbacks.hooks import Hooks, Snapshot
from zoo.runs.metrics import MetricsLog, plot_curves, show_samples
from zoo.runs.processes import RunError
from zoo.training.chips import peak_flops
from zoo.training.state import TrainState


class Recorder:
    """The metrics of steps, checked one step late; the logs, pictures and checkpoints of a run."""

    def __init__(self, loop: Hooks, written: int = 0):
        """`written` evaluations of the first step are in metrics.jsonl already: not again."""
        run, training = loop.run, loop.training
        self._run, self._start, self._unit = run, loop.start, training.data.unit
        self._loop, self._written = loop, written
        self._saved = training.saved
        self._pending: list[tuple[int, Mapping[str, Any]]] = []
        self._log: MetricsLog | None = None  # of process 0
        self._stack = contextlib.ExitStack()
        self._throughput = monitor.Throughput(
            flops_per_token=training.flops_per_token,
            peak=peak_flops(run.mesh.devices.flat[0], run.precision),
            devices=run.mesh.size,
        )
        self._rate: Any = None
        if training.schedule is not None:  # one program, compiled here and not in the loop
            self._rate = jax.jit(training.schedule).lower(np.float32(0)).compile()
        self.bar = monitor.ProgressBar(run.config.steps, start=self._start, note=lambda: run.status)
        loop.attach(self.bar.print, self._paused)
        self._trace = contextlib.ExitStack()

    def __enter__(self) -> "Recorder":
        run = self._run
        if jax.process_index() == 0:
            path = run.folder / "metrics.jsonl"
            self._log = MetricsLog(path, resume_step=self._start)
            self._stack.callback(self._log.close)
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
        """A context around the dispatch of step k."""
        if self._run.config.profile and k == self._start + 10:
            folder = self._run.folder / "profile"
            self._trace.enter_context(monitor.profile(folder, say=self.bar.print))
        self._run.check_address()
        with jax.profiler.StepTraceAnnotation("train", step_num=k):
            yield

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
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

        Before a save too: a resumed run would not see the same infinity or nan again.
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
        return step == 1 or step % config.log_every == 0 or self._loop.is_last(step)

    def _show(self, step: int, values: dict[str, float]) -> None:
        # A source of a mixture that has no token in this step has no loss.
        values = {n: x for n, x in values.items() if not (n.endswith("/loss") and math.isnan(x))}
        values[self._unit] = values.pop("tokens")
        speeds = {
            f"{self._unit}_per_second": self._throughput.tokens_per_second,
            "mfu": self._throughput.mfu,
        }
        values |= {name: speed for name, speed in speeds.items() if speed is not None}
        if self._rate is not None:
            updates = step - int(values["skipped"])  # a skipped step does not advance the schedule
            values["learning_rate"] = float(self._rate(np.float32(max(updates - 1, 0))))
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
            "--optimizer.learning-rate, a longer --optimizer.warmup-steps, or --precision fp32. "
            "The batch's own numbers are finite; a target beyond the logits gives nan too."
        )

    def evaluation(self, step: int, state: TrainState, whole: bool) -> dict[str, float]:
        """Evaluate, and write, show and return the result."""
        self._loop.whole = whole
        with self._paused():
            values = self._loop.evaluate(state.model)
            values = self._loop.on_evaluation(step, state, values)
            self._write(step, **values)
            shown = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
            self.bar.print(f"step {step}: {shown}")
            if not whole:  # the end draws it once more
                self.plot()
        return values

    def save(self, step: int, state: TrainState, meta: dict[str, Any], snapshot: Snapshot) -> None:
        """Save a checkpoint, once all steps are checked, with the callbacks' state."""
        with self._paused():
            arrays, of_callbacks = snapshot
            meta = meta | of_callbacks | {"data_position": step}
            self._run.checkpointer.save(step, self._saved(state), meta, arrays)
        self._run.check_address(copies=True)
        self._loop.on_checkpoint(step, state)

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Leave the time within out of the tokens per second."""
        self.flush()
        with self._throughput.pause():
            yield

    def plot(self) -> None:
        """Draw curves.png, and samples.html where there are samples."""
        if jax.process_index() == 0:
            folder = self._run.folder
            plot_curves(folder / "metrics.jsonl", folder / "curves.png")
            if (folder / "samples.jsonl").exists():
                show_samples(folder / "samples.jsonl", folder / "samples.html")
        self._run.copy()

    def _write(self, step: int, **values: Any) -> None:
        is_written = self._written > 0 and step == self._start
        self._written -= is_written
        if self._log is not None:
            if not is_written:
                self._log.write(step, **values)
            self._loop.on_log(step, values)
