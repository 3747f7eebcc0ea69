"""Mamba-2 (Dao & Gu 2024): a state-space model whose state is a matrix per head.

`step` is the recurrence, with a time step Δ for each head,

    S ← e^{-AΔ} S + B ⊗ Δx;  y = Sᵀ C + D x,

which `chunk` computes for many steps at once, as attention whose weights C·B decay. The layer
around it is that of the reference implementation.

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
    Convolution,
    Part,
    Recurrence,
    RecurrenceConfig,
    decay,
    draw_gates,
    einsum,
    heads_first,
    left_of_start,
    recur,
)
from zoo.nn.recurrences.marks import Marks
from zoo.nn.stateful import InFloat32
from zoo.sharding import constrain

State = Float[Array, "batch heads keys values"]


class Tokens(NamedTuple):
    """The inputs of steps, in float32 [batch, seq, heads, …]; without seq, one step of each row."""

    c: Float[Array, "batch *seq heads keys"]
    """The query."""
    b: Float[Array, "batch *seq heads keys"]
    x: Float[Array, "batch *seq heads values"]
    """The value, times Δ."""
    log_decay: Float[Array, "batch *seq heads"]


def step(state: State, token: Tokens) -> tuple[State, Float[Array, "batch heads values"]]:
    """The recurrence, but for D: one step of each row."""
    state = jnp.exp(token.log_decay)[..., None, None] * state
    state = state + token.b[..., :, None] * token.x[..., None, :]
    return state, einsum("bnkv,bnk->bnv", state, token.c)


def chunk(
    state: State, tokens: Tokens, marks: Marks
) -> tuple[State, Float[Array, "batch seq heads values"]]:
    """The steps of a chunk at once."""
    c, b, x = map(heads_first, (tokens.c, tokens.b, tokens.x))
    if marks.valid is not None:
        x = jnp.where(marks.valid[:, None, :, None], x, 0.0)
    logs = decay(tokens.log_decay, marks)
    within, start = jnp.exp(logs.within), jnp.exp(logs.start)[..., None]
    out = start * einsum("bnkv,bntk->bntv", state, c)
    out = out + einsum("bnts,bnsv->bntv", within * einsum("bntk,bnsk->bnts", c, b), x)
    left = within[:, :, -1, :, None] * b
    state = start[:, :, -1:] * state + einsum("bntk,bntv->bnkv", left, x)
    return state, heads_first(out)


def _open(state: State, tokens: Tokens) -> tuple[State, Tokens]:
    return jnp.zeros_like(state), tokens


def _summary(part: Part) -> tuple[State, Float[Array, "batch heads"]]:
    """The state that the part adds, and the share that it leaves of the one before it."""
    return part.state, jnp.exp(left_of_start(part.tokens.log_decay, part.marks)[:, -1])


def _after(state: State, summary: tuple[State, Float[Array, "batch heads"]]) -> State:
    added, left = summary
    return added + left[..., None, None] * state


def _outputs(state: State, part: Part) -> Float[Array, "batch seq heads values"]:
    left = jnp.exp(left_of_start(part.tokens.log_decay, part.marks))
    return part.outputs + left[..., None] * einsum("bnkv,btnk->btnv", state, part.tokens.c)


RECURRENCE = Recurrence(step, chunk, _open, _summary, _after, _outputs)


class Gates(InFloat32):
    """Time steps Δ = softplus(dt + bias), rates A = e^log_rate, and the skip D."""

    log_rate: Float[Array, "heads"]
    bias: Float[Array, "heads"]
    skip: Float[Array, "heads"]


class Mamba2(eqx.Module):
    """The layer: projections, convolutions of x, B and C, a norm of the gated output."""

    wz: Float[Array, "in heads head_dim"] | Operand
    wx: Float[Array, "in heads head_dim"] | Operand
    wb: Float[Array, "in groups head_dim"] | Operand
    wc: Float[Array, "in groups head_dim"] | Operand
    wdt: Float[Array, "in heads"] | Operand
    wo: Float[Array, "heads head_dim embed"] | Operand
    conv_x: Convolution
    conv_b: Convolution
    conv_c: Convolution
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
        eps: float = 1e-5,
    ):
        """`eps` is what the norm of the output adds to the variance."""
        keys = jax.random.split(key, 10)
        heads, groups, taps = config.num_heads, config.num_key_heads or 1, config.taps
        state_size, size = config.sizes(width)
        self.wz = normal(keys[0], (in_size, heads, size), in_size)
        self.wx = normal(keys[1], (in_size, heads, size), in_size)
        self.wb = normal(keys[2], (in_size, groups, state_size), in_size)
        self.wc = normal(keys[3], (in_size, groups, state_size), in_size)
        self.wdt = normal(keys[4], (in_size, heads), in_size)
        self.wo = normal(keys[5], (heads, size, width), heads * size)
        self.conv_x = Convolution(taps, heads, size, axis="heads", bias=True, key=keys[6])
        self.conv_b, self.conv_c = (
            Convolution(taps, groups, state_size, axis="groups", bias=True, key=k)
            for k in keys[7:9]
        )
        self.gates = Gates(*draw_gates(keys[9], heads), jnp.ones(heads))
        self.norm_scale = jnp.ones((heads, size))
        self.config, self.axes, self.eps = config, (("in", in_axis),), eps

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype that the layer takes and gives."""
        return self.norm_scale.dtype

    def initial_state(self, batch_size: int) -> tuple:
        """Zeros: what the convolutions have read, and the matrices."""
        convolutions = (self.conv_x, self.conv_b, self.conv_c)
        heads, size = self.conv_x.weight.shape[1:]
        matrices = jnp.zeros((batch_size, heads, self.conv_b.weight.shape[2], size))
        return (*(c.initial_state(batch_size) for c in convolutions), matrices)

    def __call__(
        self, x: Float[Array, "batch seq in"], state: tuple, marks: Marks
    ) -> tuple[tuple, Float[Array, "batch seq embed"]]:
        """The state behind the row, and each step's output in the dtype of `x`."""
        *read, matrices = state
        heads = constrain(matmul(x, self.wx), "batch", "inner_seq", "heads", "head_dim")
        read_x, values = self.conv_x(heads, read[0], marks)
        read_b, b = self.conv_b(matmul(x, self.wb), read[1], marks)
        read_c, c = self.conv_c(matmul(x, self.wc), read[2], marks)
        times = self.wx.shape[1] // self.wb.shape[1]
        b, c = (jnp.repeat(x.astype(jnp.float32), times, 2) for x in (b, c))
        values = values.astype(jnp.float32)
        dt = matmul(x, self.wdt, dtype=jnp.float32) + self.gates.bias[None, None]
        dt = jax.nn.softplus(dt)
        tokens = Tokens(
            c, b, dt[..., None] * values, -jnp.exp(self.gates.log_rate)[None, None] * dt
        )
        matrices, out = recur(RECURRENCE, self.config, matrices, tokens, marks)
        out = out + self.gates.skip[None, None, :, None] * values
        out = out * jax.nn.silu(matmul(x, self.wz, dtype=jnp.float32))
        out = self._normed(out).astype(x.dtype)
        out = constrain(out, "batch", "inner_seq", "heads", "head_dim")
        return (read_x, read_b, read_c, matrices), matmul(out, self.wo, contract=2)

    def _normed(self, out: Float[Array, "batch seq heads values"]) -> Array:
        """RMSNorm over the heads of each group."""
        groups = self.wb.shape[1]
        grouped = out.reshape(*out.shape[:2], groups, -1)
        scale = jax.lax.rsqrt(jnp.square(grouped).mean(-1, keepdims=True) + self.eps)
        out = (grouped * scale).reshape(out.shape)
        return out * self.norm_scale.astype(jnp.float32)[None, None]


def num_products(config: RecurrenceConfig, in_size: int, width: int, size: int) -> int:
    """Multiplications per step of a row that is read in chunks of that size."""
    heads, (state_size, value_dim) = config.num_heads, config.sizes(width)
    shared, values = (config.num_key_heads or 1) * state_size, heads * value_dim
    weights = in_size * (2 * values + 2 * shared + heads) + values * width
    within = size * (state_size + value_dim)
    return weights + heads * (within + 2 * state_size * value_dim)
