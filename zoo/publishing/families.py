"""The families by name: the `config.json` of a model, and the skeleton that it describes.

Opening a folder makes a model of one of these families, or of classes that are registered (see
`registry`). Folders name families by this table, never by module.

A model of a family in which modules are of other classes keeps its `config`, and has `parts`, the
description of each such module by path. A model of a class of the user's own has `model`, the
description of all of it. Both have `needs`, the registered names in them.
"""

import dataclasses
import json
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array, Key, PyTree

from zoo import bert, mlp, rnn, transformer
from zoo.base import configuration
from zoo.nn.products import is_derived
from zoo.publishing.errors import PublishError
from zoo.publishing.folder import CONFIG, read_json, version
from zoo.publishing.parts import class_names, decode, encode
from zoo.publishing.registry import Classes, lookup, name_of, needs
from zoo.publishing.structure import check_model, first_difference, replaced, with_part
from zoo.publishing.tensors import check_counts, num_parameters
from zoo.wrappers.classifier import Classifier, Pooling
from zoo.wrappers.ensemble import Ensemble


class Family(NamedTuple):
    """The classes of a model and of its configuration."""

    model: Any
    config: Any


FAMILIES = {
    "bert": Family(bert.BERT, bert.Config),
    "mlp": Family(mlp.MLP, mlp.Config),
    "rnn": Family(rnn.RNN, rnn.Config),
    "transformer": Family(transformer.Transformer, transformer.Config),
}


def family_name(model: PyTree) -> str:
    """The family of a model, by name, or the registered name of its class.

    For an ensemble it is that of its members, for a classifier that of its body.
    """
    cls = type(body_of(model))
    for name, family in FAMILIES.items():
        if family.model is cls:
            return name
    if (registered := name_of(cls)) in needs([registered or ""]):
        return str(registered)
    raise PublishError(
        f"{cls.__module__}.{cls.__qualname__} is no family of the zoo; those are "
        f"{', '.join(FAMILIES)}. A class of your own is stored once it is registered: write "
        f'@zoo.register("my-project/{cls.__name__.lower()}") above it'
    )


def describe(model: PyTree) -> dict[str, Any]:
    """The content of `config.json`, after a check that it suffices to make the model again."""
    head = {"zoo": version(), "family": family_name(model)}
    if not _is_of_family(model):
        encoded = encode(model)
        check_model(model, decode(encoded, lookup({})))
        needed = needs(class_names(encoded))
        return {
            **head,
            "num_parameters": num_parameters(model),
            "needs": needed,
            "model": encoded,
        }
    parts = _parts(model, fresh(model))
    check_model(model, _with_parts(fresh(model), parts, {}))
    config = body_of(model).config
    fields = dataclasses.asdict(config)
    try:
        again = configuration.from_json(type(config), json.loads(json.dumps(fields)))
    except (TypeError, ValueError) as error:
        raise PublishError(f"the configuration does not survive JSON: {error}") from error
    assert again == config
    return {
        **head,
        **_around(model),
        "num_parameters": num_parameters(model),
        "config": fields,
        **({"needs": needs(class_names(parts)), "parts": parts} if parts else {}),
    }


def _is_of_family(model: PyTree) -> bool:
    body = body_of(model)
    return any(family.model is type(body) for family in FAMILIES.values()) and not isinstance(
        model, tuple
    )


def _parts(model: PyTree, plain: PyTree) -> dict[str, Any]:
    """The description of each module that is of another class than its configuration makes."""
    found = replaced(model, plain)
    unnamed = [path for path, part in found.items() if name_of(type(part)) is None]
    if unnamed:
        cls = type(found[unnamed[0]])
        for path in found.keys() - {*unnamed}:
            plain = with_part(plain, path, found[path])
        raise PublishError(
            f"the model is not the one that its configuration makes:\n  "
            f"{first_difference(model, plain)}\nTo have it stored, register its class: write "
            f'@zoo.register("my-project/{cls.__name__.lower()}") above it'
        )
    return {path: encode(part, path) for path, part in found.items()}


def _with_parts(plain: PyTree, parts: Mapping[str, Any], classes: Mapping[str, Any]) -> PyTree:
    for path, part in parts.items():
        plain = with_part(plain, path, decode(part, classes or lookup({})))
    return plain


def skeleton_of(model: PyTree) -> PyTree:
    """The skeleton of the model that `load` makes of the folder that `save` writes."""
    if not _is_of_family(model):
        return decode(encode(model), lookup({}))
    plain = fresh(model)
    return _with_parts(plain, _parts(model, plain), {})


