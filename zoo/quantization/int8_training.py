"""Products of a training step in int8, for the matrices of a model's blocks.

The scheme is SwitchBack (Wortsman et al. 2023): an activation has one scale per row, a
weight one per output, and both are rounded anew in each step, so that nothing is stored. The
product and the gradient of the activation are of int8. The weight's gradient stays in the compute
dtype: its sum is over all tokens, and one scale for a column of tokens would lose the small ones.
"""

import dataclasses
import math
import re
from typing import Any, TypeVar

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jaxtyping import Array, DTypeLike, Float, Int8

from zoo.nn.parameters import takes_operands
from zoo.nn.precision import Scheme
from zoo.nn.products import (
    PRODUCT,
    Codes,
    cast_array,
    compute_capability,
    matmul,
    multiply,
    platform,
    product,
)
from zoo.sharding.axes import ANNOTATION, Named, map_named
from zoo.sharding.rules import is_hidden_matrix, matrix_axes

Layer = TypeVar("Layer")


class Rounded(Codes):
    """A matrix as int8 codes, with the matrix itself for its gradient alone.

    Where products are the only use of it, the codes are what is gathered over the devices.
    """

    weight: Float[Array, "*matrix"]  # None within a product, which does not read it
    codes: Int8[Array, "*matrix"]
    scales: Float[Array, "*outputs"]
    """float32."""
    num_inputs: int = eqx.field(static=True)
    axes: tuple[tuple[str, str], ...] = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return self.codes.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the matrix."""
        return self.weight.dtype

    def value(self) -> Float[Array, "..."]:
        """The matrix itself."""
        return self.weight

    def cast(self, dtype: DTypeLike) -> "Rounded":
        """The matrix as it is used in a dtype; its codes and scales stay."""
        return dataclasses.replace(self, weight=cast_array(self.weight, dtype))

    def times(
        self, x: Float[Array, "..."], *, contract: int = 1, dtype: DTypeLike | None = None
    ) -> Float[Array, "..."]:
        """The product `matmul(x, self)` of both, rounded."""
        if contract != self.num_inputs:  # over other axes than those of a scale
            return matmul(x, self.weight, contract=contract, dtype=dtype)
        codes = eqx.tree_at(lambda x: x.weight, self, None)
        y = multiply(x, self.weight, codes, contract=contract, dtype=dtype)
        return checkpoint_name(y, PRODUCT)

    def product(
        self, rows: Float[Array, "rows k"], contract: int, dtype: DTypeLike
    ) -> Float[Array, "rows n"]:
        """Rows, rounded, times the codes."""
        codes, scales = rounded(rows, (1,))
        y = _product(codes, self._matrix, 0) * scales * self.scales.reshape(1, -1)
        return y.astype(dtype)

    def input_gradient(
        self, g: Float[Array, "rows n"], contract: int, dtype: DTypeLike
    ) -> Float[Array, "rows k"]:
        """The gradient, rounded, times the codes transposed."""
        # The sum is over outputs here: their scales go into the gradient before it is rounded.
        codes, scales = rounded(g.astype(jnp.float32) * self.scales.reshape(1, -1), (1,))
        return (_product(codes, self._matrix, 1) * scales).astype(dtype)

    @property
    def _matrix(self) -> Int8[Array, "k n"]:
        return self.codes.reshape(math.prod(self.shape[: self.num_inputs]), -1)


class SwitchBack(Scheme):
    """The precision "int8"."""

    dtype = jnp.bfloat16

    def operands(self, layer: Layer) -> Layer:
        """A layer with its hidden matrices `Rounded`.

        Those are the matrices that only products take, and whose inputs and outputs are not the
        model's own: no embedding, no head. A quantised one stays as it is, and so do experts.
        """

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

    def check_device(self, device: Any) -> None:
        """Raise a ValueError for a device without products of int8.

        They came to Cloud TPUs with v4, and to NVIDIA's GPUs with compute capability 7.5 (Turing).
        CPUs have the same numbers by way of bf16.
        """
        capability = compute_capability(device)
        is_old_gpu = capability is not None and capability < 7.5
        if is_old_gpu or re.match(r"TPU v[23]\b", device.device_kind):
            others = "fp16 or fp32" if is_old_gpu else "bf16 or fp32"
            raise ValueError(
                f"precision='int8': {device.device_kind} has no products of int8; take {others} "
                "there, or a TPU from v4 on or a GPU from Turing on"
            )

    def check_loss(self, jaxpr: Any) -> None:
        """Raise a ValueError for the jaxpr of a loss that multiplies nothing in int8."""
        if not _rounds(jaxpr):
            raise ValueError(
                "precision='int8': the model has no matrix to multiply in int8, which is for the "
                "blocks of transformers, of BERT and of MLPs (layers that zoo.nn.remat.scan_layers "
                "runs), and for neither recurrent cells nor quantised matrices; take bf16"
            )


INT8 = SwitchBack()


def _rounds(jaxpr: Any) -> bool:
    return any(equation.params.get("name") == PRODUCT for equation in jaxpr.eqns) or any(
        map(_rounds, core.subjaxprs(jaxpr))
    )


def rounded(
    x: Float[Array, "..."], axes: tuple[int, ...]
) -> tuple[Int8[Array, "..."], Float[Array, "..."]]:
    """The nearest `codes · scales`: codes from -127 to 127, and a scale for all values along axes.

    A value that is not finite makes its scale so too.
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
