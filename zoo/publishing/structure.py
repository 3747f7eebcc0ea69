"""Whether a model is as its configuration makes it: its classes, static fields and shapes."""

import dataclasses
import reprlib
from typing import Any

import equinox as eqx
from jaxtyping import PyTree

from zoo.publishing.errors import PublishError
from zoo.publishing.parts import with_fields
from zoo.publishing.tensors import check_tensors, parameter_shapes
from zoo.sharding.axes import is_parameter


def check_model(model: PyTree, fresh: PyTree) -> None:
    """Raise a PublishError if a model differs from `fresh` in more than its values.

    `fresh` is the model, or its skeleton, that its configuration makes.
    """
    check_tensors("the model", parameter_shapes(model), parameter_shapes(fresh))
    if difference := first_difference(model, fresh):
        raise PublishError(
            f"the model is not the one that its configuration makes, and that loading it would "
            f"give:\n  {difference}\nSave its arrays by equinox.tree_serialise_leaves, "
            "and make the model by its own code"
        )


def first_difference(model: Any, fresh: Any, path: str = "") -> str | None:
    """The first path at which the classes or static fields of two models differ, or None.

    Shapes, dtypes and values of arrays are not compared.
    """
    if is_parameter(model) and is_parameter(fresh):
        return None
    mine, theirs = _children(model), _children(fresh)
    if type(model) is type(fresh) and mine is not None and theirs is not None:
        found = (
            first_difference(mine.get(name), theirs.get(name), f"{path}.{name}".lstrip("."))
            for name in {**theirs, **mine}
        )
        return next((line for line in found if line is not None), None)
    if mine is None and theirs is None and _is_same(model, fresh):
        return None
    return (
        f"{path or type(fresh).__name__}: {_text(model)} here, {_text(fresh)} by the configuration"
    )


def replaced(model: Any, fresh: Any, path: str = "") -> dict[str, Any]:
    """The modules of a model, by path, that stand where `fresh` has something of another class."""
    mine, theirs = _children(model), _children(fresh)
    if type(model) is type(fresh) and mine is not None and theirs is not None:
        found: dict[str, Any] = {}
        for name in theirs:
            found |= replaced(mine.get(name), theirs[name], f"{path}.{name}".lstrip("."))
        return found
    differs = isinstance(model, eqx.Module) and type(model) is not type(fresh)
    return {path: model} if differs and not is_parameter(fresh) else {}


def with_part(model: Any, path: str, part: Any) -> Any:
    """The model with another part at a dotted path; a PublishError if it has no such path."""
    if not path:
        return part
    name, _, rest = path.partition(".")
    children = {str(key): value for key, value in (_children(model) or {}).items()}
    if name not in children:
        raise PublishError(f"a {type(model).__name__} has no part {reprlib.repr(name)}")
    children[name] = with_part(children[name], rest, part)
    if isinstance(model, eqx.Module):
        return with_fields(type(model), children)
    if type(model) in (list, tuple):
        return type(model)(children.values())
    if type(model) is dict:
        return dict(zip(model, children.values(), strict=True))
    raise PublishError(f"no part of a {type(model).__name__} can be replaced")


def _children(x: Any) -> dict[Any, Any] | None:
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return {field.name: getattr(x, field.name, None) for field in dataclasses.fields(x)}
    if isinstance(x, list | tuple):
        return dict(enumerate(x))
    if isinstance(x, eqx.nn.State):
        values, keys = x.tree_flatten()
        return dict(zip(keys, values, strict=True))
    return x if isinstance(x, dict) else None


def _is_same(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except (TypeError, ValueError):
        return False


def _text(x: Any) -> str:
    if is_parameter(x):
        return "an array"
    cls = type(x)
    return reprlib.repr(x) if _children(x) is None else f"{cls.__module__}.{cls.__qualname__}"
