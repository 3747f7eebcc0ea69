"""The processes of a run: signals that all of them heed, and what they need to find each other."""

import contextlib
import signal
import threading

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from zoo.runs import processes
from zoo.runs.config import Config
from zoo.runs.processes import SECONDS, RunError, Signals, Stopped
from zoo.runs.run import Run


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def asked(monkeypatch):
    """Two processes, of which the other one is quick and has no signal; when this one asked."""
    clock, times = Clock(), []

    def allgather(mine):
        times.append(clock.now)
        return np.stack([mine, np.zeros(2, np.float32)])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", allgather)
    return clock, times


def call(signals, clock, seconds, times):
    for _ in range(times):
        clock.now += seconds
        assert not signals.agreed()


def longest(times):
    return np.diff([0.0, *times]).max()


@pytest.mark.parametrize("seconds", [0.001, 0.3, 1.0, 60.0])
def test_signal_checks_follow_wall_time(seconds, asked):
    clock, times = asked
    call(Signals(clock), clock, seconds, 10_000)
    assert longest(times) <= max(SECONDS, seconds) * 1.01
    seldom = max(SECONDS - seconds, seconds)  # no whole number of steps takes two seconds
    assert len(times) <= 10_000 * seconds / seldom + 20


def test_evaluations_restart_the_check_interval(asked):
    clock, times = asked
    signals = Signals(clock)
    call(signals, clock, 0.001, 10_000)
    began = len(times)
    assert not signals.agreed(now=True)
    assert len(times) == began + 1
    call(signals, clock, 1.5, 20)
    assert longest(times) <= SECONDS * 1.01


def test_remote_signals_stop_this_process(asked, monkeypatch):
    clock, _ = asked
    signals = Signals(clock)
    call(signals, clock, 0.001, 100)
    other = np.array([signal.SIGTERM, 0], np.float32)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda mine: np.stack([mine, other]))

    def evaluate():
        for _ in range(10_000):
            clock.now += 0.001
            signals.check()

    with pytest.raises(Stopped):
        evaluate()
    assert signals.received == signal.SIGTERM
    assert signals.agreed(now=True)


def test_processes_check_at_equal_steps(monkeypatch):
    """Where they did not, one would wait in vain, and the barrier would break."""
    meeting, given, asked = threading.Barrier(2, timeout=20), {}, {0: [], 1: []}

    def allgather(mine):
        process = int(threading.current_thread().name)
        given[process] = mine
        meeting.wait()
        both = np.stack([given[0], given[1]])
        meeting.wait()
        return both

    def run(process):
        clock = Clock()
        signals = Signals(clock)
        for step in range(3000):
            clock.now += (0.003, 0.011)[process] * (1 + step % 7)
            before = signals._asked
            signals.agreed(now=step % 1000 == 0)
            if signals._asked != before:
                asked[process].append(step)
        done.append(process)

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", allgather)
    done: list[int] = []
    threads = [threading.Thread(target=run, args=(i,), name=str(i)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [0, 1]
    assert asked[0] == asked[1]
    assert len(asked[0]) > 20


def test_late_signals_are_passed_on():
    taken = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: taken.append(number))
    try:
        with Signals() as signals:
            signal.raise_signal(signal.SIGTERM)
            assert signals.agreed()
            assert taken == []
        assert taken == [signal.SIGTERM]
        with contextlib.suppress(SystemExit), Signals():
            signal.raise_signal(signal.SIGTERM)
            raise SystemExit
        assert taken == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_folder_of_the_first_process_is_handed_on(tmp_path, monkeypatch):
    sent: dict[str, str] = {}
    monkeypatch.setattr(processes, "from_first", lambda content: sent.update(content) or sent)
    (tmp_path / "0" / "templates").mkdir(parents=True)
    for name in ("tokenizer.json", "templates/tool.jinja"):
        (tmp_path / "0" / name).write_bytes(name.encode() + b"\xff")
    for number in range(2):
        monkeypatch.setattr(jax, "process_index", lambda number=number: number)
        processes.hand_on(tmp_path / str(number))
    for name in ("tokenizer.json", "templates/tool.jinja"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "0" / name).read_bytes()


def test_missing_distributed_variable_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1")
    monkeypatch.delenv("JAX_NUM_PROCESSES", raising=False)
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    with pytest.raises(RunError, match="--distributed: JAX_NUM_PROCESSES"):
        Run(Config(run_dir=tmp_path / "run", steps=1, distributed=True)).__enter__()
