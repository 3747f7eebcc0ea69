"""A frozen matrix with trained values in the place of some of its rows, or of all.

So a few new tokens are learnt without training their whole table, and what was there before stays
at hand, as the model to compare with.
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int, PyTree

from zoo.common.configuration import require
from zoo.nn.layers import look_up
from zoo.nn.products import Operand, matmul
from zoo.sharding.axes import Named, keystr, map_parameters


class Retrained(Operand):
    """A matrix with trained values in some of its rows, or in all, which begin as its own."""

    weight: Float[Array, "*matrix"] | Operand
    new: Float[Array, "*new"]
    """The trained values, float32: the rows of `ids` in their order, or the whole matrix."""
    ids: tuple[int, ...] | None = eqx.field(static=True)
    axes: tuple[tuple[str, str], ...] = eqx.field(static=True)
    named_by: str = eqx.field(static=True)
    frozen: bool = eqx.field(static=True, default=False)
    """Whether newer adapters were put on the model: this one is not trained then."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return self.weight.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the matrix."""
        return self.weight.dtype

    @property
    def trained(self) -> list[Any]:
        """The arrays that are trained."""
        return [self.new]

    def value(self) -> Array:
        """The matrix with the new values, in the matrix's dtype."""
        new = self.new.astype(self.dtype)
        if self.ids is None:
            return new
        return value_of(self.weight).at[jnp.asarray(self.ids)].set(new)

    def times(self, x: Array, *, contract: int = 1, dtype: DTypeLike | None = None) -> Array:
        """The product `matmul(x, self)`."""
        return matmul(x, self.value().astype(x.dtype), contract=contract, dtype=dtype)

    def rows(self, ids: Int[Array, "..."]) -> Float[Array, "... embed"]:
        """The rows of a table with these ids; one beyond the last takes that row."""
        new = self.new.astype(self.dtype)
        if self.ids is None:
            return look_up(new, ids)
        order = np.argsort(self.ids)
        known = jnp.asarray(np.asarray(self.ids, np.int32)[order])
        place = jnp.minimum(jnp.searchsorted(known, ids), len(order) - 1)
        retrained = look_up(new, jnp.asarray(order.astype(np.int32))[place])
        is_new = (known[place] == jnp.minimum(ids, self.shape[0] - 1))[..., None]
        return jnp.where(is_new, retrained, look_up(self.weight, ids))


def value_of(weight: Array | Operand) -> Array:
    """A matrix as an array."""
    return weight.value() if isinstance(weight, Operand) else weight


def retrained(weight: Array | Operand, named: Named, ids: Sequence[int] | None) -> Retrained:
    """A matrix of these logical axes whose rows `ids`, or all with None, are trained."""
    names = " ".join(map(str, named.names))
    new = value_of(weight).astype(jnp.float32)
    if ids is not None:
        new, ids = new[jnp.asarray(ids)], tuple(ids)
    of_new = names if ids is None else f"rank {named.names[1]}"  # a few rows, on every device
    return Retrained(weight, new, ids, (("*matrix", names), ("*new", of_new)), named.by)


def retrained_in(
    model: PyTree, tokens: tuple[int, ...], whole: Sequence[str]
) -> dict[str, tuple[int, ...] | None]:
    """The paths in a skeleton of what is retrained, with the ids of its rows, or None for all.

    They are the embedding, for `tokens`, and any embedding or head with a path in `whole`.

    Raises:
        ValueError: there is no such matrix, or row, or an embedding would be both.
    """
    found: dict[str, tuple[int, ...] | None] = {}

    def add(path: tuple, names: tuple[str | None, ...], leaf: Any) -> None:
        key = keystr(path)
        if names == ("vocab", "embed") and tokens:
            size = leaf.shape[0]
            require(max(tokens) < size, f"tokens={tokens}: {key} has {size} rows")
            require(key not in whole, f"tokens={tokens}, whole={whole}: both are of {key}")
            found[key] = tokens
        elif key in whole and {*names} == {"vocab", "embed"}:
            found[key] = None

    map_parameters(add, model)
    require(not tokens or tokens in found.values(), f"tokens={tokens}: there is no embedding")
    for path in whole:
        require(path in found, f"whole={path!r} is no embedding or head of the model")
    return found
