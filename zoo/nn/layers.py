"""The layers that families share: linear maps, tables, output heads, norms, activations, dropout.

Each works on the last axis of an input of any leading shape, in the input's dtype; norms and
activations compute in fp32 inside. Legend of suffixes: B batch, T time, E embed.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo.nn.parameters import cast_for_use, reshard, unshard
from zoo.nn.products import Operand, Static, custom_vjp, matmul
from zoo.nn.table_parts import TableParts
from zoo.sharding import constrain, is_sharding

Activation = Literal["gelu", "gelu_erf", "relu", "relu2", "silu", "tanh"]
MLPKind = Literal["swiglu", "geglu", "geglu_erf", "swiglu_clamped", Activation]
NormKind = Literal["rms", "layer", "rms_offset", "layer_offset", "layer_plain"]
OptionalNorm = Literal["none", NormKind]


def normal(key: Key[Array, ""], shape: tuple[int, ...], fan_in: int) -> Float[Array, "..."]:
    """A float32 weight drawn from N(0, 1/fan_in), which keeps the variance of its input."""
    return jax.random.normal(key, shape, jnp.float32) / math.sqrt(fan_in)


class Linear(eqx.Module):
    """`x @ weight + bias`, with the logical axes that its place in a model gives it."""

    weight: Float[Array, "in out"] | Operand
    bias: Float[Array, "out"] | None
    axes: tuple[tuple[str, str], ...] = eqx.field(static=True)

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        in_axis: str,
        out_axis: str,
        bias: bool = True,
        key: Key[Array, ""],
    ):
        self.weight = normal(key, (in_size, out_size), in_size)
        self.bias = jnp.zeros(out_size) if bias else None
        self.axes = (("in", in_axis), ("out", out_axis))

    def __call__(self, x: Float[Array, "... in"]) -> Float[Array, "... out"]:
        """Map [..., in] to [..., out]."""
        return add_bias(matmul(x, self.weight), self.bias)


def add_bias(x: Float[Array, "..."], bias: Float[Array, "..."] | None) -> Float[Array, "..."]:
    """Add a bias of the trailing shape of x; None adds nothing."""
    if bias is None:
        return x
    # In fp32, or its gradient would add up all positions in the compute dtype.
    bias32 = bias.astype(jnp.float32).reshape((1,) * (x.ndim - bias.ndim) + bias.shape)
    return (x.astype(jnp.float32) + bias32).astype(x.dtype)


def times(x: Float[Array, "..."], factor: float) -> Float[Array, "..."]:
    """An array times a number, in its dtype."""
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


class Readout(eqx.Module):
    """An output head as it is used: gathered, in the compute dtype, the embedding's where tied."""

    weight: Float[Array, "embed out"] | Operand
    bias: Float[Array, "out"] | None = None
    axes: tuple[tuple[str, str], ...] = eqx.field(static=True, default=(("out", "vocab"),))
    soft_cap: float | None = eqx.field(static=True, default=None)

    def __call__(self, x_BTE: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq out"]:
        """The outputs in fp32; with a soft cap, its multiple of tanh (Gemma 2)."""
        outputs = add_bias(matmul(x_BTE, self.weight, dtype=jnp.float32), self.bias)
        outputs = constrain(outputs, "batch", "inner_seq", dict(self.axes)["out"])
        return (
            outputs if self.soft_cap is None else self.soft_cap * jnp.tanh(outputs / self.soft_cap)
        )


class Embedding(eqx.Module):
    """A table of vectors, float32[rows, embed]; one of tokens can also serve as the output head."""

    weight: Float[Array, "rows embed"] | Operand
    axes: tuple[tuple[str, str], ...] = eqx.field(static=True)

    def __init__(self, num_rows: int, size: int, *, axis: str = "vocab", key: Key[Array, ""]):
        self.weight = 0.02 * jax.random.normal(key, (num_rows, size), jnp.float32)
        self.axes = (("rows", axis),)

    def __call__(self, ids: Int[Array, "..."]) -> Float[Array, "... embed"]:
        """Look up [...] ids as [..., embed]; an id beyond the last row takes that row.

        The table is cast here, and not gathered where devices exchange vectors instead.
        """
        axes, table = (dict(self.axes)["rows"], "embed"), cast_for_use(self).weight
        if is_sharding() and not isinstance(table, Operand):
            parts = TableParts.of(axes)
            if parts.are_exchanged((*ids.shape, table.shape[1])):
                return _look_up(reshard(table, parts.table, parts.stored), ids, parts)
        return look_up(unshard(self).weight, ids, axes)


def look_up(
    weight: Float[Array, "rows embed"] | Operand,
    ids: Int[Array, "..."],
    axes: tuple[str | None, str | None] = (None, None),
) -> Float[Array, "... embed"]:
    """The rows of a table with these ids; an id beyond the last row takes that row.

    `axes` names the logical axes of the table, along which a mesh may split it.
    """
    if isinstance(weight, Operand):
        return weight.rows(ids)
    return _look_up(weight, ids, TableParts.of(axes) if is_sharding() else None)


# The gradient is written out to add up the rows of a frequent id in fp32, without converting the
# table in the forward pass.
@functools.partial(custom_vjp, nondiff_argnums=(2,))
def _look_up(weight: Array, ids: Array, parts: TableParts | None) -> Array:
    if parts is None or not parts.are_exchanged((*ids.shape, weight.shape[1])):
        return weight.at[ids].get(mode="clip")
    return parts.look_up(weight, ids)


def _look_up_forward(
    weight: Array, ids: Array, parts: TableParts | None, *, needed: tuple[bool, bool]
) -> tuple[Array, tuple[Array, Array] | None]:
    return _look_up(weight, ids, parts), (weight, ids) if needed[0] else None


def _look_up_backward(
    parts: TableParts | None, residuals: tuple[Array, Array] | None, g: Array
) -> tuple[Array | None, None]:
    if residuals is None:
        return None, None
    weight, ids = residuals

    def add_up(ids: Array, g: Array) -> Array:
        rows = jnp.zeros(weight.shape, jnp.float32)
        return rows.at[ids].add(g.astype(jnp.float32), mode="clip").astype(weight.dtype)

    if parts is None or not parts.divide(g.shape):
        return add_up(ids, g), None
    return parts.add_up(add_up, ids, g), None


_look_up.defvjp(_look_up_forward, _look_up_backward, by_need=True)


class RMSNorm(eqx.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019) over the last axis.

    It multiplies by `scale + offset`; Gemma's norms have an offset of one.
    """

    scale: Float[Array, "features"]
    eps: float = eqx.field(static=True)
    offset: float = eqx.field(static=True)
    axes: tuple[tuple[str, str], ...] = eqx.field(static=True)

    def __init__(self, size: int, *, axis: str = "embed", eps: float = 1e-6, offset: float = 0.0):
        self.scale = jnp.full(size, 1 - offset)
        self.eps = eps
        self.offset = offset
        self.axes = (("features", axis),)

    def __call__(self, x: Float[Array, "... features"]) -> Float[Array, "... features"]:
        """Normalise x, reducing in fp32."""
        scale = self.scale
        if self.offset:
            scale = scale.astype(jnp.float32) + self.offset
        return _normalise(x, scale, self.eps, False)


class LayerNorm(eqx.Module):
    """Layer norm (Ba et al. 2016) over the last axis; scale and bias are optional.

    It multiplies by `scale + offset`; Nemotron's norms have an offset of one.
    """

    scale: Float[Array, "features"] | None
    bias: Float[Array, "features"] | None
    eps: float = eqx.field(static=True)
    offset: float = eqx.field(static=True)
    axes: tuple[tuple[str, str], ...] = eqx.field(static=True)

    def __init__(
        self,
        size: int,
        *,
        axis: str = "embed",
        eps: float = 1e-5,
        bias: bool = True,
        scale: bool = True,
        offset: float = 0.0,
    ):
        self.scale = jnp.full(size, 1 - offset) if scale else None
        self.bias = jnp.zeros(size) if bias else None
        self.eps = eps
        self.offset = offset
        self.axes = (("features", axis),)

    def __call__(self, x: Float[Array, "... features"]) -> Float[Array, "... features"]:
        """Normalise x, reducing in fp32."""
        scale = jnp.ones(x.shape[-1]) if self.scale is None else self.scale
        if self.offset:
            scale = scale.astype(jnp.float32) + self.offset
        return add_bias(_normalise(x, scale, self.eps, True), self.bias)


Norm = RMSNorm | LayerNorm


def make_norm(
    kind: OptionalNorm,
    size: int,
    *,
    axis: str = "embed",
    eps: float | None = None,
    bias: bool = True,
) -> Norm | None:
    """The norm of that kind over `size` features, or None; the bias is LayerNorm's.

    `eps` defaults to the kind's own.
    """
    options: dict[str, Any] = {"axis": axis} if eps is None else {"axis": axis, "eps": eps}
    match kind:
        case "none":
            return None
        case "rms":
            return RMSNorm(size, **options)
        case "layer":
            return LayerNorm(size, bias=bias, **options)
        case "rms_offset":
            return RMSNorm(size, offset=1.0, **options)
        case "layer_offset":
            return LayerNorm(size, bias=bias, offset=1.0, **options)
        case "layer_plain":
            return LayerNorm(size, bias=False, scale=False, **options)


def _last_axis(vector: Array, like: Array) -> Array:
    return vector.reshape((1,) * (like.ndim - 1) + (-1,))


# The gradient is written out because autodiff keeps three copies of x where one is enough.
@functools.partial(custom_vjp, nondiff_argnums=(2, 3))
def _normalise(x: Array, scale: Array, eps: float, centre: bool) -> Array:
    return _normalise_forward(x, scale, eps, centre, needed=(True, False))[0]


def _to_fp32(x: Array, centre: bool) -> Array:
    x32 = x.astype(jnp.float32)
    return x32 - x32.mean(-1, keepdims=True) if centre else x32


def _normalise_forward(
    x: Array, scale: Array, eps: float, centre: bool, *, needed: tuple[bool, ...]
) -> tuple[Array, tuple]:
    x32 = _to_fp32(x, centre)
    inverse = jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + eps)
    y = x32 * inverse * _last_axis(scale.astype(jnp.float32), x)
    return y.astype(x.dtype), (x, inverse, scale, Static(needed[1]))


def _normalise_backward(
    eps: float, centre: bool, residuals: tuple, g: Array
) -> tuple[Array, Array | None]:
    x, inverse, scale, scale_needed = residuals
    g32, normed = g.astype(jnp.float32), _to_fp32(x, centre) * inverse
    scaled = g32 * _last_axis(scale.astype(jnp.float32), x)
    dx = inverse * (_to_fp32(scaled, centre) - normed * (scaled * normed).mean(-1, keepdims=True))
    if not scale_needed.value:
        return dx.astype(x.dtype), None
    dscale = (g32 * normed).sum(range(x.ndim - 1))
    return dx.astype(x.dtype), dscale.astype(scale.dtype)


_normalise.defvjp(_normalise_forward, _normalise_backward, by_need=True)


@custom_vjp
def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """GELU by the tanh approximation (Hendrycks & Gimpel 2016), in fp32 inside; keeps x alone."""
    return _gelu_forward(x)[0]


_GELU_SCALE, _GELU_CUBIC = math.sqrt(2 / math.pi), 0.044715


def _gelu_forward(x: Array) -> tuple[Array, Array]:
    x32 = x.astype(jnp.float32)
    tanh = jnp.tanh(_GELU_SCALE * (x32 + _GELU_CUBIC * x32 * x32 * x32))
    return (0.5 * x32 * (1 + tanh)).astype(x.dtype), x


def _gelu_backward(x: Array, g: Array) -> tuple[Array]:
    x32 = x.astype(jnp.float32)
    tanh = jnp.tanh(_GELU_SCALE * (x32 + _GELU_CUBIC * x32 * x32 * x32))
    slope = _GELU_SCALE * (1 + 3 * _GELU_CUBIC * x32 * x32)
    derivative = 0.5 * (1 + tanh) + 0.5 * x32 * (1 - tanh * tanh) * slope
    return ((g.astype(jnp.float32) * derivative).astype(x.dtype),)


gelu.defvjp(_gelu_forward, _gelu_backward)


def gelu_erf(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """GELU as it is defined, by the error function, in fp32 inside."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(x.dtype)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_erf": gelu_erf,
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),  # So et al. 2021
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}
# Gated MLPs (Shazeer 2020), and the activation of each one's gate.
GATED_MLPS: dict[str, Activation] = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_erf": "gelu_erf",
    "swiglu_clamped": "silu",
}
_CLAMP, _STEEPNESS = 7.0, 1.702


def gated(kind: str, gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
    """The hidden features of a gated MLP, from those of its gate and `up`.

    A clamped one (gpt-oss, 2025) bounds both, takes the sigmoid of a multiple of the gate, and adds
    one to `up`; in fp32 inside.
    """
    if kind != "swiglu_clamped":
        return ACTIVATIONS[GATED_MLPS[kind]](gate) * up
    gate32 = jnp.minimum(gate.astype(jnp.float32), _CLAMP)
    up32 = jnp.clip(up.astype(jnp.float32), -_CLAMP, _CLAMP)
    return ((up32 + 1) * gate32 * jax.nn.sigmoid(_STEEPNESS * gate32)).astype(up.dtype)


def dropout(x: Float[Array, "..."], rate: float, key: Key[Array, ""] | None) -> Float[Array, "..."]:
    """Inverted dropout (Srivastava et al. 2014); without a key, or at rate 0, the identity."""
    if key is None or rate == 0.0:
        return x
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x * jnp.asarray(1 / (1 - rate), x.dtype), jnp.zeros_like(x))
