"""Floating-point operations of a traced step, recomputation and masked products included."""

import math
from typing import Any

import jax
from jax.extend import core


def count(jaxpr: Any) -> float:
    """FLOPs of the products of a jaxpr, on all devices together: two per multiply and add.

    Loops count as often as they run (one of no fixed length once), of branches the dearest.
    """
    total = 0.0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name == "dot_general":
            total += _dot(equation)
            continue
        inner = [
            count(x) for x in jax.tree.leaves(equation.params, is_leaf=_is_jaxpr) if _is_jaxpr(x)
        ]
        if equation.primitive.name == "cond":
            inner = [max(inner)]
        total += sum(inner) * equation.params.get("length", 1 if inner else 0)
    return total


def _dot(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    inner = math.prod(left[axis] for axis in contracted)
    return 2.0 * inner * math.prod(equation.outvars[0].aval.shape)


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, core.Jaxpr | core.ClosedJaxpr)
