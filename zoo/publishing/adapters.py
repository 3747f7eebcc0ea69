"""Folders of adapters without their model, which they name, in formats such as PEFT's."""

import fnmatch
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import PyTree

from zoo import sharding
from zoo.common import checksums
from zoo.common.addresses import is_remote
from zoo.common.files import local_path
from zoo.nn.products import is_quantized
from zoo.publishing import downloads, formats
from zoo.publishing.errors import PublishError
from zoo.publishing.families import with_more_ends
from zoo.publishing.folder import replacing, verify
from zoo.publishing.formats import AdapterFormat, Base, Opened
from zoo.publishing.shelf import find, find_here
from zoo.publishing.structure import check_model
from zoo.publishing.tensors import parse_dtype
from zoo.wrappers import lora

ALL_LINEAR = "all-linear"
logger = logging.getLogger(__name__)


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
    check(model, config)
    name, base_folder, revision = _located(base)
    if lora.has_adapters(below) and not (base_folder and are_adapters(base_folder)):
        raise PublishError(
            f"the model has other adapters below those to save, and base={name!r} has none: save "
            "those first, from the model without these, and name their folder"
        )
    with replacing(folder) as new:
        origin = Base(
            name,
            revision,
            weights_checksum(base_folder) if new and base_folder else None,
            _quantized_kinds(model),
            tuple(getattr(getattr(model, "config", None), "eos_ids", ())),
        )
        _written_format().write(new, model, config, origin)
        if new is not None:
            if tokenizer is not None:
                tokenizer.save(new)
            checksums.write(new)


def check(model: PyTree, config: lora.Config) -> None:
    """Raise a PublishError if such adapters of a model, by its paths, cannot be saved."""
    _written_format().check(model, config)


def _written_format() -> AdapterFormat:
    if not (known := formats.adapter_formats()):
        raise PublishError("no format of adapters is installed")
    return known[0]


def _located(name: Path | str) -> tuple[str, Path | None, str | None]:
    """The name of a base as it is stored, its folder on this machine, and its revision."""
    folder = find_here(name)
    if Path(name).expanduser().exists():
        return str(Path(name).expanduser().absolute()), folder, None
    hub = formats.of_id(name)
    return str(name), folder, hub.revision(folder) if hub and folder else None


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


def _open(folder: Path, base: PyTree) -> Opened:
    if not folder.is_dir():
        raise PublishError(f"{folder} is no folder: give one that save_adapters or PEFT wrote")
    if (format := formats.of_adapters(folder)) is None:
        raise PublishError(f"{folder} holds no adapters: zoo.load opens a whole model")
    if (folder / checksums.NAME).exists():
        verify(folder)
    return format.open(folder, base)


def _with_ends(adapted: PyTree, origin: Base, folder: Path) -> PyTree:
    try:
        return with_more_ends(adapted, origin.eos_ids)
    except ValueError as error:
        raise PublishError(f"{folder}: {error}") from None


def are_adapters(folder: Path) -> bool:
    """Whether a folder holds adapters, and no whole model."""
    return formats.of_adapters(folder) is not None


def base_in(folder: Path) -> Base:
    """The base of the adapters in a folder; errors as of `AdapterFormat.base`."""
    return _format(folder).base(folder)


def _format(folder: Path) -> AdapterFormat:
    found = formats.of_adapters(folder)
    assert found is not None, folder
    return found


def base_of(folder: Path) -> Path:
    """The folder of the base of the adapters in a folder.

    Raises:
        PublishError: they name none, or the bases below it lead back to one of them.
    """
    chain = [folder]
    while len(chain) == 1 or are_adapters(chain[-1]):
        format, base = _format(chain[-1]), base_in(chain[-1])
        if not base.name:
            raise PublishError(
                f"{chain[-1] / format.config} names no {format.base_field}: load that "
                "model, and put these adapters on it by zoo.load_adapters"
            )
        found = find(base.name, revision=base.revision)
        if any(found.samefile(other) for other in chain):
            round = " on ".join(map(str, [*chain, found]))
            raise PublishError(
                f"{chain[-1]}: the base of its adapters, {base.name!r}, is "
                + ("this folder itself" if len(chain) == 1 else f"on them again ({round})")
                + f": name a whole model as {format.base_field} in {format.config}"
            )
        chain.append(found)
    return chain[1]


def check_base(folder: Path) -> None:
    """Raise a PublishError if the base of adapters has other weights than they were trained on."""
    format, base, found = _format(folder), base_in(folder), base_of(folder)
    if base.checksum is not None and base.checksum != weights_checksum(found):
        raise PublishError(
            f"{folder} holds adapters of {base.name!r}, and {found} has other weights than the "
            f"model of that name had: give its files back, or name where they are now as "
            f"{format.base_field} in {format.config}. zoo.load_adapters takes a model that you "
            "have loaded yourself"
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
        return checksums.digest(folder, formats.of(folder).weight_files(folder))
    own = checksums.digest(folder, _format(folder).weight_files(folder))
    return checksums.joined(weights_checksum(base_of(folder)), own)


def sampling(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file with a model's settings of sampling, and they by the names of `zoo.Sampling`.

    Adapters without any take the nearest base's; without a file the result is empty.
    """
    found = (x.sampling(folder) for x in formats.formats())
    settings = next((x for x in found if x is not None), None)
    if settings is None and are_adapters(folder):
        return sampling(base_of(folder))
    return settings or (folder, {})


def with_paths(config: lora.Config, model: PyTree) -> lora.Config:
    """The configuration with the zoo's paths in place of the names that formats have for modules.

    A target that is a path of the model, or a pattern of one, stays. `q_proj` stands for all
    modules of that name, as in PEFT, and "all-linear" for all matrices but embeddings and heads.
    A comma separates targets too.

    Raises:
        ValueError: a target that matches nothing; it names what there is.
    """
    matrices = lora.targets(model, lora.Config(targets=("*",)))
    modules = [item for x in formats.adapter_formats() for item in x.modules(model).items()]

    def paths(target: str) -> list[str]:
        if target == ALL_LINEAR:
            return lora.targets(model, lora.Config())
        if fnmatch.filter(matrices, target):
            return [target]
        return [path for path, name in modules if f".{name}".endswith(f".{target}")]

    found: dict[str, None] = {}
    for target in (name for names in config.targets for name in names.split(",")):
        if not (chosen := paths(target)):
            names = sorted({name.rpartition(".")[2] for _, name in modules})
            raise ValueError(
                f"targets={target!r} matches no matrix; those are {', '.join(matrices)}"
                + (f", or by the names of modules: {', '.join(names)}" if names else "")
                + f", or {ALL_LINEAR!r} for all but embeddings and heads"
            )
        found |= dict.fromkeys(chosen)
    return replace(config, targets=tuple(found))
