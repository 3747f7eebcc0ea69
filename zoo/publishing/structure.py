"""Whether a model is what its configuration makes: its classes, static fields and shapes."""

import dataclasses
import reprlib
from typing import Any

from jaxtyping import PyTree

from zoo.publishing.tensors import PublishError, check_tensors, parameter_shapes
from zoo.sharding.axes import is_parameter


def check_model(model: PyTree, fresh: PyTree) -> None:
    """Refuse a model that is not as `fresh`, what its configuration makes, but for its numbers.

    Raises:
        PublishError: it names the first path that differs, and what is there in both.
    """
    check_tensors("the model", parameter_shapes(model), parameter_shapes(fresh))
    if difference := first_difference(model, fresh):
        raise PublishError(
            f"the model is another one than its configuration makes, which is what loading it "
            f"would give:\n  {difference}\nKeep its arrays by equinox.tree_serialise_leaves, "
            "and make it by its own code"
        )


def first_difference(model: Any, fresh: Any, path: str = "") -> str | None:
    """The first path at which two models have other classes or static fields, and which; or None.

    Arrays are alike whatever their shapes, dtypes and values.
    """
    if is_parameter(model) and is_parameter(fresh):
        return None
    mine, theirs = _children(model), _children(fresh)
    if type(model) is type(fresh) and mine is not None and theirs is not None:
        names = [*dict.fromkeys([*theirs, *mine])]
        found = (
            first_difference(mine.get(name), theirs.get(name), f"{path}.{name}".lstrip("."))
            for name in names
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


def _name(x: Any) -> str:
    return f"{x.__module__}.{x.__qualname__}"


def _text(x: Any) -> str:
    if is_parameter(x):
        return "an array"
    return reprlib.repr(x) if _children(x) is None else _name(type(x))
