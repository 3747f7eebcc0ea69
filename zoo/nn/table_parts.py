"""Tables of vectors on a mesh: devices exchange the vectors of tokens, and none has a whole table.

Legend of suffixes: B batch, T time, E embed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from zoo.sharding import mesh_axes, partition_spec, spec_in_use
from zoo.sharding.specs import between, num_shards


class TableParts(NamedTuple):
    """How a mesh cuts [batch, seq] tokens, and [rows, embed] of a table's gradient.

    Found in the forward pass, as JAX traces a gradient outside of the contexts around it.
    """

    tokens: PartitionSpec
    stored: PartitionSpec
    table: PartitionSpec
    sizes: tuple[int, int, int]
    """Into how many parts: batch, seq, embed."""
    vectors: PartitionSpec
    """How vectors, [batch, seq, embed], are cut where they are used."""

    @staticmethod
    def of(axes: tuple[str | None, str | None]) -> "TableParts":
        """Of a table with these logical axes, on the mesh that is set."""
        mesh = jax.sharding.get_abstract_mesh()
        stored = partition_spec(axes, mesh)
        *_, table = stored, *between(stored, spec_in_use(axes, mesh))  # what `unshard` takes first
        taken = frozenset(mesh_axes(table))
        tokens = partition_spec(("batch", "inner_seq"), mesh, without=taken)
        batch, seq, embed = (num_shards([entry], mesh) for entry in (*tokens, table[1]))
        vectors = partition_spec(("batch", "inner_seq", None), mesh)
        return TableParts(tokens, stored, table, (batch, seq, embed), vectors)

    def divide(self, shape: tuple[int, ...]) -> bool:
        """Whether they cut vectors of [batch, seq, embed] evenly."""
        return len(shape) == 3 and not any(np.array(shape) % self.sizes)

    def are_exchanged(self, shape: tuple[int, ...]) -> bool:
        """Whether each device looks up its columns of the table for the tokens of others too."""
        return self.sizes[2] > 1 and self.divide(shape)

    def look_up(
        self, weight: Float[Array, "rows embed"], ids_BT: Int[Array, "batch seq"]
    ) -> Float[Array, "batch seq embed"]:
        """The rows of tokens, by an exchange of their vectors."""
        rows = weight.at[self._cut(ids_BT)].get(mode="clip")
        spec = PartitionSpec(*self.tokens, None, None, self.table[1])
        rows = jax.lax.with_sharding_constraint(rows, spec)
        rows = rows.swapaxes(1, 2).reshape(*ids_BT.shape, weight.shape[1])
        return jax.lax.with_sharding_constraint(rows, self.vectors)

    def add_up(
        self,
        function: Callable[[Array, Array], Array],
        ids_BT: Int[Array, "batch seq"],
        g_BTE: Float[Array, "batch seq embed"],
    ) -> Float[Array, "rows embed"]:
        """A table's gradient, of which `function(ids, g)` adds up some tokens.

        Devices exchange the tokens' vectors, and each adds up all tokens in its columns of the
        table: none has a gradient of the whole table, as it would by adding up the rows of its own
        tokens. Over axes that store no columns, devices add up in the dtype of the weight.
        """
        g, ids = self._cut(g_BTE, self.table[1]), self._cut(ids_BT)
        by_part = jax.vmap(jax.vmap(function))(ids, g)
        spec = PartitionSpec(*self.tokens, *self.table)
        by_part = jax.lax.with_sharding_constraint(by_part, spec)
        return jax.lax.reduce(by_part, jnp.zeros((), by_part.dtype), jax.lax.add, (0, 1))

    def _cut(self, x: Array, *last: Any) -> Array:
        """The first two axes of x in parts, the new first two; `last` cuts the last one."""
        (rows, length), (m, n, _) = x.shape[:2], self.sizes
        x = x.reshape(m, rows // m, n, length // n, *x.shape[2:]).swapaxes(1, 2)
        return jax.lax.with_sharding_constraint(x, PartitionSpec(*self.tokens, None, None, *last))
