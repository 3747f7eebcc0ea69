"""Recurrences with a matrix as state: their chunks beside their steps, and beside attention.

python -m benchmarks.recurrences
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import tyro

from benchmarks.harness import Table, Timing, in_turn, main, median_ratio
from zoo.nn.attention.attention import attention
from zoo.nn.recurrences import gated_deltanet, mamba2, mlstm
from zoo.nn.recurrences.chunks import RecurrenceConfig, in_chunks
from zoo.nn.recurrences.marks import Marks


@dataclass(frozen=True)
class Options:
    """Forward and backward passes in fp32, without the projections around them."""

    seq_lens: tuple[int, ...] = (512, 2048, 8192)
    """Steps per row."""
    batch_size: int = 2
    """Rows."""
    num_heads: int = 4
    """Heads."""
    head_dim: int = 64
    """Size of a head's keys and values."""


def recurrences(
    options: Annotated[Options, tyro.conf.arg(name="")] = Options(),
    timing: Timing = Timing(turn_seconds=0.0),
) -> list[Table]:
    """A table per length of rows: milliseconds of a gradient, and ratios to attention's."""
    return [_table(options, timing, seq) for seq in options.seq_lens]


def _table(options: Options, timing: Timing, seq: int) -> Table:
    keys = jax.random.split(jax.random.key(0), 6)
    shape = options.batch_size, seq, options.num_heads
    q, k, v = (jax.random.normal(key, (*shape, options.head_dim)) for key in keys[:3])
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    log_decay, rate, gate = (jax.random.normal(key, shape) for key in keys[3:])
    log_decay, rate = -jax.nn.softplus(log_decay), jax.nn.sigmoid(rate)
    zeros = jnp.zeros((options.batch_size, options.num_heads, options.head_dim, options.head_dim))
    memory = mlstm.Memory(jnp.pad(zeros, ((0, 0),) * 3 + ((0, 1),)), zeros[..., 0, 0])
    cells: dict[str, tuple[Any, Any, Any]] = {
        "gated_deltanet": (
            gated_deltanet.RECURRENCE,
            zeros,
            gated_deltanet.Tokens(q, k, v, log_decay, rate),
        ),
        "mamba2": (mamba2.RECURRENCE, zeros, mamba2.Tokens(q, k, v, log_decay)),
        "mlstm": (mlstm.RECURRENCE, memory, mlstm.Tokens(q, k, v, log_decay, gate)),
    }
    calls = {"attention": _gradient(lambda x: attention(*x, causal=True), (q, k, v))}
    config = RecurrenceConfig(num_heads=options.num_heads)
    for name, (cell, state, tokens) in cells.items():
        calls[name] = _gradient(
            lambda x, cell=cell, state=state: in_chunks(cell, config, state, x, Marks())[1], tokens
        )
        calls[f"{name}, step by step"] = _gradient(
            lambda x, cell=cell, state=state: jax.lax.scan(cell.step, state, x)[1],
            jax.tree.map(lambda x: x.swapaxes(0, 1), tokens),
        )
    for call in calls.values():
        call()  # compiles
    seconds = in_turn(calls, timing.rounds)
    table = Table(f"gradients over {options.batch_size} rows of {seq} steps, fp32")
    for name, times in seconds.items():
        ratio = median_ratio(times, seconds["attention"])
        table.add(peer=name, milliseconds=1e3 * min(times), ratio=ratio)
    return table


def _gradient(function: Callable[[Any], jax.Array], inputs: Any) -> Callable[[], None]:
    gradient = jax.jit(jax.grad(lambda x: function(x).sum()))
    return lambda: jax.block_until_ready(gradient(inputs)) and None


if __name__ == "__main__":
    main(recurrences)
