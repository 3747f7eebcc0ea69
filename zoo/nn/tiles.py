"""Sizes of the tiles of products over groups on a TPU, by the least time of a chip."""

import functools
import itertools
import math
from dataclasses import dataclass

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
        """Of the chip and its memory, at their peaks: 166 of v5p, 241 of v5e, 560 of v6e."""
        return 560.0 if self.kind.startswith("TPU v6") else 241.0

    @property
    def memory(self) -> int:
        """Bytes for tiles: three quarters of what a kernel has by default."""
        return (24 if self.kind.startswith("TPU v6") else 12) * 2**20


def padded(rows: int) -> int:
    """The rows, and the padding that fills the last tile."""
    largest = next((size for size in _ROWS if size >= rows), _ROWS[-1])
    return rows + -rows % largest


@functools.cache
def of_products(products: Products) -> Tile:
    """Rows, inputs and outputs of a tile of each row's product with the matrix of its group."""
    return min(_tiles(products), key=lambda tile: _time_of_products(products, tile))


@functools.cache
def of_sums(products: Products) -> Tile:
    """The same, of each group's sum of the outer products of its inputs and outputs."""
    return min(_tiles(products), key=lambda tile: _time_of_sums(products, tile))


def _tiles(products: Products) -> list[Tile]:
    """All that divide the rows; inputs and outputs in up to so many parts."""
    rows = [size for size in _ROWS if products.rows % size == 0]
    inner, outer = (
        {size if parts == 1 else _up(math.ceil(size / parts), _LANES): None
         for parts in range(1, _MOST_PARTS + 1)}
        for size in (products.inner, products.outer)
    )  # fmt: skip
    return list(itertools.product(rows, inner, outer))


def _up(size: int, multiple: int) -> int:
    return size + -size % multiple


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
