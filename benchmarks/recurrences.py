"""Recurrences beside their own steps, attention, and what a TPU's compiler makes of them.

python -m benchmarks.recurrences times    # chunks, steps and attention, on this machine
python -m benchmarks.recurrences plans    # a layer of each, compiled for a TPU
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from benchmarks.harness import Table, Timing, in_turn, main, median_ratio
from benchmarks.plans import compiled, skeleton
from zoo.nn.attention.attention import attention
from zoo.nn.recurrences import gated_deltanet, mamba2, mlstm
from zoo.nn.recurrences.chunks import CHUNK, RecurrenceConfig, in_chunks
from zoo.nn.recurrences.marks import Marks
from zoo.nn.recurrences.mixers import MIXERS
from zoo.planning import flops, targets
from zoo.planning.roofline import roofline
from zoo.transformer.config import Config
from zoo.transformer.flops import num_flops_per_token
from zoo.transformer.part_configs import MixerConfig

HEADS, SIZE = 4, 64


def times(
    seq_lens: tuple[int, ...] = (512, 2048, 8192, 32_768), timing: Timing = Timing()
) -> list[Table]:
    """A table per length of rows: milliseconds of a gradient, and its ratio to attention's.

    Over two rows, or one of more than 8,192 steps, over which attention takes most of a minute.
    Each recurrence is set beside its own steps, the same chunks by hand and, where PyTorch and
    transformers are installed, their code for a CPU.
    """
    return [_table(timing, seq) for seq in seq_lens]


def _table(timing: Timing, seq: int) -> Table:
    keys, rows = jax.random.split(jax.random.key(0), 6), 2 if seq <= 8192 else 1
    shape = (rows, seq, HEADS)
    q, k, v = (jax.random.normal(key, (*shape, SIZE)) for key in keys[:3])
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    forget, rate, gate = (jax.random.normal(key, shape) for key in keys[3:])
    log_decay, rate = jax.nn.log_sigmoid(forget), jax.nn.sigmoid(rate)
    zeros = jnp.zeros((rows, HEADS, SIZE, SIZE + 1))
    memory = mlstm.Memory(zeros, zeros[..., 0, 0])
    cells: dict[str, tuple[Any, Any, Any]] = {
        "gated_deltanet": (gated_deltanet, zeros[..., 1:], (log_decay, rate)),
        "mamba2": (mamba2, zeros[..., 1:], (log_decay,)),
        "mlstm": (mlstm, memory, (log_decay, gate)),
    }
    table = Table(f"gradients over {rows} × {seq} steps, {HEADS} heads of {SIZE}, fp32")
    calls = {"attention": _gradient(lambda x: attention(*x, causal=True), (q, k, v))}
    config = RecurrenceConfig(num_heads=HEADS)
    for name, (cell, state, gates) in cells.items():
        tokens = cell.Tokens(q, k, v, *gates)
        chunks = lambda x, r=cell.RECURRENCE, s=state: in_chunks(r, config, s, x, Marks())[1]  # noqa: E731
        by_hand = functools.partial(BY_HAND[name], config.chunk_size)
        steps = lambda x, step=cell.step, s=state: jax.lax.scan(step, s, x)[1]  # noqa: E731
        calls[name] = _gradient(chunks, tokens)
        calls[f"{name}, by hand"] = _gradient(by_hand, tokens)
        order = jax.tree.map(lambda x: x.swapaxes(0, 1), tokens)
        calls[f"{name}, step by step"] = _gradient(steps, order)
        wanted, found = jax.jit(chunks)(tokens), jax.jit(by_hand)(tokens)
        if not jnp.allclose(found, wanted, rtol=0, atol=1e-3 * jnp.abs(wanted).max()):
            table.failures.append(f"{name} by hand has other outputs")
    try:
        calls |= _of_transformers(q, k, v, forget, rate, gate)
    except ImportError as error:
        table.notes.append(f"transformers skipped: {error}")
    seconds = in_turn(calls, timing.rounds)
    for name, x in seconds.items():
        ratio = median_ratio(x, seconds["attention"])
        own = median_ratio(x, seconds[name.partition(",")[0]])
        table.add(peer=name, milliseconds=1e3 * min(x), ratio=ratio, of_chunks=own)
    return table


def _gradient(function: Callable[[Any], jax.Array], inputs: Any) -> Callable[[], None]:
    gradient = jax.jit(jax.grad(lambda x: function(x).sum())).lower(inputs).compile()
    return lambda: jax.block_until_ready(gradient(inputs)) and None


# --- By hand: one document, decays as differences of sums, a triangular solve ---------------------


def _scanned(body: Callable[..., Any], size: int, state: Any, tokens: Any) -> jax.Array:
    """The outputs [batch, seq, heads, …] of chunks, each computed again in the backward pass."""

    def chunked(x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1, size, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2))  # [chunks, batch, heads, steps, …]

    out = jax.lax.scan(jax.checkpoint(body), state, jax.tree.map(chunked, tuple(tokens)))[1]
    out = jnp.moveaxis(out, (0, 2), (1, 3))
    return out.reshape(out.shape[0], -1, *out.shape[3:])


def _delta(size: int, tokens: gated_deltanet.Tokens) -> jax.Array:
    def body(state: jax.Array, x: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, rate = x
        total = jnp.cumsum(g, -1)
        seen, left = _seen(total), jnp.exp(total)[..., None]
        system = jnp.tril(rate[..., None] * seen * (k @ k.mT), -1) + jnp.eye(size)
        wanted = rate[..., None] * (v - left * (k @ state))
        written = solve_triangular(system, wanted, lower=True, unit_diagonal=True)
        out = left * (q @ state) + (seen * (q @ k.mT)) @ written
        return left[..., -1:, :] * state + (seen[..., -1, :, None] * k).mT @ written, out

    return _scanned(body, size, jnp.zeros((len(tokens.v), HEADS, SIZE, SIZE)), tokens)


def _ssd(size: int, tokens: mamba2.Tokens) -> jax.Array:
    def body(state: jax.Array, x: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, g = x
        total = jnp.cumsum(g, -1)
        seen, left = _seen(total), jnp.exp(total)[..., None]
        out = left * (q @ state) + (seen * (q @ k.mT)) @ v
        return left[..., -1:, :] * state + (seen[..., -1, :, None] * k).mT @ v, out

    return _scanned(body, size, jnp.zeros((len(tokens.x), HEADS, SIZE, SIZE)), tokens)


def _exponential(size: int, tokens: mlstm.Tokens) -> jax.Array:
    def body(state: Any, x: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        (cell, before), (q, k, v, g, gate) = state, x
        total, v = jnp.cumsum(g, -1), jnp.pad(v, ((0, 0),) * 3 + ((0, 1),), constant_values=1.0)
        logs = jnp.log(_seen(total)) + gate[..., None, :]
        largest = jnp.maximum(logs.max(-1), total + before[..., None])
        weights = jnp.exp(logs - largest[..., None])
        left = jnp.exp(total + before[..., None] - largest)[..., None]
        out = left * (q @ cell) + (weights * (q @ k.mT)) @ v
        cell = left[..., -1:, :] * cell + (weights[..., -1, :, None] * k).mT @ v
        out = jnp.concatenate([out, largest[..., None]], -1)
        return (cell, largest[..., -1]), out

    zeros = jnp.zeros((len(tokens.v), HEADS, SIZE, SIZE + 1))
    return _scanned(body, size, (zeros, zeros[..., 0, 0]), tokens)


def _seen(total: jax.Array) -> jax.Array:
    """What is left behind step t of what step s has added, [t, s]."""
    later = jnp.tril(jnp.ones((total.shape[-1],) * 2, bool))
    return jnp.exp(jnp.where(later, total[..., None] - total[..., None, :], -jnp.inf))


BY_HAND: dict[str, Any] = {"gated_deltanet": _delta, "mamba2": _ssd, "mlstm": _exponential}


def _of_transformers(*arrays: jax.Array) -> dict[str, Callable[[], None]]:
    """Gradients of what transformers runs on a CPU, by PyTorch.

    Raises:
        ImportError: either is not installed.
    """
    import torch
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
    from transformers.models.xlstm.modeling_xlstm import mlstm_chunkwise_native_autograd

    q, k, v, forget, rate, gate = (torch.tensor(np.asarray(x)).requires_grad_() for x in arrays)
    steps = torch.nn.functional.softplus(-forget.detach()).requires_grad_()
    first = lambda *found: [x.transpose(1, 2) for x in found]  # noqa: E731
    chunk = CHUNK["cpu"]
    calls = {
        "gated_deltanet": lambda: torch_chunk_gated_delta_rule(q, k, v, -steps, rate)[0],
        "mamba2": lambda: mamba2_chunk_scan(v, steps, -torch.ones(HEADS), k, q, chunk),
        "mlstm": lambda: mlstm_chunkwise_native_autograd(*first(q, k, v, gate, forget)),
    }

    def timed(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            found = call()
            (found[0] if isinstance(found, tuple) else found).sum().backward()

        run()
        return run

    return {f"{name}, transformers": timed(call) for name, call in calls.items()}


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
