"""The costs of the default recipe besides its step: the start-up, and the input pipeline."""

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

import zoo
from benchmarks.report import Table
from benchmarks.timing import PAUSE_SECONDS, Timing, median_ratio
from recipes import lm
from zoo import losses, optimizers, text, transformer
from zoo.data import loader
from zoo.nn.precision import native_precision

ROOT = Path(__file__).parents[1]


def measure_startup() -> list[Table]:
    """Seconds from the start of `python -m recipes.lm` to the end of its first step."""
    table = Table("python -m recipes.lm: from the start of the process to the end of a step")
    with tempfile.TemporaryDirectory() as folder:
        caches = [f"--data.cache={folder}/corpus", f"--compilation-cache={folder}/jax"]
        for name, run_dir, steps in (
            ("cold: caches empty, tokenizer trained", "first", 1),
            ("caches warm, tokenizer trained", "second", 1),
            ("the second run resumed: tokenizer kept", "second", 2),
        ):
            seconds = _seconds_to_step(steps, Path(folder, run_dir), caches)
            table.rows.append({"start": name, "seconds": seconds})
    table.print()
    return [table]


def _seconds_to_step(step: int, run_dir: Path, flags: list[str]) -> float:
    command = [sys.executable, "-m", "recipes.lm", f"--run-dir={run_dir}", f"--steps={step}"]
    start = time.perf_counter()
    process = subprocess.Popen([*command, *flags], cwd=ROOT, stdout=subprocess.DEVNULL)
    metrics = run_dir / "metrics.jsonl"
    while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
        if process.poll() is not None:
            raise RuntimeError(f"{command} ended with {process.returncode} before step {step}")
        time.sleep(0.005)
    seconds = time.perf_counter() - start
    process.wait()
    return seconds


def measure_pipeline(timing: Timing) -> list[Table]:
    """The recipe's step on batches of the input pipeline and, in turn, on one resident batch."""
    config = lm.Config()
    with tempfile.TemporaryDirectory() as folder:

        def make_once(make: Callable[[Path], object]) -> Path:
            make(Path(folder))
            return Path(folder)

        data = text.read_text(config.data, seed=0, tokenizer_folder=make_once)
    model_config = lm.model_config(config, data)
    optimizer = optimizers.make_optimizer(config.optimizer, config.steps)
    state = zoo.init_state(
        lambda key: transformer.Transformer(model_config, key=key),
        optimizer,
        key=jax.random.key(0),
    )
    step = zoo.make_train_step(losses.next_token, optimizer, precision=native_precision())
    step.compile(state, *data.train.shapes().values())

    with contextlib.closing(loader.batches(data.train)) as loaded:
        _, resident = next(loaded)
        sources: dict[str, Iterator] = {
            "one resident batch": iter(lambda: resident, None),
            "the input pipeline": (batch for _, batch in loaded),
        }
        seconds: dict[str, list[float]] = {name: [] for name in sources}
        num_steps = 3
        for turn in range(timing.rounds + 1):  # the first one is the warm-up
            for name, batches in sources.items():
                time.sleep(PAUSE_SECONDS)
                start = time.perf_counter()
                for _ in range(num_steps):
                    state, metrics = step(state, next(batches))
                jax.block_until_ready(metrics)
                if turn:
                    seconds[name].append((time.perf_counter() - start) / num_steps)
    table = Table("the default recipe's step with its input pipeline")
    baseline = seconds["one resident batch"]
    tokens = config.data.batch_size * config.data.seq_len
    for name, times in seconds.items():
        typical = statistics.median(times)
        ratio = median_ratio(times, baseline)
        table.rows.append({"batches": name, "tokens/s": tokens / typical, "time / resident": ratio})
    table.print()
    return [table]
