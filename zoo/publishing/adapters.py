"""Folders of adapters without their model, which they name: in the zoo's format, or in PEFT's.

In the zoo's, `config.json` has the name of the base in `adapters_of`, and `model.safetensors` the
arrays by their paths in the model; PEFT's is in `peft`.
"""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import PyTree

from zoo import sharding
from zoo.base import checksums, configuration
from zoo.base.addresses import is_remote
from zoo.base.files import local_path
from zoo.nn.products import dequantize
from zoo.publishing import bases, downloads, hf, peft, peft_config, peft_writing, token_ids
from zoo.publishing.errors import PublishError
from zoo.publishing.families import family_name, skeleton_of
from zoo.publishing.folder import (
    ADAPTER_CONFIG,
    CONFIG,
    WEIGHTS,
    read_json,
    replacing,
    verify,
    version,
)
from zoo.publishing.slices import open_file
from zoo.publishing.structure import check_model
from zoo.publishing.tensors import (
    parse_dtype,
    read_dtypes,
    read_tensors,
    write_tensors,
)
from zoo.wrappers import lora

BASE = "adapters_of"  # a field of `config.json` that only adapters have
Format = Literal["zoo", "peft"]


def save_adapters(
    folder: Path | str,
    model: PyTree,
    *,
    base: Path | str,
    format: Format = "zoo",
    tokenizer: Any = None,
) -> None:
    """Write only the adapters of a model, as a folder that `load_adapters` and `zoo.load` open.

    PEFT opens `format="peft"` too. `base` names the model that they adapt: a folder, a name on the
    shelf or a hub id. If it is on this machine, the checksum of its weights is stored, by which
    `zoo.load` refuses another model in its place; so is the commit of a hub id. The kinds of the
    model's quantised matrices and the ids that end its texts are stored too. `tokenizer` is as for
    `zoo.save`. All processes call it, and the first writes.

    Raises PublishError if the folder has other files, or PEFT's format has no such adapters,
    ValueError if the model has none, or for another format.
    """
    configuration.check_value("format", format, Format)
    config = _config_of(model)
    name, base_folder, revision = bases.locate(base)
    check_format(format, model, config, base_folder)
    if lora.has_adapters(lora.base(model)) and not (base_folder and are_adapters(base_folder)):
        raise PublishError(
            f"the model has other adapters below those to save, and base={name!r} has none: save "
            "those first, from the model without these, and name their folder"
        )
    sample = bases.sample_of(model)
    with replacing(folder) as new:
        origin: dict[str, Any] = {
            "sample": sample,
            "quantized": bases.quantized_kinds(model),
            "eos_ids": getattr(getattr(model, "config", None), "eos_ids", ()),
        }
        if new is not None and base_folder is not None:
            origin["weights"] = weights_checksum(base_folder)
        if format == "peft":
            named = {"base_model_name_or_path": name, "revision": revision}
            peft_writing.write(new, model, config, named, json.dumps(origin))
        else:
            write_tensors(new and new / WEIGHTS, eqx.filter(model, lora.trainable(model)))
        if new is not None:
            if format == "zoo":
                description = {
                    "zoo": version(),
                    "family": family_name(model),
                    BASE: name,
                    "revision": revision,
                    "base": origin,
                    **dataclasses.asdict(config),
                }
                (new / CONFIG).write_text(json.dumps(description, indent=1) + "\n")
            if tokenizer is not None:
                tokenizer.save(new)
            checksums.write(new)


def _config_of(model: PyTree) -> lora.Config:
    """The configuration of a model's adapters, after a check that it suffices to make them."""
    config = lora.config_of(model)
    model = eqx.filter_eval_shape(dequantize, model)  # as its base is stored
    below = eqx.filter_eval_shape(lora.base, model)
    base_skeleton = below if lora.has_adapters(below) else skeleton_of(below)
    skeleton = eqx.filter_eval_shape(lora.adapt, base_skeleton, config, key=jax.random.key(0))
    check_model(model, skeleton)
    return config


