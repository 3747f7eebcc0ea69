"""Products of rows with the matrix of their group: experts of a mixture, each with its tokens.

A TPU's tiles have the sizes that take it the least time. Legend of suffixes: R rows, in order of
their groups, X groups, I and O inputs and outputs.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Int

from zoo.nn.products import custom_vjp, device_kind, in_forward_mode, platform

# The name around a call of the kernel, by which a plan knows it.
SCOPE = "grouped_product"

_ROWS = (128, 256, 512)  # of a tile: multiples of a TPU's matrix unit
_LANES = 128  # the other sizes are whole, or multiples of this
_MOST_PARTS = 32  # of inputs, or of outputs

Tile = tuple[int, int, int]


@dataclass(frozen=True)
class Products:
    """Rows in groups, the inputs and outputs of a group's matrix, the bytes of a number, the chip.

    `kind` is JAX's name of it.
    """

    rows: int
    groups: int
    inner: int
    outer: int
    itemsize: int
    kind: str = ""

    @property
    def flops_per_byte(self) -> float:
        """The chip's operations per byte of its memory, at their peaks; v5p has 166."""
        return 560.0 if self.kind.startswith("TPU v6") else 241.0

    @property
    def memory(self) -> int:
        """Bytes for tiles: three quarters of what a kernel has by default."""
        return (24 if self.kind.startswith("TPU v6") else 12) * 2**20


def grouped_product(
    x_RI: Float[Array, "rows in"],
    w_XIO: Float[Array, "groups in out"],
    sizes_X: Int[Array, "groups"],
) -> Float[Array, "rows out"]:
    """The product of each row with its group's matrix; groups are consecutive rows, of any size.

    Rows behind all groups come out as anything, not even finite. On a TPU it is the kernel
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


@contextlib.contextmanager
def _kernel() -> Iterator[None]:
    """Around a call of JAX's kernels, which promote dtypes."""
    with jax.named_scope(SCOPE), jax.numpy_dtype_promotion("standard"):
        yield


# The kernels have no rule for `vmap`: members of an ensemble take turns.
def _gmm(
    x_RI: Array, w_XIO: Array, sizes_X: Array, interpret: bool, *, transposed: bool
) -> Float[Array, "rows out"]:
    """Rows times the matrices of their groups, or these transposed."""
    # Imported here: it takes a second, which only TPUs need.
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    @sequential_vmap
    def product(x_RI: Array, w_XIO: Array, sizes_X: Array) -> Array:
        outer = w_XIO.shape[1 if transposed else 2]
        tiling = tile_of_products(_products(x_RI, w_XIO.shape[0], outer))
        options = {"transpose_rhs": transposed, "interpret": interpret}
        with _kernel():
            return gmm(x_RI, w_XIO, sizes_X, x_RI.dtype, tiling, **options)

    return product(x_RI, w_XIO, sizes_X)


def _tgmm(
    x_RI: Array, g_RO: Array, sizes_X: Array, interpret: bool
) -> Float[Array, "groups in out"]:
    """The sum of the outer products of the rows of each group."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    @sequential_vmap
    def product(x_RI: Array, g_RO: Array, sizes_X: Array) -> Array:
        tiling = tile_of_sums(_products(x_RI, len(sizes_X), g_RO.shape[1]))
        with _kernel():
            return tgmm(x_RI.T, g_RO, sizes_X, x_RI.dtype, tiling, interpret=interpret)

    return product(x_RI, g_RO, sizes_X)


def _products(x_RI: Array, groups: int, outer: int) -> Products:
    size = x_RI.dtype.itemsize
    return Products(len(x_RI), groups, x_RI.shape[1], outer, size, device_kind())


def padded(rows: int) -> int:
    """The rows, and the padding that fills the last tile."""
    largest = next((size for size in _ROWS if size >= rows), _ROWS[-1])
    return rows + -rows % largest


@functools.cache
def tile_of_products(products: Products) -> Tile:
    """Rows, inputs and outputs of a tile of each row's product with the matrix of its group."""
    return min(_tiles(products), key=lambda tile: _time_of_products(products, tile))


@functools.cache
def tile_of_sums(products: Products) -> Tile:
    """The same for each group's sum of the outer products of its inputs and outputs."""
    return min(_tiles(products), key=lambda tile: _time_of_sums(products, tile))


def _tiles(products: Products) -> list[Tile]:
    """All that divide the rows; inputs and outputs in up to so many parts."""
    rows = [size for size in _ROWS if products.rows % size == 0]
    inner, outer = (
        {size if parts == 1 else math.ceil(size / parts / _LANES) * _LANES: None
         for parts in range(1, _MOST_PARTS + 1)}
        for size in (products.inner, products.outer)
    )  # fmt: skip
    return list(itertools.product(rows, inner, outer))


def _time_of_products(products: Products, tile: Tile) -> tuple[float, float]:
    """FLOPs, or those of the time that the bytes take, whichever are more; then the bytes.

    A group's matrix stays from one tile of rows to the next if that has all inputs, and is read
    again for each if not.
    """
    rows, inner, outer = tile
    steps, of_inner, of_outer = _steps(products, tile)
    matrix = products.inner * products.outer
    moved = products.rows * products.outer
    if of_inner == 1:
        moved += products.rows * inner * of_outer + products.groups * matrix
    else:
        moved += steps * (rows * products.inner * of_outer + matrix)
    # A block of each operand and the next one, the sum, and the product to be added to it.
    held = 2 * products.itemsize * (rows * inner + inner * outer + rows * outer)
    return _time(products, tile, moved, held + 8 * rows * outer)


def _time_of_sums(products: Products, tile: Tile) -> tuple[float, float]:
    rows, inner, outer = tile
    _, of_inner, of_outer = _steps(products, tile)
    moved = products.rows * (products.inner * of_outer + products.outer * of_inner)
    moved += products.groups * products.inner * products.outer
    held = 2 * products.itemsize * (rows * inner + inner * outer + rows * outer)
    held += 4 * (2 * inner * outer + rows * (inner + outer))  # also both operands, masked in fp32
    return _time(products, tile, moved, held)


def _steps(products: Products, tile: Tile) -> tuple[int, int, int]:
    """Tiles of rows, of which each group shares one with the next, of inputs and of outputs."""
    rows, inner, outer = tile
    tiles = products.rows // rows + products.groups - 1
    return tiles, math.ceil(products.inner / inner), math.ceil(products.outer / outer)


def _time(products: Products, tile: Tile, moved: int, held: int) -> tuple[float, float]:
    if held > products.memory:
        return math.inf, float(held)
    flops = 2.0 * math.prod(_steps(products, tile)) * math.prod(tile)
    return max(flops, products.flops_per_byte * moved * products.itemsize), float(moved)
