"""Saving a model as a folder that anyone can open, and loading it; adapters without their model.

In the zoo's own format a folder holds `config.json` (family, parameter count, the fields of its
`Config`), `model.safetensors` (one tensor per parameter, named by its dotted path in the model),
`README.md`, `checksums.json` and, if given, `metrics.json` and the tokenizer's files. Other formats
are found by `formats`. Folders of adapters name the model that they are on.
"""

import fnmatch
import json
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import PyTree

from zoo import sharding
from zoo.common import checksums
from zoo.common.files import is_remote, local_path
from zoo.nn.products import Kind, is_operand, is_quantized
from zoo.publishing import PublishError, formats
from zoo.publishing.families import (
    DIFFERENCE,
    check_model,
    family_name,
    reconfigured,
    with_more_ends,
)
from zoo.publishing.formats import (
    METRICS,
    README,
    AdapterFormat,
    Base,
    Options,
    Source,
    read_json,
    verify,
)
from zoo.publishing.replacing import replacing
from zoo.publishing.shelf import chain, fetched, find, find_here, whole
from zoo.publishing.shelf import weights_checksum as weights_checksum
from zoo.publishing.tensors import num_parameters, stored_dtypes
from zoo.sharding.axes import keystr
from zoo.wrappers import lora

ALL_LINEAR = "all-linear"
logger = logging.getLogger(__name__)


def save(
    folder: Path | str,
    model: PyTree,
    *,
    format: str = "zoo",
    tokenizer: Any = None,
    card: str = "",
    metrics: dict | None = None,
    like: Path | str | None = None,
) -> None:
    """Write `model`, in its own dtypes, as a folder that `load` opens: all of it or nothing.

    `like` is the model that it came from, for example by fine-tuning, as an argument of `load`: its
    dtypes are taken over, and in Hugging Face's format its token ids and settings of generation.

    A model already there is replaced; a folder with other files is refused. transformers opens
    `format="hf"` too. `tokenizer` is any object with `.save(folder)`, `card` is Markdown for the
    README, `metrics` is JSON, which is stored with the checksums of the measured files.
    A model with classes of your own, in a model of the zoo or as all of it (also beside its
    `equinox.nn.State`), is stored too, and opens with `zoo.load(folder, like=...)`.
    All processes call it, and the first writes. Raises PublishError if the model is quantised or
    has adapters, or if no Hugging Face family has it, and ValueError for another format.
    """
    if (chosen := formats.formats().get(format)) is None:
        raise ValueError(f"format={format!r}: choose one of {[*formats.formats()]}")
    if any(map(is_quantized, jax.tree.leaves(model, is_leaf=is_quantized))):
        raise PublishError(
            "the model is quantised, and folders hold models as they were before: save that one, "
            "and load it by zoo.load(folder, quantize=...), or save what "
            "zoo.nn.products.dequantize makes of this one"
        )
    if any(map(is_operand, jax.tree.leaves(model, is_leaf=is_operand))):
        raise PublishError(
            "the model has adapters: merge them by zoo.lora.merge, or save them alone by "
            "zoo.save_adapters"
        )
    source = None if like is None else whole(find(like))
    stored, default = ({}, None) if source is None else formats.of(source).dtypes(source)
    with replacing(folder) as new:
        if new is not None and tokenizer is not None:
            tokenizer.save(new)
        dtypes = stored_dtypes(model, stored, default)
        written = chosen.write(new, model, Source(dtypes, tokenizer, source))
        if new is not None:
            readme = _readme(Path(str(folder)).absolute().name, model, card, new / chosen.config)
            (new / README).write_text(readme, encoding="utf-8")
            # The card is in no checksum, so that it may be edited by hand.
            if metrics is not None:
                files = checksums.of(new, skip=(README,), known=written)
                measured = {**metrics, "files": files}
                (new / METRICS).write_text(json.dumps(measured, indent=1) + "\n")
            checksums.write(new, skip=(README,), known=written)


def _readme(name: str, model: PyTree, card: str, config: Path) -> str:
    text = f"{card.strip()}\n\n" if card.strip() else ""
    how = "Open it with `zoo.load(folder)`, given the path of this folder"
    if DIFFERENCE in read_json(config):
        how = how.replace("folder)", "folder, like=model)", 1) + " and a model of its class"
    return (
        f"# {name}\n\n{text}"
        f"- Family: `{family_name(model)}`, {num_parameters(model):,} parameters\n- {how}\n"
    )


