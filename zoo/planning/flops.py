"""Floating-point operations of a traced step, and the bytes of its Pallas kernels.

Recomputation and masked products are included. A kernel counts by its grid or its estimate.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend import core
from jaxtyping import PyTree

from zoo.transformer.config import Config
from zoo.transformer.dispatch import RARELY
from zoo.transformer.flops import num_flops_per_image, num_flops_per_token
from zoo.transformer.model import Transformer
from zoo.transformer.vision import VisionTransformer
from zoo.wrappers.lora import Adapted, is_adapted
from zoo.wrappers.retrained import Retrained

# Of a kernel that leaves out steps of its grid, as `zoo.nn.attention.splash` names its calls, and
# of experts that have room for more rows, as `zoo.transformer.dispatch` does.
_STEPS = re.compile(r"runs_(\d+)_of_(\d+)_steps")

Amounts = Mapping[Any, float]


def count(jaxpr: Any, of: Any = None) -> float:
    """FLOPs of the products of a jaxpr, on all devices together: two per multiply and add.

    Loops count as often as they run, branches by the dearest that is not marked as seldom taken, a
    kernel by its estimate or else by what it executes, and the program of one device in a
    `shard_map` as often as there are devices. Given a dtype, only products `of` such operands
    count, and no kernel.

    Raises:
        ValueError: products in a loop or a kernel of which it is not known how often it runs.
    """

    def products(equation: Any, scope: str) -> float | None:
        name = equation.primitive.name
        if name == "dot_general":
            return _dot(equation) if of in (None, equation.invars[0].aval.dtype) else 0.0
        if name.startswith("ragged_dot"):
            return _ragged_dot(equation) * _share(scope) if of is None else 0.0
        if not _is_kernel(equation):
            return None
        if of is not None:
            return 0.0
        estimate = equation.params["cost_estimate"]
        if estimate is None:
            return _executed(equation, scope)
        return float(estimate.flops) * (_share(scope) if _is_open(equation) else 1.0)

    def amounts(equation: Any, scope: str) -> Amounts | None:
        found = products(equation, scope)
        return None if found is None else {"products": found}

    return _total(jaxpr, amounts).get("products", 0.0)


def of_kernels(jaxpr: Any) -> dict[str, tuple[float, float]]:
    """FLOPs and bytes of the kernels of a jaxpr by their names, on all devices together.

    These are the FLOPs that they execute, which may be more than `count` has of them.

    Raises:
        ValueError: as `count`.
    """

    def amounts(equation: Any, scope: str) -> Amounts | None:
        if not _is_kernel(equation):
            return None
        name = _kernel_name(equation, scope)
        executed, moved = _executed(equation, scope), _moved(equation, scope)
        return {(name, "FLOPs"): executed, (name, "bytes"): moved}

    found = _total(jaxpr, amounts)
    names = sorted({name for name, _ in found})
    return {name: (found[name, "FLOPs"], found[name, "bytes"]) for name in names}


def per_unit(model: PyTree, seq_len: int) -> float | None:
    """FLOPs that the maths of training a transformer needs per token, or per image; else None.

    Adapters, and a head with `whole`, are trained alone: the weights beside them take part in the
    forward pass and in the gradients of activations, and have none themselves.
    """
    head: Any = None
    if isinstance(model, VisionTransformer):
        config, tokens = model.config.parts, model.config.num_tokens
        total, weights = (num_flops_per_image(model.config, n) for n in (tokens, 0))
    elif isinstance(model, Transformer):
        config, tokens, head = model.config, 1, (model.head or model.embedding).weight
        total, weights = (num_flops_per_token(config, length) for length in (seq_len, 0))
    else:
        return None
    leaves = jax.tree.leaves(model, is_leaf=is_adapted)
    adapters = [x for x in leaves if isinstance(x, Adapted)]
    of_adapters = 6 * tokens * sum(_used(x, config) for x in adapters)
    if isinstance(head, Retrained) and head.ids is None:
        of_adapters += 2 * math.prod(head.shape)
    return total - bool(adapters) * weights / 3 + of_adapters


def _used(adapter: Adapted, config: Config) -> float:
    """The weights of an adapter that a token is multiplied by: of experts, those it goes to."""
    share = 1.0
    experts = config.experts
    if experts.num_experts is not None and "experts" in dict(adapter.axes)["*inputs"].split():
        share = experts.per_token / experts.num_experts
    return share * (adapter.down.size + adapter.up.size)


def _dot(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    inner = math.prod(left[axis] for axis in contracted)
    return 2.0 * inner * math.prod(equation.outvars[0].aval.shape)


def _ragged_dot(equation: Any) -> float:
    """Each row is multiplied by the matrix of its group, and by no other."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    left, _, groups = (x.aval.shape for x in equation.invars[:3])
    inner = math.prod(left[axis] for axis in contracted)
    flops = 2.0 * inner * math.prod(equation.outvars[0].aval.shape)
    # A matrix of each group is the sum of the products of its own rows.
    summed = set(numbers.lhs_ragged_dimensions) <= set(contracted)
    return flops / groups[-1] if summed else flops


