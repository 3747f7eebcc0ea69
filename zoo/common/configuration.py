"""Configurations are dataclasses whose fields have values of the types they are annotated with.

A `Config` calls `check(self)` in its `__post_init__`; `from_json` makes one of a file's fields. A
field that `may_differ` between two starts of a run says so in its own declaration. A field of a
configuration in another has a dotted name, such as "attention.window", as on the command line.
"""

import dataclasses
import functools
import math
import numbers
import reprlib
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

_TEXTS = {
    bool: "True or False",
    float: "a finite number",
    int: "an integer of 32 bits",
    str: "a text",
    Path: "a path",
    type(None): "None",
}


# In the metadata of fields:
_MAY_DIFFER, _OF_TRAINING = "may differ", "of training"


def may_differ(default: Any = dataclasses.MISSING) -> Any:
    """A field that may differ between two starts of a run, as it does not change the maths.

    For the dataclass of a run's configuration: `workers: int = zoo.may_differ(2)`. Any other field
    is compared, and a folder with another value is refused. A subclass that gives the field another
    default need not say so again.
    """
    return dataclasses.field(default=default, metadata={_MAY_DIFFER: True})


def of_training(default: Any) -> Any:
    """A field that changes how a model trains, not its parameters or what it then computes."""
    return dataclasses.field(default=default, metadata={_OF_TRAINING: True})


def changed(config: Any, values: Mapping[str, Any]) -> Any:
    """A model's configuration with other values for fields that its parameters do not depend on.

    Those are the fields that `may_differ`, and those `of_training`; see `replaced` for the names.

    Raises:
        ValueError: another field, or a value that it can't have.
    """
    allowed = [*_names(config, _MAY_DIFFER), *_names(config, _OF_TRAINING)]
    given = flat(values)
    if others := [name for name in given if name not in allowed]:
        raise ValueError(
            f"{others[0]}={given[others[0]]!r}: {', '.join(allowed)} can be another than a model "
            "is stored with, and no other field"
        )
    return replaced(config, values)


def names_that_may_differ(config: Any) -> set[str]:
    """The dotted names of the fields that `may_differ`."""
    return {*_names(config, _MAY_DIFFER)}