def load(
    name_or_folder: str | Path,
    *,
    mesh: Mesh | sharding.Layout | None = None,
    dtype: DTypeLike | None = None,
    quantize: Kind | str | None = None,
    overrides: Mapping[str, Any] | None = None,
    like: PyTree = None,
    ignore: Collection[str] = (),
) -> Any:
    """The model in a folder, given its path, its name on the shelf or its Hugging Face hub id.

    It is sharded over `mesh` or a `zoo.Layout` (None: on one device): each device reads its own
    slices, so that no device or host holds the whole model. Floating point parameters are cast to
    `dtype` slice by slice: "bf16", "fp16", "fp32", or any floating point dtype (None: as stored).
    Checksums are verified first; Hugging Face's folders have none.

    With `quantize` of "int8", "int4" or "nf4" matrices have 8 or 4 bits per value, and some for
    scales. They are quantised layer by layer as they are read, and stay so in memory; products
    dequantise them as they read them. Routers, tables of positions, norms and biases stay as they
    are, and so does what adapters add.

    `overrides` are other values for fields of the model's configuration that its parameters do not
    depend on, as `{"dropout": 0.1, "remat": "full"}`.

    `ignore` names fields of a Hugging Face `config.json` that the zoo does not know, and that would
    be refused, as they may change the maths.

    `like` is a model, or a skeleton of one by `equinox.filter_eval_shape`, with the classes and
    shapes of the folder's: a model with classes of your own opens with it.

    Nothing in a folder is executed, and nothing that it names is imported. Raises PublishError,
    which names the file, field, class or tensor at fault.
    """
    options = Options(mesh, dtype, quantize, overrides, like, ignore)
    return _made(name_or_folder, options, arrays=True)


def skeleton(
    name_or_folder: str | Path,
    *,
    dtype: DTypeLike | None = None,
    quantize: Kind | str | None = None,
    overrides: Mapping[str, Any] | None = None,
    weights: bool = True,
    ignore: Collection[str] | None = (),
) -> PyTree:
    """The skeleton of the model that `load` would return: its shapes and dtypes.

    `ignore` is as for `load`; None ignores all unknown fields. Only `config.json` and the tables of
    the weights' files are read. With `weights=False` a hub's model needs no weights, and none are
    downloaded: their dtype is then that of `config.json`. Raises PublishError, which names the
    file, field or tensor at fault.
    """
    options = Options(None, dtype, quantize, overrides, None, ignore, weights)
    return _made(name_or_folder, options, arrays=False)


def _made(name_or_folder: str | Path, options: Options, *, arrays: bool) -> PyTree:
    """A model, or without `arrays` its skeleton: a whole one, then adapters one after another."""
    folders = [*chain(find(name_or_folder, weights=options.weights))]
    for upper, below in pairwise(folders) if arrays else ():
        format = formats.of(upper)
        assert isinstance(format, AdapterFormat)
        base = format.base(upper)
        if base.checksum is not None and base.checksum != weights_checksum(below):
            raise PublishError(
                f"{upper} holds adapters of {base.name!r}, and {below} has other weights than the "
                f"model of that name had: give its files back, or name where they are now as "
                f"{format.base_field} in {format.config}. zoo.load_adapters takes a model that you "
                "have loaded yourself"
            )
    model = None
    for folder in reversed(folders):
        model = _opened(folder, model, options, arrays=arrays)
    return model


