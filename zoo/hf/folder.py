"""Models of the zoo read from and written to folders in Hugging Face's format."""

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from zoo.common.checksums import Digest
from zoo.hf import gpt2_bert, llama, quantization
from zoo.hf.family import Family
from zoo.hf.matrices import Matrix, Part
from zoo.hf.names import Layout, Piece, layouts, pieces
from zoo.hf.token_ids import with_eos_ids
from zoo.hf.weights import Weights, write_weights
from zoo.publishing.errors import PublishError
from zoo.publishing.formats import Options
from zoo.publishing.slices import BLOCK_BYTES
from zoo.publishing.structure import check_model
from zoo.publishing.tensors import Tensor, check_tensors, fill, parse_dtype, quantized_skeleton
from zoo.sharding.axes import keystr
from zoo.sharding.parts import gathered, place

# `describe` prefers the first of the families that fit.
_ORDER = [llama.LLAMA, llama.MISTRAL, llama.QWEN2, llama.QWEN3, llama.OLMO2]
_ORDER += [llama.GEMMA2, llama.GEMMA3, llama.MIXTRAL, llama.QWEN3_MOE]
_ORDER += [gpt2_bert.GPT2, gpt2_bert.BERT]
MODEL_TYPES = {family.model_type: family for family in _ORDER}


def read_model(folder: Path, values: dict, options: Options) -> Any:
    """The model in a folder whose `config.json` holds `values`."""
    skeleton, weights, found = _open(folder, values, options)
    dtype, is_whole = options.dtype, options.quantize is not None

    with weights.reader() as read:

        def part(name: str, index: tuple[slice, ...]) -> np.ndarray:
            return found[name].read(index, _dtype(weights, found[name], dtype), read)

        def make(name: str, shape: tuple[int, ...], where: jax.sharding.Sharding) -> jax.Array:
            return place(shape, where, partial(part, name))

        # Those that the files have quantised are made array by array, as all others are.
        return fill(skeleton, options.mesh, make, part if is_whole else None)


def read_skeleton(folder: Path, values: dict, options: Options) -> PyTree:
    """The skeleton of the model that `read_model` would return."""
    return _open(folder, values, options)[0]


def announced_skeleton(folder: Path, values: dict, options: Options) -> PyTree:
    """The same by `config.json` alone, in the dtype that it names, of a folder without weights."""
    if quantization.FIELD in values:
        raise PublishError(
            f"{folder / 'config.json'} has a {quantization.FIELD}, whose details its weights say: "
            "download the model first, by zoo.load, or plan the model that it was made of"
        )
    skeleton = _skeleton(*_family(folder, values))
    named = values.get("dtype") or values.get("torch_dtype") or "float32"
    dtype = options.dtype or parse_dtype(named)
    typed = fill(skeleton, None, lambda name, shape, where: jax.ShapeDtypeStruct(shape, dtype))
    return quantized_skeleton(typed, options.quantize)


def _family(folder: Path, values: dict, ignore: Collection[str] | None = ()) -> tuple[Family, Any]:
    """The family of a folder's model, and its configuration."""
    where = f"{folder / 'config.json'}"
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        inner = values.get("text_config")
        inside = inner.get("model_type") if isinstance(inner, dict) else None
        remedy = (
            "if its maths is one of theirs under another name, write that one as its model_type; "
            "else build it of zoo.transformer's parts, or write its Family as CONTRIBUTING.md says"
        )
        if inside in MODEL_TYPES:
            remedy = (
                f"its language model is a {inside}, which opens once it is saved alone: by "
                "transformers, AutoModelForCausalLM.from_pretrained(...).save_pretrained(folder)"
            )
        raise PublishError(f"{where}: model_type {kind!r} is unknown; known are {known}. {remedy}")
    family = MODEL_TYPES[kind]
    given = {x: values[x] for x in values if x != quantization.FIELD}
    return family, family.read(given, where, ignore)


def _open(
    folder: Path, values: dict, options: Options
) -> tuple[PyTree, Weights, dict[str, Layout | Part]]:
    """The skeleton of a folder's model, its files, and where in them each parameter lies."""
    family, config = _family(folder, values, options.ignore)
    method = quantization.read_method(values, f"{folder / 'config.json'}", options.quantize)
    weights = Weights(folder)
    config = with_eos_ids(family.adapt(config, weights.tensors), folder, values)
    skeleton = _skeleton(family, config)
    present = (x for x in family.prefixes if family.marker.format(prefix=x) in weights.tensors)
    prefix = next(present, family.prefixes[0])
    found = layouts(skeleton, family.tensors, prefix)
    matrices = quantization.find(method, weights, found, family.model_type)
    _check(family, weights, found, matrices)
    embedding = next(x for x in found.values() if x.tensor.name == family.marker)
    of_values = _dtype(weights, embedding, options.dtype)
    skeleton, parts = quantization.put(skeleton, found, matrices, weights, of_values)

    def typed(name: str, shape: tuple[int, ...], where: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, _dtype(weights, parts[name], options.dtype))

    skeleton = quantized_skeleton(fill(skeleton, None, typed), options.quantize)
    return skeleton, weights, parts


