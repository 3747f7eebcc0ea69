"""Models of the zoo read from and written to folders in Hugging Face's format."""

import json
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from zoo.common.checksums import Digest
from zoo.data import special_tokens
from zoo.data import tokenizer as tokenizers
from zoo.hf import floats, heads, quantization, token_ids
from zoo.hf.family import Family
from zoo.hf.layouts import Layout, filled, tensors_of
from zoo.hf.methods import read_method
from zoo.hf.model_types import MODEL_TYPES, REFUSED
from zoo.hf.quantization import Expected, Matrix, Part
from zoo.hf.weights import FLOATS, Weights, are_present, weight_files
from zoo.publishing import PublishError, formats
from zoo.publishing.families import check_model
from zoo.publishing.formats import (
    CONFIG,
    WEIGHTS,
    Format,
    Opened,
    Options,
    Source,
    json_object,
    parse_dtype,
    read_json,
)
from zoo.publishing.tensors import (
    check_tensors,
    fill,
    parameters,
    quantized_skeleton,
    typed,
    write_file,
)

logger = logging.getLogger(__name__)

PROCESSOR = "preprocessor_config.json"  # of images
# No pickled weights, and none in the formats of other libraries.
FILES = [
    "adapter_config.json",
    "adapter_model.safetensors",
    "config.json",
    PROCESSOR,
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    tokenizers.FILE_NAME,
    special_tokens.CONFIG_NAME,
    *special_tokens.BESIDE,
]


class _HuggingFace(Format):
    """Folders and hub ids that transformers opens, with a `model_type` in `config.json`."""

    def describes(self, folder: Path) -> bool:
        return "model_type" in json_object(folder / CONFIG)

    def open(self, folder: Path, options: Options, base: PyTree = None) -> Opened:
        if options.like is not None:
            raise PublishError(f"like: {folder} is in Hugging Face's format, and needs none")
        values = read_json(folder / CONFIG)
        if not options.weights and not are_present(folder):
            return Opened(_announced_skeleton(folder, values, options), lambda skeleton: skeleton)
        skeleton, weights, found = _open(folder, values, options)

        def load(skeleton: PyTree) -> PyTree:
            with weights.reader() as read:
                part = lambda name, at, dtype: found[name].read(at, dtype, read)  # noqa: E731
                quantize = options.quantize is not None  # else the files' are arrays
                return fill(skeleton, options.mesh, part, quantize=quantize)

        return Opened(skeleton, load)

    def dtypes(self, folder: Path) -> tuple[Mapping[str, Any], Any]:
        values = read_json(folder / CONFIG)
        plain, _, _ = _open(folder, values, Options(ignore=None))
        stored = {name: x.dtype for name, x in parameters(plain).items()}
        # Of quantised weights, which other parameters stand for, it is that of their computation.
        dtype = values.get("dtype") or values.get("torch_dtype")
        return stored, jnp.dtype(dtype) if dtype in ("bfloat16", "float16", "float32") else None

    def write(self, folder: Path | None, model: PyTree, source: Source) -> dict[str, Digest]:
        dtypes, tokenizer, like = source
        values, generation = {}, {}
        if like is not None and formats.of(like) is self:
            values, generation = read_json(like / CONFIG), token_ids.read_generation(like)
        elif like is None and tokenizer is None and folder is not None:
            logger.warning(
                "saved without like=, and so without bos_token_id, pad_token_id and the generation "
                "settings of a folder that the model came from; like=FOLDER keeps them"
            )
        model, family = heads.of(model, lambda body: family_of(body, values.get("model_type")))
        description = heads.named(family.write(model.config), like)
        ids = token_ids.describe_ids(model.config, tokenizer, values, generation)
        ids = {name: x for name, x in ids.items() if x is not None or name not in description}
        dtype = str(next(iter(dtypes.values())))
        # In the words of version 5 of transformers and of earlier ones.
        description |= {**ids, "dtype": dtype, "torch_dtype": dtype}
        found = family.layouts(family.skeleton(model.config), family.prefix(model.config))
        tensors = tensors_of(model, found, dtypes)
        # transformers needs this metadata
        written = write_file(folder and folder / WEIGHTS, tensors, {"format": "pt"})
        if folder is not None:
            (folder / CONFIG).write_text(json.dumps(description, indent=1) + "\n")
            if like is not None and (like / PROCESSOR).is_file():
                (folder / PROCESSOR).write_bytes((like / PROCESSOR).read_bytes())
            # The tokenizer may have brought the settings along.
            given = generation or token_ids.read_generation(folder)
            settings = token_ids.describe_generation(model.config, ids, given)
            if settings:
                text = json.dumps(settings, indent=1) + "\n"
                (folder / token_ids.GENERATION).write_text(text)
        return {WEIGHTS: written}

    def weight_files(self, folder: Path) -> list[str]:
        return weight_files(folder)

    def sampling(self, folder: Path) -> tuple[Path, dict[str, Any]] | None:
        return token_ids.read_sampling(folder)

    def is_id(self, name: str) -> bool:
        return is_hub_id(_without_scheme(name))

    def fetch(self, name: str, *, revision: str | None, weights: bool) -> Path:
        return snapshot(_without_scheme(name), revision=revision, weights=weights)

    def cached(self, name: str) -> Path | None:
        try:
            import huggingface_hub

            where = huggingface_hub.snapshot_download(_without_scheme(name), local_files_only=True)
        except (ImportError, OSError, ValueError):  # the cache lacks it
            return None
        return Path(where)

    def revision(self, folder: Path) -> str | None:
        return folder.name if folder.parent.name == "snapshots" else None