def check_format(format: Format, model: PyTree, config: lora.Config, base: Path | None) -> None:
    """Raise a PublishError if `save_adapters` cannot write such adapters of a model in a format.

    `config` has the paths of its matrices as targets; `base` is the folder of their base, if that
    is on this machine.
    """
    if format != "peft":
        return
    if base is not None and are_adapters(base):
        raise PublishError(
            f"{base} holds adapters itself, and PEFT's format names a whole model: merge them by "
            "zoo.lora.merge, save the model, and begin with that; or take the zoo's format"
        )
    peft_writing.check(model, config)


def load_adapters(
    folder: Path | str,
    base: Any,
    *,
    mesh: Mesh | sharding.Layout | None = None,
    dtype: DTypeLike | None = None,
) -> Any:
    """The model `base` with the adapters in a folder; `zoo.load` also loads the base itself.

    The folder is one of `save_adapters`, or of PEFT's. `zoo.lora.merge` makes a plain model of the
    result. `mesh` and `dtype` are as for `zoo.load`, and `base` has to be on that mesh.

    A model does not know its files. So a few of its values are compared with the ones that the
    adapters were trained on, which tells any other model from it, but not a variant of it, such as
    one that was fine-tuned from it; `zoo.load` compares the checksum of the files. The same model
    quantised otherwise than in training is a warning.

    Raises PublishError, which names the file, field or tensor at fault.
    """
    folder = downloads.fetched(folder) if is_remote(folder) else local_path(folder, "folder")
    dtype = parse_dtype(dtype)
    opened, layout = _open(folder, base), sharding.layout_of(mesh)
    with sharding.use(layout.without_mesh):
        read = opened.read(opened.adapters, layout.mesh, dtype)
        adapted = eqx.combine(read, lora.adapt(base, opened.config, key=jax.random.key(0)))
        if layout.mesh is not None:  # the seeds of dropout, which are new
            adapted = eqx.filter_shard(adapted, sharding.shardings(adapted, layout.mesh))
    origin = base_in(folder)
    origin.check_values(adapted, folder)
    return _with_ends(adapted, origin, folder)


def adapters_skeleton(folder: Path, base: PyTree, *, dtype: DTypeLike | None) -> PyTree:
    """The skeleton of the model that `load_adapters` would return, given that of the base."""
    opened = _open(folder, base)
    adapted = eqx.filter_eval_shape(lora.adapt, base, opened.config, key=jax.random.key(0))
    adapted = eqx.combine(opened.dtypes(opened.adapters, dtype), adapted)
    return _with_ends(adapted, base_in(folder), folder)


def _with_ends(adapted: PyTree, origin: bases.Base, folder: Path) -> PyTree:
    try:
        return token_ids.with_more_ends(adapted, origin.eos_ids)
    except ValueError as error:
        raise PublishError(f"{folder}: {error}") from None


class _Opened(NamedTuple):
    """A folder of adapters that fits a model: their configuration, skeleton, arrays and dtypes."""

    config: lora.Config
    adapters: PyTree
    read: Callable[[PyTree, Mesh | None, DTypeLike | None], PyTree]
    dtypes: Callable[[PyTree, DTypeLike | None], PyTree]


def _open(folder: Path, base: PyTree) -> _Opened:
    if not folder.is_dir():
        raise PublishError(f"{folder} is no folder: give one that save_adapters or PEFT wrote")
    if peft.is_peft(folder):
        _verify(folder)
        opened = peft.Opened(folder, base)
        config, read, dtypes = opened.config, opened.read, opened.dtypes
    else:
        description, config = _read(folder)
        if (family := family_name(base)) != (stored := description.get("family")):
            raise PublishError(
                f"{folder} holds adapters of the family {stored!r}, and the model is of {family!r}"
            )
        weights = folder / WEIGHTS
        read, dtypes = partial(read_tensors, weights), partial(read_dtypes, weights)
    try:
        skeleton = eqx.filter_eval_shape(lora.adapt, base, config, key=jax.random.key(0))
    except (ValueError, TypeError) as error:
        raise PublishError(f"{folder} does not fit the model: {error}") from error
    return _Opened(config, eqx.filter(skeleton, lora.trainable(skeleton)), read, dtypes)


