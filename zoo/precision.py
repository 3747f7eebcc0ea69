"""Mixed precision: fp32 master weights, bf16 or fp16 compute, fp32 reductions, and dynamic scale.

Every matrix product of the zoo with a weight goes through `matmul`, the one place that chooses how
a platform multiplies.
"""

import math
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float, Int32

Tree = TypeVar("Tree")
Precision = Literal["bf16", "fp16", "fp32"]

_DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}


def compute_dtype(precision: Precision) -> Any:
    """The dtype of activations and products: "bf16", "fp16" or "fp32".

    Raises:
        ValueError: another name.
    """
    if precision not in _DTYPES:
        raise ValueError(f"precision={precision!r}: choose one of {sorted(_DTYPES)}")
    return _DTYPES[precision]


def cast(tree: Tree, dtype: DTypeLike) -> Tree:
    """Cast the floating-point arrays of a tree, and leave the rest as it is."""
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, tree)


def _product(x: Array, y: Array, contract_x: tuple[int, ...], contract_y: tuple[int, ...]) -> Array:
    """Contract axes of x with axes of y, in their common dtype.

    XLA for CPU uses the bf16 instructions only where a product of bf16 returns fp32; an
    accelerator accumulates in fp32 anyway, and writes half as much.
    """
    on_cpu = x.dtype != jnp.float32 and jax.default_backend() == "cpu"
    preferred = jnp.float32 if on_cpu else x.dtype
    dimensions = ((contract_x, contract_y), ((), ()))
    return lax.dot_general(x, y, dimensions, preferred_element_type=preferred).astype(x.dtype)


# A custom gradient, or the product that returns fp32 would have fp32 inputs in its gradient.
@jax.custom_vjp
def _matmul(x: Float[Array, "b m k"], w: Float[Array, "k n"]) -> Float[Array, "b m n"]:
    b, m, k = x.shape
    return _product(x.reshape(b * m, k), w, (1,), (0,)).reshape(b, m, -1)


def _matmul_forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return _matmul(x, w), (x, w)


def _matmul_backward(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, w = residuals
    b, m, n = g.shape
    dx = _product(g.reshape(b * m, n), w, (1,), (1,)).reshape(x.shape)
    if x.dtype == jnp.float32:
        return dx, _product(x.reshape(b * m, -1), g.reshape(b * m, n), (0,), (0,))
    # Two contracted axes make XLA for CPU transpose x in memory, which its bf16 product needs.
    return dx, _product(x, g, (0, 1), (0, 1))


_matmul.defvjp(_matmul_forward, _matmul_backward)


def matmul(x: Float[Array, "..."], w: Float[Array, "..."], *, contract: int = 1) -> Array:
    """Contract the last `contract` axes of an activation with the first ones of a weight.

    Both have the same dtype, which is also the result's; so have the products of the gradient.
    `matmul(x_BTE, wq_ENH)` is [B, T, N, H], and `matmul(y_BTNH, wo_NHE, contract=2)` is [B, T, E].
    """
    batch, out = x.shape[: x.ndim - contract], w.shape[contract:]
    inner = math.prod(w.shape[:contract])
    first = batch[0] if batch else 1
    rows = x.reshape(first, math.prod(batch[1:]), inner)
    return _matmul(rows, w.reshape(inner, -1)).reshape(*batch, *out)


class LossScale(eqx.Module):
    """Dynamic loss scaling (Micikevicius et al. 2018), which fp16 needs.

    The scale halves at an overflow, and doubles after `PERIOD` steps in a row without one.
    """

    PERIOD = 2000
    scale: Float[Array, ""]
    good_steps: Int32[Array, ""]

    @staticmethod
    def init() -> "LossScale":
        """The scale that training starts with: 2¹⁵."""
        return LossScale(jnp.float32(2.0**15), jnp.int32(0))

    def update(self, finite: Bool[Array, ""]) -> "LossScale":
        """The scale for the next step, given whether this step's gradient was finite."""
        good_steps = jnp.where(finite, self.good_steps + 1, 0)
        grow = good_steps >= self.PERIOD
        scale = jnp.where(finite, jnp.where(grow, self.scale * 2, self.scale), self.scale / 2)
        return LossScale(jnp.clip(scale, 1.0, 2.0**24), jnp.where(grow, 0, good_steps))
