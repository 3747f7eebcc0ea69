"""Floating-point operations of a traced step, recomputation and masked products included."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core
from jaxtyping import PyTree

from zoo.nn.grouped_products import SCOPE
from zoo.planning import kernels
from zoo.transformer.config import Config, num_flops_per_token
from zoo.transformer.model import Transformer
from zoo.wrappers.lora import Adapted, is_adapted


def count(jaxpr: Any, of: Any = None) -> float:
    """FLOPs of the products of a jaxpr, on all devices together: two per multiply and add.

    Loops count as often as they run, of branches the dearest, a kernel as `kernels.flops` says,
    and the program of one device in a `shard_map` as often as there are devices. Given a dtype,
    only those `of` operands of it, and no kernel.

    Raises:
        ValueError: products in a loop or a kernel of which it is not known how often it runs.
    """

    def products(equation: Any, scope: str) -> float | None:
        if of is not None and kernels.is_kernel(equation):
            return 0.0
        if equation.primitive.name == "dot_general":
            return _dot(equation) if of in (None, equation.invars[0].aval.dtype) else 0.0
        if equation.primitive.name.startswith("ragged_dot"):
            return _ragged_dot(equation) if of is None else 0.0
        if kernels.is_kernel(equation):
            return kernels.flops(equation, scope, count)
        return None

    return _total(jaxpr, products)


def of_kernels(jaxpr: Any) -> dict[str, tuple[float, float]]:
    """FLOPs and bytes of the kernels of a jaxpr by their names, on all devices together.

    These are the FLOPs that they execute, which may be more than `count` has of them.

    Raises:
        ValueError: as `count`.
    """
    names: set[str] = set()

    def total(amount: Callable[[Any, str], float], name: str) -> float:
        def of_kernel(equation: Any, scope: str) -> float | None:
            if not kernels.is_kernel(equation):
                return None
            names.add(kernels.name(equation, scope))
            return amount(equation, scope) if kernels.name(equation, scope) == name else 0.0

        return _total(jaxpr, of_kernel)

    total(kernels.num_bytes, "")  # collects the names
    executed = functools.partial(kernels.executed, count=count)
    return {name: (total(executed, name), total(kernels.num_bytes, name)) for name in sorted(names)}


def has_local_experts(jaxpr: Any, is_local: bool = False) -> bool:
    """Whether a device has some of the experts, and so rows that it multiplies by none of its own.

    How many these are is known only as it runs.
    """
    for equation in _equations(jaxpr):
        kernel = SCOPE in str(equation.source_info.name_stack)
        if is_local and (kernel or equation.primitive.name.startswith("ragged_dot")):
            return True
        inside = is_local or equation.primitive.name == "shard_map"
        if any(has_local_experts(x, inside) for x in _inner(equation)):
            return True
    return False


def per_token(model: PyTree, seq_len: int) -> float | None:
    """FLOPs that the maths of training a transformer needs per token; None for another model.

    Adapters are trained alone: the weights beside them take part in the forward pass and in the
    gradients of activations, and have none themselves.
    """
    if not isinstance(model, Transformer):
        return None
    adapters = [x for x in jax.tree.leaves(model, is_leaf=is_adapted) if is_adapted(x)]
    total, weights = (num_flops_per_token(model.config, length) for length in (seq_len, 0))
    return total - bool(adapters) * weights / 3 + 6 * sum(_used(x, model.config) for x in adapters)


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


def _total(jaxpr: Any, amount: Callable[[Any, str], float | None], scope: str = "") -> float:
    """The sum of an amount over a jaxpr, loops and devices included; None looks inside."""
    total, used = 0.0, _used_in(jaxpr)
    for equation in _equations(jaxpr):
        if kernels.is_kernel(equation) and used.isdisjoint(equation.outvars):
            continue  # JAX leaves it in a program that recomputes other things; XLA drops it
        names = f"{scope}/{equation.source_info.name_stack}"
        found = amount(equation, names)
        if found is None:
            inner = [_total(x, amount, names + _jitted(equation)) for x in _inner(equation)]
            if equation.primitive.name == "cond":
                inner = [max(inner)]
            found = sum(inner) and sum(inner) * _times(equation)
        total += found
    return total


def _jitted(equation: Any) -> str:
    """The name of a function that is jitted, as the program's instructions have it."""
    return f"/jit({equation.params['name']})" if equation.primitive.name in ("jit", "pjit") else ""


def _used_in(jaxpr: Any) -> set[Any]:
    """The variables that an equation takes, or that the jaxpr returns."""
    taken = [x for equation in _equations(jaxpr) for x in equation.invars]
    taken += getattr(jaxpr, "jaxpr", jaxpr).outvars
    return {x for x in taken if not isinstance(x, core.Literal)}


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


def _inner(equation: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(equation.params, is_leaf=_is_jaxpr) if _is_jaxpr(x)]


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, core.Jaxpr | core.ClosedJaxpr)
