"""The stall of the training steps by a checkpoint: asynchronous, and synchronous."""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import jax

import zoo
from benchmarks.peers import jax_step, zoo_step
from benchmarks.peers.common import Precision
from benchmarks.peers.transformer import given, zoo_model
from benchmarks.peers.transformer.given import Shape
from benchmarks.report import Table
from benchmarks.timing import PAUSE_SECONDS, Timing
from zoo import losses
from zoo.runs.checkpoint import Checkpointer


@dataclass(frozen=True)
class Options:
    """The stall of a train step by a checkpoint."""

    shape: Shape = field(default_factory=Shape)
    """Sizes of the saved transformer, and of a step's batch."""
    precision: Precision = "fp32"
    """Precision of the compute, over fp32 weights."""
    steps: int = 6
    """Steps during a save: enough for it to finish meanwhile."""


def measure(options: Options, timing: Timing) -> list[Table]:
    """The same number of steps without a save, during a save, and after a completed save."""
    shape, optimizer = options.shape, jax_step.optimizer()
    config = zoo_model.sizes(shape, "none", scan=True)
    state = zoo.init_state(
        lambda key: zoo_model.init(config, shape, key), optimizer, key=jax.random.key(0)
    )
    step = zoo.make_train_step(losses.next_token, optimizer, precision=options.precision)
    batch = jax.device_put(zoo_step.token_batch(given.batch(shape)))
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(state) if isinstance(x, jax.Array))

    def run(before: Callable[[], object]) -> float:
        """Seconds of `before()` and the steps after it."""
        nonlocal state
        time.sleep(PAUSE_SECONDS)
        start = time.perf_counter()
        before()
        for _ in range(options.steps):
            state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        return time.perf_counter() - start

    with tempfile.TemporaryDirectory() as folder:
        checkpointer = Checkpointer(Path(folder), keep=1)
        saves, returned, written = 0, [], []

        def save(and_wait: bool) -> None:
            nonlocal saves
            saves += 1
            start = time.perf_counter()
            checkpointer.save(saves, state, {})
            (written if and_wait else returned).append(time.perf_counter() - start)
            if and_wait:
                checkpointer.wait()
                written[-1] = time.perf_counter() - start

        kinds: dict[str, Callable[[], object]] = {
            "no save": lambda: None,
            "asynchronous (the zoo)": lambda: save(and_wait=False),
            "synchronous": lambda: save(and_wait=True),
        }
        seconds: dict[str, list[float]] = {name: [] for name in kinds}
        for turn in range(timing.rounds + 1):  # the first one is the warm-up
            for name, before in kinds.items():
                seconds[name].append(run(before))
                checkpointer.wait()
            if turn == 0:
                for times in (*seconds.values(), returned, written):
                    times.clear()
        checkpointer.close()
    return [_table(options, seconds, num_bytes, returned, written)]


def _table(
    options: Options,
    seconds: dict[str, list[float]],
    num_bytes: int,
    returned: list[float],
    written: list[float],
) -> Table:
    table = Table(f"checkpoint of {num_bytes / 2**20:,.0f} MiB of state: the stall of the steps")
    alone = seconds["no save"]
    for name, times in seconds.items():
        stalls = [a - b for a, b in zip(times, alone, strict=True)]
        calls = {"no save": [], "synchronous": written}.get(name, returned)
        table.rows.append(
            {
                "save": name,
                "steps/s": options.steps / statistics.median(times),
                "stall, s": statistics.median(stalls),
                "stall, steps": statistics.median(stalls)
                * options.steps
                / statistics.median(alone),
                "save call, s": statistics.median(calls) if calls else None,
            }
        )
    table.notes.append(
        f"stall = seconds of a save and {options.steps} steps − seconds of {options.steps} steps, "
        "the median over the rounds; on a CPU, writing takes cores from the steps"
    )
    if statistics.median(written) > statistics.median(seconds["asynchronous (the zoo)"]):
        table.notes.append(
            "the save outlasts the steps: the true stall is longer; raise checkpoint.steps"
        )
    table.print()
    return table
