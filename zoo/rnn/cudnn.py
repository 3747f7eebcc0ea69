"""cuDNN's LSTM, the one recurrence that jax has a kernel for: no GRU, and no bf16."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import rnn
from jaxtyping import Array, Bool, Float

from zoo.nn.products import in_forward_mode, platform
from zoo.rnn.cells import CellName, State
from zoo.rnn.recurrence import Weights


def refusal(cell: CellName, *, packed: bool) -> str | None:
    """Why cuDNN's LSTM cannot serve here, or None if it can."""
    if cell != "lstm":
        return f"has cell 'lstm' alone, and this is {cell!r}"
    if packed:
        return "can't begin afresh between the segments of packed rows: pass mask, not segment_ids"
    if in_forward_mode():
        return "has no rule for forward mode"
    if platform() != "gpu":
        return f"needs an NVIDIA GPU, and this run is on {platform()!r}"
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1:
        return "runs on one device, and the mesh has more"
    return None


def lstm(
    x_BTI: Float[Array, "batch seq in"],
    directions: Sequence[Weights],
    states: Sequence[State],
    valid: Bool[Array, "batch seq"] | None,
) -> tuple[tuple[State, ...], Float[Array, "batch seq out"]]:
    """One layer by cuDNN, in fp32: the directions' final states, and their h side by side.

    Padding has to come last in a row. `jax.experimental.rnn` documents the layout of the weights.
    """
    batch, seq, in_size = x_BTI.shape
    lengths = jnp.full(batch, seq) if valid is None else valid.sum(1)
    matrices = [
        jnp.moveaxis(w, 0, -1).reshape(-1)
        for d in directions
        for w in (d.ih, d.hh)
        if w is not None
    ]
    biases = [b.reshape(-1) for d in directions for b in (d.bias, jnp.zeros_like(d.bias))]
    h, *final = rnn.lstm(
        x_BTI.astype(jnp.float32),
        *(jnp.stack(s) for s in zip(*states, strict=True)),
        jnp.concatenate(matrices + biases).astype(jnp.float32),
        # A row of padding alone has a length of one, and its result is thrown away.
        jnp.maximum(lengths, 1).astype(jnp.int32),
        input_size=in_size,
        hidden_size=directions[0].bias.shape[-1],
        num_layers=1,
        dropout=0.0,
        bidirectional=len(directions) == 2,
    )
    kept = (lengths > 0)[:, None]
    finals = tuple(
        tuple(jnp.where(kept, new[d], old) for new, old in zip(final, state, strict=True))
        for d, state in enumerate(states)
    )
    return finals, h.astype(x_BTI.dtype)
