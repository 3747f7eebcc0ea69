"""The families by name: what `config.json` says of a model, and the skeleton of what it describes.

Opening a folder makes a model of one of these and nothing else, and the names in a folder are those
of this table: no folder knows in which module a class is.
"""

import dataclasses
import json
import reprlib
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from zoo import bert, mlp, rnn, transformer
from zoo.base import configuration
from zoo.publishing.folder import CONFIG, read_json, version
from zoo.publishing.structure import check_model
from zoo.publishing.tensors import PublishError, check_counts, parameter_shapes
from zoo.wrappers.classifier import Classifier, Pooling
from zoo.wrappers.ensemble import Ensemble


class Family(NamedTuple):
    """The class of a model, and that of its configuration."""

    model: Any
    config: Any


FAMILIES = {
    "bert": Family(bert.BERT, bert.Config),
    "mlp": Family(mlp.MLP, mlp.Config),
    "rnn": Family(rnn.RNN, rnn.Config),
    "transformer": Family(transformer.Transformer, transformer.Config),
}

# In folders of the zoo up to 0.1 a family is named by its class.
FORMER_NAMES = {
    "zoo.bert.BERT": "bert",
    "zoo.mlp.MLP": "mlp",
    "zoo.rnn.RNN": "rnn",
    "zoo.transformer.Transformer": "transformer",
}


def current_name(name: Any) -> Any:
    """The name of a family in the table, of that or of its former one; any other as it is."""
    return FORMER_NAMES.get(name, name) if isinstance(name, str) else name


def family_name(model: eqx.Module) -> str:
    """The family of a model, or of what an ensemble or a classification head has in it.

    Raises:
        PublishError: a model of no family of the zoo.
    """
    cls = type(body_of(model))
    for name, family in FAMILIES.items():
        if family.model is cls:
            return name
    raise PublishError(
        f"{cls.__module__}.{cls.__qualname__} is no family of the zoo; those are "
        f"{', '.join(FAMILIES)}"
    )


def describe(model: eqx.Module) -> dict:
    """What `config.json` holds, after the proof that the model can be made again from it."""
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
    shapes = parameter_shapes(model)
    return {
        "zoo": version(),
        "family": family_name(model),
        **_around(model),
        "num_parameters": sum(int(np.prod(shape)) for shape in shapes.values()),
        "config": fields,
    }


def fresh(model: PyTree) -> PyTree:
    """The skeleton of what `load` makes of the configuration of a model.

    Raises:
        PublishError: a model of no family of the zoo.
    """
    cls = FAMILIES[family_name(model)].model
    return _skeleton(cls, body_of(model).config, _around(model))


def _around(model: PyTree) -> dict[str, Any]:
    """What `config.json` says of an ensemble's members, or of a classification head."""
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
            for name, annotation in (
                ("num_members", int),
                ("num_classes", int),
                ("pooling", Pooling),
            )
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
    def one(key: Any) -> PyTree:
        return cls(config, key=key)

    def make(key: Any) -> PyTree:
        if "num_members" in around:
            return Ensemble(one, around["num_members"], key=key)
        if "num_classes" in around:
            if "pooling" not in around:
                raise ValueError("a classifier has the field pooling beside num_classes")
            return Classifier(one(key), around["num_classes"], pooling=around["pooling"], key=key)
        return one(key)

    return eqx.filter_eval_shape(make, jax.random.key(0))


def body_of(model: eqx.Module) -> Any:
    """What an ensemble has several of, or a classification head stands on; else the model."""
    if isinstance(model, Classifier):
        return model.body
    return model.members if isinstance(model, Ensemble) else model
