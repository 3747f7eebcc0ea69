"""Chunks of recurrences beside their steps and attention: `python -m benchmarks.recurrences`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness import Table, Timing, in_turn, main, median_ratio
from zoo.nn.attention.attention import attention
from zoo.nn.recurrences import gated_deltanet, mamba2, mlstm
from zoo.nn.recurrences.chunks import RecurrenceConfig, in_chunks
from zoo.nn.recurrences.marks import Marks

ROWS, HEADS, SIZE = 2, 4, 64


def recurrences(
    seq_lens: tuple[int, ...] = (512, 2048, 8192), timing: Timing = Timing()
) -> list[Table]:
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


if __name__ == "__main__":
    main(recurrences)