def _without_scheme(name: str) -> str:
    """The hub id of `hf://organisation/model`."""
    return re.sub("^hf:/+", "", name)


def is_hub_id(name: str) -> bool:
    """Whether a text has the form of a hub id, "organisation/model"."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not name.startswith((".", "/"))


def snapshot(name: str, *, revision: str | None = None, weights: bool = True) -> Path:
    """The folder of a model on the Hub; only files that the local cache lacks are downloaded.

    `revision` is a commit, a branch or a tag; None is the newest commit. Without `weights` all but
    those are downloaded, which is all that a plan takes.

    The cache is in `HF_HOME`, the server is `HF_ENDPOINT`; `HF_HUB_OFFLINE=1` uses the cache alone.

    Raises:
        PublishError: the client is missing, no server answers, or there is no such model.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise PublishError(
            f"{name!r} is no folder here, and looking for it on the Hugging Face Hub needs "
            "huggingface_hub: pip install 'zoo[hf]'"
        ) from None
    files = FILES if weights else [name for name in FILES if "safetensors" not in name]
    try:
        # In FILES "*" would match slashes too: other subfolders are left out.
        folder = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=files, ignore_patterns="model-*/*"
        )
    except Exception as error:  # of the client, of its HTTP library, or of the system
        constants = huggingface_hub.constants
        offline = constants.HF_HUB_OFFLINE
        reason = "HF_HUB_OFFLINE is set" if offline else f"{constants.ENDPOINT} gave"
        raise PublishError(
            f"{name!r} is no folder here, and could not be downloaded from the Hugging Face Hub; "
            f"it is not in the local cache {constants.HF_HUB_CACHE}, and {reason}: "
            f"{type(error).__name__}: {str(error).strip()}"
        ) from error
    return Path(folder)


HUGGING_FACE = _HuggingFace()


def _announced_skeleton(folder: Path, values: dict, options: Options) -> PyTree:
    """The skeleton of a folder without weights, in the dtype that `config.json` names."""
    if quantization.FIELD in values and not _is_decoded(values):
        raise PublishError(
            f"{folder / 'config.json'} has a {quantization.FIELD}, whose details its weights say: "
            "download the model first, by zoo.load, or plan the model that it was made of"
        )
    family, config = _family(folder, values)
    skeleton = family.skeleton(config)
    default = "bfloat16" if _is_decoded(values) else "float32"
    named = values.get("dtype") or values.get("torch_dtype") or default
    dtype = options.dtype or parse_dtype(named)
    return quantized_skeleton(typed(skeleton, lambda name: dtype), options.quantize)