def describe(model: eqx.Module) -> tuple[Family, dict]:
    """The family of a model, and what its `config.json` says of the maths.

    Raises:
        PublishError: no family has such a model; the message names the nearest family.
    """
    family = family_of(model)
    return family, family.write(getattr(model, "config", None))


def family_of(model: PyTree) -> Family:
    """The family of a model, or of its skeleton; errors as of `describe`."""
    config = getattr(model, "config", None)
    differences = {
        kind: family.difference(config)
        for kind, family in MODEL_TYPES.items()
        if isinstance(model, family.model)
    }
    if not differences:
        raise PublishError(f"Hugging Face's format has no {type(model).__name__} like the zoo's")
    kind, lacks = min(differences.items(), key=lambda item: len(item[1]))
    if lacks:
        raise PublishError(
            f"no family of Hugging Face's has such a model; {kind} is the nearest, without "
            + ", ".join(lacks)
        )
    family = MODEL_TYPES[kind]
    check_model(model, _skeleton(family, config))
    return family


def write_model(
    folder: Path | None, model: Any, family: Family, dtypes: Mapping[str, np.dtype]
) -> dict[str, Digest]:
    """Write the weights, in `dtypes` by path; all processes call it, those without folder too.

    Returns the checksums of their files by name.
    """
    leaves = jax.tree_util.tree_leaves_with_path(model)
    arrays = {keystr(path): leaf for path, leaf in leaves if eqx.is_array(leaf)}
    tensors, prefix = family.tensors, family.prefixes[0]
    found = layouts(_skeleton(family, model.config), tensors, prefix)

    def each(parts: list[Piece], dtype: np.dtype) -> Iterator[np.ndarray]:
        axis = found[parts[0].path].part_axis
        # Along the first axis one part follows on another, along any other they lie side by side.
        for group in [parts] if axis else [[part] for part in parts]:
            for rows in found[group[0].path].rows(BLOCK_BYTES // dtype.itemsize):
                made = []
                for path, at in group:
                    taken = gathered(arrays[path], found[path].at({**at, **rows}))
                    made.append(found[path].write(at, taken))
                yield np.concatenate(made, axis or 0, dtype=dtype)

    described = {}
    for name, parts in pieces(found).items():
        dtype = np.result_type(*[dtypes[part.path] for part in parts])
        shape = found[parts[0].path].tensor_shape
        described[name] = Tensor(shape, dtype, partial(each, parts, dtype))
    return write_weights(folder, described)


def _skeleton(family: Family, config: Any) -> PyTree:
    return eqx.filter_eval_shape(lambda key: family.model(config, key=key), jax.random.key(0))


def _dtype(weights: Weights, layout: Layout | Part, dtype: DTypeLike | None) -> Any:
    """`dtype`, or that in which a parameter is stored; the widest one if its tensors differ.

    Of a quantised parameter's arrays always their own.
    """
    if isinstance(layout, Part):
        return layout.dtype
    if dtype is not None:
        return jnp.dtype(dtype)
    dtypes = {weights.dtype(name) for name, _ in layout.names()}
    return max(dtypes, key=lambda dtype: jnp.dtype(dtype).itemsize)


def _check(
    family: Family,
    weights: Weights,
    found: dict[str, Layout],
    matrices: dict[str, dict[str, Matrix]],
) -> None:
    """Refuse files with missing, surplus or misshapen tensors."""
    whole = [layout for path, layout in found.items() if path not in matrices]
    wanted = {name: x.tensor_shape for x in whole for name, _ in x.names()}
    stored = {name: x.shape for name, x in weights.tensors.items()}
    of_matrices = quantization.tensors(matrices)
    for name, expected in of_matrices.items():
        wanted[name] = stored.get(name, (1,)) if expected.shape is None else expected.shape
    for name in stored.keys() - wanted.keys():
        if (
            name.endswith(family.buffers)
            or _is_tied_head(weights, name, wanted)
            or quantization.is_zero_bias(weights, name, matrices)
        ):
            del stored[name]
    check_tensors(f"{weights.folder}", stored, wanted)
    for name in wanted.keys() - of_matrices.keys():
        weights.dtype(name)
    quantization.check_dtypes(weights, of_matrices)


def _is_tied_head(weights: Weights, name: str, wanted: dict) -> bool:
    """Whether a tensor is a copy of the embedding, stored as the head that is tied to it."""
    tied = [x for x in wanted if x.endswith(("embed_tokens.weight", "wte.weight"))]
    if name != "lm_head.weight" or not tied:
        return False
    ours, theirs = weights.tensors.get(tied[0]), weights.tensors[name]
    if ours is None or (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return False
    with weights.reader() as read:
        for start in range(0, ours.shape[0], 4096):
            rows = (slice(start, min(start + 4096, ours.shape[0])), slice(0, ours.shape[1]))
            if read(tied[0], rows).tobytes() != read(name, rows).tobytes():
                return False
    return True
