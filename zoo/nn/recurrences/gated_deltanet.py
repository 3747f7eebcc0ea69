"""Gated DeltaNet (Yang, Kautz & Hatamizadeh 2024): a memory of keys and values that overwrites.

`step` is the recurrence: the state S decays, and what it says of a key moves towards the value,

    S ← e^g S;  S ← S + k ⊗ β (v - Sᵀk);  o = Sᵀq.

`chunk` is the same for many steps at once. What they write, u = β (v - Sᵀk), depends on what the
earlier ones of the chunk write, by a triangular system whose inverse is one of products (the WY
form, Yang, Wang, Zhang, Shen & Kim 2024). The layer around it is that of Qwen3-Next.

Legend of suffixes: as in `chunks`.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.nn.layers import RMSNorm, normal
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
    recur,
)
from zoo.nn.recurrences.marks import Marks
from zoo.nn.stateful import InFloat32
from zoo.sharding import constrain

State = Float[Array, "batch heads keys values"]
Opened = Float[Array, "batch heads keys values_and_keys"]


class Tokens(NamedTuple):
    """The inputs of steps, in float32 [batch, seq, heads, …]; without seq, one step of each row."""

    q: Float[Array, "batch *seq heads keys"]
    k: Float[Array, "batch *seq heads keys"]
    v: Float[Array, "batch *seq heads values"]
    log_decay: Float[Array, "batch *seq heads"]
    """g, at most 0."""
    rate: Float[Array, "batch *seq heads"]
    """β, how far what the state says of a key moves to the value."""


def step(state: State, token: Tokens) -> tuple[State, Float[Array, "batch heads values"]]:
    """The recurrence: one step of each row."""
    state = jnp.exp(token.log_decay)[..., None, None] * state
    said = einsum("bnkv,bnk->bnv", state, token.k)
    written = token.rate[..., None] * (token.v - said)
    state = state + token.k[..., :, None] * written[..., None, :]
    return state, einsum("bnkv,bnk->bnv", state, token.q)


def chunk(
    state: State, tokens: Tokens, marks: Marks
) -> tuple[State, Float[Array, "batch seq heads values"]]:
    """The steps of a chunk at once."""
    q, k, v, rate = map(heads_first, (tokens.q, tokens.k, tokens.v, tokens.rate))
    if marks.valid is not None:
        rate = jnp.where(marks.valid[:, None], rate, 0.0)
    logs = decay(tokens.log_decay, marks)
    within, start = jnp.exp(logs.within), jnp.exp(logs.start)[..., None]
    said = start * einsum("bnkv,bntk->bntv", state, k)
    earlier = jnp.tril(within * einsum("bntk,bnsk->bnts", k, k), -1)
    inverse = unit_lower_inverse(rate[..., None] * earlier)
    written = einsum("bnts,bnsv->bntv", inverse, rate[..., None] * (v - said))
    out = start * einsum("bnkv,bntk->bntv", state, q)
    out = out + einsum("bnts,bnsv->bntv", within * einsum("bntk,bnsk->bnts", q, k), written)
    left = within[:, :, -1, :, None] * k
    state = start[:, :, -1:] * state + einsum("bntk,bntv->bnkv", left, written)
    return state, heads_first(out)


def _open(state: State, tokens: Tokens) -> tuple[Opened, Tokens]:
    """Zeros, and beside them the identity, which the steps turn into the part's transition."""
    keys = state.shape[2]
    identity = jnp.broadcast_to(jnp.eye(keys), (*state.shape[:3], keys))
    v = jnp.pad(tokens.v, ((0, 0), (0, 0), (0, 0), (0, keys)))
    return jnp.concatenate([jnp.zeros_like(state), identity], -1), tokens._replace(v=v)


def _after(state: State, summary: Opened) -> State:
    made, transition = jnp.split(summary, [state.shape[-1]], -1)
    return made + einsum("bnij,bnjv->bniv", transition, state)