def _is_decoded(values: dict) -> bool:
    """Whether the weights are read as floats, though they are stored as fewer bits."""
    settings = values.get(quantization.FIELD)
    return isinstance(settings, dict) and settings.get("quant_method") in floats.METHODS


def _family(
    folder: Path,
    values: dict,
    ignore: Collection[str] | None = (),
    names: Collection[str] | None = None,
) -> tuple[Family, Any]:
    """The family of a folder's model, and its configuration, by the names of its tensors too."""
    where = f"{folder / 'config.json'}"
    kind = values.get("model_type")
    for family in MODEL_TYPES.values():
        inner = values.get(family.described_by)
        if kind == family.within and isinstance(inner, dict):
            if inner.get("model_type", family.model_type) != family.model_type:
                continue
            kind, values = family.model_type, {**inner, **_given(values, "tie_word_embeddings")}
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        known, inner = ", ".join(MODEL_TYPES), values.get("text_config")
        inside = inner.get("model_type") if isinstance(inner, dict) else None
        remedy = (
            "if its maths is one of theirs under another name, write that one as its model_type; "
            "else build it of zoo.transformer's parts, or write its Family as CONTRIBUTING.md says"
        )
        for refused in (x for x in (kind, inside) if isinstance(x, str) and x in REFUSED):
            remedy = f"{REFUSED[refused]}, and nothing of the zoo's does"
        if inside in MODEL_TYPES:
            remedy = (
                f"its language model is a {inside}, which opens once it is saved alone: by "
                "transformers, AutoModelForCausalLM.from_pretrained(...).save_pretrained(folder)"
            )
        raise PublishError(f"{where}: model_type {kind!r} is unknown; known are {known}. {remedy}")
    family = heads.read(MODEL_TYPES[kind], values, where, ignore)
    given = {x: values[x] for x in values if x != quantization.FIELD}
    return family, _with_origin(MODEL_TYPES[kind], family.read(given, where, ignore, names))


def _with_origin(family: Family, config: Any) -> Any:
    """The configuration, which names its family where an export would choose another."""
    if not hasattr(config, "origin"):
        return config
    fits = (x for x in MODEL_TYPES.values() if x is family or not x.difference(config))
    return config if next(fits) is family else replace(config, origin=family.model_type)


def _given(values: dict, *names: str) -> dict:
    return {name: values[name] for name in names if name in values}


def _open(
    folder: Path, values: dict, options: Options
) -> tuple[PyTree, Weights, dict[str, Layout | Part]]:
    """The skeleton of a folder's model, its files, and where in them each parameter lies."""
    family, config = _family(folder, values, options.ignore)
    method, weights = None, Weights(folder)
    if _is_decoded(values):
        weights = floats.decoded(weights, values[quantization.FIELD], f"{folder / CONFIG}")
    elif (settings := values.get(quantization.FIELD)) is not None:
        method = read_method(settings, f"{folder / CONFIG}", options.quantize)
    if family.as_published is not None:
        weights = family.as_published(config, weights)
    if family.bare:
        _, config = _family(folder, values, options.ignore, weights.tensors)
    of_part = values[family.described_by] if values["model_type"] == family.within else {}
    config = token_ids.with_eos_ids(config, folder, values, of_part)
    skeleton = family.skeleton(config)
    present = (x for x in family.prefixes if family.marker.format(prefix=x) in weights.tensors)
    prefix = next(present, family.prefix(config))
    found = family.layouts(skeleton, prefix)
    matrices = quantization.find(method, weights, found, family.model_type)
    _check(family, config, weights, found, matrices)
    embedding = next(x for x in found.values() if x.tensor.name == family.marker)
    of_values = _dtype(weights, embedding, options.dtype)
    skeleton, parts = quantization.put(skeleton, found, matrices, weights, of_values)
    skeleton = typed(skeleton, lambda name: _dtype(weights, parts[name], options.dtype))
    return quantized_skeleton(skeleton, options.quantize), weights, parts


