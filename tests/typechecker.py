"""The checker of types in the tests: beartype's, once per signature."""

from collections.abc import Callable, Hashable

import beartype

_known: dict[Hashable, Callable] = {}


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
