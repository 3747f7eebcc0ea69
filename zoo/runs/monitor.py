"""The progress of a run: its progress line, its speed, its compiles, its traces."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from zoo.runs.metrics import Number, Value

_SHOWN = {
    "loss": "loss {:.4f}",
    "accuracy": "accuracy {:.1%}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "examples_per_second": "{:,.0f} examples/s",
    "mfu": "MFU {:.1%}",
}


class ProgressBar:
    """One line: step, loss, speed, MFU and the time left; silent but on process 0.

    On a terminal a bar that stays in one line at any width; elsewhere (a log file, CI) a plain
    line at the first and last step and every `seconds_between_lines`. The time left is reckoned
    from all steps since the first, so it counts evaluations and checkpoints but not the compile.
    """

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        console: Console | None = None,
        seconds_between_lines: Number = 15.0,
        clock: Callable[[], float] = time.monotonic,
        note: Callable[[], str] = lambda: "",
    ):
        """`note` gives what else the line says, at its end."""
        if jax.process_index() != 0:
            console = Console(quiet=True, force_interactive=False)
        self._console = console or Console()
        is_live = self._console.is_interactive
        self._seconds_between_drawings = 0.1 if is_live else seconds_between_lines
        self._total, self._clock, self._note = total, clock, note
        self._metrics: dict[str, Value] = {}
        self._began = clock()
        self._first: tuple[float, int] | None = None  # time and step of the first update
        self._drawn = -math.inf
        self._progress = Progress(
            TextColumn("{task.description} {task.completed}/{task.total}", markup=False),
            BarColumn(bar_width=None),  # the one column that gives way
            TextColumn("{task.fields[status]}", markup=False),
            console=self._console,
            auto_refresh=False,
            expand=True,
            disable=not is_live,
        )
        self._task = self._progress.add_task("train", total=total, completed=start, status="")

    def __enter__(self) -> "ProgressBar":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def update(self, step: int, **metrics: Value) -> None:
        """Show `step` steps done; `loss`, the speed and `mfu` stay until given anew."""
        now = self._clock()
        self._first = self._first or (now, step)
        self._metrics |= metrics
        if now - self._drawn < self._seconds_between_drawings and step < self._total:
            return
        if self._progress.disable and not self._metrics:  # a line would say nothing
            return
        self._drawn = now
        status = self._status(step, now)
        if self._progress.disable:
            self.print(f"train {step}/{self._total}  {status}")
        self._progress.update(self._task, completed=step, status=status, refresh=True)

    def print(self, text: str) -> None:
        """Print a text, above the bar where there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _status(self, step: int, now: float) -> str:
        shown = [(form, self._metrics.get(name)) for name, form in _SHOWN.items()]
        parts = [form.format(value) for form, value in shown if value is not None]
        numbers = {n: x for n, x in self._metrics.items() if isinstance(x, float)}
        for suffix, form, title in (("/loss", ".4f", "losses"), ("/epoch", ".2f", "epochs")):
            of_sources = [
                f"{name.removesuffix(suffix)} {x:{form}}"
                for name, x in numbers.items()
                if name.endswith(suffix)
            ]
            parts += [f"{title} {', '.join(of_sources)}"] if of_sources else []
        first_time, first_step = self._first or (now, step)
        if step >= self._total:
            parts.append(f"took {timedelta(seconds=int(now - self._began))}")
        elif step > first_step:
            left = (now - first_time) / (step - first_step) * (self._total - step)
            parts.append(f"ETA {timedelta(seconds=int(left))}")
        return "  ".join([*parts, *filter(None, [self._note()])])


@dataclass
class CompileCounter:
    """Counts the programs that JAX compiles in this process between `with` and its end.

    `compiles` counts every program that the backend had to provide and `seconds` how long that
    took; of these, `cache_hits` came out of the persistent compilation cache.
    """

    compiles: int = 0
    cache_hits: int = 0
    seconds: float = 0.0

    def __enter__(self) -> "CompileCounter":
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)
        return self

    def __exit__(self, *exception: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        jax.monitoring.unregister_event_listener(self._on_event)

    def _on_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.compiles += 1
            self.seconds += duration_secs

    def _on_event(self, event: str, **_: Any) -> None:
        self.cache_hits += event == "/jax/compilation_cache/cache_hits"


@dataclass(kw_only=True)
class Throughput:
    """Tokens/s, and model FLOPs utilization (MFU), over a sliding window of wall time.

    `flops_per_token` counts forward and backward, `peak` is one device's FLOP/s. Time in `pause()`
    (an evaluation, a checkpoint) and before the first `update` (the compile) does not count.
    """

    flops_per_token: Number | None = None
    peak: Number | None = None
    devices: int = 1
    window_seconds: Number = 30.0
    clock: Callable[[], float] = time.monotonic
    _paused: float = field(default=0.0, init=False)
    _tokens: float = field(default=0.0, init=False)
    _samples: deque[tuple[float, float]] = field(default_factory=deque, init=False)  # time, tokens

    def update(self, tokens: Number) -> None:
        """Say that steps of `tokens` tokens in all, over all devices, have just finished."""
        now = self.clock() - self._paused
        self._tokens += tokens
        self._samples.append((now, self._tokens))
        # The oldest sample is the last one before the window, so that slow steps have a rate too.
        while len(self._samples) > 2 and self._samples[1][0] <= now - self.window_seconds:
            self._samples.popleft()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stop the clock. Wait for the steps under way first, or the pause hides their time."""
        began = self.clock()
        try:
            yield
        finally:
            self._paused += self.clock() - began

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens/s over all devices; None before the second update."""
        if len(self._samples) < 2:
            return None
        (first, tokens_before), (last, tokens) = self._samples[0], self._samples[-1]
        return (tokens - tokens_before) / (last - first) if last > first else None

    @property
    def mfu(self) -> float | None:
        """The share of the devices' peak that the model's FLOPs use; None where it is unknown."""
        speed = self.tokens_per_second
        if speed is None or self.flops_per_token is None or self.peak is None:
            return None
        return speed * self.flops_per_token / (self.peak * self.devices)


@contextmanager
def profile(folder: Path, *, say: Callable[[str], None] = print) -> Iterator[None]:
    """Trace the programs within into `folder`, and `say` where the trace lies and how to open it.

    Wait inside for the last step's result: work that is still under way at the end is cut off.
    Python's own calls are left out: their tracer hooks every thread, of data and checkpoints
    too, and slows the steps that it shows.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(folder, create_perfetto_trace=True, profiler_options=options)
    try:
        yield
    finally:
        jax.profiler.stop_trace()
        trace = max(folder.glob("plugins/profile/*/perfetto_trace.json.gz"), default=folder)
        say(f"profile: open {trace} at https://ui.perfetto.dev, or: xprof --logdir {folder}")
