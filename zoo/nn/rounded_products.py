"""Products of a training step in int8, for the matrices of a model's blocks.

The scheme is that of SwitchBack (Wortsman et al. 2023): an activation has one scale per row, a
weight one per output, and both are rounded anew in each step, so that nothing is stored. The
product and the gradient of the activation are of int8. The weight's gradient stays in the compute
dtype: its sum is over all tokens, and one scale for a column of tokens would lose the small ones.

aqtp and qwix have such products too; they would bring Flax with them, keep both operands of a
frozen matrix, and gather a sharded one before they round it.
"""

import dataclasses
import functools
import math
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jaxtyping import Array, DTypeLike, Float, Int8

from zoo.nn.derivatives import Static, custom_vjp, in_forward_mode
from zoo.nn.parameters import Operand, cast, takes_operands
from zoo.nn.precision import matmul, platform, product, rounds_blocks, weight_gradient
from zoo.sharding.axes import map_named
from zoo.sharding.foreign import ANNOTATION, Named
from zoo.sharding.kinds import is_hidden_matrix, matrix_axes

Layer = TypeVar("Layer")

# The name of what these products give, which a remat policy that keeps products keeps.
NAME = "rounded_product"


class Rounded(Operand):
    """A matrix as int8 codes, with the matrix itself for its gradient alone.

    Where products are the only use of it, the codes are what is gathered over the devices.
    """

    weight: Float[Array, "*matrix"]
    codes: Int8[Array, "*matrix"]
    scales: Float[Array, "*outputs"]
    """float32."""
    num_inputs: int = eqx.field(static=True)
    axes: tuple[tuple[str, str], ...] = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return self.weight.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the matrix."""
        return self.weight.dtype

    def value(self) -> Float[Array, "..."]:
        """The matrix itself."""
        return self.weight

    def cast(self, dtype: DTypeLike) -> "Rounded":
        """The matrix as it is used in a dtype; its codes and scales stay."""
        return dataclasses.replace(self, weight=cast(self.weight, dtype))

    def times(
        self, x: Float[Array, "..."], *, contract: int = 1, dtype: DTypeLike | None = None
    ) -> Float[Array, "..."]:
        """The product `matmul(x, self)` of both, rounded; its gradients are those of plain ones."""
        if contract != self.num_inputs:  # over other axes than those of a scale
            return matmul(x, self.weight, contract=contract, dtype=dtype)
        batch, out = x.shape[: x.ndim - contract], self.shape[contract:]
        inner = math.prod(self.shape[:contract])
        rows = x.reshape(batch[0] if batch else 1, math.prod(batch[1:]), inner)
        weight, codes = self.weight.reshape(inner, -1), self.codes.reshape(inner, -1)
        result = x.dtype if dtype is None else dtype
        y = _times(rows, weight, codes, self.scales.reshape(1, -1), result)
        return y.reshape(*batch, *out)


def round_matrices(layer: Layer) -> Layer:
    """A layer with its hidden matrices `Rounded`, within a step in int8; else as it is.

    Those are the matrices that only products take, and whose inputs and outputs are not the
    model's own: no embedding, no head. A quantised one stays as it is, and so do experts.
    """
    if not rounds_blocks():
        return layer

    def visit(path: tuple, named: Named, leaf: Any) -> Any:
        names, is_float = named.names, jnp.issubdtype(leaf.dtype, jnp.floating)
        if not is_float or named.by != ANNOTATION or not takes_operands(layer, path):
            return leaf
        if "routes" in names or not is_hidden_matrix(names):
            return leaf
        inputs, outputs = matrix_axes(names)
        codes, scales = rounded(lax.stop_gradient(leaf), inputs)
        axes = {"*matrix": names, "*outputs": [names[axis] for axis in outputs]}
        renamed = tuple((name, " ".join(map(str, of))) for name, of in axes.items())
        return Rounded(leaf, codes, scales.squeeze(inputs), len(inputs), renamed)

    return map_named(visit, layer)


def check_rounds(jaxpr: Any) -> None:
    """Refuse the jaxpr of a loss in "int8" that multiplies nothing in it.

    Raises:
        ValueError: such a jaxpr.
    """
    if not _rounds(jaxpr):
        raise ValueError(
            "precision='int8': the model has no matrix to multiply in int8, which is for the "
            "blocks of transformers, of BERT and of MLPs (layers that zoo.nn.remat.scan_layers "
            "runs), and for neither recurrent cells nor quantised matrices; take bf16"
        )


def _rounds(jaxpr: Any) -> bool:
    return any(
        equation.params.get("name") == NAME
        or any(map(_rounds, filter(_is_jaxpr, jax.tree.leaves(equation.params, is_leaf=_is_jaxpr))))
        for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns
    )


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, core.Jaxpr | core.ClosedJaxpr)


def rounded(
    x: Float[Array, "..."], axes: tuple[int, ...]
) -> tuple[Int8[Array, "..."], Float[Array, "..."]]:
    """The nearest `codes · scales`: codes from -127 to 127, and a scale for all values along axes.

    What is not finite makes its scale not finite, too.
    """
    x = x.astype(jnp.float32)
    largest = jnp.abs(x).max(axes, keepdims=True)
    scales = jnp.where(largest == 0, 1.0, largest / 127)
    return jnp.round(x / scales).astype(jnp.int8), scales


def _product(x: Array, codes: Array, axis: int) -> Float[Array, "rows n"]:
    """Rows of codes [rows, k] times one axis of a matrix of codes.

    XLA for CPU multiplies integers slowly, and bf16 holds codes exactly: the same numbers, but for
    sums beyond 2²⁴. Those of int32 have room for 133,000 products.
    """
    axes = ((1,), (axis,))
    if platform() == "cpu":
        return product(x.astype(jnp.bfloat16), codes.astype(jnp.bfloat16), axes)
    sums = lax.dot_general(x, codes, (axes, ((), ())), preferred_element_type=jnp.int32)
    return sums.astype(jnp.float32)


@functools.partial(custom_vjp, nondiff_argnums=(4,))
def _times(
    x: Float[Array, "b m k"],
    weight: Float[Array, "k n"],
    codes: Int8[Array, "k n"],
    scales: Float[Array, "1 n"],
    dtype: DTypeLike,
) -> Float[Array, "b m n"]:
    y = _forward(x, weight, codes, scales, dtype, needed=(False,) * 4)[0]
    if not in_forward_mode():
        return y
    plain = matmul(x, weight, dtype=dtype)  # for a derivative, of which rounding has none
    return plain + lax.stop_gradient(y - plain)


def _forward(
    x: Array,
    weight: Array,
    codes: Array,
    scales: Array,
    dtype: DTypeLike,
    *,
    needed: tuple[bool, ...],
) -> tuple[Array, tuple]:
    b, m, k = x.shape
    x_codes, x_scales = rounded(x.reshape(b * m, k), (1,))
    y = (_product(x_codes, codes, 0) * x_scales * scales).astype(dtype).reshape(b, m, -1)
    kept = codes if needed[0] else None, x if needed[1] else None
    return checkpoint_name(y, NAME), (*kept, scales, Static((x.dtype, weight.dtype)))


def _backward(
    dtype: DTypeLike, residuals: tuple, g: Array
) -> tuple[Array | None, Array | None, None, None]:
    codes, x, scales, dtypes = residuals
    of_x, of_w = dtypes.value
    b, m, n = g.shape
    dx = None
    if codes is not None:
        # The sum is over outputs here: their scales go into the gradient before it is rounded.
        scaled = g.astype(jnp.float32).reshape(b * m, n) * scales
        g_codes, g_scales = rounded(scaled, (1,))
        dx = (_product(g_codes, codes, 1) * g_scales).astype(of_x).reshape(b, m, -1)
    dw = None if x is None else weight_gradient(x, g.astype(of_x), of_w)
    return dx, dw, None, None


_times.defvjp(_forward, _backward, by_need=True)
