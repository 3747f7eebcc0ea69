"""zoo.monitor: what a killed, resumed or diverged run leaves must still be readable and true."""

import fcntl
import io
import json
import math
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from zoo import monitor


class Clock:
    """A clock that moves only when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def write_run(path: Path, steps: range, *, resume_step: int = 0) -> None:
    log = monitor.MetricsLog(path, resume_step=resume_step)
    for step in steps:
        log.write(step, loss=10.0 / step, note="a line\nwith ünicode", missing=None)
    log.close()


# metrics.jsonl


def test_metrics_come_back_as_they_were_written(tmp_path: Path):
    write_run(tmp_path / "metrics.jsonl", range(1, 4))
    assert monitor.read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": step, "loss": 10.0 / step, "note": "a line\nwith ünicode", "missing": None}
        for step in (1, 2, 3)
    ]


def test_every_line_is_on_disk_at_once(tmp_path: Path):
    log = monitor.MetricsLog(tmp_path / "metrics.jsonl")
    log.write(1, loss=2.0)
    assert monitor.read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.0}]
    log.close()


def test_non_finite_values_are_strict_json_and_come_back(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    log = monitor.MetricsLog(path)
    log.write(1, a=math.nan, b=math.inf, c=-math.inf, d=np.float64("nan"))
    log.close()

    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (record,) = monitor.read_metrics(path)
    assert math.isnan(record["a"])
    assert math.isnan(record["d"])
    assert (record["b"], record["c"]) == (math.inf, -math.inf)


def test_a_run_killed_at_any_byte_and_resumed_equals_one_that_never_stopped(tmp_path: Path):
    straight, killed = tmp_path / "straight.jsonl", tmp_path / "killed.jsonl"
    write_run(straight, range(1, 7))
    whole = straight.read_bytes()
    last_two = sum(map(len, whole.splitlines(keepends=True)[-2:]))
    for kept in range(len(whole) - last_two, len(whole) + 1):
        killed.write_bytes(whole[:kept])
        written = monitor.read_metrics(killed)
        assert [record["step"] for record in written] == list(range(1, len(written) + 1))
        assert len(written) >= 4
        write_run(killed, range(4, 7), resume_step=3)  # the last checkpoint was at step 3
        assert killed.read_bytes() == whole


def test_a_complete_last_line_without_its_newline_is_kept(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write_run(path, range(1, 4))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    write_run(path, range(4, 4), resume_step=3)
    assert path.read_bytes() == whole


def test_a_run_that_starts_anew_starts_an_empty_file(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "eval_loss": 5.0}\n{"step": 1}\n')
    write_run(path, range(1, 2))
    assert [record["step"] for record in monitor.read_metrics(path)] == [1]


def test_resuming_where_the_metrics_are_gone_starts_a_file(tmp_path: Path):
    write_run(tmp_path / "metrics.jsonl", range(4, 6), resume_step=3)
    assert len(monitor.read_metrics(tmp_path / "metrics.jsonl")) == 2


@pytest.mark.parametrize(
    "damage", [b'{"step": 2, "lo', b"\0\0\0", b"\xff\xfe", b"3", b'{"loss": 1}']
)
def test_a_damaged_line_in_the_middle_is_named_and_nothing_is_lost(tmp_path: Path, damage: bytes):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 2 is damaged .* remove it"):
        monitor.MetricsLog(path, resume_step=3)
    assert path.read_bytes().endswith(b'{"step": 3}\n')


def test_a_rewrite_that_dies_leaves_the_old_file(tmp_path: Path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write_run(path, range(1, 4))
    whole = path.read_bytes()
    monkeypatch.setattr(monitor.os, "replace", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        monitor.MetricsLog(path, resume_step=1)
    assert path.read_bytes() == whole


# TensorBoard


def test_tensorboard_without_its_package_names_the_extra(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'zoo[tensorboard]'")):
        monitor.TensorBoard(tmp_path)


def test_tensorboard_writes_the_numbers_alone(tmp_path: Path):
    pytest.importorskip("tensorboardX")
    board = monitor.TensorBoard(tmp_path, resume_step=2)
    board.write(3, loss=1.5, note="text", mfu=None)
    board.close()
    (events,) = tmp_path.glob("events.out.tfevents.*")
    assert b"loss" in events.read_bytes()
    assert b"note" not in events.read_bytes()


# curves.png


def write_curves(path: Path, steps: int, *, drop: tuple[str, ...] = ()) -> None:
    log = monitor.MetricsLog(path)
    noise = np.random.default_rng(0).normal(size=steps + 1)
    for step in range(1, steps + 1):
        values = {
            "loss": math.nan if step == 20 else 2.0 + 4.0 / step + 0.05 * float(noise[step]),
            "learning_rate": 1e-3 * min(1.0, step / 10),
            "grad_norm": 100.0 / step,
            "tokens_per_second": 9e3 if step > 1 else None,
            "eval_loss": 2.1 + 4.0 / step if step % 10 == 0 else None,
        }
        log.write(step, **{name: value for name, value in values.items() if name not in drop})
    log.close()


def axes_of(figure_spy: mock.Mock) -> dict[str, object]:
    (figure,) = [call.args[0] for call in figure_spy.call_args_list]
    return {axes.get_ylabel(): axes for axes in figure.axes}


@pytest.fixture
def figure_spy(monkeypatch) -> mock.Mock:
    """Sees the figure that is saved, and saves it."""
    from matplotlib.figure import Figure

    spy = mock.Mock(wraps=Figure.savefig)
    monkeypatch.setattr(Figure, "savefig", lambda *args, **kwargs: spy(*args, **kwargs))
    return spy


def test_curves_show_every_metric(tmp_path: Path, figure_spy: mock.Mock):
    write_curves(tmp_path / "metrics.jsonl", 60)
    monitor.plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    axes = axes_of(figure_spy)
    assert set(axes) == {"loss", "learning rate", "grad norm", "tokens per second"}
    raw, smoothed, held_out = axes["loss"].lines
    assert len(raw.get_xdata()) == 60
    assert list(held_out.get_xdata()) == [10, 20, 30, 40, 50, 60]
    assert np.isnan(raw.get_ydata()).sum() == np.isnan(smoothed.get_ydata()).sum() == 1
    assert axes["grad norm"].get_yscale() == "log"
    assert axes["loss"].get_yscale() == axes["learning rate"].get_yscale() == "linear"
    image = imread(tmp_path / "curves.png")
    assert image.shape[0] > 500
    assert image.std() > 0.05
    assert [path.name for path in tmp_path.glob("curves*")] == ["curves.png"]


@pytest.mark.parametrize(
    ("drop", "labels"),
    [
        (("learning_rate", "grad_norm", "tokens_per_second"), {"loss"}),
        (("loss", "eval_loss", "learning_rate"), {"grad norm", "tokens per second"}),
    ],
)
def test_curves_show_what_there_is(tmp_path: Path, figure_spy: mock.Mock, drop, labels):
    write_curves(tmp_path / "metrics.jsonl", 12, drop=drop)
    monitor.plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert set(axes_of(figure_spy)) == labels


def test_no_curves_of_nothing(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": "nan"}\n')
    monitor.plot_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def test_smoothing_keeps_a_straight_line_and_removes_noise():
    line = np.linspace(5.0, 1.0, 1000)
    noise = np.random.default_rng(0).normal(size=1000)
    smooth = monitor._smooth(line + noise)
    np.testing.assert_allclose(monitor._smooth(line)[50:-50], line[50:-50], rtol=1e-9)
    assert np.std(smooth - line) < 0.3
    assert len(monitor._smooth(line[:1])) == 1


# The progress line


def test_away_from_a_terminal_progress_is_a_plain_line_now_and_then():
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


def test_progress_keeps_a_metric_until_it_is_given_anew():
    out = io.StringIO()
    with monitor.ProgressBar(2, console=Console(file=out), seconds_between_lines=0) as bar:
        bar.update(1, loss=3.0, mfu=0.345)
        bar.update(2)
    assert out.getvalue().splitlines()[1].startswith("train 2/2  loss 3.0000  MFU 34.5%")


def test_progress_is_silent_on_other_processes(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True)
    with monitor.ProgressBar(2, console=console, seconds_between_lines=0) as bar:
        bar.update(1, loss=3.0)
        bar.print("text")
    assert out.getvalue() == ""


@pytest.mark.parametrize("width", [30, 80, 120])
def test_on_a_terminal_progress_is_one_line_of_any_width(width: int):
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


def test_progress_in_a_real_terminal_stays_in_one_line():
    program = (
        "from zoo.monitor import ProgressBar\n"
        "with ProgressBar(300, label='train') as bar:\n"
        "    for step in range(1, 301):\n"
        "        bar.update(step, loss=2.0, tokens_per_second=123456.0, mfu=0.3)\n"
    )
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    environment |= {"TERM": "xterm-256color", "PYTHONPATH": str(Path(monitor.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=child, stdout=child, stderr=child, env=environment
    )
    os.close(child)
    output = b""
    while select.select([parent], [], [], 60)[0]:
        try:
            output += os.read(parent, 65536)
        except OSError:  # the other end is closed
            break
    assert process.wait(60) == 0, output
    os.close(parent)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())
    lines = [line for line in re.split(r"[\r\n]+", text) if line]
    assert max(len(line) for line in lines) == 80
    assert lines[-1].startswith("train 300/300 ━━━")
    assert text.count("\n") == 1


# Compiles


def test_compiles_are_counted_exactly():
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


def test_counters_nest_and_leave_no_listener():
    f = jax.jit(lambda x: x * 5.0)
    with monitor.CompileCounter() as outer:
        f(np.zeros(3, np.float32))
        with pytest.raises(ZeroDivisionError), monitor.CompileCounter() as inner:  # noqa: PT012
            f(np.zeros(5, np.float32))
            raise ZeroDivisionError
        f(np.zeros(7, np.float32))
    assert (outer.compiles, inner.compiles) == (3, 1)


def test_hits_of_the_persistent_cache_are_counted(tmp_path: Path):
    from jax.experimental.compilation_cache import compilation_cache

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
def test_peaks_by_device_kind(kind: str, dtype: str, peak: float | None):
    device = mock.Mock(spec=jax.Device, device_kind=kind)
    assert monitor.peak_flops(device, dtype) == pytest.approx(peak)


def test_this_cpu_has_no_known_peak():
    assert monitor.peak_flops(jax.devices()[0], "fp32") is None


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


def test_throughput_forgets_what_lies_before_its_window():
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


def test_a_profile_says_where_its_trace_lies(tmp_path: Path):
    said: list[str] = []
    f = jax.jit(lambda x: x * 2.0)
    with monitor.profile(tmp_path, say=said.append):
        for step in range(2):
            with monitor.step_annotation(step):
                f(np.zeros(3, np.float32)).block_until_ready()
    (text,) = said
    trace = Path(text.split()[2])
    assert trace.name == "perfetto_trace.json.gz"
    assert trace.stat().st_size > 0
    with monitor.profile(tmp_path / "again", say=said.append):  # the first one has ended
        pass
