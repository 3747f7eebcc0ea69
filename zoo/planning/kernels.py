"""Pallas kernels in a traced step: FLOPs and bytes of a call, by its grid or its estimate."""

import math
import re
from collections.abc import Callable
from typing import Any

from jax.extend import core

# Of a kernel that leaves out steps of its grid, as `zoo.nn.attention.splash` names its calls.
_STEPS = re.compile(r"runs_(\d+)_of_(\d+)_steps")


def is_kernel(equation: Any) -> bool:
    """Whether an equation of a jaxpr calls a Pallas kernel."""
    return equation.primitive.name == "pallas_call"


def flops(equation: Any, scope: str, count: Callable[[Any], float]) -> float:
    """FLOPs of a call: its estimate, or those that `count` finds in a step, as often as it runs.

    `scope` holds the names around the call.

    Raises:
        ValueError: a grid whose size is not known, without an estimate.
    """
    estimate = equation.params["cost_estimate"]
    if estimate is not None:
        return float(estimate.flops)
    steps = math.prod(_grid(equation)) * _share(scope)
    return steps * count(equation.params["jaxpr"])


def num_bytes(equation: Any, scope: str) -> float:
    """Bytes that a call moves between the chip and its memory: its estimate, or block by block.

    A block is moved at each step of the grid where it may be another one than at the step before.

    Raises:
        ValueError: as `flops`.
    """
    estimate = equation.params["cost_estimate"]
    if estimate is not None:
        return float(estimate.bytes_accessed)
    grid, total = _grid(equation), 0.0
    for block in equation.params["grid_mapping"].block_mappings:
        sizes = [getattr(size, "block_size", size) for size in block.block_shape]
        elements = math.prod(size for size in sizes if isinstance(size, int))
        axes = 1 + max(_axes(block.index_map_jaxpr.jaxpr, len(grid)), default=-1)
        moves = math.prod(grid[:axes]) * (_share(scope) if axes == len(grid) else 1.0)
        total += moves * elements * _dtype(block).itemsize
    return total


def _dtype(block: Any) -> Any:
    return block.array_aval.dtype


def _grid(equation: Any) -> tuple[int, ...]:
    grid = equation.params["grid_mapping"].grid
    if not all(isinstance(size, int) for size in grid):
        name = equation.params.get("name") or "of no name"
        raise ValueError(f"the kernel {name}: its grid is known only as it runs: {grid}")
    return tuple(grid)


def _share(scope: str) -> float:
    found = _STEPS.findall(scope)
    return int(found[-1][0]) / int(found[-1][1]) if found else 1.0


def _axes(index_map: Any, rank: int) -> set[int]:
    """The axes of the grid on which a block's place depends."""
    needed = {x for x in index_map.outvars if not isinstance(x, core.Literal)}
    for equation in reversed(index_map.eqns):
        if needed & set(equation.outvars):
            needed |= {x for x in equation.invars if not isinstance(x, core.Literal)}
    return {axis for axis, x in enumerate(index_map.invars[:rank]) if x in needed}
