"""Saving a model as a folder that anyone can open, and loading it.

In the zoo's own format it holds `config.json` (family, parameter count, the fields of its
`Config`), `model.safetensors` (one tensor per parameter, named by its dotted path in the model),
`README.md`, `checksums.json` and, if given, `metrics.json` and the tokenizer's files. Other formats
are found by `formats`; folders of adapters are read and written by `adapters`.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import PyTree

from zoo.common import checksums
from zoo.nn.products import Kind, is_derived, is_quantized
from zoo.publishing import adapters, formats
from zoo.publishing.adapters import weights_checksum as weights_checksum
from zoo.publishing.errors import PublishError
from zoo.publishing.families import DIFFERENCE, family_name
from zoo.publishing.folder import METRICS, README, read_json, replacing, verify
from zoo.publishing.formats import Options
from zoo.publishing.shelf import find
from zoo.publishing.tensors import check_kind, num_parameters, parse_dtype, stored_dtypes
from zoo.sharding import Layout


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
    chosen = formats.named(format)
    if any(map(is_quantized, jax.tree.leaves(model, is_leaf=is_quantized))):
        raise PublishError(
            "the model is quantised, and folders hold models as they were before: save that one, "
            "and load it by zoo.load(folder, quantize=...), or save what "
            "zoo.nn.products.dequantize makes of this one"
        )
    if any(map(is_derived, jax.tree.leaves(model, is_leaf=is_derived))):
        raise PublishError(
            "the model has adapters: merge them by zoo.lora.merge, or save them alone by "
            "zoo.save_adapters"
        )
    source = None if like is None else adapters.whole(find(like))
    stored, default = ({}, None) if source is None else formats.of(source).dtypes(source)
    with replacing(folder) as new:
        if new is not None and tokenizer is not None:
            tokenizer.save(new)
        dtypes = stored_dtypes(model, stored, default)
        written = chosen.write(new, model, dtypes, tokenizer=tokenizer, like=source)
        if new is not None:
            readme = _readme(Path(str(folder)).absolute().name, model, card, new / chosen.config)
            (new / README).write_text(readme, encoding="utf-8")
            # The card is in no checksum, so that it may be edited by hand.
            if metrics is not None:
                files = checksums.of(new, skip=(README,), known=written)
                measured = {**metrics, "files": files}
                (new / METRICS).write_text(json.dumps(measured, indent=1) + "\n")
            checksums.write(new, skip=(README,), known=written)


def load(
    name_or_folder: str | Path,
    *,
    mesh: Mesh | Layout | None = None,
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

    `like` is a model, or a skeleton of one by `equinox.filter_eval_shape`, of the classes and
    shapes that the folder's has: what a model with classes of your own opens with.

    Nothing in a folder is executed, and nothing that it names is imported. Raises PublishError,
    which names the file, field, class or tensor at fault.
    """
    check_kind(quantize)
    options = Options(mesh, parse_dtype(dtype), quantize, overrides, like, ignore)
    return _load(find(name_or_folder), options)


def _load(folder: Path, options: Options) -> Any:
    if adapters.are_adapters(folder):
        adapters.check_base(folder)
        base = _load(adapters.base_of(folder), options)
        return adapters.load_adapters(folder, base, mesh=options.mesh, dtype=options.dtype)
    found = formats.of(folder)
    if found.has_checksums or (folder / checksums.NAME).exists():
        verify(folder, by_parts=True)
    return found.load(folder, options)


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

    `ignore` is as for `load`; None ignores all unknown fields.
    Only `config.json` and the tables of the weights' files are read. Given `weights=False` a hub's
    model needs none of them, nor are they downloaded: their dtype is then that of `config.json`.
    Raises PublishError, which names the file, field or tensor at fault.
    """
    check_kind(quantize)
    options = Options(None, parse_dtype(dtype), quantize, overrides, ignore=ignore)
    return _skeleton(find(name_or_folder, weights=weights), options, weights=weights)


def _skeleton(folder: Path, options: Options, *, weights: bool) -> PyTree:
    if adapters.are_adapters(folder):
        base = _skeleton(adapters.base_of(folder), options, weights=weights)
        return adapters.adapters_skeleton(folder, base, dtype=options.dtype)
    return formats.of(folder).skeleton(folder, options, weights=weights)


def _readme(name: str, model: PyTree, card: str, config: Path) -> str:
    text = f"{card.strip()}\n\n" if card.strip() else ""
    how = "Open it with `zoo.load(folder)`, given the path of this folder"
    if DIFFERENCE in read_json(config):
        how = how.replace("folder)", "folder, like=model)", 1) + " and a model of its class"
    return (
        f"# {name}\n\n{text}"
        f"- Family: `{family_name(model)}`, {num_parameters(model):,} parameters\n- {how}\n"
    )
