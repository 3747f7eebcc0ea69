"""Matrices of few bits: integer codes and scales in memory, dequantised where they are used.

A block of a matrix has one scale: in `int8` an output of a product (for all of its inputs), in
`int4` and `nf4` a group of inputs of one output. A value is `(code - zero) * scale`, of `nf4` the
code's entry in a table times the scale, computed in fp32. Two codes of 4 bits share a byte: in each
group, those of the first half are the low bits and those of the second half the high ones, so that
a group stays whole where a mesh cuts the matrix, and so that unpacking moves no neighbours apart.
Files of other programs have `int8` in groups too, another table (`fp4`), and inputs in an order of
their own.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int, Integer, Num

from zoo.nn.derivatives import custom_vjp
from zoo.nn.parameters import Operand
from zoo.nn.precision import platform, product
from zoo.sharding.foreign import ANNOTATION
from zoo.sharding.kinds import is_stack, matrix_axes

Model = TypeVar("Model")
Kind = Literal["int8", "int4", "nf4"]
KINDS: tuple[Kind, ...] = get_args(Kind)
StoredKind = Kind | Literal["fp4"]  # and what is read alone
GROUP_SIZE = 64

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
_FEW_ROWS = 8  # of decoding: other forms of a product and of a lookup are better for these


class Quantized(Operand):
    """A matrix of 8 or 4 bits per value; stacked matrices have stacked codes and scales.

    It is never trained: gradients pass through its products to their other operand alone.
    """

    codes: Integer[Array, "*matrix"]
    """int8, or uint8 that holds two codes of 4 bits along the axis `packed`."""
    scales: Float[Array, "*blocks"]
    """Of the matrix's rank: each is for a block of shape / scales.shape values."""
    zeros: Num[Array, "*blocks"] | None
    """The code of the value zero; None for 0 in int8, 8 in int4, and always with a table."""
    kind: StoredKind = eqx.field(static=True)
    packed: int | None = eqx.field(static=True)
    """The axis along which two codes share a byte, counted from the last: -1 and below."""
    dtype_name: str = eqx.field(static=True)
    axes: tuple[tuple[str, str], ...] = eqx.field(static=True)
    named_by: str = eqx.field(static=True, default=ANNOTATION)
    is_transposed: bool = eqx.field(static=True, default=False)
    """The matrix is the transpose of what codes and scales say: a table, kept as the head that it
    may be."""
    order: Int[Array, "*order"] | None = None
    """Which of the model's inputs each of the codes' is, counted over all axes of inputs."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        shape = _matrix_shape(self.codes.shape, self.packed)
        return (*shape[:-2], shape[-1], shape[-2]) if self.is_transposed else shape

    @property
    def dtype(self) -> Any:
        """The dtype of the matrix's values."""
        return jnp.dtype(self.dtype_name)

    def value(self) -> Float[Array, "..."]:
        """The whole matrix, dequantised."""
        value = _dequantize(self.codes, self.scales, self.zeros, self._form).astype(self.dtype)
        if self.order is not None:
            rows = value.reshape(*self.order.shape, -1)
            places = jnp.argsort(self.order)[..., None]
            value = jnp.take_along_axis(rows, places, self.order.ndim - 1).reshape(value.shape)
        return value.swapaxes(-1, -2) if self.is_transposed else value

    def times(
        self, x: Float[Array, "..."], *, contract: int = 1, dtype: DTypeLike | None = None
    ) -> Float[Array, "..."]:
        """The product `matmul(x, self)`, dequantised as it is read."""
        shape = self.shape
        batch, out = x.shape[: x.ndim - contract], shape[contract:]
        rows = x.reshape(
            batch[0] if batch else 1, math.prod(batch[1:]), math.prod(shape[:contract])
        )
        if self.order is not None:
            rows = rows.at[:, :, self.order].get(unique_indices=True, mode="promise_in_bounds")
        result = jnp.dtype(x.dtype if dtype is None else dtype)
        y = _times(rows, self.codes, self.scales, self.zeros, self._form, contract, result)
        return y.reshape(*batch, *out)

    def rows(self, ids: Int[Array, "..."]) -> Float[Array, "... embed"]:
        """The rows of these ids, which alone are dequantised; one beyond the last takes that."""
        if not self.is_transposed:
            return self.value().at[ids].get(mode="clip")

        def look_up(x: Array) -> Array:
            is_shared = x.shape[-1] != self.shape[0]
            return x if is_shared else x.at[:, ids.reshape(-1)].get(mode="clip")

        codes, scales = look_up(self.codes), look_up(self.scales)
        zeros = None if self.zeros is None else look_up(self.zeros)
        found = _dequantize(codes, scales, zeros, self._form).astype(self.dtype)
        return found.T.reshape(*ids.shape, -1)

    def transposed(self) -> "Quantized":
        """The transposed matrix, of two axes, in the same codes."""
        return dataclasses.replace(self, is_transposed=not self.is_transposed)

    def cast(self, dtype: DTypeLike) -> "Quantized":
        """The matrix with values of `dtype`; codes and scales stay as they are."""
        return dataclasses.replace(self, dtype_name=str(jnp.dtype(dtype)))

    @property
    def _form(self) -> "_Form":
        return self.kind, self.packed, self.is_transposed


