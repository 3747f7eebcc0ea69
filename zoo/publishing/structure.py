"""Whether a model is as its configuration makes it: its classes, static fields and shapes."""

import dataclasses
import reprlib
from typing import Any

from jaxtyping import PyTree

from zoo.publishing.errors import PublishError
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


def _children(x: Any) -> dict[Any, Any] | None:
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return {field.name: getattr(x, field.name, None) for field in dataclasses.fields(x)}
    if isinstance(x, list | tuple):
        return dict(enumerate(x))
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
