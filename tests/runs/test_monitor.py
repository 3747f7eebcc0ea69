"""zoo.runs.monitor: progress in any terminal, compiles counted, speed over running time, traces."""

import io
import re
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from rich.console import Console

from zoo.runs import monitor
from zoo.training import chips


class Clock:
    """A clock that moves only when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# The progress line


def test_progress_prints_plain_lines_without_terminal():
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=40)
    with monitor.ProgressBar(
        1000, start=100, console=console, seconds_between_lines=10, clock=clock
    ) as bar:
        for step in range(101, 1001):
            clock.now += 1.0
            bar.update(step, loss=2.0, tokens_per_second=12345.6, mfu=None, grad_norm=1.0)
        bar.print("[bold]done[/bold] " + "x" * 60)
    lines = out.getvalue().splitlines()
    assert len(lines) == 92  # one every ten of 900 seconds, the last step, the print
    assert lines[0] == "train 101/1000  loss 2.0000  12,346 tokens/s"
    assert lines[1] == "train 111/1000  loss 2.0000  12,346 tokens/s  ETA 0:14:49"
    assert lines[-2] == "train 1000/1000  loss 2.0000  12,346 tokens/s  took 0:15:00"
    assert lines[-1] == "[bold]done[/bold] " + "x" * 60
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()


def test_progress_is_silent_on_other_processes(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True)
    with monitor.ProgressBar(2, console=console, seconds_between_lines=0) as bar:
        bar.update(1, loss=3.0)
        bar.print("text")
    assert out.getvalue() == ""


@pytest.mark.parametrize("width", [30, 80, 120])
def test_terminal_progress_fits_any_width(width: int):
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=True, width=width, _environ={"TERM": "xterm"})
    with monitor.ProgressBar(123456, console=console, clock=clock) as bar:
        for step in (1, 2, 123455, 123456):
            clock.now += 3600.0
            bar.update(step, loss=12.3456, tokens_per_second=1234567.8, mfu=0.3456)
            bar.print("[text]")
    frames = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    lines = re.split(r"[\r\n]+", frames)
    assert max(map(len, lines)) <= width
    assert not re.search(r"\x1b\[\d*A", out.getvalue())  # it never moves up: it never wrapped
    assert frames.count("[text]") == 4
    if width >= 80:
        assert "train 123456/123456" in lines[-2]
        assert "loss 12.3456  1,234,568 tokens/s  MFU 34.6%  took 4:00:00" in lines[-2]


# Compiles


def test_compiles_are_counted_exactly(no_cache):
    f = jax.jit(lambda x: x * 3.0 + 1.0)
    short, long = np.zeros(3, np.float32), np.zeros(5, np.float32)
    with monitor.CompileCounter() as counter:
        f(short), f(long)
        assert counter.compiles == 2
        assert counter.seconds > 0
        f(short), f(long)
        assert counter.compiles == 2
        assert counter.cache_hits == 0
    f(np.zeros(7, np.float32))
    assert counter.compiles == 2


def test_persistent_cache_hits_are_counted(tmp_path: Path):
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    x = np.zeros(11, np.float32)
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        with monitor.CompileCounter() as cold:
            jax.jit(lambda x: x * 7.0 - 2.0)(x)
        with monitor.CompileCounter() as warm:
            jax.jit(lambda x: x * 7.0 - 2.0)(x)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert (cold.compiles, cold.cache_hits) == (1, 0)
    assert (warm.compiles, warm.cache_hits) == (1, 1)


# Peaks and throughput


@pytest.mark.parametrize(
    ("kind", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H200", "fp16", 989e12),
        ("NVIDIA H200", "fp32", 67e12),
        ("NVIDIA H20", "bf16", None),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312e12),
        ("NVIDIA B200", "bf16", 2250e12),
        ("NVIDIA GB200", "bf16", 2500e12),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla T4", "fp16", 65e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA L40", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("TPU v2", "bf16", 22.5e12),
        ("TPU v3", "bf16", 61.5e12),
        ("TPU v4", "bf16", 275e12),
        ("TPU v4 lite", "bf16", None),
        ("TPU v5 lite", "bf16", 197e12),
        ("TPU v5", "bf16", 459e12),
        ("TPU v5p", "bf16", 459e12),
        ("TPU v6 lite", "bf16", 918e12),
        ("TPU v6 lite", "fp32", None),
        ("TPU7x", "bf16", 1153.5e12),
    ],
)
def test_peak_flops_by_device_kind(kind: str, dtype: str, peak: float | None):
    device = mock.Mock(spec=jax.Device, device_kind=kind)
    assert chips.peak_flops(device, dtype) == pytest.approx(peak)


def test_throughput_is_tokens_over_running_time():
    clock = Clock()
    throughput = monitor.Throughput(flops_per_token=6e9, peak=1e12, devices=3, clock=clock)
    clock.now += 50.0  # compiling
    throughput.update(1000)
    assert throughput.tokens_per_second is None
    assert throughput.mfu is None
    for _ in range(4):
        clock.now += 2.0
        throughput.update(1000)
    assert throughput.tokens_per_second == pytest.approx(500.0)
    assert throughput.mfu == pytest.approx(500.0 * 6e9 / 3e12)


def test_throughput_uses_only_its_window():
    clock = Clock()
    throughput = monitor.Throughput(window_seconds=10.0, clock=clock)
    for seconds in [1.0] * 30 + [2.0] * 5:
        clock.now += seconds
        throughput.update(1000)
    assert throughput.tokens_per_second == pytest.approx(500.0)
    clock.now += 100.0  # a step longer than the window
    throughput.update(1000)
    assert throughput.tokens_per_second == pytest.approx(10.0)
    assert throughput.mfu is None


def test_a_pause_costs_no_throughput():
    clock = Clock()
    throughput = monitor.Throughput(window_seconds=10.0, clock=clock)
    throughput.update(1000)
    for _ in range(8):
        clock.now += 1.0
        throughput.update(1000)
        with pytest.raises(KeyError), throughput.pause():  # noqa: PT012
            clock.now += 77.0
            raise KeyError
    assert throughput.tokens_per_second == pytest.approx(1000.0)


# Traces


@pytest.mark.slow
def test_profile_reports_its_trace_path(tmp_path: Path):
    said: list[str] = []
    f = jax.jit(lambda x: x * 2.0)
    with monitor.profile(tmp_path, say=said.append):
        for _ in range(2):
            f(np.zeros(3, np.float32)).block_until_ready()
    (text,) = said
    trace = Path(text.split()[2])
    assert trace.name == "perfetto_trace.json.gz"
    assert trace.stat().st_size > 0
    with monitor.profile(tmp_path / "again", say=said.append):  # the first one has ended
        pass
