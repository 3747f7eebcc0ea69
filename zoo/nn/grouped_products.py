"""Products of rows with the matrix of their group: experts of a mixture, each with its tokens.

Legend of suffixes: R rows, in order of their groups, X groups, I and O inputs and outputs.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Int

from zoo.nn.products import custom_vjp, device_kind, in_forward_mode, platform

_ROWS = (128, 256, 512)  # of a tile: multiples of a TPU's matrix unit
SHARED_ROWS = _ROWS[0]  # a group's extra time, in rows: it shares a tile with the next
_LANES = 128  # the other sizes of a tile are whole, or multiples of this

Tile = tuple[int, int, int]


def grouped_product(
    x_RI: Float[Array, "rows in"],
    w_XIO: Float[Array, "groups in out"],
    sizes_X: Int[Array, "groups"],
) -> Float[Array, "rows out"]:
    """The product of each row with its group's matrix; groups are consecutive rows, of any size.

    Rows behind all groups come out as anything, perhaps not finite. On a TPU it is the kernel
    `jax.experimental.pallas.ops.tpu.megablox`, forward and backward: XLA's own gradient for the
    matrices multiplies every row with every group. Elsewhere, and in forward mode, it is
    `jax.lax.ragged_dot`.
    """
    kernel_applies = x_RI.dtype == w_XIO.dtype and x_RI.dtype in (jnp.bfloat16, jnp.float32)
    if platform() == "tpu" and kernel_applies and not in_forward_mode():
        return megablox(x_RI, w_XIO, sizes_X)
    return jax.lax.ragged_dot(x_RI, w_XIO, sizes_X)


def megablox(
    x_RI: Float[Array, "rows in"],
    w_XIO: Float[Array, "groups in out"],
    sizes_X: Int[Array, "groups"],
    *,
    interpret: bool = False,
) -> Float[Array, "rows out"]:
    """`grouped_product` by the kernel; `interpret` runs it without a TPU."""
    num_rows = x_RI.shape[0]
    x_RI = jnp.pad(x_RI, ((0, padded(num_rows) - num_rows), (0, 0)))
    return _product(x_RI, w_XIO, sizes_X, interpret)[:num_rows]


@functools.partial(custom_vjp, nondiff_argnums=(3,))
def _product(x_RI: Array, w_XIO: Array, sizes_X: Array, interpret: bool) -> Array:
    return _gmm(x_RI, w_XIO, sizes_X, interpret, transposed=False)


def _forward(
    x_RI: Array, w_XIO: Array, sizes_X: Array, interpret: bool
) -> tuple[Array, tuple[Array, Array, Array]]:
    return _product(x_RI, w_XIO, sizes_X, interpret), (x_RI, w_XIO, sizes_X)


def _backward(
    interpret: bool, residuals: tuple[Array, Array, Array], g_RO: Array
) -> tuple[Array, Array, None]:
    x_RI, w_XIO, sizes_X = residuals
    dx_RI = _gmm(g_RO, w_XIO, sizes_X, interpret, transposed=True)
    return dx_RI, _tgmm(x_RI, g_RO, sizes_X, interpret), None


_product.defvjp(_forward, _backward)


# The kernels have no rule for `vmap`: members of an ensemble take turns. And they promote dtypes.
def _gmm(
    x_RI: Array, w_XIO: Array, sizes_X: Array, interpret: bool, *, transposed: bool
) -> Float[Array, "rows out"]:
    """Rows times the matrices of their groups, or these transposed."""
    # Imported here: it takes a second, which only TPUs need.
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    @sequential_vmap
    def product(x_RI: Array, w_XIO: Array, sizes_X: Array) -> Array:
        tiling = _tile_for(x_RI, len(sizes_X), w_XIO.shape[1 if transposed else 2], sums=False)
        options = {"transpose_rhs": transposed, "interpret": interpret}
        with jax.numpy_dtype_promotion("standard"):
            return gmm(x_RI, w_XIO, sizes_X, x_RI.dtype, tiling, **options)

    return product(x_RI, w_XIO, sizes_X)


def _tgmm(
    x_RI: Array, g_RO: Array, sizes_X: Array, interpret: bool
) -> Float[Array, "groups in out"]:
    """The sum of the outer products of the rows of each group."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    @sequential_vmap
    def product(x_RI: Array, g_RO: Array, sizes_X: Array) -> Array:
        tiling = _tile_for(x_RI, len(sizes_X), g_RO.shape[1], sums=True)
        with jax.numpy_dtype_promotion("standard"):
            return tgmm(x_RI.T, g_RO, sizes_X, x_RI.dtype, tiling, interpret=interpret)

    return product(x_RI, g_RO, sizes_X)


def padded(rows: int) -> int:
    """The rows, and the padding that fills the last tile."""
    largest = next((size for size in _ROWS if size >= rows), _ROWS[-1])
    return rows + -rows % largest


def _tile_for(x_RI: Array, groups: int, outer: int, *, sums: bool) -> Tile:
    # Bytes for tiles: three quarters of what a kernel has by default on this chip.
    memory = (24 if device_kind().startswith("TPU v6") else 12) * 2**20
    rows, inner = x_RI.shape
    return tile(rows, groups, inner, outer, x_RI.dtype.itemsize, memory, sums=sums)


@functools.cache
def tile(
    rows: int, groups: int, inner: int, outer: int, itemsize: int, memory: int, *, sums: bool
) -> Tile:
    """Rows, inputs and outputs of a tile: the one that fits and moves the fewest bytes.

    It is for the product of each row with the matrix of its group, or for each group's sum of the
    outer products of its inputs and outputs. Each group shares a tile of rows with the next.
    """
    m = _ROWS[0]
    for size in _ROWS[1:]:
        if rows % size == 0 and 8 * groups * size <= rows:
            m = size

    def cost(sizes: tuple[int, int]) -> tuple[bool, int]:
        k, n = sizes
        of_inner, of_outer = math.ceil(inner / k), math.ceil(outer / n)
        held = 2 * itemsize * (m * k + k * n + m * n)  # a block of each operand, and the next one
        moved = rows * inner * of_outer
        if sums:
            held += 4 * (2 * k * n + m * (k + n))  # the sum, and both operands, masked in fp32
            moved += rows * outer * of_inner + groups * inner * outer
        else:
            held += 8 * m * n  # the sum, and the product to be added to it
            # A matrix stays from one tile of rows to the next if the tile has all inputs.
            reads = groups if of_inner == 1 else rows // m + groups - 1
            moved += rows * outer + reads * inner * outer
        return held > memory, held if held > memory else moved

    return (m, *min(itertools.product(_parts(inner), _parts(outer)), key=cost))


def _parts(size: int) -> list[int]:
    """The size itself, and the multiples of a TPU's lanes that divide it once it is padded."""
    lanes = math.ceil(size / _LANES)
    return [size, *(_LANES * part for part in range(1, lanes) if lanes % part == 0)]
