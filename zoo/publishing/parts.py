"""Modules of any registered class as JSON: their classes and fields, without the arrays' values.

Arrays are `{"array": "float32", "shape": [4, 8]}`; modules and dataclasses `{"class": name,
"fields": {…}}`; functions `{"function": name}`; plain values are as JSON has them.
"""

import dataclasses
import math
import reprlib
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from zoo.publishing.errors import PublishError
from zoo.publishing.registry import name_of
from zoo.sharding.axes import is_parameter

_NONFINITE = ("inf", "-inf", "nan")


def encode(x: Any, path: str = "", *, static: bool = False) -> Any:
    """A module, or any value in one, as JSON; `static` is for what is no leaf of the model.

    Raises:
        PublishError: a value that can't be stored; it names its path.
    """

    def inner(name: Any, value: Any, static: bool = static) -> Any:
        return encode(value, f"{path}.{name}".lstrip("."), static=static)

    if is_parameter(x) and not static:
        return {"array": str(x.dtype), "shape": [*x.shape]}
    if x is None or type(x) in (bool, int, str):
        return x
    if type(x) is float:
        return x if math.isfinite(x) else {"float": str(x)}
    if type(x) is list:
        return [inner(i, item) for i, item in enumerate(x)]
    if type(x) is tuple:
        return {"tuple": [inner(i, item) for i, item in enumerate(x)]}
    if type(x) is dict and all(type(key) is str for key in x):
        return {"dict": {key: inner(key, value) for key, value in x.items()}}
    if type(x) is eqx.nn.StateIndex and type(x.marker) is str:
        return {"state_index": x.marker}
    if type(x) is eqx.nn.State:
        values, keys = x.tree_flatten()
        return {"state": inner("state", dict(zip(keys, values, strict=True)))["dict"]}
    is_stateful = type(x) is eqx.nn.StateIndex
    if dataclasses.is_dataclass(x) and not is_stateful and (name := name_of(type(x))) is not None:
        is_module = isinstance(x, eqx.Module)
        fields = {
            field.name: inner(
                field.name,
                getattr(x, field.name),
                static or not is_module or bool(field.metadata.get("static")),
            )
            for field in dataclasses.fields(x)
        }
        return {"class": name, "fields": fields}
    if not isinstance(x, type) and callable(x) and (name := name_of(x)) is not None:
        return {"function": name}
    raise PublishError(f"{path or 'the model'}: {_reason(x)}")


def _reason(x: Any) -> str:
    cls = type(x)
    name = f"{cls.__module__}.{cls.__qualname__}"
    if type(x) is eqx.nn.StateIndex:
        return (
            "its state is inside the model: make both by eqx.nn.make_with_state, and save the two"
        )
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return f"{name} is not registered: write @zoo.register above {cls.__qualname__}"
    if is_parameter(x):
        return "an array in a static field, which is no parameter, can't be stored"
    if callable(x) and not isinstance(x, eqx.Module):
        return (
            f"{reprlib.repr(x)} can't be stored: folders hold no code. Take a function of jax.nn, "
            "or register your own, @zoo.register above its def"
        )
    return f"{reprlib.repr(x)} of type {name} can't be stored: keep it out of the model's fields"


def class_names(encoded: Any) -> set[str]:
    """All names of classes and functions in what `encode` gave."""
    found: set[str] = set()
    if isinstance(encoded, list):
        return found.union(*map(class_names, encoded))
    if isinstance(encoded, dict):
        found = {encoded[key] for key in ("class", "function") if type(encoded.get(key)) is str}
        return found.union(*map(class_names, encoded.values()))
    return found


def decode(encoded: Any, classes: Mapping[str, Any]) -> Any:
    """The skeleton of what `encode` was given; `classes` is what the names stand for.

    Raises:
        ValueError: no value that `encode` gives, or a class that has other fields.
    """
    if encoded is None or type(encoded) in (bool, int, float, str):
        return encoded
    if type(encoded) is list:
        return [decode(item, classes) for item in encoded]
    match encoded:
        case {"array": str(dtype), "shape": list(shape), **rest} if not rest and _is_shape(shape):
            return jax.ShapeDtypeStruct(tuple(shape), _dtype(dtype))
        case {"float": str(text), **rest} if not rest and text in _NONFINITE:
            return float(text)
        case {"tuple": list(items), **rest} if not rest:
            return tuple(decode(item, classes) for item in items)
        case {"dict": dict(items), **rest} if not rest:
            return {key: decode(value, classes) for key, value in items.items()}
        case {"state_index": str(marker), **rest} if not rest:
            index = eqx.nn.delete_init_state(eqx.nn.StateIndex(0))
            object.__setattr__(index, "marker", marker)
            return index
        case {"state": dict(items), **rest} if not rest:
            values = tuple(decode(value, classes) for value in items.values())
            return eqx.nn.State.tree_unflatten(tuple(items), values)
        case {"function": str(name), **rest} if not rest:
            if isinstance(found := _find(name, classes), type):
                raise ValueError(f"{reprlib.repr(name)} is a class, not a function")
            return found
        case {"class": str(name), "fields": dict(fields), **rest} if not rest:
            found = {key: decode(value, classes) for key, value in fields.items()}
            return _instance(name, _find(name, classes), found)
    raise ValueError(f"{reprlib.repr(encoded)} describes no part of a model")


def _instance(name: str, cls: Any, fields: dict[str, Any]) -> Any:
    if not dataclasses.is_dataclass(cls) or not isinstance(cls, type):
        raise ValueError(f"{reprlib.repr(name)} is no class of modules")
    declared = [field.name for field in dataclasses.fields(cls)]
    if {*declared} != fields.keys():
        raise ValueError(
            f"{reprlib.repr(name)} has the fields {', '.join(declared)} now, and the folder has "
            f"{reprlib.repr(', '.join(fields))}: load it with the class that it was saved with"
        )
    if not issubclass(cls, eqx.Module):
        return cls(**fields)  # a dataclass of settings, which checks its own values
    return with_fields(cls, fields)


def with_fields(cls: type, fields: Mapping[str, Any]) -> Any:
    """A module of some fields, without a call of its constructor."""
    new: Any = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(new, name, value)
    return new


def _find(name: str, classes: Mapping[str, Any]) -> Any:
    if name not in classes:
        raise ValueError(f"nothing is registered as {reprlib.repr(name)}")
    return classes[name]


def _is_shape(shape: list[Any]) -> bool:
    return all(type(size) is int and 0 <= size < 2**63 for size in shape)


def _dtype(name: str) -> Any:
    try:
        return jnp.dtype(name)
    except TypeError:
        raise ValueError(f"{reprlib.repr(name)} is no dtype") from None
