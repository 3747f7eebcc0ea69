"""Whether two models are the same but for their values: classes, static fields and shapes."""

import dataclasses
import reprlib
from collections.abc import Mapping
from typing import Any

import equinox as eqx
from jaxtyping import PyTree

from zoo.publishing.errors import PublishError
from zoo.publishing.tensors import differences, parameter_shapes
from zoo.sharding.axes import is_parameter


def check_model(model: PyTree, fresh: PyTree) -> None:
    """Raise a PublishError if a model differs from `fresh` in more than its values.

    `fresh` is the model, or its skeleton, that its configuration makes.
    """
    if difference := first_difference(model, fresh):
        raise PublishError(
            f"the model is not the one that its configuration makes:\n  {difference}"
        )


def first_difference(model: PyTree, fresh: PyTree) -> str | None:
    """One line on the first path at which a model and `fresh` differ in more than values, or None.

    That is a parameter's shape, a class, or a static field.
    """
    shapes = parameter_shapes(model), parameter_shapes(fresh)
    lines = differences(*shapes, "here", "by the configuration")
    return _difference(model, fresh, "") or next(iter(lines), None)


def _difference(model: Any, fresh: Any, path: str) -> str | None:
    if is_parameter(model) and is_parameter(fresh):
        return None
    mine, theirs = _children(model), _children(fresh)
    if type(model) is type(fresh) and mine is not None and theirs is not None:
        found = (
            _difference(mine.get(name), theirs.get(name), f"{path}.{name}".lstrip("."))
            for name in {**theirs, **mine}
        )
        return next((line for line in found if line is not None), None)
    try:
        if mine is None and theirs is None and (model is fresh or bool(model == fresh)):
            return None
    except (TypeError, ValueError):
        pass  # values that cannot be compared differ
    return (
        f"{path or type(fresh).__name__}: {_text(model)} here, {_text(fresh)} by the configuration"
    )


def _children(x: Any) -> Mapping[Any, Any] | None:
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return {field.name: getattr(x, field.name, None) for field in dataclasses.fields(x)}
    if isinstance(x, list | tuple):
        return dict(enumerate(x))
    if isinstance(x, eqx.nn.State):
        values, keys = x.tree_flatten()
        return dict(zip(keys, values, strict=True))
    return x if isinstance(x, dict) else None


def _text(x: Any) -> str:
    if is_parameter(x):
        return "an array"
    cls = type(x)
    return reprlib.repr(x) if _children(x) is None else f"{cls.__module__}.{cls.__qualname__}"
