"""Folders of adapters without their model, which they name: in the format of PEFT."""

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import PyTree

from zoo import sharding
from zoo.base import checksums
from zoo.base.addresses import is_remote
from zoo.base.configuration import check_value, require
from zoo.base.files import local_path
from zoo.nn.products import is_quantized
from zoo.publishing import downloads, hf, peft, peft_config, token_ids
from zoo.publishing.errors import PublishError
from zoo.publishing.folder import ADAPTER_CONFIG, read_json, replacing, verify
from zoo.publishing.shelf import find, find_here
from zoo.publishing.slices import open_file
from zoo.publishing.structure import check_model
from zoo.publishing.tensors import parse_dtype
from zoo.wrappers import lora

NAME, REVISION = "base_model_name_or_path", "revision"  # of the base, in PEFT's words
METADATA = "zoo"  # in the header of the weights, which PEFT does not read
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Base:
    """The model that adapters are for, as their folder describes it."""

    name: str
    """A folder, a name on the shelf or a hub id; "" if it is not known."""
    revision: str | None = None
    """The commit of a hub id."""
    checksum: str | None = None
    """Of the files of its weights; None if they were not on this machine."""
    quantized: tuple[str, ...] | None = None
    """The kinds of its quantised matrices; None if they are not known."""
    eos_ids: tuple[int, ...] = ()
    """The ids that end the texts of the model with its adapters."""


def save_adapters(
    folder: Path | str, model: PyTree, *, base: Path | str, tokenizer: Any = None
) -> None:
    """Write only the adapters of a model, as a folder that `load_adapters` and `zoo.load` open.

    The format is PEFT's, which opens them too where Hugging Face has such a model; the modules of
    other models are named by the paths of their matrices.

    `base` names the model that they adapt: a folder, a name on the shelf or a hub id. If it is on
    this machine, the checksum of its weights is stored, by which `zoo.load` refuses another model
    in its place; so is the commit of a hub id. The kinds of the model's quantised matrices and the
    ids that end its texts are stored too. `tokenizer` is as for `zoo.save`. All processes call it,
    and the first writes.

    Raises PublishError if the folder has other files, or PEFT's format has no such adapters, and
    ValueError if the model has none.
    """
    config = lora.config_of(model)
    below = lora.base(model)
    check_model(model, eqx.filter_eval_shape(lora.adapt, below, config, key=jax.random.key(0)))
    peft.check(model, config)
    name, base_folder, revision = _located(base)
    if lora.has_adapters(below) and not (base_folder and are_adapters(base_folder)):
        raise PublishError(
            f"the model has other adapters below those to save, and base={name!r} has none: save "
            "those first, from the model without these, and name their folder"
        )
    with replacing(folder) as new:
        origin = {
            "weights": weights_checksum(base_folder) if new and base_folder else None,
            "quantized": _quantized_kinds(model),
            "eos_ids": getattr(getattr(model, "config", None), "eos_ids", ()),
        }
        peft.write(
            new, model, config, {NAME: name, REVISION: revision}, {METADATA: json.dumps(origin)}
        )
        if new is not None:
            if tokenizer is not None:
                tokenizer.save(new)
            checksums.write(new)


def _located(name: Path | str) -> tuple[str, Path | None, str | None]:
    """The name of a base as it is stored, its folder on this machine, and its revision."""
    known = Path(name).expanduser().exists()
    folder = find_here(name)
    is_snapshot = not known and folder is not None and folder.parent.name == "snapshots"
    stored = str(Path(name).expanduser().absolute()) if known else str(name)
    return stored, folder, folder.name if is_snapshot and folder is not None else None