def are_adapters(folder: Path) -> bool:
    """Whether a folder holds adapters instead of a whole model."""
    return peft.is_peft(folder) or BASE in read_json(folder / CONFIG)


def base_in(folder: Path) -> bases.Base:
    """The base of the adapters in a folder."""
    if not peft.is_peft(folder):
        description, _ = _read(folder)
        values = description.get("base", {})
        return bases.parse(description[BASE], description.get("revision"), values, folder / CONFIG)
    path = folder / ADAPTER_CONFIG
    _, values = peft_config.read(path)
    with open_file(folder / peft.WEIGHTS) as file:
        text = (file.metadata() or {}).get(peft.METADATA, "{}")
    try:
        origin = json.loads(text)
    except ValueError as error:
        raise PublishError(f"{folder / peft.WEIGHTS}: metadata {text!r}: {error}") from error
    return bases.parse(values.get("base_model_name_or_path"), values.get("revision"), origin, path)


def base_of(folder: Path) -> Path:
    """The folder of the base of the adapters in a folder.

    Raises:
        PublishError: they name none, or the bases below it lead back to one of them.
    """
    chain = [folder]
    while len(chain) == 1 or are_adapters(chain[-1]):
        base = base_in(chain[-1])
        if not base.name:
            raise PublishError(
                f"{chain[-1] / ADAPTER_CONFIG} names no base_model_name_or_path: load that model, "
                "and put these adapters on it by zoo.load_adapters"
            )
        found = base.folder()
        if any(found.samefile(other) for other in chain):
            round = " on ".join(map(str, [*chain, found]))
            raise PublishError(
                f"{chain[-1]}: the base of its adapters, {base.name!r}, is "
                + ("this folder itself" if len(chain) == 1 else f"on them again ({round})")
                + f": name a whole model as {BASE} or base_model_name_or_path in its configuration"
            )
        chain.append(found)
    return chain[1]


def check_base(folder: Path) -> None:
    """Raise a PublishError if the base of adapters has other weights than they were trained on."""
    base, found = base_in(folder), base_of(folder)
    if base.checksum is not None and base.checksum != weights_checksum(found):
        raise PublishError(
            f"{folder} holds adapters of {base.name!r}, and {found} has other weights than the "
            "model of that name had: give its files back, or name where they are now in the "
            "adapters' configuration. zoo.load_adapters takes a model that you have loaded yourself"
        )


def nearest(folder: Path, file: str) -> Path:
    """A model's folder, or if it is of adapters without that file, the nearest base with it."""
    while not (folder / file).is_file() and are_adapters(folder):
        folder = base_of(folder)
    return folder


def whole(folder: Path) -> Path:
    """The folder of a whole model: that which adapters are on in the end, or the folder itself."""
    while are_adapters(folder):
        folder = base_of(folder)
    return folder


def weights_checksum(folder: Path) -> str:
    """One checksum of the weights in a model's folder: of what its `checksums.json` says of their
    files, or else of their bytes; of adapters, with that of their base.
    """
    if not are_adapters(folder):
        return checksums.digest(folder, hf.weight_files(folder))
    own = checksums.digest(folder, [peft.WEIGHTS if peft.is_peft(folder) else WEIGHTS])
    return checksums.joined(weights_checksum(base_of(folder)), own)


def _verify(folder: Path) -> None:
    """Verify the checksums of a folder in PEFT's format, if it has any."""
    if (folder / checksums.NAME).exists():
        verify(folder)


def _read(folder: Path) -> tuple[dict[str, Any], lora.Config]:
    """The content of `config.json`, and the configuration in it."""
    verify(folder)
    path = folder / CONFIG
    description = read_json(path)
    if BASE not in description:
        raise PublishError(f"{folder} holds no adapters: zoo.load opens a whole model")
    try:
        configuration.check_value(BASE, description[BASE], str)
        fields = {name: description.get(name) for name in configuration.annotations(lora.Config)}
        return description, configuration.from_json(lora.Config, fields)
    except (TypeError, ValueError) as error:
        raise PublishError(f"{path}: {error}") from error
