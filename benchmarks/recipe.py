"""The cost of the default recipe's input pipeline beside its step."""

import contextlib
import statistics
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