def family_of(model: PyTree, prefer: str | None = None) -> Family:
    """The family of a model, or of its skeleton; of several that have it, the one to prefer.

    If none is given, that is the one that it came from.

    Raises:
        PublishError: no family has such a model; the message names the nearest family.
    """
    config = getattr(model, "config", None)
    differences: dict[str, list[str]] = {}
    prefer = prefer or getattr(config, "origin", None)
    for kind in sorted(MODEL_TYPES, key=lambda kind: kind != prefer):
        if isinstance(model, MODEL_TYPES[kind].model):
            differences[kind] = MODEL_TYPES[kind].difference(config)
            if not differences[kind]:
                break
    if not differences:
        raise PublishError(f"Hugging Face's format has no {type(model).__name__} like the zoo's")
    kind, lacks = min(differences.items(), key=lambda item: len(item[1]))
    if lacks:
        raise PublishError(
            f"no family of Hugging Face's has such a model; {kind} is the nearest, without "
            + ", ".join(lacks)
        )
    family = MODEL_TYPES[kind]
    check_model(model, family.skeleton(config))
    return family


def _dtype(weights: Weights, layout: Layout | Part, dtype: DTypeLike | None) -> Any:
    """`dtype`, or that in which a parameter is stored; the widest one if its tensors differ.

    A quantised parameter's arrays always have their own.
    """
    if isinstance(layout, Part):
        return layout.dtype
    if dtype is not None:
        return jnp.dtype(dtype)
    dtypes = {jnp.dtype(weights.tensors[name].dtype) for name, _ in layout.names()}
    return max(dtypes, key=lambda dtype: dtype.itemsize)


def _check(
    family: Family,
    config: Any,
    weights: Weights,
    found: dict[str, Layout],
    matrices: dict[str, dict[str, Matrix]],
) -> None:
    """Refuse files with missing, surplus or misshapen tensors, or of other types."""
    whole = [layout for path, layout in found.items() if path not in matrices]
    wanted = {name: Expected(x.tensor_shape, FLOATS) for x in whole for name, _ in x.names()}
    for stack in matrices.values():
        for matrix in stack.values():
            wanted |= matrix.tensors()
    stored = {name: x.shape for name, x in weights.tensors.items()}
    for start, content in family.left_out.items():
        start = start.format(num_layers=getattr(config, "num_layers", 0))
        if names := [name for name in stored if name.startswith(start)]:
            logger.warning(
                "%s: %s (%d tensors, %s…) are left out: the zoo's model has none",
                weights.folder,
                content,
                len(names),
                start,
            )
            stored = {name: shape for name, shape in stored.items() if name not in names}
    prefix = next(iter(found.values())).prefix
    copies = {
        filled(name, prefix, {}): filled(of, prefix, {})
        for name, of in {"lm_head.weight": family.marker, **family.copies}.items()
    }
    for name in stored.keys() - wanted.keys():
        if (
            name.endswith(family.buffers)
            or _is_copy(weights, name, copies.get(name, ""))
            or quantization.is_zero_bias(weights, name, matrices)
        ):
            del stored[name]
    shapes = {x: stored.get(x, (1,)) if y.shape is None else y.shape for x, y in wanted.items()}
    check_tensors(f"{weights.folder}", stored, shapes)
    for name, expected in wanted.items():
        if (tensor := weights.tensors[name]).dtype not in expected.dtypes:
            raise PublishError(
                f"{weights.folder / tensor.file}: {name} is of type {tensor.dtype}, and has to be "
                f"{' or '.join(expected.dtypes)}; get it again from its source, or open a "
                "checkpoint that is not quantized"
            )


def _is_copy(weights: Weights, name: str, of: str) -> bool:
    """Whether a tensor has the content of another, such as an output head that is the embedding."""
    ours, theirs = weights.tensors.get(of), weights.tensors[name]
    if ours is None or (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return False
    with weights.reader() as read:
        for start in range(0, ours.shape[0], 4096):
            rows = tuple(slice(0, size) for size in ours.shape[1:])
            rows = (slice(start, min(start + 4096, ours.shape[0])), *rows)
            if read(of, rows).tobytes() != read(name, rows).tobytes():
                return False
    return True