def _outputs(state: State, part: Part) -> Float[Array, "batch seq heads values"]:
    own, transitions = jnp.split(part.outputs, [state.shape[-1]], -1)
    return own + einsum("bnkv,btnk->btnv", state, transitions)


RECURRENCE = Recurrence(step, chunk, _open, lambda part: part.state, _after, _outputs)


@jax.custom_jvp
def unit_lower_inverse(lower: Float[Array, "*batch size size"]) -> Float[Array, "*batch size size"]:
    """The inverse of 1 + lower, for matrices that are zero on the diagonal and above it.

    Blocks on the diagonal are inverted in pairs, from 1x1 on, by [[A, 0], [C, B]]⁻¹ =
    [[A⁻¹, 0], [-B⁻¹ C A⁻¹, B⁻¹]]: products alone, and none of the cancellation of a power series.
    """
    *batch, size, _ = lower.shape
    padding = (1 << (size - 1).bit_length()) - size
    lower = jnp.pad(lower, ((0, 0),) * len(batch) + ((0, padding), (0, padding)))
    blocks = jnp.ones((*batch, size + padding, 1, 1), lower.dtype)
    while blocks.shape[-3] > 1:
        count, width = blocks.shape[-3] // 2, blocks.shape[-1]
        below = lower.reshape(*batch, count, 2, width, count, 2, width)[..., 1, :, :, 0, :]
        corner = jnp.moveaxis(jnp.diagonal(below, axis1=-4, axis2=-2), -1, -3)
        first, second = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
        corner = -_product(_product(second, corner), first)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        blocks = jnp.concatenate([upper, jnp.concatenate([corner, second], -1)], -2)
    return blocks[..., 0, :size, :size]


def _product(a: Float[Array, "*batch i j"], b: Float[Array, "*batch j k"]) -> Array:
    if a.shape[-1] > 8:
        return einsum("...ij,...jk->...ik", a, b)
    # Many small matrices: a sum in one loop, where XLA would call a product for each of them.
    return (a[..., :, :, None] * b[..., None, :, :]).sum(-2)


@unit_lower_inverse.defjvp
def _inverse_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    inverse = unit_lower_inverse(*primals)
    return inverse, -einsum("...ij,...jk,...kl->...il", inverse, jnp.tril(tangents[0], -1), inverse)


class Gates(InFloat32):
    """Parameters of the logarithm of the decay, g = -e^rate softplus(a + bias)."""

    log_rate: Float[Array, "heads"]
    bias: Float[Array, "heads"]

    def __call__(self, a: Float[Array, "batch seq heads"]) -> Float[Array, "batch seq heads"]:
        """The logarithm of each step's decay."""
        steps = jax.nn.softplus(a + self.bias[None, None])
        return -jnp.exp(self.log_rate)[None, None] * steps


