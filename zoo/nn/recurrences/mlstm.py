"""mLSTM (Beck et al. 2024, xLSTM): an LSTM whose cell is a matrix per head, with exponential gates.

`step` is the recurrence. A gate of forgetting f and one of input i, both logarithms, are kept in
range by their largest value so far, m:

    m' = max(f + m, i);  C ← e^{f+m-m'} C + e^{i-m'} k ⊗ v;  n likewise, with 1 for v;
    h = Cᵀq / (max(|nᵀq|, e^{-m'}) + ε).

n is one more column of C here. `chunk` is the same for many steps at once. The layer around it is
that of xLSTM 7B (Beck et al. 2025), which bounds the gates softly.

Legend of suffixes: as in `chunks`.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.nn.layers import normal
from zoo.nn.products import Operand, matmul
from zoo.nn.recurrences.chunks import (
    Part,
    Recurrence,
    RecurrenceConfig,
    decay,
    einsum,
    heads_first,
    left_of_start,
    recur,
)
from zoo.nn.recurrences.marks import Marks
from zoo.nn.stateful import InFloat32
from zoo.sharding import constrain

EPS = 1e-6
CAP = 15.0  # of the gates


class Memory(NamedTuple):
    """The state: the cell and its normaliser side by side, less a factor of e^largest."""

    cell: Float[Array, "batch heads keys values_and_one"]
    largest: Float[Array, "batch heads"]
    """m."""


class Tokens(NamedTuple):
    """The inputs of steps, in float32 [batch, seq, heads, …]; without seq, one step of each row."""

    q: Float[Array, "batch *seq heads keys"]
    k: Float[Array, "batch *seq heads keys"]
    v: Float[Array, "batch *seq heads values"]
    log_forget: Float[Array, "batch *seq heads"]
    """f, at most 0."""
    log_input: Float[Array, "batch *seq heads"]
    """i."""


def step(state: Memory, token: Tokens) -> tuple[Memory, Float[Array, "batch heads outputs"]]:
    """The recurrence: one step of each row, whose output `_normalised` takes."""
    decayed = token.log_forget + state.largest
    largest = jnp.maximum(decayed, token.log_input)
    added = token.k[..., :, None] * _with_one(token.v)[..., None, :]
    cell = jnp.exp(decayed - largest)[..., None, None] * state.cell
    cell = cell + jnp.exp(token.log_input - largest)[..., None, None] * added
    out = einsum("bnkv,bnk->bnv", cell, token.q)
    return Memory(cell, largest), _outputs_of(out, largest)


def chunk(
    state: Memory, tokens: Tokens, marks: Marks
) -> tuple[Memory, Float[Array, "batch seq heads outputs"]]:
    """The steps of a chunk at once."""
    q, k, v, log_input = map(heads_first, (tokens.q, tokens.k, tokens.v, tokens.log_input))
    if marks.valid is not None:
        log_input = jnp.where(marks.valid[:, None], log_input, -jnp.inf)
    logs = decay(tokens.log_forget, marks)
    start = logs.start + state.largest[..., None]
    candidates = log_input
    if marks.restart is not None:  # a new document begins with m = 0
        begun = jnp.maximum(log_input, heads_first(tokens.log_forget))
        candidates = jnp.where(marks.restart[:, None], begun, log_input)
    largest = jnp.maximum(start, (logs.within + candidates[:, :, None]).max(-1))
    weights = jnp.exp(logs.within + log_input[:, :, None] - largest[..., None])
    carried = jnp.exp(start - largest)[..., None]
    values = _with_one(v)
    out = carried * einsum("bnkv,bntk->bntv", state.cell, q)
    out = out + einsum("bnts,bnsv->bntv", weights * einsum("bntk,bnsk->bnts", q, k), values)
    left = weights[:, :, -1, :, None] * k
    cell = carried[:, :, -1:] * state.cell + einsum("bntk,bntv->bnkv", left, values)
    return Memory(cell, largest[..., -1]), heads_first(_outputs_of(out, largest))


def _with_one(v: Float[Array, "... values"]) -> Float[Array, "... values_and_one"]:
    return jnp.concatenate([v, jnp.ones_like(v[..., :1])], -1)


def _outputs_of(out: Array, largest: Array) -> Float[Array, "... outputs"]:
    return jnp.concatenate([out, largest[..., None]], -1)


def _normalised(outputs: Float[Array, "... outputs"]) -> Float[Array, "... values"]:
    """Cᵀq over its normaliser, from Cᵀq, nᵀq and m side by side."""
    out, size, largest = outputs[..., :-2], outputs[..., -2:-1], outputs[..., -1:]
    return out / (jnp.maximum(jnp.abs(size), jnp.exp(-largest)) + EPS)


def _open(state: Memory, tokens: Tokens) -> tuple[Memory, Tokens]:
    # An m that is below all others, as the part's own one begins with its first step.
    return Memory(jnp.zeros_like(state.cell), jnp.full_like(state.largest, -1e30)), tokens


def _summary(part: Part) -> tuple[Memory, Float[Array, "batch heads"]]:
    """The memory that the part adds, and the logarithm of the share that it leaves."""
    return part.state, left_of_start(part.tokens.log_forget, part.marks)[:, -1]


def _after(state: Memory, summary: tuple[Memory, Float[Array, "batch heads"]]) -> Memory:
    added, log_left = summary
    decayed = log_left + state.largest
    largest = jnp.maximum(added.largest, decayed)
    cell = jnp.exp(added.largest - largest)[..., None, None] * added.cell
    cell = cell + jnp.exp(decayed - largest)[..., None, None] * state.cell
    return Memory(cell, largest)


def _outputs(state: Memory, part: Part) -> Float[Array, "batch seq heads outputs"]:
    out, own = part.outputs[..., :-1], part.outputs[..., -1]
    decayed = left_of_start(part.tokens.log_forget, part.marks) + state.largest[:, None]
    largest = jnp.maximum(own, decayed)
    carried = einsum("bnkv,btnk->btnv", state.cell, part.tokens.q)
    out = jnp.exp(own - largest)[..., None] * out
    return _outputs_of(out + jnp.exp(decayed - largest)[..., None] * carried, largest)


RECURRENCE = Recurrence(step, chunk, _open, _summary, _after, _outputs)


class Gates(InFloat32):
    """The biases of the gates: at first little comes in, and little is forgotten."""

    forget: Float[Array, "heads"]
    input: Float[Array, "heads"]


class MLSTM(eqx.Module):
    """The layer: projections, a norm of each head, and an output gate."""

    wq: Float[Array, "in heads head_dim"] | Operand
    wk: Float[Array, "in heads head_dim"] | Operand
    wv: Float[Array, "in heads head_dim"] | Operand
    wz: Float[Array, "in heads head_dim"] | Operand
    wf: Float[Array, "in heads"] | Operand
    wi: Float[Array, "in heads"] | Operand
    wo: Float[Array, "heads head_dim embed"] | Operand
    gates: Gates
    norm_scale: Float[Array, "heads head_dim"]
    config: RecurrenceConfig = eqx.field(static=True)
    axes: tuple[tuple[str, str], ...] = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    def __init__(
        self,
        config: RecurrenceConfig,
        in_size: int,
        width: int,
        in_axis: str,
        *,
        key: Key[Array, ""],
        eps: float = 1e-6,
    ):
        """`eps` is what the norm of the output adds to the variance."""
        keys = jax.random.split(key, 7)
        heads, (key_dim, value_dim) = config.num_heads, config.sizes(width)
        self.wq = normal(keys[0], (in_size, heads, key_dim), in_size)
        self.wk = normal(keys[1], (in_size, heads, key_dim), in_size)
        self.wv = normal(keys[2], (in_size, heads, value_dim), in_size)
        self.wz = normal(keys[3], (in_size, heads, value_dim), in_size)
        self.wf = normal(keys[4], (in_size, heads), in_size)
        self.wi = normal(keys[5], (in_size, heads), in_size)
        self.wo = normal(keys[6], (heads, value_dim, width), heads * value_dim)
        self.gates = Gates(jnp.linspace(3.0, 6.0, heads), jnp.full(heads, -10.0))
        self.norm_scale = jnp.ones((heads, value_dim))
        self.config, self.axes, self.eps = config, (("in", in_axis),), eps

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype that the layer takes and gives."""
        return self.norm_scale.dtype

    def initial_state(self, batch_size: int) -> Memory:
        """Zeros."""
        _, heads, key_dim = self.wk.shape
        cell = jnp.zeros((batch_size, heads, key_dim, self.wv.shape[2] + 1))
        return Memory(cell, jnp.zeros((batch_size, heads)))

    def __call__(
        self, x: Float[Array, "batch seq in"], state: Memory, marks: Marks
    ) -> tuple[Memory, Float[Array, "batch seq embed"]]:
        """The state behind the row, and each step's output in the dtype of `x`."""

        def project(weight: Array | Operand) -> Array:
            heads = constrain(matmul(x, weight), "batch", "inner_seq", "heads", "head_dim")
            return heads.astype(jnp.float32)

        def gate(weight: Array | Operand, bias: Array) -> Array:
            logits = matmul(x, weight, dtype=jnp.float32) + bias[None, None]
            return CAP * jnp.tanh(logits / CAP)

        q, k, v = map(project, (self.wq, self.wk, self.wv))
        tokens = Tokens(
            q * q.shape[-1] ** -0.5,
            k,
            v,
            jax.nn.log_sigmoid(gate(self.wf, self.gates.forget)),
            gate(self.wi, self.gates.input),
        )
        state, out = recur(RECURRENCE, self.config, state, tokens, marks)
        out = _normalised(out)
        out = out - out.mean(-1, keepdims=True)
        out = out * jax.lax.rsqrt(jnp.square(out).mean(-1, keepdims=True) + self.eps)
        out = out * self.norm_scale.astype(jnp.float32)[None, None]
        out = out * jax.nn.sigmoid(matmul(x, self.wz, dtype=jnp.float32))
        out = constrain(out.astype(x.dtype), "batch", "inner_seq", "heads", "head_dim")
        return state, matmul(out, self.wo, contract=2)


def num_products(config: RecurrenceConfig, in_size: int, width: int, size: int) -> int:
    """Multiplications per step of a row that is read in chunks of that size."""
    heads, (key_dim, value_dim) = config.num_heads, config.sizes(width)
    weights = in_size * heads * (2 * key_dim + 2 * value_dim + 2) + heads * value_dim * width
    values = value_dim + 1  # and the normaliser
    return weights + heads * (size * (key_dim + values) + 2 * key_dim * values)
