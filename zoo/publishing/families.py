"""The families by name: the `config.json` of a model, and the skeleton that it describes.

Folders name a family by this table or an entry point of the group `zoo.families`, never by module,
and its `Config` makes the model again. A model with other classes in it than its configuration
makes, or of no family, is stored with a line on the difference, and opens with `like`. `OWN` is the
zoo's format of folders.
"""

import dataclasses
import json
import reprlib
import typing
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
from jaxtyping import Array, Key, PyTree

from zoo import mlp, rnn, transformer
from zoo.common import configuration, plugins
from zoo.common.checksums import Digest
from zoo.nn.products import is_operand
from zoo.publishing import PublishError
from zoo.publishing.formats import (
    CONFIG,
    WEIGHTS,
    Format,
    Opened,
    Options,
    Source,
    json_object,
    read_json,
    version,
)
from zoo.publishing.tensors import (
    differences,
    num_parameters,
    outline,
    parameter_shapes,
    read_arrays,
    read_dtypes,
    write_tensors,
)
from zoo.sharding.axes import is_parameter
from zoo.wrappers.classifier import Classifier, Pooling, TokenClassifier
from zoo.wrappers.ensemble import Ensemble

Model = TypeVar("Model", bound=type[eqx.Module])

FAMILIES: dict[str, Any] = {
    "mlp": mlp.MLP,
    "rnn": rnn.RNN,
    "transformer": transformer.Transformer,
    "vision_transformer": transformer.VisionTransformer,
}
_GROUP = "zoo.families"  # of the entry points of other packages
_MOST = 4096  # layers or experts: a damaged file can name any number, and all would be made
DIFFERENCE = "differs"  # in `config.json`: from the model that the configuration makes


def register(name: str) -> Callable[[Model], Model]:
    """Let folders name a class of models, by which `zoo.load` opens them: a decorator.

    The class is a module with a field `config`, annotated with a dataclass whose values JSON has,
    and is made by `cls(config, key=key)`. A name such as "my-project/network" stays when the code
    moves.

    Raises:
        ValueError: the name is taken, or the class has no such field.
    """

    def add(cls: Model) -> Model:
        place = lambda x: (x.__module__, x.__qualname__)  # noqa: E731
        # A cell of a notebook that runs again defines the same class anew.
        if place(FAMILIES.get(name, cls)) != place(cls):
            raise ValueError(f"register: the name {name!r} is taken, by {FAMILIES[name]}")
        if not dataclasses.is_dataclass(_config_class(cls)):
            raise ValueError(
                f"register: {cls.__qualname__} has no field config annotated with a dataclass; "
                "without one a model is stored too, and opens with zoo.load(folder, like=...)"
            )
        FAMILIES[name] = cls
        return cls

    return add


def _config_class(cls: type) -> Any:
    return typing.get_type_hints(cls).get("config")


def family_name(model: PyTree) -> str:
    """The family of a model, by name, or else the name of its class.

    For an ensemble it is that of its members, for a classifier that of its body.
    """
    cls = type(body_of(model))
    names = (name for name in [*FAMILIES, *plugins.names(_GROUP)] if _class_of(name) is cls)
    return next(names, f"{cls.__module__}.{cls.__qualname__}")


def _class_of(name: str) -> Any:
    """The class of a family, or None."""
    return FAMILIES[name] if name in FAMILIES else plugins.find(_GROUP, name)


def describe(model: PyTree) -> dict[str, Any]:
    """The content of `config.json`."""
    name = family_name(model)
    description = {
        "zoo": version(),
        "family": name,
        **_around(model),
        "num_parameters": num_parameters(model),
    }
    if not _is_of_family(model):
        return description | {DIFFERENCE: f"{name} is no family of the zoo"}
    config = body_of(model).config
    fields = dataclasses.asdict(config)
    try:
        again = configuration.from_json(type(config), json.loads(json.dumps(fields)))
    except (TypeError, ValueError) as error:
        raise PublishError(f"the configuration does not survive JSON: {error}") from error
    if again != config:
        raise PublishError(f"the configuration does not survive JSON: {config} became {again}")
    difference = first_difference(model, _fresh(model, config))
    return description | {"config": fields} | ({DIFFERENCE: difference} if difference else {})