def _total(jaxpr: Any, amounts: Callable[[Any, str], Amounts | None], scope: str = "") -> Amounts:
    """The sums of amounts over a jaxpr, loops and devices included; None looks inside."""
    total, used = defaultdict[Any, float](float), _used_in(jaxpr)
    for equation in _equations(jaxpr):
        if _is_kernel(equation) and used.isdisjoint(equation.outvars):
            continue  # JAX leaves it in a program that recomputes other things; XLA drops it
        names = f"{scope}/{equation.source_info.name_stack}"
        found = amounts(equation, names)
        if found is None:
            inner = [
                _total(x, amounts, names + _jitted(equation))
                for x in core.jaxprs_in_params(equation.params)
                if not (equation.primitive.name == "cond" and _is_rare(x))
            ]
            joined = max if equation.primitive.name == "cond" else sum
            keys = {key for each in inner for key in each}
            found = {key: joined(each.get(key, 0.0) for each in inner) for key in keys}
            if any(found.values()):
                times = _times(equation)
                found = {key: times * amount for key, amount in found.items()}
        for key, amount in found.items():
            total[key] += amount
    return total


def _jitted(equation: Any) -> str:
    """The name of a function that is jitted, as the program's instructions have it."""
    return f"/jit({equation.params['name']})" if equation.primitive.name in ("jit", "pjit") else ""


def _used_in(jaxpr: Any) -> set[Any]:
    """The variables that an equation takes, or that the jaxpr returns."""
    taken = [x for equation in _equations(jaxpr) for x in equation.invars]
    taken += getattr(jaxpr, "jaxpr", jaxpr).outvars
    return {x for x in taken if not isinstance(x, core.Literal)}


def _is_rare(branch: Any) -> bool:
    return any(RARELY in str(x.source_info.name_stack) for x in _equations(branch))


def _times(equation: Any) -> int:
    """How often the program inside of an equation runs, on all devices together."""
    params = equation.params
    if equation.primitive.name == "shard_map":
        axes = params.get("newly_manual_axes", params.get("manual_axes"))  # by the release of JAX
        return math.prod(params["mesh"].shape[axis] for axis in axes)
    if equation.primitive.name == "while":
        raise ValueError(
            f"a loop with products in it, in {equation.source_info.name_stack or 'the step'}: how "
            "often it runs is known only as it runs; write it as jax.lax.scan"
        )
    return params.get("length", 1)


def _equations(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr).eqns


def _is_kernel(equation: Any) -> bool:
    return equation.primitive.name == "pallas_call"


def _kernel_name(equation: Any, scope: str) -> str:
    """The name of the kernel that a call runs, as the compiled program has it.

    That is its own or, if it has none, that of the jitted function around it.
    """
    params = equation.params
    if "name_and_src_info" in params:  # of earlier versions of JAX
        return str(params["name_and_src_info"].name)
    jitted = re.findall(r"\bjit\((\w+)\)", scope)
    return str(params["name"] or (jitted or [params["jaxpr"].debug_info.func_name])[-1])


def _executed(equation: Any, scope: str) -> float:
    """FLOPs of all steps of a kernel's call: with rows in groups, a tile counts for each of them.

    Raises:
        ValueError: a grid whose size is not known, and no table that says how long it may be.
    """
    estimate = equation.params["cost_estimate"]
    if estimate is not None and not _is_open(equation):
        return float(estimate.flops)
    return math.prod(_grid(equation, scope)) * count(equation.params["jaxpr"])


def _moved(equation: Any, scope: str) -> float:
    """Bytes that a call moves between the chip and its memory: its estimate, or block by block.

    A block is moved at each step of the grid where it may be another one than at the step before.
    The size of a grid may be known only as it runs, by tables which say what each step works on,
    as those of megablox do. An estimate then knows no more than the shapes, so blocks are counted:
    an axis is as long as its tables; along it blocks come in order, each once, however many steps
    work on it. So a matrix of a group is moved once for each turn of the axes outside.

    Raises:
        ValueError: as `_executed`.
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
        where = f"the kernel {_kernel_name(equation, scope)}"
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
