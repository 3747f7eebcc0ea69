"""Products of rows with the matrix of their group: experts of a mixture, each with its tokens.

Legend of suffixes: R rows, in order of their groups, X groups, I and O inputs and outputs.
"""

import contextlib
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Int

from zoo.nn import tiles
from zoo.nn.derivatives import custom_vjp, in_forward_mode
from zoo.nn.products import device_kind, platform

# The name around a call of the kernel, by which a plan knows it.
SCOPE = "grouped_product"


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
    x_RI = jnp.pad(x_RI, ((0, tiles.padded(num_rows) - num_rows), (0, 0)))
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
        tiling = tiles.of_products(_products(x_RI, w_XIO.shape[0], outer))
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
        tiling = tiles.of_sums(_products(x_RI, len(sizes_X), g_RO.shape[1]))
        with _kernel():
            return tgmm(x_RI.T, g_RO, sizes_X, x_RI.dtype, tiling, interpret=interpret)

    return product(x_RI, g_RO, sizes_X)


def _products(x_RI: Array, groups: int, outer: int) -> tiles.Products:
    size = x_RI.dtype.itemsize
    return tiles.Products(len(x_RI), groups, x_RI.shape[1], outer, size, device_kind())
