"""The checker of types in the tests: beartype's, of shapes only where there are some."""

import functools
import re
import types
import typing
from typing import Any

import beartype
import jaxtyping

_jaxtyped: Any = jaxtyping.jaxtyped
_of_all: Any = beartype.beartype(
    conf=beartype.BeartypeConf(violation_type=jaxtyping.TypeCheckError)
)
_SHAPES = re.compile(r"jaxtyping\.(?!PyTree\b(?!\[))")  # PyTree alone has none


def jaxtyped(function: Any = None, *, typechecker: Any) -> Any:
    """`jaxtyping.jaxtyped`, which binds the arguments of each call, where there are shapes.

    Other functions are checked by beartype alone, in a thirtieth of the time.
    """
    if function is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if isinstance(function, types.FunctionType):
        nested = "<locals>" in function.__qualname__  # is defined anew in each call of the outer
        if nested or not function.__annotations__:
            return function
    hints = _hints_without_shapes(function)
    if hints is None:
        return _jaxtyped(function, typechecker=typechecker)
    code, names = function.__code__, function.__globals__
    checked = types.FunctionType(
        code, names, function.__name__, function.__defaults__, function.__closure__
    )
    checked.__annotations__, checked.__kwdefaults__ = hints, function.__kwdefaults__
    checked.__qualname__, checked.__module__ = function.__qualname__, function.__module__
    checked = _of_all(checked)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = function if jaxtyping.config.jaxtyping_disable else checked
        return chosen(*args, **kwargs)

    return call


def _hints_without_shapes(function: Any) -> dict[str, Any] | None:
    """The types of a function's arguments; None where one is an array, or may be.

    Of a class too.
    """
    if not isinstance(function, types.FunctionType):
        return None
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception:  # a name that is defined later
        return None
    return None if _SHAPES.search(repr(hints)) else hints
