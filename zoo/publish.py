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
import safetensors
import safetensors.numpy
from jax.experimental import multihost_utils
from jax.sharding import Mesh, SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import PyTree

from zoo import checksums, sharding
from zoo.ensemble import Ensemble

# Opening a folder makes one of these and nothing else; `Config` is beside the class.
FAMILIES = ("zoo.bert.BERT", "zoo.mlp.MLP", "zoo.rnn.RNN", "zoo.transformer.Transformer")
CONFIG, WEIGHTS, METRICS, README = "config.json", "model.safetensors", "metrics.json", "README.md"


class PublishError(Exception):
    """A folder that can't be written as a model, or can't be opened as one."""


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
    for the README, `metrics` is JSON. All processes call it, and the first writes. Raises
    PublishError where `load` could not make the model again, or no Hugging Face family has it.
    """
    folder = Path(folder).absolute()
    _check_replaceable(folder)
    with _replacing(folder) as new:
        if format == "hf":
            from zoo import hf

            family, description = hf.describe(model, tokenizer)
            hf.write(new, model, family)
        else:
            description = _describe_model(model)
            tensors = {name: _on_host(leaf) for name, leaf in _named(model)}
            if new is not None:
                safetensors.numpy.save_file(tensors, new / WEIGHTS)
        if new is not None:
            (new / CONFIG).write_text(json.dumps(description, indent=1) + "\n")
            readme = _readme(folder.name, model, card)
            (new / README).write_text(readme, encoding="utf-8")
            if metrics is not None:
                (new / METRICS).write_text(json.dumps(metrics, indent=1) + "\n")
            if tokenizer is not None:
                tokenizer.save(new)
            # A card may be edited by hand, and the model opens still.
            checksums.write(new, skip=(README,))


@contextlib.contextmanager
def _replacing(folder: Path) -> Iterator[Path | None]:
    """A new folder to fill, which then takes the place of `folder`; None on other processes."""
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
    folder = _find(name_or_folder)
    values = _hugging_face_config(folder)
    if values is None or (folder / checksums.NAME).exists():
        _verify(folder)
    if values is not None:
        from zoo import hf

        return hf.load(folder, values, mesh=mesh, dtype=dtype)
    skeleton = _skeleton(*_read_config(folder))
    if mesh is None:
        one = SingleDeviceSharding(jax.local_devices()[0])
        placed = jax.tree.map(lambda leaf: one, skeleton)
    else:
        placed = sharding.shardings(skeleton, mesh)
    with safetensors.safe_open(folder / WEIGHTS, "numpy") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        _check_tensors(f"{folder / WEIGHTS}", stored, _shapes(skeleton))

        def fill(path: tuple, leaf: Any, where: Any) -> Any:
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf
            return _read(file, sharding.keystr(path), leaf.shape, where, dtype)

        return jax.tree_util.tree_map_with_path(fill, skeleton, placed)


def _verify(folder: Path) -> None:
    if problems := checksums.problems(folder):
        raise PublishError(
            f"{folder} is damaged or not a model of the zoo:\n  "
            + "\n  ".join(problems)
            + "\nPut back the files from a copy, or publish it again."
        )


def _hugging_face_config(folder: Path) -> dict | None:
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


def _find(name_or_folder: str | Path) -> Path:
    """A folder that exists comes before a name on the shelf, and that before a hub id."""
    from zoo import hf

    for folder in (Path(name_or_folder), _shelf() / name_or_folder):
        if (folder / CONFIG).is_file():
            return folder
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
    num_members = model.num_members if isinstance(model, Ensemble) else None
    one = _one(model)
    cls, family = type(one), _family(one)
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
    shapes = _shapes(model)
    _check_tensors("the model", shapes, _shapes(_skeleton(cls, config, num_members)))
    return {
        "zoo": _version(),
        "family": family,
        **({} if num_members is None else {"num_members": num_members}),
        "num_parameters": sum(int(np.prod(shape)) for shape in shapes.values()),
        "config": fields,
    }


def _read_config(folder: Path) -> tuple[type, Any, int | None]:
    """The model class, its Config, and the number of members of an ensemble, if it is one.

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
            f"the zoo, and this is {_version()}"
        )
    try:
        config = module.Config(**values)
        return getattr(module, class_name), config, description.get("num_members")
    except (TypeError, ValueError) as error:
        raise PublishError(f"{folder / CONFIG}: {error}") from error


def _as_field(value: Any) -> Any:
    """JSON has no tuples, and a frozen configuration no lists."""
    return tuple(_as_field(item) for item in value) if isinstance(value, list) else value


def _skeleton(cls: type, config: Any, num_members: int | None) -> PyTree:
    def make(key: Any) -> PyTree:
        return cls(config, key=key)

    if num_members is None:
        return eqx.filter_eval_shape(make, jax.random.key(0))
    return eqx.filter_eval_shape(
        lambda key: Ensemble(make, num_members, key=key), jax.random.key(0)
    )


def _named(model: PyTree) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            yield sharding.keystr(path), leaf


def _shapes(model: PyTree) -> dict[str, tuple[int, ...]]:
    return {name: leaf.shape for name, leaf in _named(model)}


def _check_tensors(
    where: str, stored: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]
) -> None:
    lines = [
        f"{name}: {stored.get(name, 'missing')} here, "
        f"{wanted.get(name, 'no such tensor')} by the configuration"
        for name in sorted(stored.keys() | wanted.keys())
        if stored.get(name) != wanted.get(name)
    ]
    if lines:
        raise PublishError(f"{where} does not fit its configuration:\n  " + "\n  ".join(lines))


def _on_host(leaf: jax.Array) -> np.ndarray:
    if not leaf.is_fully_addressable:
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    # safetensors writes the buffer as it lies, which is wrong for any other order than C.
    return np.asarray(leaf, order="C")


def _read(file: Any, name: str, shape: tuple, where: Any, dtype: DTypeLike | None) -> jax.Array:
    def read(index: Any) -> np.ndarray:
        # get_slice refuses an empty array.
        part = file.get_slice(name)[index] if 0 not in shape else file.get_tensor(name)
        floating = jnp.issubdtype(part.dtype, jnp.floating)
        return part.astype(dtype) if dtype is not None and floating else part

    return jax.make_array_from_callback(shape, where, read)


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
    num_parameters = sum(int(np.prod(shape)) for shape in _shapes(model).values())
    return (
        f"# {name}\n\n{card.strip()}\n\n"
        f"- Family: `{_family(_one(model))}`, {num_parameters:,} parameters\n"
        f'- Open it with `zoo.load("{name}")`, or the path of this folder\n'
    )


def _one(model: eqx.Module) -> Any:
    """What an ensemble has several of; any other model itself."""
    return model.members if isinstance(model, Ensemble) else model


def _family(model: eqx.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


def _version() -> str:
    try:
        return importlib.metadata.version("zoo")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"
