"""The names in jaxtyping annotations, for the axes of the arrays that they annotate."""

import functools
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zoo.sharding.rules import ShardingError

Names = tuple[str | None, ...]


@functools.cache
def field_hint(cls: type, field: str) -> Any:
    """The annotation of a field of a class or of its bases; None if it has none.

    Raises:
        ShardingError: an annotation of something that is not there at run time.
    """
    try:
        return typing.get_type_hints(cls).get(field)
    except (NameError, AttributeError, TypeError, SyntaxError):
        pass  # perhaps of another field
    for base in cls.__mro__:
        if field in getattr(base, "__annotations__", {}):
            hint = base.__annotations__[field]
            holder = type(cls.__name__, (), {"__annotations__": {field: hint}})
            holder.__module__ = base.__module__
            try:
                return typing.get_type_hints(holder)[field]
            except (NameError, AttributeError, TypeError, SyntaxError) as error:
                raise ShardingError(
                    f"the annotation {hint!r} of {cls.__qualname__}.{field} can't be resolved: "
                    f"{error}; import it at run time, or name the array's axes from outside, by "
                    f"axes={{'*.{field}': 'embed mlp'}}"
                ) from error
    return None


def names_of(
    hint: Any, path: tuple, shape: Sequence[int], renamed: Mapping[str, str], field: str
) -> Names | None:
    """The names of an array's axes by an annotation; None if it names none.

    `path` leads from the annotated field to the array, through containers. Of a union, the part
    that has the array's rank counts. `renamed` are a generic layer's own names for the annotated.

    Raises:
        ShardingError: an array of lower rank than its annotation; `field` names it.
    """
    found = [dims.split() for dims in _dimensions(hint, path)]
    parsed = [parse(dims, renamed) for dims in found if _has_names(dims, renamed)]
    if not parsed:
        return None
    return align(min(parsed, key=lambda names: _missing(names, len(shape))), shape, field)


def _dimensions(hint: Any, path: tuple) -> Iterator[str]:
    """The dimensions in an annotation, also inside a union or a container."""
    if hasattr(hint, "dim_str"):
        yield hint.dim_str
        return
    arguments: Sequence[Any] = typing.get_args(hint)
    if hasattr(hint, "leaftype"):  # of PyTree[...]
        arguments = [hint.leaftype]
    elif typing.get_origin(hint) not in (typing.Union, types.UnionType):
        if typing.get_origin(hint) is tuple and path and ... not in arguments:
            arguments = arguments[path[0].idx :][:1]
        path = path[1:]
    for argument in arguments:
        yield from _dimensions(argument, path)


def _has_names(dims: Sequence[str], renamed: Mapping[str, str]) -> bool:
    """Whether dimensions say how to shard: those of `"4 _"` don't, while a scalar has none."""
    return not dims or any(dim in renamed or _name(dim) for dim in dims)


def parse(dims: Sequence[str], renamed: Mapping[str, str] = types.MappingProxyType({})) -> tuple:
    """Names of dimensions: None for one without, `...` for any number, "#name" if broadcast."""
    names: tuple = ()
    for dim in dims:
        modifiers = dim[: len(dim) - len(dim.lstrip("#*?_"))]
        if dim in renamed:
            found = tuple(renamed[dim].split())
            names += found or (() if "*" in modifiers else (None,))
        else:
            names += (...,) if dim == "..." or "*" in modifiers else (_name(dim),)
    return names


def _name(dim: str) -> str | None:
    """The name of one dimension; `4`, `_`, `_name`, `...`, `*name` and `n+1` have none."""
    name = dim.lstrip("#?").partition("=")[0]  # of `name=4` too
    if not name.isidentifier() or name.startswith("_"):
        return None
    return f"#{name}" if "#" in dim else name


def _missing(names: tuple, rank: int) -> float:
    """How many axes of an array its names leave out; infinity if there are too many of them."""
    free = rank - len([name for name in names if name is not ...])
    return math.inf if free < 0 else 0.0 if ... in names else float(free)


def align(names: tuple, shape: Sequence[int], field: str) -> Names:
    """The names of all axes of an array: right-aligned, so that what stacks it is None.

    Raises:
        ShardingError: an array of lower rank than its names; `field` names it.
    """
    fixed = tuple(name for name in names if name is not ...)
    if len(fixed) > len(shape):
        raise ShardingError(
            f"{field} has the shape {tuple(shape)}, of lower rank than its axes {fixed}"
        )
    start = names.index(...) if ... in names else 0
    whole = (*fixed[:start], *(None,) * (len(shape) - len(fixed)), *fixed[start:])
    return tuple(
        # What is broadcast may have the size 1, which nothing divides.
        None if name is None or (name.startswith("#") and size == 1) else name.lstrip("#")
        for name, size in zip(whole, shape, strict=True)
    )
