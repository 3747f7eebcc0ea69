"""Matrices of few bits: integer codes and scales in memory, dequantised where they are used.

A block of a matrix has one scale: in `int8` an output of a product (for all of its inputs), in
`int4` and `nf4` a group of inputs of one output. A value is `(code - zero) * scale`, of `nf4` the
code's entry in a table times the scale, computed in fp32. Files of other programs have `int8` in
groups too, another table (`fp4`), and inputs in an order of their own.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, Integer, Num

from zoo.nn.codes import Form, Kind, StoredKind, dequantized, matrix_shape, pack, rounded
from zoo.nn.parameters import Operand
from zoo.nn.quantized_products import times
from zoo.sharding.foreign import ANNOTATION
from zoo.sharding.kinds import is_stack, matrix_axes

Model = TypeVar("Model")
GROUP_SIZE = 64


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
        shape = self.shape
        batch, out = x.shape[: x.ndim - contract], shape[contract:]
        rows = x.reshape(
            batch[0] if batch else 1, math.prod(batch[1:]), math.prod(shape[:contract])
        )
        if self.order is not None:
            rows = rows.at[:, :, self.order].get(unique_indices=True, mode="promise_in_bounds")
        result = jnp.dtype(x.dtype if dtype is None else dtype)
        y = times(rows, self.codes, self.scales, self.zeros, self._form, contract, result)
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
        found = dequantized(codes, scales, zeros, self._form).astype(self.dtype)
        return found.T.reshape(*ids.shape, -1)

    def transposed(self) -> "Quantized":
        """The transposed matrix, of two axes, in the same codes."""
        return dataclasses.replace(self, is_transposed=not self.is_transposed)

    def cast(self, dtype: DTypeLike) -> "Quantized":
        """The matrix with values of `dtype`; codes and scales stay as they are."""
        return dataclasses.replace(self, dtype_name=str(jnp.dtype(dtype)))

    @property
    def _form(self) -> Form:
        return self.kind, self.packed, self.is_transposed


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

    codes, scales = rounded(array, tuple(blocks), kind)
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