def _quantized_kinds(model: PyTree) -> tuple[str, ...]:
    """The kinds of a model's quantised matrices, each once."""
    leaves = jax.tree.leaves(model, is_leaf=is_quantized)
    return tuple(sorted({x.kind for x in leaves if is_quantized(x)}))


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

    A model does not know its files: that they are the base's, `zoo.load` alone tells, by their
    checksum. A model quantised otherwise than in training is a warning.

    Raises PublishError, which names the file, field or tensor at fault.
    """
    folder = downloads.fetched(folder) if is_remote(folder) else local_path(folder, "folder")
    opened, layout = _open(folder, base), sharding.layout_of(mesh)
    with sharding.use(layout.without_mesh):
        adapted = lora.adapt(base, opened.config, key=jax.random.key(0))
        adapted = eqx.combine(opened.read(layout.mesh, parse_dtype(dtype)), adapted)
        if layout.mesh is not None:  # the seeds of dropout, which are new
            adapted = eqx.filter_shard(adapted, sharding.shardings(adapted, layout.mesh))
    origin, kinds = base_in(folder), _quantized_kinds(adapted)
    if origin.quantized is not None and kinds != origin.quantized:
        kind = next(
            (x for x in origin.quantized if x != "int8"), next(iter(origin.quantized), None)
        )
        logger.warning(
            f"{folder} holds adapters that were trained over other values than these of "
            f"{origin.name!r}, which was {', '.join(origin.quantized) or 'not quantised'} and now "
            f"is {', '.join(kinds) or 'not quantised'}: load it with quantize={kind!r}"
        )
    return _with_ends(adapted, origin, folder)


def adapters_skeleton(folder: Path, base: PyTree, *, dtype: DTypeLike | None) -> PyTree:
    """The skeleton of the model that `load_adapters` would return, given that of the base."""
    opened = _open(folder, base)
    adapted = eqx.filter_eval_shape(lora.adapt, base, opened.config, key=jax.random.key(0))
    return _with_ends(eqx.combine(opened.dtypes(dtype), adapted), base_in(folder), folder)


def _open(folder: Path, base: PyTree) -> peft.Opened:
    if not folder.is_dir():
        raise PublishError(f"{folder} is no folder: give one that save_adapters or PEFT wrote")
    if not are_adapters(folder):
        raise PublishError(f"{folder} holds no adapters: zoo.load opens a whole model")
    if (folder / checksums.NAME).exists():
        verify(folder)
    return peft.Opened(folder, base)


def _with_ends(adapted: PyTree, origin: Base, folder: Path) -> PyTree:
    try:
        return token_ids.with_more_ends(adapted, origin.eos_ids)
    except ValueError as error:
        raise PublishError(f"{folder}: {error}") from None


def are_adapters(folder: Path) -> bool:
    """Whether a folder holds adapters, and no whole model."""
    return (folder / ADAPTER_CONFIG).is_file() and not any(folder.glob("model*.safetensors*"))


def base_in(folder: Path) -> Base:
    """The base of the adapters in a folder.

    Raises:
        PublishError: a value of another type; it names the file and the field.
    """
    peft_config.read(folder / ADAPTER_CONFIG)  # refuses other methods before a base is opened
    values = read_json(folder / ADAPTER_CONFIG)
    with open_file(folder / peft.WEIGHTS) as file:
        text = (file.metadata() or {}).get(METADATA, "{}")
    try:
        origin, name, revision = json.loads(text), values.get(NAME), values.get(REVISION)
        check_value(NAME, name, str | None)
        check_value(REVISION, revision, str | None)
        is_commit = revision is None or re.fullmatch(r"\w[\w.-]*", revision)
        require(bool(is_commit), f"{REVISION}={revision!r}: must be a commit")
        check_value("base", origin, dict)
        checksum, quantized = origin.get("weights"), origin.get("quantized")
        check_value("base.weights", checksum, str | None)
        quantized = quantized if quantized is None else tuple(quantized)
        check_value("base.quantized", quantized, tuple[str, ...] | None)
        eos_ids = tuple(origin.get("eos_ids", ()))
        check_value("base.eos_ids", eos_ids, tuple[int, ...])
    except (TypeError, ValueError) as error:
        raise PublishError(f"{folder / ADAPTER_CONFIG} or {peft.WEIGHTS}: {error}") from error
    return Base(name or "", revision, checksum, quantized, eos_ids)


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
                f"{chain[-1] / ADAPTER_CONFIG} names no {NAME}: load that model, and put these "
                "adapters on it by zoo.load_adapters"
            )
        found = find(base.name, revision=base.revision)
        if any(found.samefile(other) for other in chain):
            round = " on ".join(map(str, [*chain, found]))
            raise PublishError(
                f"{chain[-1]}: the base of its adapters, {base.name!r}, is "
                + ("this folder itself" if len(chain) == 1 else f"on them again ({round})")
                + f": name a whole model as {NAME} in {ADAPTER_CONFIG}"
            )
        chain.append(found)
    return chain[1]


def check_base(folder: Path) -> None:
    """Raise a PublishError if the base of adapters has other weights than they were trained on."""
    base, found = base_in(folder), base_of(folder)
    if base.checksum is not None and base.checksum != weights_checksum(found):
        raise PublishError(
            f"{folder} holds adapters of {base.name!r}, and {found} has other weights than the "
            f"model of that name had: give its files back, or name where they are now as {NAME} in "
            f"{ADAPTER_CONFIG}. zoo.load_adapters takes a model that you have loaded yourself"
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
    own = checksums.digest(folder, [peft.WEIGHTS])
    return checksums.joined(weights_checksum(base_of(folder)), own)