def _is_of_family(model: PyTree) -> bool:
    return _class_of(family_name(model)) is not None and not isinstance(model, tuple)


def _fresh(model: PyTree, config: Any) -> PyTree:
    """The skeleton of the model that a configuration makes in the place of this one's."""
    return skeleton(_class_of(family_name(model)), config, _around(model))


def reconfigured(model: PyTree, overrides: Mapping[str, Any] | None) -> PyTree:
    """A model, or a skeleton, whose configuration has other values: see `configuration.changed`.

    Raises:
        PublishError: a field that it does not have, or that its parameters depend on; or a model
            that is not as its configuration makes it.
    """
    if not overrides:
        return model
    leaves = jax.tree.leaves(model, is_leaf=is_operand)
    structure: Any = jax.tree.structure(model, is_leaf=is_operand)
    if not _is_of_family(model) or structure != jax.tree.structure(
        _fresh(model, body_of(model).config)
    ):
        raise PublishError(
            f"overrides={dict(overrides)}: the model is not as a configuration of the zoo makes it"
        )
    try:
        config = configuration.changed(body_of(model).config, overrides)
    except ValueError as error:
        raise PublishError(f"overrides: of a {family_name(model)}, {error}") from error
    return jax.tree.unflatten(jax.tree.structure(_fresh(model, config)), leaves)


_AROUND = {
    "num_members": int,
    "num_classes": int,
    "pooling": Literal[Pooling, "none"],
    "head_bias": bool,
}


def _around(model: PyTree) -> dict[str, Any]:
    """The fields of `config.json` for an ensemble or a classification head."""
    if isinstance(model, Ensemble):
        return {"num_members": model.num_members}
    if isinstance(model, Classifier):
        has_bias = model.head.bias is not None
        return {"num_classes": model.num_classes, "pooling": model.pooling, "head_bias": has_bias}
    return {}


def read_skeleton(folder: Path, like: PyTree = None) -> PyTree:
    """The skeleton of the model that `config.json` describes, or that is `like`; see `zoo.load`."""
    path = folder / CONFIG
    description = read_json(path)
    if like is not None:
        return eqx.filter_eval_shape(lambda model: model, like)
    if (difference := description.get(DIFFERENCE)) is not None:
        raise PublishError(
            f"{path}: the model is not one that a configuration makes "
            f"({str(difference)[:200]!r}): "
            "give a model of its classes and shapes, zoo.load(folder, like=model)"
        )
    name = description.get("family")
    cls = _class_of(name) if isinstance(name, str) else None
    if cls is None:
        raise PublishError(
            f"{path}: family {reprlib.repr(name)} is unknown; known are "
            f"{', '.join([*FAMILIES, *plugins.names(_GROUP)])}. "
            "Import the module that registers it: loading imports nothing"
        )
    try:
        values: Any = description.get("config")
        configuration.check_value("config", values, dict)
        around = {
            field: configuration.value_from_json(field, description[field], annotation)
            for field, annotation in _AROUND.items()
            if field in description
        }
        config = configuration.from_json(_config_class(cls), values)
        check_counts(config)
        return skeleton(cls, config, around)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise PublishError(
            f"{path}: {error}. The folder was written by version "
            f"{reprlib.repr(description.get('zoo'))} of the zoo, and this is {version()}"
        ) from error


def check_counts(config: Any) -> None:
    """Raise a ValueError for implausible numbers of layers or experts."""
    for name, count in configuration.flat(config).items():
        if name.split(".")[-1] in ("num_layers", "num_experts") and (count or 0) > _MOST:
            raise ValueError(f"{name}={count}: must be at most {_MOST}")


