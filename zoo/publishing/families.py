"""The families by name: the `config.json` of a model, and the skeleton that it describes.

Opening a folder makes a model of one of these families and nothing else. Folders name families by
this table, never by module.
"""

import dataclasses
import json
import reprlib
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array, Key, PyTree

from zoo import bert, mlp, rnn, transformer
from zoo.base import configuration
from zoo.publishing.errors import PublishError
from zoo.publishing.folder import CONFIG, read_json, version
from zoo.publishing.structure import check_model
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

# Versions up to 0.1 named a family by its class.
FORMER_NAMES = {
    "zoo.bert.BERT": "bert",
    "zoo.mlp.MLP": "mlp",
    "zoo.rnn.RNN": "rnn",
    "zoo.transformer.Transformer": "transformer",
}


def current_name(name: Any) -> Any:
    """A family's name in the table, given it or the former one; any other name as it is."""
    return FORMER_NAMES.get(name, name) if isinstance(name, str) else name


def family_name(model: eqx.Module) -> str:
    """The family of a model, of an ensemble's members or of a classifier's body, by name."""
    cls = type(body_of(model))
    for name, family in FAMILIES.items():
        if family.model is cls:
            return name
    raise PublishError(
        f"{cls.__module__}.{cls.__qualname__} is no family of the zoo; those are "
        f"{', '.join(FAMILIES)}"
    )


def describe(model: eqx.Module) -> dict:
    """The content of `config.json`, after a check that it suffices to make the model again."""
    check_model(model, fresh(model))
    config = body_of(model).config
    fields = dataclasses.asdict(config)
    for field, value in fields.items():
        try:
            again = json.loads(json.dumps(value))
            same = (tuple(again) if isinstance(again, list) else again) == value
        except TypeError:
            same = False
        if not same:
            raise PublishError(f"Config.{field}={value!r} does not survive JSON")
    return {
        "zoo": version(),
        "family": family_name(model),
        **_around(model),
        "num_parameters": num_parameters(model),
        "config": fields,
    }


def fresh(model: PyTree) -> PyTree:
    """The skeleton of the model that `load` makes from the configuration of this one."""
    cls = FAMILIES[family_name(model)].model
    return _skeleton(cls, body_of(model).config, _around(model))


_AROUND = {"num_members": int, "num_classes": int, "pooling": Pooling}


def _around(model: PyTree) -> dict[str, Any]:
    """The fields of `config.json` for an ensemble or a classification head."""
    if isinstance(model, Ensemble):
        return {"num_members": model.num_members}
    if isinstance(model, Classifier):
        return {"num_classes": model.num_classes, "pooling": model.pooling}
    return {}


def read_skeleton(folder: Path) -> PyTree:
    """The skeleton of the model that `config.json` describes."""
    path = folder / CONFIG
    description = read_json(path)
    name = current_name(description.get("family"))
    if not isinstance(name, str) or name not in FAMILIES:
        raise PublishError(
            f"{path}: family {reprlib.repr(description.get('family'))} is unknown; known are "
            f"{', '.join(FAMILIES)}"
        )
    cls, config_class = FAMILIES[name]
    try:
        values: Any = description.get("config")
        configuration.check_value("config", values, dict)
        around = {
            name: configuration.value_from_json(name, description[name], annotation)
            for name, annotation in _AROUND.items()
            if name in description
        }
        config = configuration.from_json(config_class, values)
        check_counts(vars(config))
        return _skeleton(cls, config, around)
    except (TypeError, ValueError, OverflowError) as error:
        raise PublishError(
            f"{path}: {error}. The folder was written by version "
            f"{reprlib.repr(description.get('zoo'))} of the zoo, and this is {version()}"
        ) from error


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


def body_of(model: eqx.Module) -> Any:
    """The members of an ensemble, the body of a classifier; else the model itself."""
    if isinstance(model, Classifier):
        return model.body
    return model.members if isinstance(model, Ensemble) else model