_Form = tuple[StoredKind, int | None, bool]


def is_quantized(x: Any) -> bool:
    """Whether a node of a model is a quantised matrix."""
    return isinstance(x, Quantized)


def dequantize(model: Model) -> Model:
    """The model with plain matrices in the place of quantised ones, in their dtypes."""
    return jax.tree.map(lambda x: x.value() if is_quantized(x) else x, model, is_leaf=is_quantized)


def quantize(
    array: Float[Array, "..."],
    names: Sequence[str | None],
    kind: Kind,
    group_size: int = GROUP_SIZE,
    *,
    named_by: str = ANNOTATION,
) -> Quantized:
    """The matrix (or a stack of them) of the logical axes `names`, rounded to codes of `kind`.

    Groups of 4 bits are of at most `group_size` values: the largest even divisor of the last input
    axis, of a table of tokens the embedding's; where that is below 8, int8 takes the place of 4
    bits, as the scales would need as much.

    Raises:
        ValueError: a group size below 8.
    """
    if group_size < 8:
        raise ValueError(f"group_size={group_size}: must be at least 8")
    inputs, _ = matrix_axes(names)
    is_table = names[inputs[0]] == "vocab"
    if is_table:
        array, names = array.swapaxes(-1, -2), (*names[:-2], names[-1], names[-2])
    axis = inputs[-1]
    size = array.shape[axis]
    group = max((d for d in range(2, min(group_size, size) + 1, 2) if size % d == 0), default=1)
    kind = "int8" if group < 8 else kind
    blocks = list(array.shape)
    if kind == "int8":
        for each in inputs:
            blocks[each] = 1
    else:
        blocks[axis] = size // group

    codes, scales = _rounded(array, tuple(blocks), kind)
    packed = None if kind == "int8" else axis - array.ndim
    if packed is not None:
        codes = pack(codes, packed, group)
    return Quantized(
        codes,
        scales,
        None,
        kind=kind,
        packed=packed,
        dtype_name=str(array.dtype),
        axes=axes_of(names, blocks),
        named_by=named_by,
        is_transposed=is_table,
    )


def axes_of(names: Sequence[str | None], blocks: Sequence[int]) -> tuple[tuple[str, str], ...]:
    """The field `axes` of a matrix of these logical axes, and of so many blocks along each."""
    # The axes of stacked layers are named from outside. An axis of one block is cut over no mesh.
    known = [(name, n) for name, n in zip(names, blocks, strict=True) if name is not None]
    of_blocks = [f"#{name}" if n == 1 else name for name, n in known]
    of_order = [name for name in names if name is not None and is_stack(name)]
    return (
        ("*matrix", " ".join(name for name, _ in known)),
        ("*blocks", " ".join(of_blocks)),
        ("*order", " ".join([*of_order, "element"])),
    )


