"""A matrix with a low-rank adapter, as an operand of products.

With lengths (DoRA) it is `magnitude · V / |V|`, column by column, of V = W + scale · down·up.
"""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, Key, UInt32

from zoo.nn.layers import dropout, look_up, normal
from zoo.nn.parameters import dropout_key
from zoo.nn.products import Operand, matmul, product, transposed
from zoo.sharding.foreign import Named
from zoo.sharding.kinds import matrix_axes


class Adapted(Operand):
    """A matrix with its adapter; stacked matrices have stacked ones.

    `down` takes the matrix's input axes to the rank, and `up` the rank to its output axes. A
    product with it is x·W + scale · (x·down)·up: the sum of both matrices is never made. The matrix
    may be another operand: a quantised one, or one that has an adapter already.
    """

    weight: Float[Array, "*matrix"] | Operand
    down: Float[Array, "*inputs"]
    up: Float[Array, "*outputs"]
    magnitude: Float[Array, "*columns"] | None
    """Of DoRA: the length of each column, float32."""
    seed: UInt32[Array, "*stack"] | None
    """With dropout, a number per stacked matrix, so that no two have the same masks."""
    alpha: float = eqx.field(static=True)
    rank_stabilized: bool = eqx.field(static=True)
    dropout: float = eqx.field(static=True)
    num_inputs: int = eqx.field(static=True)
    axes: tuple[tuple[str, str], ...] = eqx.field(static=True)
    named_by: str = eqx.field(static=True)
    frozen: bool = eqx.field(static=True, default=False)
    """Whether adapters stand on the model that this one belongs to: it is not trained then."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return self.weight.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the matrix."""
        return self.weight.dtype

    @property
    def rank(self) -> int:
        """The rank of the adapter."""
        return self.down.shape[-1]

    @property
    def scale(self) -> float:
        """The factor of the adapter's product."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    @property
    def _inputs(self) -> tuple[int, ...]:
        """The input axes."""
        last = self.down.ndim - 1
        return tuple(range(last - self.num_inputs, last))

    def value(self) -> Float[Array, "..."]:
        """The matrix with its adapter merged, in the matrix's dtype; without dropout."""
        total = self._sum()
        if self.magnitude is not None:
            factor = self.magnitude / jax.lax.stop_gradient(_lengths(total, self._inputs))
            total = total * jnp.expand_dims(factor, self._inputs)
        return total.astype(self.dtype)

    def _sum(self) -> Float[Array, "..."]:
        """The sum of both matrices in fp32."""
        stacked = tuple(range(self._inputs[0]))
        added = jax.lax.dot_general(
            self.down.astype(jnp.float32),
            self.up.astype(jnp.float32),
            (((self.down.ndim - 1,), (len(stacked),)), (stacked, stacked)),
            precision=jax.lax.Precision.HIGHEST,
        )
        return _array(self.weight).astype(jnp.float32) + self.scale * added

    def times(
        self, x: Float[Array, "..."], *, contract: int = 1, dtype: DTypeLike | None = None
    ) -> Float[Array, "..."]:
        """The product `matmul(x, self)` with a single matrix, by way of the rank."""
        if contract != self.num_inputs:  # over other axes than the adapter reads
            return matmul(x, self.value().astype(x.dtype), contract=contract, dtype=dtype)
        low = matmul(self._dropped(x), self.down.astype(x.dtype), contract=contract)
        added = matmul(low * self.scale, self.up.astype(x.dtype), dtype=dtype)
        return self._with_lengths(matmul(x, self.weight, contract=contract, dtype=dtype) + added)

    def rows(self, ids: Int[Array, "..."]) -> Float[Array, "... embed"]:
        """The rows of a table with these ids; one beyond the last takes that row."""
        rows = look_up(self.weight, ids)
        low = look_up(self.down, ids).astype(rows.dtype)
        return self._with_lengths(rows + matmul(low * self.scale, self.up.astype(rows.dtype)))

    def transposed(self) -> Array | Operand:
        """The matrix with its two axes exchanged."""
        if self.magnitude is not None:  # whose columns are rows then
            return self.value().T
        names = {name: axes.split() for name, axes in self.axes}
        return Adapted(
            transposed(self.weight),
            self.up.T,
            self.down.T,
            None,
            None,
            self.alpha,
            self.rank_stabilized,
            0.0,
            1,
            tuple(
                (name, " ".join(reversed(names[of])))
                for name, of in (("*matrix",) * 2, ("*inputs", "*outputs"), ("*outputs", "*inputs"))
            ),
            self.named_by,
            self.frozen,
        )

    def cast(self, dtype: DTypeLike) -> Operand:
        """The matrix as it is used in a dtype; lengths stay as they are, to be exact."""
        new = super().cast(dtype)
        lengths = lambda x: x.magnitude  # noqa: E731
        return new if self.magnitude is None else eqx.tree_at(lengths, new, self.magnitude)

    def _dropped(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """The input of the adapter, with dropout within a training step."""
        key = dropout_key()
        if key is None or self.seed is None or self.frozen:
            return x
        return dropout(x, self.dropout, jax.random.fold_in(key, self.seed))

    def _with_lengths(self, y: Float[Array, "..."]) -> Float[Array, "..."]:
        """A product with the sum of both matrices, as one with columns of the trained lengths."""
        if self.magnitude is None:
            return y
        factor = self.magnitude / jax.lax.stop_gradient(self._lengths_of_sum())
        factor = factor.reshape((1,) * (y.ndim - factor.ndim) + factor.shape)
        return (y.astype(jnp.float32) * factor).astype(y.dtype)

    def _lengths_of_sum(self) -> Float[Array, "..."]:
        """The length of each column of the sum of both matrices, which is not made for that."""
        columns, inner = self.up.shape[1:], math.prod(self.down.shape[:-1])
        weight = _array(self.weight).reshape(inner, -1)
        down = self.down.reshape(inner, -1).astype(weight.dtype)
        up = self.scale * self.up.reshape(self.rank, -1).astype(jnp.float32)
        # |W + D·U|² = |W|² + (2 DᵀW + DᵀD·U)·U, column by column.
        both = 2 * product(down, weight, ((0,), (0,)))
        both += product(product(down, down, ((0,), (0,))), up, ((1,), (0,)))
        squared = _lengths(weight.astype(jnp.float32), (0,)) ** 2 + (both * up).sum(0)
        return jnp.sqrt(jnp.maximum(squared, 0)).reshape(columns)


def _lengths(x: Float[Array, "..."], axes: tuple[int, ...]) -> Float[Array, "..."]:
    return jnp.sqrt(jnp.square(x).sum(axes))


def _array(weight: Array | Operand) -> Array:
    return weight.value() if isinstance(weight, Operand) else weight


def adapted(
    weight: Float[Array, "..."] | Operand,
    named: Named,
    *,
    rank: int,
    alpha: float,
    rank_stabilized: bool,
    dora: bool,
    dropout: float,
    key: Key[Array, ""],
) -> Adapted:
    """A matrix (or a stack) of the logical axes `named` with an adapter that adds nothing yet."""
    names, named_by = named
    inputs, outputs = matrix_axes(names)
    stacked = weight.shape[: inputs[0]]
    rows, columns = ([weight.shape[axis] for axis in axes] for axes in (inputs, outputs))
    # The axes of stacked layers or members are named from outside; that of experts is not.
    experts = [name for name in names[: inputs[0]] if name is not None]
    into, out = ([str(names[axis]) for axis in axes] for axes in (inputs, outputs))
    seeds = jax.random.bits(jax.random.fold_in(key, 1), stacked, jnp.uint32) if dropout else None
    return Adapted(
        weight,
        down=normal(key, (*stacked, *rows, rank), math.prod(rows)),
        # With zeros training begins with the model as it was.
        up=jnp.zeros((*stacked, rank, *columns)),
        magnitude=_lengths(_array(weight).astype(jnp.float32), inputs) if dora else None,
        seed=seeds,
        alpha=alpha,
        rank_stabilized=rank_stabilized,
        dropout=dropout,
        num_inputs=len(inputs),
        axes=(
            ("*matrix", " ".join([*experts, *into, *out])),
            ("*inputs", " ".join([*experts, *into, "rank"])),
            ("*outputs", " ".join([*experts, "rank", *out])),
            ("*columns", " ".join([*experts, *out])),
            ("*stack", ""),
        ),
        named_by=named_by,
    )


def is_adapted(x: Any) -> bool:
    """Whether a node of a model is a matrix with its adapter."""
    return isinstance(x, Adapted)