def skeleton(cls: type, config: Any, around: Mapping[str, Any]) -> PyTree:
    """The skeleton of a configuration's model, with the fields of what is `around` it."""

    def one(key: Key[Array, ""]) -> PyTree:
        return cls(config, key=key)

    def make(key: Key[Array, ""]) -> PyTree:
        if "num_members" in around:
            return Ensemble(one, around["num_members"], key=key)
        if "num_classes" in around:
            if "pooling" not in around:
                raise ValueError("the field pooling is missing beside num_classes")
            options = {"bias": around.get("head_bias", True), "key": key}  # older ones have one
            if around["pooling"] == "none":
                return TokenClassifier(one(key), around["num_classes"], **options)
            options["pooling"] = around["pooling"]
            return Classifier(one(key), around["num_classes"], **options)
        return one(key)

    return eqx.filter_eval_shape(make, jax.random.key(0))


def body_of(model: PyTree) -> Any:
    """The members of an ensemble, the body of a classifier; else the model itself.

    For a model beside its `equinox.nn.State` it is the model.
    """
    if isinstance(model, tuple) and len(model) == 2 and isinstance(model[1], eqx.nn.State):
        return model[0]
    if isinstance(model, Classifier):
        return model.body
    return model.members if isinstance(model, Ensemble) else model


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

    It differs in a parameter's shape, a class, or a static field.
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


def choose_eos_ids(config: Any, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a model's texts: its configuration's, or if it has none the tokenizer's.

    Raises:
        PublishError: the tokenizer's are not in the model's vocabulary.
    """
    if not hasattr(config, "eos_ids") or config.vocab_size is None:
        return ()
    ids = config.eos_ids or tokenizer_eos_ids(tokenizer)
    try:
        configuration.check_ids("the tokenizer", ids, config.vocab_size)
    except ValueError as error:
        raise PublishError(f"{error}: it is not the tokenizer of this model") from None
    return ids


def tokenizer_eos_ids(tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a text by a tokenizer: its `eos_ids`, or else its separator."""
    separator = getattr(tokenizer, "separator_id", None)
    return tuple(getattr(tokenizer, "eos_ids", () if separator is None else (separator,)))


def with_more_ends(model: Any, ids: tuple[int, ...]) -> Any:
    """The same model, whose texts may end with these ids as well."""
    old: Any = getattr(model, "config", None)
    if not hasattr(old, "eos_ids") or {*ids} <= {*old.eos_ids}:
        return model
    ends = tuple(dict.fromkeys([*old.eos_ids, *ids]))
    return with_config(model, dataclasses.replace(old, eos_ids=ends))


def with_config(model: Any, config: Any) -> Any:
    """The same model, with another configuration."""
    changed = object.__new__(type(model))
    for name, value in {**vars(model), "config": config}.items():
        object.__setattr__(changed, name, value)
    return changed


class _Own(Format):
    """The zoo's own format: `config.json` with a family, and its parameters by their paths."""

    has_checksums = True

    def describes(self, folder: Path) -> bool:
        return not {"family", "config"}.isdisjoint(json_object(folder / CONFIG))

    def open(self, folder: Path, options: Options, base: PyTree = None) -> Opened:
        if options.ignore:
            raise PublishError(f"ignore={options.ignore!r}: {folder} is in the zoo's own format")
        path, quantize = folder / WEIGHTS, options.quantize
        skeleton = read_dtypes(path, read_skeleton(folder, options.like), options.dtype, quantize)
        read = partial(read_arrays, path, mesh=options.mesh, quantize=quantize is not None)
        return Opened(skeleton, read)

    def dtypes(self, folder: Path) -> tuple[Mapping[str, Any], Any]:
        return {name: x.dtype for name, x in outline(folder / WEIGHTS).items()}, None

    def write(self, folder: Path | None, model: PyTree, source: Source) -> dict[str, Digest]:
        description = describe(model)
        eos_ids = choose_eos_ids(getattr(body_of(model), "config", None), source.tokenizer)
        if eos_ids and "config" in description:
            description["config"]["eos_ids"] = eos_ids
        if folder is not None:
            (folder / CONFIG).write_text(json.dumps(description, indent=1) + "\n")
        return {WEIGHTS: write_tensors(folder and folder / WEIGHTS, model, source.dtypes)}


OWN = _Own()
