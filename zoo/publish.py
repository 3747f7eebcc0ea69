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
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import PyTree

from zoo import checksums
from zoo.classifier import Classifier
from zoo.ensemble import Ensemble
from zoo.files import local_path
from zoo.tensors import PublishError, check_tensors, parameter_shapes, read_tensors, write_tensors

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
    or host holds the whole; floating point parameters are cast to `dtype` slice by slice (None: as
    stored). The checksums of a folder that has them are verified first; Hugging Face's have none.
    Nothing in a folder is executed. Raises PublishError, naming the file, field or tensor at fault.
    """
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise PublishError(f"dtype={dtype}: parameters can be cast to floating point types only")
    folder = find(name_or_folder)
    values = hugging_face_config(folder)
    if values is None or (folder / checksums.NAME).exists():
        verify(folder)
    if values is not None:
        from zoo import hf

        return hf.load(folder, values, mesh=mesh, dtype=dtype)
    description = json.loads((folder / CONFIG).read_text())
    if "adapters_of" in description:
        from zoo import lora

        return lora.load(folder, mesh=mesh, dtype=dtype)
    return read_tensors(folder / WEIGHTS, _skeleton(*_read_config(folder)), mesh, dtype)


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
        values = json.loads((folder / CONFIG).read_bytes())
        if not isinstance(values, dict):
            raise ValueError(f"it holds no object, but {values!r:.40}")
    except ValueError as error:
        if (folder / checksums.NAME).exists():
            return None  # the checksums will tell
        raise PublishError(f"{folder / CONFIG} is damaged: {error}") from error
    return None if "family" in values else values


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
    description = json.loads((folder / CONFIG).read_text())
    readme, metrics = folder / README, folder / METRICS
    return Card(
        name=folder.name,
        folder=folder,
        family=description["family"],
        num_parameters=description["num_parameters"],
        text=readme.read_text(encoding="utf-8") if readme.is_file() else "",
        metrics=json.loads(metrics.read_text()) if metrics.is_file() else {},
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
    around, one = _around(model), _one(model)
    cls, family = type(one), family_name(one)
    if family not in FAMILIES:
        raise PublishError(f"{family} is no family of the zoo; those are {', '.join(FAMILIES)}")
    config = one.config
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for field, value in fields.items():
        try:
            same = _as_field(json.loads(json.dumps(value))) == value
        except TypeError:
            same = False
        if not same:
            raise PublishError(f"Config.{field}={value!r} does not survive JSON")
    shapes = parameter_shapes(model)
    check_tensors("the model", shapes, parameter_shapes(_skeleton(cls, config, around)))
    return {
        "zoo": version(),
        "family": family,
        **around,
        "num_parameters": sum(int(np.prod(shape)) for shape in shapes.values()),
        "config": fields,
    }


def _around(model: PyTree) -> dict[str, Any]:
    """What `config.json` says of an ensemble's members, or of a classification head."""
    if isinstance(model, Ensemble):
        return {"num_members": model.num_members}
    if isinstance(model, Classifier):
        return {"num_classes": model.num_classes, "pooling": model.pooling}
    return {}


def _read_config(folder: Path) -> tuple[type, Any, dict[str, Any]]:
    """The model class, its Config, and what is around it, if it is an ensemble or a classifier.

    Nothing but a family of the zoo is ever imported.
    """
    description = json.loads((folder / CONFIG).read_text())
    family = description.get("family")
    if family not in FAMILIES:
        raise PublishError(
            f"{folder / CONFIG}: family {family!r} is unknown; known are {', '.join(FAMILIES)}"
        )
    module_name, _, class_name = family.rpartition(".")
    module = importlib.import_module(module_name)
    values = {field: _as_field(value) for field, value in description["config"].items()}
    known = [field.name for field in dataclasses.fields(module.Config)]
    if unknown := sorted(values.keys() - set(known)):
        raise PublishError(
            f"{folder / CONFIG}: {module_name}.Config has no field {', '.join(unknown)} (it has "
            f"{', '.join(known)}); the folder was written by version {description.get('zoo')} of "
            f"the zoo, and this is {version()}"
        )
    try:
        config = module.Config(**values)
        return getattr(module, class_name), config, description
    except (TypeError, ValueError) as error:
        raise PublishError(f"{folder / CONFIG}: {error}") from error


def _as_field(value: Any) -> Any:
    """JSON has no tuples, and a frozen configuration no lists."""
    return tuple(_as_field(item) for item in value) if isinstance(value, list) else value


def _skeleton(cls: type, config: Any, around: dict[str, Any]) -> PyTree:
    def one(key: Any) -> PyTree:
        return cls(config, key=key)

    def make(key: Any) -> PyTree:
        if "num_members" in around:
            return Ensemble(one, around["num_members"], key=key)
        if "num_classes" in around:
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
