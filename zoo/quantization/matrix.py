"""Matrices of few bits: integer codes and scales in memory, dequantised as products read them.

A block of a matrix has one scale: in `int8` an output of a product (for all of its inputs), in
`int4` and `nf4` a group of inputs of one output. A value is `(code - zero) * scale`, or for `nf4`
the code's entry in a table times the scale, computed in fp32. Files of other programs have `int8`
in groups too, another table (`fp4`), and inputs in an order of their own.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int, Integer, Num

from zoo.nn.products import Kind, Quantized, multiply, platform, product
from zoo.quantization.codes import Form, StoredKind, dequantized, matrix_shape, pack, rounded
from zoo.sharding.axes import ANNOTATION
from zoo.sharding.rules import is_stack, matrix_axes

GROUP_SIZE = 64
_FEW_ROWS = 8  # of decoding: other forms of a product and of a lookup are better for these


class QuantizedMatrix(Quantized):
    """A matrix of 8 or 4 bits per value; stacked matrices have stacked codes and scales.

    It is never trained: gradients pass through its products to their other operand alone.
    """

    codes: Integer[Array, "*matrix"]
    """int8, or uint8 that holds two codes of 4 bits along the axis `packed`."""
    scales: Float[Array, "*blocks"]
    """Scales in the matrix's rank, each for a block of shape / scales.shape values."""
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
    """For each input of the codes, its place among the model's, counted over all axes of inputs."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        shape = matrix_shape(self.codes.shape, self.packed)
        return (*shape[:-2], shape[-1], shape[-2]) if self.is_transposed else shape

    @property
    def dtype(self) -> Any:
        """The dtype of the matrix's values."""
        return jnp.dtype(self.dtype_name)

    def value(self) -> Float[Array, "..."]:
        """The whole matrix, dequantised."""
        value = dequantized(self.codes, self.scales, self.zeros, self._form).astype(self.dtype)
        if self.order is not None:
            rows = value.reshape(*self.order.shape, -1)
            places = jnp.argsort(self.order)[..., None]
            value = jnp.take_along_axis(rows, places, self.order.ndim - 1).reshape(value.shape)
        return value.swapaxes(-1, -2) if self.is_transposed else value

    def times(
        self, x: Float[Array, "..."], *, contract: int = 1, dtype: DTypeLike | None = None
    ) -> Float[Array, "..."]:
        """The product `matmul(x, self)`, dequantised as it is read."""
        if self.order is not None:
            flat = x.reshape(*x.shape[: x.ndim - contract], -1)
            found = flat.at[..., self.order].get(unique_indices=True, mode="promise_in_bounds")
            x = found.reshape(x.shape)
        return multiply(x, None, self, contract=contract, dtype=dtype)

    def product(
        self, rows: Float[Array, "rows k"], contract: int, dtype: DTypeLike
    ) -> Float[Array, "rows n"]:
        """Rows times the matrix, in the form that XLA reads the fewest bytes for."""
        codes, scales, zeros = self.codes, self.scales, self.zeros
        on_cpu, transposed = platform() == "cpu", self.is_transposed
        summed = scales.shape[1:] if transposed else scales.shape[:contract]
        if self.kind == "int8" and zeros is None and math.prod(summed) == 1:
            # One scale per output: the product is of the codes themselves, which bf16 has exactly.
            few = on_cpu and len(rows) <= _FEW_ROWS and not transposed
            y = (_sum_of_products if few else _product)(rows, codes, transposed)
            y = y * scales.reshape(1, -1).astype(jnp.float32)
        elif (
            len(rows) == 1
            and platform() in ("cpu", "tpu")
            and self._form == ("int4", contract - 1 - codes.ndim, False)
        ):
            y = _row_product(rows, codes, scales, zeros, contract)
        elif self._shares_inputs(contract):
            both = rows.reshape(len(rows), self._num_groups, 2, -1)
            halves = (both[:, :, i].reshape(len(rows), -1) for i in (0, 1))
            low, high = (_product(x, w) for x, w in zip(halves, self._halves(), strict=True))
            y = low + high
        else:
            w = dequantized(codes, scales, zeros, self._form)
            y = _product(rows, w, transposed, dtype)
        return y.astype(dtype)

    def input_gradient(
        self, g: Float[Array, "rows n"], contract: int, dtype: DTypeLike
    ) -> Float[Array, "rows k"]:
        """The gradient times the matrix transposed."""
        g, outputs = g.astype(dtype), g.shape[1]
        if self._shares_inputs(contract):
            halves = (_product(g, w.reshape(-1, outputs), True, dtype) for w in self._halves())
            dxs = [dx.reshape(len(g), self._num_groups, -1) for dx in halves]
            return jnp.stack(dxs, 2).reshape(len(g), -1)
        w = dequantized(self.codes, self.scales, self.zeros, self._form)
        w = w if self.is_transposed else w.reshape(-1, outputs)
        return _product(g, w, not self.is_transposed, dtype)

    # The two codes of a byte are of two inputs of one output: two products, of half of the inputs
    # each, bring about no array of all codes one behind the other, which XLA for TPU keeps as
    # integers.
    def _shares_inputs(self, contract: int) -> bool:
        inputs_last = contract - 1 - self.codes.ndim
        return self.packed is not None and not self.is_transposed and self.packed == inputs_last

    def _halves(self) -> list[Float[Array, "..."]]:
        """The values of the low bits, and of the high bits."""
        plain = self.kind, None, False
        both = self.codes & 15, self.codes >> 4
        return [dequantized(codes, self.scales, self.zeros, plain) for codes in both]

    @property
    def _num_groups(self) -> int:
        """The number of groups of inputs of one output."""
        axis = self.codes.ndim + (self.packed or 0)
        return math.prod(self.codes.shape[:axis]) * self.scales.shape[axis]

    def rows(self, ids: Int[Array, "..."]) -> Float[Array, "... embed"]:
        """The rows of these ids, which alone are dequantised; one beyond the last takes that."""
        if not self.is_transposed:
            return self.value().at[ids].get(mode="clip")

        def look_up(x: Array) -> Array:
            is_shared = x.shape[-1] != self.shape[0]
            return x if is_shared else x.at[:, ids.reshape(-1)].get(mode="clip")

        codes, scales = look_up(self.codes), look_up(self.scales)
        zeros = None if self.zeros is None else look_up(self.zeros)
        found = dequantized(codes, scales, zeros, self._form).astype(self.dtype)
        return found.T.reshape(*ids.shape, -1)

    def transposed(self) -> "QuantizedMatrix":
        """The transposed matrix, of two axes, in the same codes."""
        return dataclasses.replace(self, is_transposed=not self.is_transposed)

    def cast(self, dtype: DTypeLike) -> "QuantizedMatrix":
        """The matrix with values of `dtype`; codes and scales stay as they are."""
        return dataclasses.replace(self, dtype_name=str(jnp.dtype(dtype)))

    @property
    def _form(self) -> Form:
        return self.kind, self.packed, self.is_transposed


def _product(
    x: Array, w: Array, is_transposed: bool = False, dtype: DTypeLike = jnp.float32
) -> Array:
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


def quantize(
    array: Float[Array, "..."],
    names: Sequence[str | None],
    kind: Kind,
    group_size: int = GROUP_SIZE,
    *,
    named_by: str = ANNOTATION,
) -> QuantizedMatrix:
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

    codes, scales = rounded(array, tuple(blocks), kind)
    packed = None if kind == "int8" else axis - array.ndim
    if packed is not None:
        codes = pack(codes, packed, group)
    return QuantizedMatrix(
        codes=codes,
        scales=scales,
        zeros=None,
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
