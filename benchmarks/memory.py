"""Memory of a train step: by remat policy, and by the size of the vocabulary.

Memory is XLA's plan of the compiled step, which does not have to run.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import jax

import zoo
from benchmarks.peers import jax_step, zoo_step
from benchmarks.peers.common import Precision
from benchmarks.peers.transformer import given, zoo_model
from benchmarks.peers.transformer.given import Shape
from benchmarks.report import Table
from benchmarks.timing import PAUSE_SECONDS, Timing, median_ratio
from zoo import losses, transformer
from zoo.nn.remat import POLICIES, Policy

MIB = 2**20


@dataclass(frozen=True)
class RematOptions:
    """The remat policies: memory, time, and the largest batch within a budget."""

    shape: Shape = Shape(num_layers=8, d_model=256, num_heads=4, d_ff=1024, batch_size=4)
    """Sizes of the transformer, and the batch that is timed."""
    precision: Precision = "fp32"
    """Precision of the compute, over fp32 weights."""
    budget_mib: int = 1024
    """Memory for the largest batch, in MiB."""


def measure_remat(options: RematOptions, timing: Timing) -> list[Table]:
    """One row per policy of `zoo.nn.remat`, with the layers in a scan."""
    shape, precision = options.shape, options.precision
    policies: list[Policy] = list(POLICIES)  # type: ignore[arg-type]
    built = {
        policy: zoo_model.build(shape, precision, remat=policy, scan=True) for policy in policies
    }
    seconds: dict[str, list[float]] = {policy: [] for policy in policies}
    states: dict[str, zoo.TrainState] = {policy: each.state for policy, each in built.items()}
    for turn in range(timing.rounds + 1):  # the first one is the warm-up
        for policy, each in built.items():
            time.sleep(PAUSE_SECONDS)
            start, num_steps = time.perf_counter(), 2
            for _ in range(num_steps):
                states[policy], loss = each.step(states[policy], each.batch)
            float(loss)
            if turn:
                seconds[policy].append((time.perf_counter() - start) / num_steps)
    table = Table(
        f"remat policies: {shape.num_layers} layers of {shape.d_model}, {shape.seq_len} tokens "
        f"per row, {precision}, scanned"
    )
    for policy in policies:

        def planned(batch_size: int, policy: Policy = policy) -> int:
            sized = dataclasses.replace(shape, batch_size=batch_size)
            return planned_bytes(states[policy], sized, precision)

        table.rows.append(
            {
                "policy": policy,
                f"XLA plan MiB, batch {shape.batch_size}": built[policy].planned_bytes / MIB,
                "steps/s": 1 / statistics.median(seconds[policy]),
                "time / none": median_ratio(seconds[policy], seconds["none"]),
                f"largest batch in {options.budget_mib} MiB": largest_batch(
                    planned, options.budget_mib * MIB
                ),
            }
        )
    table.print()
    return [table]


@dataclass(frozen=True)
class VocabularyOptions:
    """The memory of a train step by the size of its vocabulary."""

    sizes: tuple[int, ...] = (8192, 32768, 131072)
    """Vocabularies."""
    precision: Precision = "fp32"
    """Precision of the compute, over fp32 weights."""
    shape: Shape = Shape(
        num_layers=2, d_model=128, num_heads=2, d_ff=512, seq_len=1024, batch_size=4, tied=True
    )
    """Sizes of the model, except for the vocabulary."""


def measure_vocabulary(options: VocabularyOptions) -> list[Table]:
    """XLA's planned peak with all logits in memory at once, and with the loss in chunks."""
    shape = options.shape
    table = Table(
        f"train step, {shape.num_tokens} tokens, d_model {shape.d_model}, {options.precision}: "
        "XLA plan in MiB by vocabulary"
    )
    for size in options.sizes:
        sized = dataclasses.replace(shape, vocab_size=size)
        config = zoo_model.sizes(sized, "none", scan=True)
        state = zoo.init_state(
            lambda key, config=config: transformer.Transformer(config, key=key),
            jax_step.optimizer(),
            key=jax.random.key(0),
        )
        with mock.patch.object(losses, "LOGITS_BYTES", 2**62):
            whole = planned_bytes(state, sized, options.precision)
        chunked = planned_bytes(state, sized, options.precision)
        table.rows.append(
            {
                "vocabulary": size,
                "logits in fp32": 4 * sized.num_tokens * size / MIB,
                "all at once": whole / MIB,
                f"in chunks of {losses.LOGITS_BYTES / MIB:.0f} MiB (the zoo)": chunked / MIB,
            }
        )
    table.print()
    return [table]


def largest_batch(planned: Callable[[int], int], budget: int) -> int:
    """The largest batch with `planned(batch)` bytes within the budget, to 3%; 0 if none is.

    Memory is nearly linear in the batch size: a line through two plans gives the next size to try,
    so that few programs are compiled.
    """
    fits, too_large, sizes = 0, None, {}
    batch = 1
    while True:
        sizes[batch] = planned(batch)
        if sizes[batch] <= budget:
            fits = batch
        else:
            too_large = batch
        step = 1 + fits // 32
        if too_large is not None and too_large - fits <= step:
            return fits
        known = sorted(sizes)[-2:] if len(sizes) > 1 else [0, *sizes]
        low, high = (sizes.get(each, sizes[batch] // 2) for each in known)
        slope = max(1.0, (high - low) / (known[1] - known[0]))
        batch = max(fits + step, known[1] + int((budget - high) / slope))
        if too_large is not None:
            batch = min(batch, too_large - 1)


def planned_bytes(state: zoo.TrainState, shape: Shape, precision: Precision) -> int:
    """XLA's planned peak of a language model's train step, which is compiled but not run."""
    step = zoo.make_train_step(losses.next_token, jax_step.optimizer(), precision=precision)
    return jax_step.planned_bytes(step.lower(state, zoo_step.token_batch(given.batch(shape))))