def _rounded(array: Array, blocks: tuple[int, ...], kind: Kind) -> tuple[Array, Array]:
    """The codes of a matrix, not packed, and the scales of its blocks."""
    x, shape, _ = _in_blocks(array.astype(jnp.float32), blocks)
    inner = tuple(i for i, (n, s) in enumerate(zip(x.shape, shape, strict=True)) if s != n)
    largest = jnp.abs(x).max(inner, keepdims=True)
    top = {"int8": 127.0, "int4": 7.0, "nf4": 1.0}[kind]
    # bf16, whose range is that of fp32; rounded first, so that codes are those of what is stored.
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

    They are an array of JAX's or of numpy's, and so is what is returned.
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


def _matrix_shape(shape: tuple[int, ...], packed: int | None) -> tuple[int, ...]:
    if packed is None:
        return shape
    axis = len(shape) + packed
    return (*shape[:axis], 2 * shape[axis], *shape[axis + 1 :])


def _dequantize(codes: Array, scales: Array, zeros: Array | None, form: _Form) -> Array:
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


# A custom gradient, or the backward pass would keep the dequantised matrix. It has none for codes.
@functools.partial(custom_vjp, nondiff_argnums=(4, 5, 6))
def _times(
    x: Float[Array, "b m k"],
    codes: Array,
    scales: Array,
    zeros: Array | None,
    form: _Form,
    contract: int,
    dtype: Any,
) -> Float[Array, "b m n"]:
    return _times_forward(x, codes, scales, zeros, form, contract, dtype)[0]


def _times_forward(
    x: Array,
    codes: Array,
    scales: Array,
    zeros: Array | None,
    form: _Form,
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
        low, high = (_dequantize(c, scales, zeros, plain) for c in _halves(codes))
        y = _product(inputs[0], low, False) + _product(inputs[1], high, False)
    else:
        y = _product(rows, _dequantize(codes, scales, zeros, form), is_transposed, dtype)
    return y.astype(dtype).reshape(b, m, -1), (codes, scales, zeros, jnp.zeros(0, x.dtype))


# The two codes of a byte are of two inputs of one output: two products, of half of the inputs each,
# bring about no array of all codes one behind the other, which XLA for TPU keeps as integers.
def _shares_inputs(codes: Array, form: _Form, contract: int) -> bool:
    _, packed, is_transposed = form
    return packed is not None and not is_transposed and packed == contract - 1 - codes.ndim


def _halves(codes: Array) -> tuple[Array, Array]:
    return codes & 15, codes >> 4


def _num_groups(codes: Array, scales: Array, form: _Form) -> int:
    """The number of groups of inputs of one output."""
    axis = codes.ndim + (form[1] or 0)
    return math.prod(codes.shape[:axis]) * scales.shape[axis]


def _input_halves(x: Array, codes: Array, scales: Array, form: _Form) -> tuple[Array, Array]:
    """The inputs that meet the low bits, and those that meet the high ones."""
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


def _times_backward(
    form: _Form, contract: int, dtype: Any, residuals: tuple, g: Array
) -> tuple[Array, None, None, None]:
    codes, scales, zeros, like_x = residuals
    b, m, n = g.shape
    g = g.astype(like_x.dtype).reshape(b * m, n)
    if _shares_inputs(codes, form, contract):
        groups, plain = _num_groups(codes, scales, form), (form[0], None, False)
        halves = (_dequantize(c, scales, zeros, plain).reshape(-1, n) for c in _halves(codes))
        dxs = [_product(g, w, True, like_x.dtype).reshape(b * m, groups, -1) for w in halves]
        return jnp.stack(dxs, 2).reshape(b, m, -1), None, None, None
    w = _dequantize(codes, scales, zeros, form)
    w = w if form[-1] else w.reshape(-1, n)
    dx = _product(g, w, not form[-1], like_x.dtype)
    return dx.reshape(b, m, -1), None, None, None


_times.defvjp(_times_forward, _times_backward)
