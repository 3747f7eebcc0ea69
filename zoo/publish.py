"""A model as a folder that anyone can open: configuration, safetensors, card and checksums.

The folder holds `config.json` (family, parameter count, the fields of its `Config`),
`model.safetensors` (a tensor a parameter, named by its dotted path in the model), `README.md`,
`metrics.json` and the tokenizer's files where there are any, and `checksums.json`. Folders in
Hugging Face's format, whose `config.json` has a `model_type`, are read and written by `zoo.hf`.
"""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import reprlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import PyTree

from zoo import checksums, configuration
from zoo.classifier import Classifier, Pooling
from zoo.ensemble import Ensemble
from zoo.files import local_path
from zoo.precision import is_derived
from zoo.structure import check_model
from zoo.tensors import (
    PublishError,
    check_counts,
    parameter_shapes,
    parse_dtype,
    read_tensors,
    write_tensors,
)

# Opening a folder makes one of these and nothing else; `Config` is beside the class.
FAMILIES = ("zoo.bert.BERT", "zoo.mlp.MLP", "zoo.rnn.RNN", "zoo.transformer.Transformer")
CONFIG, WEIGHTS, METRICS, README = "config.json", "model.safetensors", "metrics.json", "README.md"


@dataclasses.dataclass(frozen=True)
class Card:
    """What the shelf says of a published model; `text` is its README."""

    name: str
    folder: Path
    family: str
    num_parameters: int
    text: str
    metrics: dict


def save(
    folder: Path | str,
    model: eqx.Module,
    *,
    format: Literal["zoo", "hf"] = "zoo",
    tokenizer: Any = None,
    card: str = "",
    metrics: dict | None = None,
) -> None:
    """Writes `model`, in the dtypes it has, as the folder that `load` opens, all or nothing.

    A model already there is replaced, and a folder with other files is refused. `format="hf"` is
    what transformers opens too. `tokenizer` is any object with `.save(folder)`, `card` is Markdown
    for the README, `metrics` is JSON, which is written with the checksums of what was measured.
    All processes call it, and the first writes. Raises PublishError where `load` could not make
    the model again, or no Hugging Face family has it.
    """
    if any(map(is_derived, jax.tree.leaves(model, is_leaf=is_derived))):
        raise PublishError(
            "the model has adapters: merge them by zoo.lora.merge, or save them alone by "
            "zoo.lora.save"
        )
    with replacing(folder) as new:
        if format == "hf":
            from zoo import hf

            family, description = hf.describe(model, tokenizer)
            hf.write(new, model, family)
        else:
            description = _describe_model(model)
            write_tensors(new and new / WEIGHTS, model)
        if new is not None:
            (new / CONFIG).write_text(json.dumps(description, indent=1) + "\n")
            readme = _readme(Path(folder).absolute().name, model, card)
            (new / README).write_text(readme, encoding="utf-8")
            if tokenizer is not None:
                tokenizer.save(new)
            # A card may be edited by hand, and the model opens still.
            if metrics is not None:  # with what they were measured on
                measured = {**metrics, "files": checksums.of(new, skip=(README,))}
                (new / METRICS).write_text(json.dumps(measured, indent=1) + "\n")
            checksums.write(new, skip=(README,))


@contextlib.contextmanager
def replacing(folder: Path | str) -> Iterator[Path | None]:
    """A new folder to fill, which then takes the place of `folder`; None on other processes.

    Raises:
        PublishError: a folder that no earlier save wrote.
        ValueError: a folder on another machine.
    """
    folder = local_path(folder, "folder").absolute()
    _check_replaceable(folder)
    if jax.process_index() == 0:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
            new = Path(temporary) / "new"
            new.mkdir()
            yield new
            if folder.exists():
                folder.rename(Path(temporary) / "old")
            new.rename(folder)
    else:
        yield None
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"zoo.save {folder}")


def load(
    name_or_folder: str | Path, *, mesh: Mesh | None = None, dtype: DTypeLike | None = None
) -> Any:
    """The model in a folder, of a name on the shelf, or of a Hugging Face hub id.

    It is born on `mesh` (None: one device): each device reads its own slices, so that no device
    or host holds the whole. Floating point parameters are cast to `dtype` slice by slice: "bf16",
    "fp16", "fp32", or any floating point dtype (None: as stored). The checksums of a folder that
    has them are verified first; Hugging Face's have none.
    Nothing in a folder is executed. Raises PublishError, naming the file, field or tensor at fault.
    """
    dtype = parse_dtype(dtype)
    folder = find(name_or_folder)
    values = hugging_face_config(folder)
    if values is None or (folder / checksums.NAME).exists():
        verify(folder)
    if values is not None:
        from zoo import hf

        return hf.load(folder, values, mesh=mesh, dtype=dtype)
    if "adapters_of" in read_json(folder / CONFIG):
        from zoo import lora

        return lora.load(folder, mesh=mesh, dtype=dtype)
    return read_tensors(folder / WEIGHTS, _read_skeleton(folder), mesh, dtype)


def verify(folder: Path) -> None:
    """Raise a PublishError where a folder's checksums do not hold."""
    if problems := checksums.problems(folder):
        raise PublishError(
            f"{folder} is damaged or not a model of the zoo:\n  "
            + "\n  ".join(problems)
            + "\nPut back the files from a copy, or publish it again."
        )


