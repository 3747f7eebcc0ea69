"""Products with matrices of few bits, in the form that XLA reads the fewest bytes for."""

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float

from zoo.nn.codes import Form, dequantized
from zoo.nn.derivatives import custom_vjp
from zoo.nn.precision import platform, product

_FEW_ROWS = 8  # of decoding: other forms of a product and of a lookup are better for these


# A custom gradient, or the backward pass would keep the dequantised matrix. It has none for codes.
@functools.partial(custom_vjp, nondiff_argnums=(4, 5, 6))
def times(
    x: Float[Array, "b m k"],
    codes: Array,
    scales: Array,
    zeros: Array | None,
    form: Form,
    contract: int,
    dtype: Any,
) -> Float[Array, "b m n"]:
    """Rows times a matrix of these codes, whose first `contract` axes are its inputs."""
    return _forward(x, codes, scales, zeros, form, contract, dtype)[0]


def _forward(
    x: Array,
    codes: Array,
    scales: Array,
    zeros: Array | None,
    form: Form,
    contract: int,
    dtype: Any,
) -> tuple[Array, tuple]:
    b, m, k = x.shape
    rows, on_cpu = x.reshape(b * m, k), platform() == "cpu"
    kind, _, is_transposed = form
    summed = scales.shape[1:] if is_transposed else scales.shape[:contract]
    if kind == "int8" and zeros is None and math.prod(summed) == 1:
        # One scale per output: the product is of the codes themselves, which bf16 holds exactly.
        few = on_cpu and b * m <= _FEW_ROWS and not is_transposed
        y = (_sum_of_products if few else _product)(rows, codes, is_transposed)
        y = y * scales.reshape(1, -1).astype(jnp.float32)
    elif (
        b * m == 1
        and platform() in ("cpu", "tpu")
        and form == ("int4", contract - 1 - codes.ndim, False)
    ):
        y = _row_product(rows, codes, scales, zeros, contract)
    elif _shares_inputs(codes, form, contract):
        inputs, plain = _input_halves(rows, codes, scales, form), (kind, None, False)
        low, high = (dequantized(c, scales, zeros, plain) for c in _halves(codes))
        y = _product(inputs[0], low, False) + _product(inputs[1], high, False)
    else:
        y = _product(rows, dequantized(codes, scales, zeros, form), is_transposed, dtype)
    return y.astype(dtype).reshape(b, m, -1), (codes, scales, zeros, jnp.zeros(0, x.dtype))


# The two codes of a byte are of two inputs of one output: two products, of half of the inputs each,
# bring about no array of all codes one behind the other, which XLA for TPU keeps as integers.
def _shares_inputs(codes: Array, form: Form, contract: int) -> bool:
    _, packed, is_transposed = form
    return packed is not None and not is_transposed and packed == contract - 1 - codes.ndim


def _halves(codes: Array) -> tuple[Array, Array]:
    return codes & 15, codes >> 4


def _num_groups(codes: Array, scales: Array, form: Form) -> int:
    """The number of groups of inputs of one output."""
    axis = codes.ndim + (form[1] or 0)
    return math.prod(codes.shape[:axis]) * scales.shape[axis]


def _input_halves(x: Array, codes: Array, scales: Array, form: Form) -> tuple[Array, Array]:
    """The inputs that meet the low bits, and the inputs that meet the high bits."""
    rows = x.shape[0]
    both = x.reshape(rows, _num_groups(codes, scales, form), 2, -1)
    return both[:, :, 0].reshape(rows, -1), both[:, :, 1].reshape(rows, -1)


def _product(x: Array, w: Array, is_transposed: bool, dtype: DTypeLike = jnp.float32) -> Array:
    """Rows times a matrix, [k, n], or [n, k] if transposed."""
    w = w.astype(x.dtype)
    if is_transposed:
        return product(x, w, ((1,), (1,)), dtype)
    return product(x, w.reshape(x.shape[1], -1), ((1,), (0,)), dtype)


# XLA for CPU writes the operands of a dot to memory before it. It does fuse a sum of products of
# floats into one pass over the codes, as these two have it, unless a part of it is also another
# product's: hence the barriers.
def _sum_of_products(x: Array, w: Array, _: bool) -> Array:
    """A few rows times a matrix of integers."""
    x, w = lax.optimization_barrier((x, w))
    rows = x.shape[0]
    x = jnp.pad(x, ((0, max(0, 2 - rows)), (0, 0)))  # one row is slow, two are not
    w = w.reshape(1, x.shape[1], -1).astype(jnp.float32)
    return (x.astype(jnp.float32)[:, :, None] * w).sum(1)[:rows]


def _row_product(
    x: Array, codes: Array, scales: Array, zeros: Array | None, contract: int
) -> Array:
    """One row times a matrix of int4, whose bits are told apart in floats."""
    groups = math.prod(scales.shape[:contract])
    outputs = math.prod(codes.shape[contract:])
    constants = jnp.float32(1 / 16), jnp.float32(16)
    codes = codes.reshape(groups, -1, outputs)  # later XLA for TPU writes them in fp32 before
    x, codes, (sixteenth, sixteen) = lax.optimization_barrier((x, codes, constants))
    both = codes.astype(jnp.float32)
    high = jnp.floor(both * sixteenth)
    low = both - high * sixteen
    x = x.astype(jnp.float32).reshape(groups, 2, -1, 1)
    zero = 8 if zeros is None else zeros.reshape(groups, outputs).astype(jnp.float32)
    sums = (low * x[:, 0] + high * x[:, 1]).sum(1) - zero * x.sum((1, 2))
    return (sums * scales.reshape(groups, outputs).astype(jnp.float32)).sum(0, keepdims=True)


def _backward(
    form: Form, contract: int, dtype: Any, residuals: tuple, g: Array
) -> tuple[Array, None, None, None]:
    codes, scales, zeros, like_x = residuals
    b, m, n = g.shape
    g = g.astype(like_x.dtype).reshape(b * m, n)
    if _shares_inputs(codes, form, contract):
        groups, plain = _num_groups(codes, scales, form), (form[0], None, False)
        halves = (dequantized(c, scales, zeros, plain).reshape(-1, n) for c in _halves(codes))
        dxs = [_product(g, w, True, like_x.dtype).reshape(b * m, groups, -1) for w in halves]
        return jnp.stack(dxs, 2).reshape(b, m, -1), None, None, None
    w = dequantized(codes, scales, zeros, form)
    w = w if form[-1] else w.reshape(-1, n)
    dx = _product(g, w, not form[-1], like_x.dtype)
    return dx.reshape(b, m, -1), None, None, None


times.defvjp(_forward, _backward)
