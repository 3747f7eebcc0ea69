"""Recurrences beside their own steps, attention, and what a TPU's compiler makes of them.

python -m benchmarks.recurrences times    # chunks, steps and attention, on this machine
python -m benchmarks.recurrences plans    # a layer of each, compiled for a TPU
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness import Table, Timing, in_turn, main, median_ratio
from benchmarks.plans import compiled, skeleton
from zoo.nn.attention.attention import attention
from zoo.nn.recurrences import gated_deltanet, mamba2, mlstm
from zoo.nn.recurrences.chunks import CHUNK, RecurrenceConfig, in_chunks
from zoo.nn.recurrences.marks import Marks
from zoo.nn.recurrences.mixers import MIXERS
from zoo.planning import flops, targets
from zoo.planning.roofline import roofline
from zoo.transformer.config import Config, MixerConfig
from zoo.transformer.flops import num_flops_per_token

ROWS, HEADS, SIZE = 2, 4, 64


def times(seq_lens: tuple[int, ...] = (512, 2048, 8192), timing: Timing = Timing()) -> list[Table]:
    """A table per length of rows: milliseconds of a gradient, and its ratio to attention's."""
    return [_table(timing, seq) for seq in seq_lens]


def _table(timing: Timing, seq: int) -> Table:
    keys, shape = jax.random.split(jax.random.key(0), 6), (ROWS, seq, HEADS)
    q, k, v = (jax.random.normal(key, (*shape, SIZE)) for key in keys[:3])
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    log_decay, rate, gate = (jax.random.normal(key, shape) for key in keys[3:])
    log_decay, rate = -jax.nn.softplus(log_decay), jax.nn.sigmoid(rate)
    zeros = jnp.zeros((ROWS, HEADS, SIZE, SIZE + 1))
    memory = mlstm.Memory(zeros, zeros[..., 0, 0])
    cells: dict[str, tuple[Any, Any, Any]] = {
        "gated_deltanet": (gated_deltanet, zeros[..., 1:], (log_decay, rate)),
        "mamba2": (mamba2, zeros[..., 1:], (log_decay,)),
        "mlstm": (mlstm, memory, (log_decay, gate)),
    }
    calls = {"attention": _gradient(lambda x: attention(*x, causal=True), (q, k, v))}
    config = RecurrenceConfig(num_heads=HEADS)
    for name, (cell, state, gates) in cells.items():
        tokens = cell.Tokens(q, k, v, *gates)
        chunks = lambda x, r=cell.RECURRENCE, s=state: in_chunks(r, config, s, x, Marks())[1]  # noqa: E731
        steps = lambda x, step=cell.step, s=state: jax.lax.scan(step, s, x)[1]  # noqa: E731
        calls[name] = _gradient(chunks, tokens)
        order = jax.tree.map(lambda x: x.swapaxes(0, 1), tokens)
        calls[f"{name}, step by step"] = _gradient(steps, order)
    seconds = in_turn(calls, timing.rounds)
    table = Table(f"gradients over {ROWS} rows of {seq} steps, {HEADS} heads of {SIZE}, fp32")
    for name, x in seconds.items():
        ratio = median_ratio(x, seconds["attention"])
        table.add(peer=name, milliseconds=1e3 * min(x), ratio=ratio)
    return table


def _gradient(function: Callable[[Any], jax.Array], inputs: Any) -> Callable[[], None]:
    gradient = jax.jit(jax.grad(lambda x: function(x).sum()))
    jax.block_until_ready(gradient(inputs))  # compiles
    return lambda: jax.block_until_ready(gradient(inputs)) and None


# --- By compiling alone ---------------------------------------------------------------------------

WIDTH, PLANNED_HEADS, VOCAB = 2048, 16, 128


def plans(
    seq_lens: tuple[int, ...] = (8192, 32_768, 131_072),
    chunks: tuple[int, ...] = (64, 128, 256, 512),
    target: str = "v5p:1x1x1",
) -> list[Table]:
    """Compile the step of a layer of each mixer over one row, in bf16.

    Args:
        seq_lens: steps of the row.
        chunks: lengths of chunks that are compared, for the first number of steps.
        target: chip to compile for.
    """
    table = Table(f"a layer of width {WIDTH}, {PLANNED_HEADS} heads of 128, one row, on {target}")
    where, default = targets.prepare(target), CHUNK["tpu"]
    for kind in ("attention", *MIXERS):
        for seq in seq_lens:
            compared = chunks if kind != "attention" and seq == seq_lens[0] else (default,)
            for size in compared:
                table.add(**_planned(kind, seq, size, where))
    table.notes.append(
        "FLOPs are those of the forward pass over the formula's. Milliseconds are the bound by "
        "instruction of a step, forward and backward, in which a product of fp32 takes six of bf16."
    )
    return [table]


def _planned(kind: str, seq: int, size: int, where: targets.Target) -> dict[str, Any]:
    recurrent = kind != "attention"
    settings = RecurrenceConfig(num_heads=PLANNED_HEADS, chunk=size) if recurrent else None
    mixer: Any = MixerConfig(pattern=(kind,), recurrence=settings or RecurrenceConfig())  # type: ignore[arg-type]
    sizes = Config(
        vocab_size=VOCAB,
        d_model=WIDTH,
        num_layers=1,
        num_heads=PLANNED_HEADS,
        mlp="none",
        mixer=mixer,
    )
    options = {"mesh": "", "batch_size": 1, "seq_len": seq, "remat": "none"}
    estimate = compiled(sizes, where.name, **options)
    roof = roofline(estimate)
    assert roof is not None
    tokens = jax.ShapeDtypeStruct((1, seq), jnp.int32)
    forward = jax.make_jaxpr(lambda model, x: model(x))(skeleton(sizes), tokens)
    wanted = num_flops_per_token(sizes, seq) * seq / 3
    return {
        "peer": kind,
        "steps": seq,
        "chunk": size if recurrent else None,
        "FLOPs / formula": flops.count(forward.jaxpr) / wanted if recurrent else None,
        "temporaries, GiB": estimate.memory.temporaries / 2**30,
        "ms": 1e3 * roof.by_op.seconds,
        "of it products": 1e3 * roof.by_op.compute,
        "memory": 1e3 * roof.by_op.memory,
        "compile s": estimate.compile_seconds,
    }


if __name__ == "__main__":
    main(times, plans)
