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


def name(equation: Any, scope: str) -> str:
    """The name of the kernel that a call runs, as the compiled program has it.

    That is its own, or if it has none the one of the function around it which is jitted.
    """
    params = equation.params
    if "name_and_src_info" in params:  # of earlier versions of JAX
        return str(params["name_and_src_info"].name)
    jitted = re.findall(r"\bjit\((\w+)\)", scope)
    return str(params["name"] or (jitted or [params["jaxpr"].debug_info.func_name])[-1])


def flops(equation: Any, scope: str, count: Callable[[Any], float]) -> float:
    """FLOPs of a call: its estimate, or what `count` finds in a step, times the number of runs.

    `scope` holds the names around the call.

    Raises:
        ValueError: a grid whose size is not known, without an estimate.
    """
    estimate = equation.params["cost_estimate"]
    if estimate is None:
        return executed(equation, scope, count)
    return float(estimate.flops) * (_share(scope) if _is_open(equation) else 1.0)


def executed(equation: Any, scope: str, count: Callable[[Any], float]) -> float:
    """FLOPs of all steps of a call: of rows in groups a tile counts for each group that has some.

    Raises:
        ValueError: a grid whose size is not known, and no table that says how long it may be.
    """
    estimate = equation.params["cost_estimate"]
    if estimate is not None and not _is_open(equation):
        return float(estimate.flops)
    return math.prod(_grid(equation, scope)) * count(equation.params["jaxpr"])


def num_bytes(equation: Any, scope: str) -> float:
    """Bytes that a call moves between the chip and its memory: its estimate, or block by block.

    A block is moved at each step of the grid where it may be another one than at the step before.
    The size of a grid may be known only as it runs, by tables which say what each step works on,
    as those of megablox do. An estimate then knows no more than the shapes, so blocks are counted:
    an axis is as long as its tables; along it blocks come in order, each once, however many steps
    work on it. So a matrix of a group is moved once for each turn of the axes outside.

    Raises:
        ValueError: as `executed`.
    """
    estimate = equation.params["cost_estimate"]
    if estimate is not None and not _is_open(equation):
        return float(estimate.bytes_accessed)
    mapping, grid, total = equation.params["grid_mapping"], _grid(equation, scope), 0.0
    for block in mapping.block_mappings:
        sizes = [getattr(size, "block_size", size) for size in block.block_shape]
        sizes = [size if isinstance(size, int) else 1 for size in sizes]
        index_map = block.index_map_jaxpr.jaxpr
        axes = [axis for axis in _axes(index_map.outvars, index_map, len(grid)) if grid[axis] > 1]
        last = max(axes, default=-1)
        moves = math.prod(grid[: last + 1])
        if axes and not isinstance(mapping.grid[last], int):
            places = zip(index_map.outvars, block.array_aval.shape, sizes, strict=True)
            blocks = math.prod(
                math.ceil(whole / size)
                for place, whole, size in places
                if last in _axes([place], index_map, len(grid))
            )
            moves *= min(1.0, blocks / grid[last])
        total += moves * math.prod(sizes) * block.array_aval.dtype.itemsize
    return total


def _is_open(equation: Any) -> bool:
    """Whether the size of a grid is known only as it runs."""
    return not all(isinstance(size, int) for size in equation.params["grid_mapping"].grid)


def _grid(equation: Any, scope: str) -> tuple[float, ...]:
    """The steps along each axis, without the ones that are left out.

    The axis that is shortened is the one whose size is known only as it runs, or the last one.
    """
    sizes = equation.params["grid_mapping"].grid
    grid = [float(size) if isinstance(size, int) else 0.0 for size in sizes]
    shortened = len(grid) - 1
    for axis, size in enumerate(sizes):
        if not isinstance(size, int):
            grid[axis], shortened = _longest(equation, scope, axis), axis
    if grid:
        grid[shortened] *= _share(scope)
    return tuple(grid)


def _longest(equation: Any, scope: str, axis: int) -> float:
    """The length of the tables that are read along an axis: the most steps that it may have."""
    found = [0]
    for block in equation.params["grid_mapping"].block_mappings:
        index_map = block.index_map_jaxpr.jaxpr
        for read in index_map.eqns:
            if read.primitive.name == "get" and read.invars[1:] == [index_map.invars[axis]]:
                found.append(read.invars[0].aval.size)
    if not any(found):
        grid = equation.params["grid_mapping"].grid
        where = f"the kernel {name(equation, scope)}"
        raise ValueError(f"{where}: its grid is known only as it runs: {grid}")
    return float(max(found))


def _share(scope: str) -> float:
    found = _STEPS.findall(scope)
    return int(found[-1][0]) / int(found[-1][1]) if found else 1.0


def _axes(outputs: Any, index_map: Any, rank: int) -> set[int]:
    """The axes of the grid on which outputs of an index map depend."""
    needed = {x for x in outputs if not isinstance(x, core.Literal)}
    for equation in reversed(index_map.eqns):
        if needed & set(equation.outvars):
            needed |= {x for x in equation.invars if not isinstance(x, core.Literal)}
    return {axis for axis, x in enumerate(index_map.invars[:rank]) if x in needed}
