"""The checker of types in the tests: beartype's, once per signature."""

import functools
import re
import types
import typing
from collections.abc import Callable, Hashable
from typing import Any

import beartype
import jaxtyping

_known: dict[Hashable, Callable] = {}
_jaxtyped: Any = jaxtyping.jaxtyped
_of_all: Any = beartype.beartype(
    conf=beartype.BeartypeConf(violation_type=jaxtyping.TypeCheckError)
)
_SHAPES = re.compile(r"jaxtyping\.(?!PyTree\b(?!\[))")  # PyTree alone has none


def check(function: Callable) -> Callable:
    """The function with its arguments checked.

    jaxtyping gives stand-ins, which are their signatures alone. A nested function is defined anew
    in each call of the outer one, and beartype would take a tenth of the tests' time for them.
    """
    code = function.__code__
    counts = (code.co_posonlyargcount, code.co_argcount, code.co_kwonlyargcount, code.co_flags)
    optional = (len(function.__defaults__ or ()), *(function.__kwdefaults__ or ()))
    hints = tuple(function.__annotations__.items())
    key = (function.__module__, function.__qualname__, counts, optional, code.co_varnames, hints)
    if key not in _known:
        _known[key] = beartype.beartype(function)
    return _known[key]


def jaxtyped(function: Any = None, *, typechecker: Any) -> Any:
    """`jaxtyping.jaxtyped`, which binds the arguments of each call, where there are shapes.

    Other functions are checked by beartype alone, in a thirtieth of the time.
    """
    if function is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if isinstance(function, types.FunctionType) and not function.__annotations__:
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

    Of a class, and of a nested function too, which is defined anew in each call.
    """
    if not isinstance(function, types.FunctionType) or "<locals>" in function.__qualname__:
        return None
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception:  # a name that is defined later
        return None
    return None if _SHAPES.search(repr(hints)) else hints