def fresh(model: PyTree, config: Any = None) -> PyTree:
    """The skeleton of the model that the configuration of this one, or another one, makes."""
    cls = FAMILIES[family_name(model)].model
    return _skeleton(cls, config or body_of(model).config, _around(model))


def reconfigured(model: PyTree, overrides: Mapping[str, Any] | None) -> PyTree:
    """A model, or a skeleton, whose configuration has other values: see `configuration.changed`.

    Raises:
        PublishError: a field that it does not have, or that its parameters depend on; or a model
            that is not as its configuration makes it.
    """
    if not overrides:
        return model
    leaves = jax.tree.leaves(model, is_leaf=is_derived)
    structure: Any = jax.tree.structure(model, is_leaf=is_derived)
    if not (_is_of_family(model) and structure == jax.tree.structure(fresh(model))):
        raise PublishError(
            f"overrides={dict(overrides)}: the model is not as a configuration of the zoo makes it"
        )
    try:
        config = configuration.changed(body_of(model).config, overrides)
    except ValueError as error:
        raise PublishError(f"overrides: of a {family_name(model)}, {error}") from error
    return jax.tree.unflatten(jax.tree.structure(fresh(model, config)), leaves)


_AROUND = {"num_members": int, "num_classes": int, "pooling": Pooling}


def _around(model: PyTree) -> dict[str, Any]:
    """The fields of `config.json` for an ensemble or a classification head."""
    if isinstance(model, Ensemble):
        return {"num_members": model.num_members}
    if isinstance(model, Classifier):
        return {"num_classes": model.num_classes, "pooling": model.pooling}
    return {}


def read_skeleton(folder: Path, classes: Classes = (), allow_import: Iterable[str] = ()) -> PyTree:
    """The skeleton of the model that `config.json` describes; see `zoo.load`."""
    path = folder / CONFIG
    description = read_json(path)
    name = description.get("family")
    if "model" not in description and (not isinstance(name, str) or name not in FAMILIES):
        raise PublishError(
            f"{path}: family {reprlib.repr(description.get('family'))} is unknown; known are "
            f"{', '.join(FAMILIES)}"
        )
    try:
        known = lookup(_needs(description), classes, allow_import)
        if "model" in description:
            return decode(description["model"], known)
        parts = description.get("parts", {})
        configuration.check_value("parts", parts, dict)
        return _with_parts(_plain(str(name), description), parts, known)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise PublishError(
            f"{path}: {error}. The folder was written by version "
            f"{reprlib.repr(description.get('zoo'))} of the zoo, and this is {version()}"
        ) from error
    except PublishError as error:
        raise PublishError(f"{path}: {error}") from error


def _needs(description: Mapping[str, Any]) -> dict[str, str]:
    needed = description.get("needs", {})
    if not isinstance(needed, dict) or not all(isinstance(x, str) for x in needed.values()):
        raise ValueError(f"needs={reprlib.repr(needed)}: must be texts by name")
    return needed


def _plain(name: str, description: Mapping[str, Any]) -> PyTree:
    """The skeleton of a family's model, without parts of other classes."""
    cls, config_class = FAMILIES[name]
    values: Any = description.get("config")
    configuration.check_value("config", values, dict)
    around = {
        name: configuration.value_from_json(name, description[name], annotation)
        for name, annotation in _AROUND.items()
        if name in description
    }
    config = configuration.from_json(config_class, values)
    check_counts(config)
    return _skeleton(cls, config, around)


def _skeleton(cls: type, config: Any, around: dict[str, Any]) -> PyTree:
    def one(key: Key[Array, ""]) -> PyTree:
        return cls(config, key=key)

    def make(key: Key[Array, ""]) -> PyTree:
        if "num_members" in around:
            return Ensemble(one, around["num_members"], key=key)
        if "num_classes" in around:
            if "pooling" not in around:
                raise ValueError("the field pooling is missing beside num_classes")
            return Classifier(one(key), around["num_classes"], pooling=around["pooling"], key=key)
        return one(key)

    return eqx.filter_eval_shape(make, jax.random.key(0))


def body_of(model: PyTree) -> Any:
    """The members of an ensemble, the body of a classifier; else the model itself.

    Of a model beside its `equinox.nn.State` it is the model.
    """
    if isinstance(model, tuple) and len(model) == 2 and isinstance(model[1], eqx.nn.State):
        return model[0]
    if isinstance(model, Classifier):
        return model.body
    return model.members if isinstance(model, Ensemble) else model
