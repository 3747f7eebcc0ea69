"""Rows whose steps a mesh splits: each device recurs over its part at the same time as the others.

A part is read from a state of zeros, and says what it makes of any other. Devices gather this
summary, as small as a state, and each finds the state that its part begins with: none waits for
another's steps, and no steps cross.
"""

from typing import Any

import jax
from jax import lax
from jaxtyping import Array, PyTree

from zoo.nn.recurrences.chunks import Part, Recurrence, RecurrenceConfig, in_chunks
from zoo.nn.recurrences.marks import Marks
from zoo.sharding import mesh_axes, partition_spec
from zoo.sharding.specs import num_parts


def recur(
    recurrence: Recurrence, config: RecurrenceConfig, state: PyTree, tokens: Any, marks: Marks
) -> tuple[PyTree, Array]:
    """Run a recurrence over rows: the state behind them, and the output [batch, seq, heads, …].

    `tokens` are arrays [batch, seq, heads, …], and the state's are [batch, heads, …].
    """
    seq, parts = jax.tree.leaves(tokens)[0].shape[1], num_parts("inner_seq")
    if parts == 1 or seq % parts:
        return in_chunks(recurrence, config, state, tokens, marks)
    mesh = jax.sharding.get_abstract_mesh()
    axes = mesh_axes(partition_spec(["inner_seq"], mesh))

    def specs(tree: PyTree, *names: str) -> PyTree:
        return jax.tree.map(lambda x: partition_spec(names[: x.ndim], mesh), tree)

    def local(state: PyTree, tokens: Any, marks: Marks) -> tuple[PyTree, Array]:
        zeros, read = recurrence.open(state, tokens)
        part = Part(tokens, marks, *in_chunks(recurrence, config, zeros, read, marks))
        summaries = lax.all_gather(recurrence.summary(part), axes)
        turn = lambda before, summary: (recurrence.after(before, summary), before)  # noqa: E731
        final, starts = lax.scan(turn, state, summaries)
        start = jax.tree.map(lambda x: x[lax.axis_index(axes)], starts)
        return final, recurrence.outputs(start, part)

    of_state, of_steps = specs(state, "batch", "heads"), ("batch", "inner_seq", "heads")
    of_output = partition_spec(of_steps, mesh)
    return jax.shard_map(
        local,
        in_specs=(of_state, specs(tokens, *of_steps), specs(marks, *of_steps)),
        out_specs=(of_state, of_output),
        check_vma=False,
    )(state, tokens, marks)