class GatedDeltaNet(eqx.Module):
    """The layer: projections, convolutions of queries, keys and values, and a gated norm."""

    wq: Float[Array, "in kv_heads head_dim"] | Operand
    wk: Float[Array, "in kv_heads head_dim"] | Operand
    wv: Float[Array, "in heads head_dim"] | Operand
    wz: Float[Array, "in heads head_dim"] | Operand
    wa: Float[Array, "in heads"] | Operand
    wb: Float[Array, "in heads"] | Operand
    wo: Float[Array, "heads head_dim embed"] | Operand
    conv_q: Convolution
    conv_k: Convolution
    conv_v: Convolution
    gates: Gates
    norm: RMSNorm
    config: RecurrenceConfig = eqx.field(static=True)
    axes: tuple[tuple[str, str], ...] = eqx.field(static=True)

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
        keys = jax.random.split(key, 11)
        heads, key_heads = config.num_heads, config.num_key_heads or config.num_heads
        key_dim, value_dim = config.sizes(width)
        self.wq = normal(keys[0], (in_size, key_heads, key_dim), in_size)
        self.wk = normal(keys[1], (in_size, key_heads, key_dim), in_size)
        self.wv = normal(keys[2], (in_size, heads, value_dim), in_size)
        self.wz = normal(keys[3], (in_size, heads, value_dim), in_size)
        self.wa = normal(keys[4], (in_size, heads), in_size)
        self.wb = normal(keys[5], (in_size, heads), in_size)
        self.wo = normal(keys[6], (heads, value_dim, width), heads * value_dim)
        taps = config.taps
        self.conv_q, self.conv_k = (
            Convolution(taps, key_heads, key_dim, axis="kv_heads", bias=False, key=k)
            for k in keys[7:9]
        )
        self.conv_v = Convolution(taps, heads, value_dim, axis="heads", bias=False, key=keys[9])
        self.gates = Gates(*draw_gates(keys[10], heads))
        self.norm = RMSNorm(value_dim, axis="head_dim", eps=eps)
        self.config, self.axes = config, (("in", in_axis),)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype that the layer takes and gives."""
        return self.norm.scale.dtype

    def initial_state(self, batch_size: int) -> tuple:
        """Zeros: what the convolutions have read, and the matrices."""
        convolutions = (self.conv_q, self.conv_k, self.conv_v)
        heads, value_dim = self.conv_v.weight.shape[1:]
        matrices = jnp.zeros((batch_size, heads, self.conv_k.weight.shape[2], value_dim))
        return (*(c.initial_state(batch_size) for c in convolutions), matrices)

    def __call__(
        self, x: Float[Array, "batch seq in"], state: tuple, marks: Marks
    ) -> tuple[tuple, Float[Array, "batch seq embed"]]:
        """The state behind the row, and each step's output in the dtype of `x`."""
        *read, matrices = state
        read_q, q = self.conv_q(_split(matmul(x, self.wq), "kv_heads"), read[0], marks)
        read_k, k = self.conv_k(_split(matmul(x, self.wk), "kv_heads"), read[1], marks)
        read_v, v = self.conv_v(_split(matmul(x, self.wv), "heads"), read[2], marks)
        times = self.wv.shape[1] // self.wk.shape[1]
        q, k = (jnp.repeat(_unit_length(x), times, 2) for x in (q, k))
        rate = jax.nn.sigmoid(matmul(x, self.wb, dtype=jnp.float32))
        tokens = Tokens(
            q * q.shape[-1] ** -0.5,
            k,
            v.astype(jnp.float32),
            self.gates(matmul(x, self.wa, dtype=jnp.float32)),
            2 * rate if self.config.negative_eigenvalues else rate,
        )
        matrices, out = recur(RECURRENCE, self.config, matrices, tokens, marks)
        z = matmul(x, self.wz, dtype=jnp.float32)
        out = _split((self.norm(out) * jax.nn.silu(z)).astype(x.dtype), "heads")
        return (read_q, read_k, read_v, matrices), matmul(out, self.wo, contract=2)


def _split(x: Array, heads: str) -> Array:
    return constrain(x, "batch", "inner_seq", heads, "head_dim")


def _unit_length(x: Float[Array, "... size"]) -> Float[Array, "... size"]:
    """In fp32; its gradient at zero is finite."""
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.rsqrt(jnp.square(x32).sum(-1, keepdims=True) + 1e-6)


def num_products(config: RecurrenceConfig, in_size: int, width: int, size: int) -> float:
    """Multiplications per step of a row that is read in chunks of that size."""
    heads, (key_dim, value_dim) = config.num_heads, config.sizes(width)
    keys, values = (config.num_key_heads or heads) * key_dim, heads * value_dim
    weights = in_size * (2 * keys + 2 * values + 2 * heads) + values * width
    within = size * (2 * key_dim + 2 * value_dim) + size**2 / 3
    return weights + heads * (within + 3 * key_dim * value_dim)
