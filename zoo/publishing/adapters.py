"""Folders of adapters without their model: `config.json` names the model that they adapt."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import PyTree

from zoo.base import checksums, configuration
from zoo.base.files import local_path
from zoo.publishing.errors import PublishError
from zoo.publishing.families import current_name, family_name, skeleton_of
from zoo.publishing.folder import CONFIG, WEIGHTS, read_json, replacing, verify, version
from zoo.publishing.shelf import find
from zoo.publishing.structure import check_model
from zoo.publishing.tensors import parse_dtype, read_dtypes, read_tensors, write_tensors
from zoo.wrappers import lora

BASE = "adapters_of"  # a field of `config.json` that only adapters have


def save_adapters(folder: Path | str, model: PyTree, *, base: Path | str) -> None:
    """Write only the adapters of a model, as a folder that `load_adapters` and `zoo.load` open.

    `base` names the model that they adapt: a folder, a name on the shelf or a hub id. All processes
    call it, and the first writes. Raises PublishError if the folder has other files, ValueError if
    the model has no adapters.
    """
    config = lora.config_of(model)
    below = eqx.filter_eval_shape(lora.base, model)
    base_skeleton = below if lora.has_adapters(below) else skeleton_of(below)
    skeleton = eqx.filter_eval_shape(lora.adapt, base_skeleton, config, key=jax.random.key(0))
    check_model(model, skeleton)
    known = Path(base).expanduser().exists()
    description = {
        "zoo": version(),
        "family": family_name(model),
        BASE: str(Path(base).expanduser().absolute()) if known else str(base),
        **dataclasses.asdict(config),
    }
    with replacing(folder) as new:
        write_tensors(new and new / WEIGHTS, eqx.filter(model, lora.trainable(model)))
        if new is not None:
            (new / CONFIG).write_text(json.dumps(description, indent=1) + "\n")
            checksums.write(new)


def load_adapters(
    folder: Path | str, base: Any, *, mesh: Mesh | None = None, dtype: DTypeLike | None = None
) -> Any:
    """The model `base` with the adapters in a folder; `zoo.load` also loads the base itself.

    `zoo.lora.merge` makes a plain model of it. `mesh` and `dtype` are as for `zoo.load`, and `base`
    has to be on that mesh. Raises PublishError, which names the file, field or tensor at fault.
    """
    folder, dtype = local_path(folder, "folder"), parse_dtype(dtype)
    adapters, config = _open(folder, base)
    read = read_tensors(folder / WEIGHTS, adapters, mesh, dtype)
    return eqx.combine(read, lora.adapt(base, config, key=jax.random.key(0)))


def adapters_skeleton(folder: Path, base: PyTree, *, dtype: DTypeLike | None) -> PyTree:
    """The skeleton of the model that `load_adapters` would return, given that of the base."""
    adapters, config = _open(folder, base)
    adapted = eqx.filter_eval_shape(lora.adapt, base, config, key=jax.random.key(0))
    return eqx.combine(read_dtypes(folder / WEIGHTS, adapters, dtype), adapted)


def _open(folder: Path, base: Any) -> tuple[PyTree, lora.Config]:
    """The skeleton of the adapters alone, and their configuration."""
    if not folder.is_dir():
        raise PublishError(f"{folder} is no folder: give one that save_adapters wrote")
    description, config = _read(folder)
    if (family := family_name(base)) != (stored := current_name(description.get("family"))):
        raise PublishError(
            f"{folder} holds adapters of the family {stored!r}, and the model is of {family!r}"
        )
    try:
        skeleton = eqx.filter_eval_shape(lora.adapt, base, config, key=jax.random.key(0))
    except (ValueError, TypeError) as error:
        raise PublishError(f"{folder} does not fit the model: {error}") from error
    return eqx.filter(skeleton, lora.trainable(skeleton)), config


def are_adapters(folder: Path) -> bool:
    """Whether a folder holds adapters instead of a whole model."""
    return BASE in read_json(folder / CONFIG)


def base_of(folder: Path) -> str:
    """The base of the adapters in a folder, as an argument for `zoo.load`."""
    description, _ = _read(folder)
    if find(description[BASE]).samefile(folder):
        raise PublishError(f"{folder / CONFIG}: {BASE}={str(folder)!r} is this folder itself")
    return description[BASE]


def _read(folder: Path) -> tuple[dict[str, Any], lora.Config]:
    """The content of `config.json`, and the configuration in it."""
    verify(folder)
    path = folder / CONFIG
    description = read_json(path)
    if BASE not in description:
        raise PublishError(f"{folder} holds no adapters: zoo.load opens a whole model")
    try:
        configuration.check_value(BASE, description[BASE], str)
        values = configuration.current(lora.Config, description)
        fields = {name: values.get(name) for name in configuration.annotations(lora.Config)}
        return description, configuration.from_json(lora.Config, fields)
    except (TypeError, ValueError) as error:
        raise PublishError(f"{path}: {error}") from error