def _names(config: Any, mark: str, prefix: str = "") -> list[str]:
    names = []
    for field in dataclasses.fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        declared = (getattr(cls, "__dataclass_fields__", {}) for cls in type(config).__mro__)
        if any(x[field.name].metadata.get(mark) for x in declared if field.name in x):
            names.append(name)
        if dataclasses.is_dataclass(value):
            names += _names(value, mark, f"{name}.")
    return names


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted name, such as "attention.window", as dictionaries in each other."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        head, _, rest = name.partition(".")
        found[head] = {**found.get(head, {}), rest: value} if rest else value
    return {k: nested(v) if isinstance(v, dict) else v for k, v in found.items()}


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """The values of a configuration, or of dictionaries in each other, by dotted name."""
    found: dict[str, Any] = {}
    is_config = dataclasses.is_dataclass(values)
    items = (
        {x.name: getattr(values, x.name) for x in dataclasses.fields(values)}
        if is_config
        else values
    )
    for name, value in items.items():
        inner = dataclasses.is_dataclass(value) or isinstance(value, dict)
        found |= flat(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return found


def replaced(config: Any, values: Mapping[str, Any]) -> Any:
    """A configuration with other values, by dotted name or as dictionaries.

    Raises:
        ValueError: a field that it does not have, or a value that it can't have.
    """
    found: dict[str, Any] = {}
    for name, value in nested(values).items():
        if name not in (known := annotations(type(config))):
            raise ValueError(f"no field {name} (known are {', '.join(known)})")
        part = getattr(config, name)
        is_part = isinstance(value, dict) and dataclasses.is_dataclass(part)
        found[name] = replaced(part, value) if is_part else value
    return dataclasses.replace(config, **found)


def require(condition: bool, message: str) -> None:
    """Raise a ValueError unless the condition holds."""
    if not condition:
        raise ValueError(message)


def check_positive(config: Any, prefix: str, *names: str) -> None:
    """Raise a ValueError for a field that is given and not positive."""
    for name in names:
        value = getattr(config, name)
        require(value is None or value > 0, f"{prefix}{name}={value}: must be positive")


def check_ids(name: str, ids: Collection[int], vocab_size: int | None) -> None:
    """Raise a ValueError for a token id that a vocabulary of that size does not have."""
    for token in ids:
        require(
            0 <= token < (vocab_size or 0),
            f"{name} has the id {token}: ids are from 0 to below vocab_size={vocab_size}",
        )


def check(config: Any, prefix: str = "") -> None:
    """Refuse values of another type than their fields', and numbers that are not finite.

    `prefix` precedes the field's name in the error, such as "optimizer.".

    Raises:
        ValueError: it names the field, the value and the choices.
    """
    for name, annotation in annotations(type(config)).items():
        check_value(prefix + name, getattr(config, name), annotation)


def check_value(name: str, value: Any, annotation: Any) -> None:
    """As `check`, for one value; an integer will do for a float."""
    if not _fits(value, annotation):
        choices = typing.get_args(annotation)
        wanted = f"must be {_text(annotation)}"
        other = type(value)
        if dataclasses.is_dataclass(annotation) and other.__name__ == _name(annotation):
            wanted += f" of {annotation.__module__}, not of {other.__module__}"
        if typing.get_origin(annotation) is Literal:
            wanted = f"choose one of {[*choices]}"
        raise ValueError(f"{name}={reprlib.repr(value)}: {wanted}")


def from_json(cls: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """A configuration of values out of JSON, in which tuples are lists, and 1.0 may be 1.

    `prefix` is as for `check`.

    Raises:
        ValueError: a field that is missing, unknown, or has a value that it can't have.
    """
    known = annotations(cls)
    if unknown := sorted(values.keys() - known.keys()):
        raise ValueError(f"no field {prefix}{', '.join(unknown)} (known are {', '.join(known)})")
    absent = dataclasses.MISSING
    for field in dataclasses.fields(cls):
        if field.name not in values and field.default is absent is field.default_factory:
            raise ValueError(f"the field {prefix}{field.name} is missing")
    return cls(
        **{name: value_from_json(prefix + name, x, known[name]) for name, x in values.items()}
    )


def value_from_json(name: str, value: Any, annotation: Any) -> Any:
    """The value of one field; see `from_json`."""
    if dataclasses.is_dataclass(annotation) and isinstance(value, dict):
        return from_json(annotation, value, f"{name}.")
    value = tuple(value) if isinstance(value, list) else value
    check_value(name, value, annotation)
    if annotation in (float, float | None) and value is not None:
        return float(value)
    return value


_type_hints = functools.cache(typing.get_type_hints)


def annotations(cls: Any) -> dict[str, Any]:
    """The type of each field of a dataclass."""
    hints = _type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _fits(value: Any, annotation: Any) -> bool:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return any(isinstance(value, type(choice)) and value == choice for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin in (tuple, Sequence):  # of any length: tuple[item, ...]
        return isinstance(value, tuple) and all(_fits(item, arguments[0]) for item in value)
    if annotation is bool or isinstance(value, bool):
        return annotation is bool and isinstance(value, bool)
    if annotation is int:
        return isinstance(value, numbers.Integral) and -(2**31) <= int(value) < 2**32
    if annotation is float:
        return isinstance(value, numbers.Real) and _is_finite(value)
    if annotation is Path:
        return isinstance(value, str | Path)
    return not isinstance(annotation, type) or isinstance(value, annotation)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _text(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_text, arguments))
    if origin in (tuple, Sequence):
        return f"a tuple, of {_text(arguments[0])} each"
    if dataclasses.is_dataclass(annotation):
        return f"a {_name(annotation)}"
    return _TEXTS.get(annotation, str(annotation))


def _name(cls: Any) -> str:
    return getattr(cls, "__name__", str(cls))
