"""Floating-point operations of a traced step, recomputation and masked products included."""

import math
from typing import Any

import jax
from jax.extend import core
from jaxtyping import PyTree

from zoo.transformer.config import Config, num_flops_per_token
from zoo.transformer.model import Transformer
from zoo.wrappers.lora import Adapted, is_adapted


def count(jaxpr: Any) -> float:
    """FLOPs of the products of a jaxpr, on all devices together: two per multiply and add.

    Loops count as often as they run (one of no fixed length once), of branches the dearest. Within
    a `shard_map` they are those of one device: see `has_local_parts`.
    """
    total = 0.0
    for equation in _equations(jaxpr):
        if equation.primitive.name == "dot_general":
            total += _dot(equation)
            continue
        if equation.primitive.name.startswith("ragged_dot"):
            total += _ragged_dot(equation)
            continue
        inner = [count(x) for x in _inner(equation)]
        if equation.primitive.name == "cond":
            inner = [max(inner)]
        total += sum(inner) * equation.params.get("length", 1 if inner else 0)
    return total


def has_local_parts(jaxpr: Any) -> bool:
    """Whether a part of a jaxpr is a program of one device, with the shapes of its share."""
    return any(
        equation.primitive.name == "shard_map" or any(map(has_local_parts, _inner(equation)))
        for equation in _equations(jaxpr)
    )


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
    if config.num_experts is not None and "experts" in dict(adapter.axes)["*inputs"].split():
        share = config.experts_per_token / config.num_experts
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


def _equations(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr).eqns


def _inner(equation: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(equation.params, is_leaf=_is_jaxpr) if _is_jaxpr(x)]


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, core.Jaxpr | core.ClosedJaxpr)