def hugging_face_config(folder: Path) -> dict | None:
    """What `config.json` holds if it is Hugging Face's; None if it is the zoo's, or damaged."""
    try:
        values = read_json(folder / CONFIG)
    except PublishError:
        if (folder / checksums.NAME).exists():
            return None  # the checksums will tell
        raise
    return None if values.keys() & {"family", "config"} else values


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        PublishError: there is none.
    """
    try:
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError(f"it holds no object, but {reprlib.repr(values)}")
        return values
    except (OSError, ValueError, RecursionError) as error:
        raise PublishError(f"{path} is damaged: {error}") from error


def published() -> dict[str, Card]:
    """The shelf: name -> card, of every model that came with the zoo."""
    configs = sorted(_shelf().glob(f"*/{CONFIG}"))
    return {config.parent.name: _card(config.parent) for config in configs}


def _shelf() -> Path:
    """In an install the models lie in the package, in a checkout beside it."""
    package = Path(__file__).parent
    installed = package / "models"
    return installed if installed.is_dir() else package.parent / "models"


def _card(folder: Path) -> Card:
    description = read_json(folder / CONFIG)
    readme, metrics = folder / README, folder / METRICS
    return Card(
        name=folder.name,
        folder=folder,
        family=description.get("family", "unknown"),
        num_parameters=description.get("num_parameters", 0),
        text=readme.read_text(encoding="utf-8") if readme.is_file() else "",
        metrics=read_json(metrics) if metrics.is_file() else {},
    )


def find(name_or_folder: str | Path) -> Path:
    """The folder of a model: one that exists, or of that name on the shelf, or of that hub id.

    A run's folder stands for the model in it.

    Raises:
        PublishError: there is none.
        ValueError: a folder on another machine.
    """
    from zoo import hf

    given = local_path(name_or_folder, "model")
    for folder in (given / "model", given, _shelf() / name_or_folder):
        if (folder / CONFIG).is_file():
            return folder
    if (given / "checkpoints").is_dir():
        raise PublishError(f"{given} is a run that has not come to its end: it has no model yet")
    if Path(name_or_folder).is_file():
        raise PublishError(f"{name_or_folder} is a file: a model is a folder with a {CONFIG}")
    if Path(name_or_folder).exists():
        raise PublishError(f"{name_or_folder} is not a model of the zoo: it has no {CONFIG}")
    if hf.is_hub_id(str(name_or_folder)):
        return hf.snapshot(str(name_or_folder))
    raise PublishError(
        f"{str(name_or_folder)!r} is neither a folder nor on the shelf, which has: "
        + (", ".join(published()) or "nothing")
    )


def _describe_model(model: eqx.Module) -> dict:
    """What `config.json` holds, after the proof that the model can be made again from it."""
    check_model(model, fresh(model))
    config = _one(model).config
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
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
        "family": family_name(_one(model)),
        **_around(model),
        "num_parameters": sum(int(np.prod(shape)) for shape in shapes.values()),
        "config": fields,
    }


def fresh(model: PyTree) -> PyTree:
    """The skeleton of what `load` makes of the configuration of a model.

    Raises:
        PublishError: a model of no family of the zoo.
    """
    one = _one(model)
    family = _family(family_name(one))
    if family is None:
        raise PublishError(
            f"{family_name(one)} is no family of the zoo; those are {', '.join(FAMILIES)}"
        )
    return _skeleton(family[0], one.config, _around(model))


def _around(model: PyTree) -> dict[str, Any]:
    """What `config.json` says of an ensemble's members, or of a classification head."""
    if isinstance(model, Ensemble):
        return {"num_members": model.num_members}
    if isinstance(model, Classifier):
        return {"num_classes": model.num_classes, "pooling": model.pooling}
    return {}


def _read_skeleton(folder: Path) -> PyTree:
    """The skeleton of the model that `config.json` describes."""
    path = folder / CONFIG
    description = read_json(path)
    family = _family(description.get("family"))
    if family is None:
        raise PublishError(
            f"{path}: family {reprlib.repr(description.get('family'))} is unknown; known are "
            f"{', '.join(FAMILIES)}"
        )
    cls, config_class = family
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


def _family(name: Any) -> tuple[Any, Any] | None:
    """A family's class and that of its configuration; nothing else is ever imported."""
    if name not in FAMILIES:
        return None
    module_name, _, class_name = name.rpartition(".")
    module = importlib.import_module(module_name)
    return getattr(module, class_name), module.Config


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


def _check_replaceable(folder: Path) -> None:
    """Nothing is deleted but what an earlier save wrote."""
    if folder.exists() and not folder.is_dir():
        raise PublishError(f"{folder} is a file: a model is a folder")
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if others := sorted(found - checksums.listed(folder) - {README, checksums.NAME}):
        raise PublishError(
            f"{folder} has files that are no part of a model: {', '.join(others)}. Move them away, "
            "or save elsewhere"
        )


def _readme(name: str, model: eqx.Module, card: str) -> str:
    num_parameters = sum(int(np.prod(shape)) for shape in parameter_shapes(model).values())
    return (
        f"# {name}\n\n{card.strip()}\n\n"
        f"- Family: `{family_name(_one(model))}`, {num_parameters:,} parameters\n"
        f'- Open it with `zoo.load("{name}")`, or the path of this folder\n'
    )


def _one(model: eqx.Module) -> Any:
    """What an ensemble has several of, or a classification head stands on; else the model."""
    if isinstance(model, Classifier):
        return model.body
    return model.members if isinstance(model, Ensemble) else model


def family_name(model: eqx.Module) -> str:
    """The family that `config.json` names, such as zoo.rnn.RNN."""
    return f"{type(model).__module__}.{type(model).__qualname__}"


def version() -> str:
    """The version of the zoo, for what is written by it."""
    try:
        return importlib.metadata.version("zoo")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"
