"""Products of two dtypes in a loss, which JAX computes in the wider one, and says nothing."""

import contextlib
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend import core
from jaxtyping import PyTree

PRODUCTS = {"dot_general", "conv_general_dilated"}
# They leave numbers as they are, but for their dtype.
MOVES = {"convert_element_type", "reshape", "transpose", "broadcast_in_dim", "squeeze", "copy"}
MOVES |= {"expand_dims", "slice", "dynamic_slice", "rev", "sharding_constraint"}
LIBRARIES = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (jax, eqx))
STANDARD_LIBRARY = os.path.dirname(contextlib.__file__)


class PrecisionWarning(UserWarning):
    """A part of a loss is computed in another dtype than a step was asked for."""


class _Origin(NamedTuple):
    """The narrowest dtype that a value had, and the argument that it is."""

    dtype: Any  # None of what is no array
    name: str = ""

    @property
    def is_low(self) -> bool:
        is_float = self.dtype is not None and jnp.issubdtype(self.dtype, jnp.floating)
        return is_float and self.dtype.itemsize < 4


class _Finding(NamedTuple):
    """A line of a program, and what there is to say of it."""

    file: str
    line: int
    text: str


def watch(
    loss: Callable[..., tuple[Any, Any]], check: Callable[[Any], None] | None = None
) -> Callable[..., None]:
    """A function that gives PrecisionWarnings for `loss(**arguments)`, when first called with such.

    There is one for each line of a product in fp32 of which one operand comes from bf16 or fp16 by
    casts and moves alone, and the other does not: so parameters in the compute dtype meet an
    activation in fp32. Two operands that were both cast to fp32 do not count, as that is
    deliberate. And there is one for a total or a weight that was summed up in bf16 or fp16.
    `check` gets the loss's jaxpr, each time until it raises nothing.
    """
    is_done = False

    def look(**arguments: PyTree) -> None:
        nonlocal is_done
        if not is_done:
            found = dict.fromkeys(_findings(loss, arguments, check))
            is_done = True
            for each in found:
                warnings.warn_explicit(each.text, PrecisionWarning, each.file, each.line)

    return look


def _findings(
    loss: Callable[..., Any],
    arguments: dict[str, PyTree],
    check: Callable[[Any], None] | None,
) -> list[_Finding]:
    """The warnings about a loss, from its trace alone: nothing is computed."""
    arrays, static = eqx.partition(arguments, eqx.is_array)
    jaxpr = jax.make_jaxpr(lambda arrays: loss(**eqx.combine(arrays, static)))(arrays).jaxpr
    if check is not None:
        check(jaxpr)
    leaves = jtu.tree_leaves_with_path(arrays)
    names = [path[0].key + jtu.keystr(path[1:]) for path, _ in leaves]
    inputs = [_Origin(x.dtype, name) for name, (_, x) in zip(names, leaves, strict=True)]
    found: list[_Finding] = []
    outputs = _visit(jaxpr, inputs, found)
    made_by = {x: equation for equation in jaxpr.eqns for x in equation.outvars}
    for what, x, origin in zip(("total", "weight"), jaxpr.outvars, outputs, strict=True):
        if origin.is_low:
            text = (
                f"the loss's {what} is a sum in {origin.dtype}: sum in float32, or keep an entry "
                "of the batch as it is by zoo.losses.keeps_dtype"
            )
            is_constant = isinstance(x, core.Literal)
            found.append(_Finding(*_place(None if is_constant else made_by.get(x)), text))
    return found


def _visit(jaxpr: Any, inputs: list[_Origin], found: list[_Finding]) -> list[_Origin]:
    """The origins of a jaxpr's outputs, given those of its inputs; adds the products found."""
    origins: dict[Any, _Origin] = dict(zip(jaxpr.invars, inputs, strict=True))

    def origin(x: Any) -> _Origin:
        own = _Origin(getattr(x.aval, "dtype", None))
        return own if isinstance(x, core.Literal) else origins.get(x, own)

    for equation in jaxpr.eqns:
        name, operands = equation.primitive.name, [origin(x) for x in equation.invars]
        if name in PRODUCTS and (text := _mixed(equation, operands[:2])):
            found.append(_Finding(*_place(equation), text))
        results: list[_Origin] = []
        for inner in _jaxprs(equation):
            # A branch has an operand in front of its own, and a loop may have.
            given = operands[len(operands) - len(inner.invars) :]
            fits = len(given) == len(inner.invars)
            own = [_Origin(getattr(x.aval, "dtype", None)) for x in inner.invars]
            results = _visit(inner, given if fits else own, found)
        if name in MOVES:
            before, after = operands[0], equation.outvars[0].aval.dtype
            keeps = before.is_low and jnp.issubdtype(after, jnp.floating)
            narrower = keeps and before.dtype.itemsize <= after.itemsize
            results = [_Origin(before.dtype if narrower else after, before.name)]
        if len(results) == len(equation.outvars):
            origins.update(zip(equation.outvars, results, strict=True))
    return [origin(x) for x in jaxpr.outvars]


def _mixed(equation: Any, operands: list[_Origin]) -> str | None:
    """The warning about a product of two dtypes in fp32; None for any other."""
    computed = max((x.aval.dtype for x in equation.invars[:2]), key=lambda dtype: dtype.itemsize)
    dtypes = {operand.dtype for operand in operands}
    if computed.itemsize < 4 or len(dtypes) == 1 or not any(x.is_low for x in operands):
        return None
    first, second = (
        f"{operand.name} {operand.dtype}{list(x.aval.shape)}".strip()
        for operand, x in zip(operands, equation.invars, strict=False)
    )
    return f"a product of {first} and {second} is computed in {computed}: cast one of the two"


def _jaxprs(equation: Any) -> Iterator[Any]:
    """The programs within an equation: of a loop, of branches or of a function.

    Not of a kernel, whose products are as its author chose them.
    """
    if equation.primitive.name == "pallas_call":
        return
    for parameter in jax.tree.leaves(equation.params, is_leaf=_is_jaxpr):
        if _is_jaxpr(parameter):
            yield getattr(parameter, "jaxpr", parameter)


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, core.Jaxpr | core.ClosedJaxpr)


def _place(equation: Any) -> tuple[str, int]:
    """The file and the line that an equation, if any, is of, outside of JAX and Equinox."""
    trace = equation and equation.source_info.traceback
    frames = traceback.extract_tb(trace.as_python_traceback()) if trace else []
    for frame in reversed(frames):
        inside = frame.filename.startswith(LIBRARIES)
        if not inside and os.path.dirname(frame.filename) != STANDARD_LIBRARY:
            return frame.filename, frame.lineno or 0
    return "a loss", 0