def _opened(folder: Path, base: PyTree, options: Options, *, arrays: bool) -> PyTree:
    """The model in a folder; for adapters, `base` with them. Without `arrays`, its skeleton."""
    format = formats.of(folder)
    if arrays and (format.has_checksums or (folder / checksums.NAME).exists()):
        verify(folder, by_parts=True)
    opened = format.open(folder, options, base)
    if not isinstance(format, AdapterFormat):
        model = reconfigured(opened.skeleton, options.overrides)
        return opened.load(model) if arrays else model
    model = opened.load(opened.skeleton) if arrays else opened.skeleton
    origin, kinds = format.base(folder), _quantized_kinds(model)
    if arrays and origin.quantized is not None and kinds != origin.quantized:
        kind = next(iter(sorted(origin.quantized, key=lambda kind: kind == "int8")), None)
        logger.warning(
            f"{folder} holds adapters that were trained over other values than these of "
            f"{origin.name!r}, which was {', '.join(origin.quantized) or 'not quantised'} and now "
            f"is {', '.join(kinds) or 'not quantised'}: load it with quantize={kind!r}"
        )
    try:
        return with_more_ends(model, origin.eos_ids)
    except ValueError as error:
        raise PublishError(f"{folder}: {error}") from None


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
    format = formats.for_adapters()
    format.check(model, config)
    base_folder, hub = find_here(base), None
    if Path(base).expanduser().exists():
        name = str(Path(base).expanduser().absolute())
    else:
        name, hub = str(base), formats.of_id(base)
    on_adapters = base_folder and isinstance(formats.of(base_folder), AdapterFormat)
    if lora.has_adapters(below) and not on_adapters:
        raise PublishError(
            f"the model has other adapters below those to save, and base={name!r} has none: save "
            "those first, from the model without these, and name their folder"
        )
    with replacing(folder) as new:
        origin = Base(
            name,
            hub.revision(base_folder) if hub and base_folder else None,
            weights_checksum(base_folder) if new and base_folder else None,
            _quantized_kinds(model),
            tuple(getattr(getattr(model, "config", None), "eos_ids", ())),
        )
        format.write_adapters(new, model, config, origin)
        if new is not None:
            if tokenizer is not None:
                tokenizer.save(new)
            checksums.write(new)


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

    A model does not know its files: `zoo.load` alone can tell by their checksum that they are the
    base's. A base quantised otherwise than in training is a warning.

    Raises PublishError, which names the file, field or tensor at fault.
    """
    folder = fetched(folder) if is_remote(folder) else local_path(folder, "folder")
    if not folder.is_dir():
        raise PublishError(f"{folder} is no folder: give one that save_adapters or PEFT wrote")
    if not isinstance(formats.of(folder), AdapterFormat):
        raise PublishError(f"{folder} holds no adapters: zoo.load opens a whole model")
    return _opened(folder, base, Options(mesh, dtype), arrays=True)


def with_paths(config: lora.Config, model: PyTree) -> lora.Config:
    """The configuration with the zoo's paths in place of the names that formats have for modules.

    A target that is a path of the model, or a pattern of one, stays. `q_proj` stands for all
    modules of that name, as in PEFT, and "all-linear" for all matrices but embeddings and heads.
    A comma separates targets too.

    Raises:
        ValueError: a target that matches nothing; it names what there is.
    """
    matrices = lora.targets(model, lora.Config(targets=("*",)))
    modules = formats.for_adapters().modules(model)

    def paths(target: str) -> list[str]:
        if target == ALL_LINEAR:
            return lora.targets(model, lora.Config())
        if fnmatch.filter(matrices, target):
            return [target]
        return [path for path, name in modules.items() if f".{name}".endswith(f".{target}")]

    def chosen(field: str, targets: Iterable[str]) -> tuple[str, ...]:
        found: dict[str, None] = {}
        for target in (name for names in targets for name in names.split(",")):
            if not (those := paths(target)):
                names = sorted({name.rpartition(".")[2] for name in modules.values()})
                raise ValueError(
                    f"{field}={target!r} matches no matrix; those are {', '.join(matrices)}"
                    + (f", or by the names of modules: {', '.join(names)}" if names else "")
                    + f", or {ALL_LINEAR!r} for all but embeddings and heads"
                )
            found |= dict.fromkeys(those)
        return tuple(found)

    targets = chosen("targets", config.targets)
    return replace(config, targets=targets, whole=chosen("whole", config.whole))


def check_finite(model: PyTree, folder: Path) -> None:
    """Raise a ValueError that names the first parameter with a NaN or an infinity."""
    floats, mesh = eqx.filter(model, eqx.is_inexact_array), sharding.mesh_of(model)
    check = jax.jit(
        lambda tree: jax.tree.map(lambda x: jnp.isfinite(x).all(), tree),
        out_shardings=None if mesh is None else sharding.replicated(mesh),
    )
    for path, is_finite in jax.tree_util.tree_leaves_with_path(jax.device_get(check(floats))):
        if not is_finite:
            raise ValueError(
                f"{folder}: {keystr(path)} has a NaN or an infinity: the model is damaged, or its "
                "training diverged; get it again, or take another --model"
            )
