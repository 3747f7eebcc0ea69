"""Codes of few bits: their kinds, how they are rounded and packed, and the values that they have.

Two codes of 4 bits share a byte: in each group, those of the first half are the low bits and those
of the second half the high ones, so that a group stays whole where a mesh cuts the matrix, and so
that unpacking moves no neighbours apart.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Integer

from zoo.nn.products import Kind

StoredKind = Kind | Literal["fp4"]  # and a kind that is only read

# The quantiles of N(0, 1) that QLoRA (Dettmers et al. 2023, appendix E) gives, as bitsandbytes has
# them: zero is one of them, and so are -1 and 1.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# A sign, two bits of an exponent and one of a fraction, as bitsandbytes has them.
FP4 = tuple(sign * x / 12 for sign in (1, -1) for x in (0, 0.0625, 8, 12, 4, 6, 2, 3))
TABLES = {"nf4": NF4, "fp4": FP4}

Form = tuple[StoredKind, int | None, bool]
"""The kind, the axis (from the last) that codes are packed along, and whether it is transposed."""


def rounded(array: Array, blocks: tuple[int, ...], kind: Kind) -> tuple[Array, Array]:
    """The codes of a matrix, not packed, and the scales of its blocks."""
    x, shape, _ = _in_blocks(array.astype(jnp.float32), blocks)
    inner = tuple(i for i, (n, s) in enumerate(zip(x.shape, shape, strict=True)) if s != n)
    largest = jnp.abs(x).max(inner, keepdims=True)
    top = {"int8": 127.0, "int4": 7.0, "nf4": 1.0}[kind]
    # bf16 has the range of fp32. Rounded first, so that codes belong to the stored scales.
    scales = (largest / top).astype(jnp.bfloat16)
    scaled = x / jnp.where(scales == 0, 1, scales).astype(jnp.float32)
    if kind == "nf4":
        middles = [(a + b) / 2 for a, b in itertools.pairwise(NF4)]
        lowest = jnp.zeros(scaled.shape, jnp.uint8)
        codes = sum(((scaled > middle).astype(jnp.uint8) for middle in middles), lowest)
    else:
        codes = jnp.clip(jnp.round(scaled), -top, top)
        codes = codes.astype(jnp.int8) if kind == "int8" else (codes + 8).astype(jnp.uint8)
    return codes.reshape(array.shape), scales.reshape(blocks)


def _in_blocks(x: Array, blocks: Sequence[int]) -> tuple[Array, tuple[int, ...], tuple[int, ...]]:
    """An array with each axis of several blocks cut in two, and the scales' shape beside it."""
    cut: list[int] = []
    beside: list[int] = []
    for size, count in zip(x.shape, blocks, strict=True):
        whole = count in (1, size)
        cut += [size] if whole else [count, size // count]
        beside += [count] if whole else [count, 1]
    return x.reshape(cut), tuple(beside), x.shape


def pack(codes: Any, axis: int, group: int) -> Any:
    """Two codes of 4 bits per byte along an axis, in groups: the first half of each is low.

    The codes are an array of JAX or numpy, and so is the result.
    """
    axis = axis % codes.ndim
    before, size, after = codes.shape[:axis], codes.shape[axis], codes.shape[axis + 1 :]
    halves = codes.astype(jnp.uint8).reshape(*before, size // group, 2, group // 2, *after)
    low, high = (halves[(slice(None),) * (axis + 1) + (i,)] for i in (0, 1))
    return (low | (high << 4)).reshape(*before, size // 2, *after)


def unpack(codes: Integer[Array, "..."], axis: int, group: int) -> Integer[Array, "..."]:
    """The codes of 4 bits that `pack` packed, as int32."""
    axis = axis % codes.ndim
    before, half, after = codes.shape[:axis], codes.shape[axis], codes.shape[axis + 1 :]
    parts = (*before, 2 * half // group, 2, group // 2, *after)
    grouped = codes.astype(jnp.int32).reshape(*parts[: axis + 1], 1, *parts[axis + 2 :])
    shift = 4 * lax.broadcasted_iota(jnp.int32, parts, axis + 1)
    return ((jnp.broadcast_to(grouped, parts) >> shift) & 15).reshape(*before, 2 * half, *after)


def matrix_shape(shape: tuple[int, ...], packed: int | None) -> tuple[int, ...]:
    """The shape of the matrix whose codes, packed along an axis, have this shape."""
    if packed is None:
        return shape
    axis = len(shape) + packed
    return (*shape[:axis], 2 * shape[axis], *shape[axis + 1 :])


def dequantized(codes: Array, scales: Array, zeros: Array | None, form: Form) -> Array:
    """The values of codes in fp32, whatever their leading axes."""
    kind, packed, _ = form
    if packed is not None:
        codes = unpack(codes, packed, 2 * codes.shape[packed] // scales.shape[packed])
    x, beside, shape = _in_blocks(codes, scales.shape)
    if kind in TABLES:
        x = _look_up(x, TABLES[kind])
    else:
        x = x.astype(jnp.float32)
        if zeros is not None:
            x = x - zeros.reshape(beside).astype(jnp.float32)
        elif kind == "int4":
            x = x - 8
    return (x * scales.reshape(beside).astype(jnp.float32)).reshape(shape)


def _look_up(codes: Array, table: Sequence[float]) -> Array:
    """The entries of a table, chosen bit by bit: a gather would be an array in memory."""
    values: list[Any] = [jnp.float32(x) for x in table]
    for bit in range(4):
        is_set = (codes >> bit) & 1 == 1
        values = [jnp.where(is_set, b, a) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]
