"""A model as programs of StableHLO, its weights beside them, and a program that runs them.

The programs are `jax.export`'s: `prefill-N` reads prompts of up to N tokens, `decode` one token
more, and `prepare` lays the weights out for it. They have no weights in them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import export

from zoo.common import checksums
from zoo.data.tokenizer import Tokenizer
from zoo.decoding.decoder import decoder_of
from zoo.decoding.sampling import SMALLEST_BUCKET, bucket_of
from zoo.publishing import PublishError
from zoo.publishing.replacing import replacing
from zoo.publishing.tensors import write_tensors
from zoo.sharding.axes import keystr

PLATFORMS = ("cpu", "cuda", "tpu")
RUN = Path(__file__).with_name("run.py")


def write(folder: Path, model: Any, *, name: str, length: int, tokenizer: Tokenizer | None) -> None:
    """Write a folder with the programs of a model for texts of up to `length` tokens.

    Each is for `PLATFORMS`, and for one row. `manifest.json` has the names of the
    weights in the order of the programs' first argument, the lengths of prompts and the ends of a
    text; `run.py` needs JAX, safetensors and flatbuffers alone.

    Raises:
        PublishError: the model continues no texts, or flatbuffers is not installed.
    """
    try:
        decoder = decoder_of(model)
        decoder.check_decoder(length)
    except ValueError as error:
        raise PublishError(f"{name}: {error}") from error
    if bucket_of(length) != length:
        raise PublishError(f"length={length}: must be a power of two, {SMALLEST_BUCKET} at least")
    prompts = [SMALLEST_BUCKET << i for i in range((length // SMALLEST_BUCKET).bit_length())]
    programs = _programs(decoder, prompts, length)
    arrays = eqx.filter(decoder, eqx.is_array)
    paths = [keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(arrays)]
    manifest = {
        "name": name,
        "weights": paths,
        "prompts": prompts,
        "length": length,
        "vocab_size": decoder.config.vocab_size,
        "ends": [*getattr(decoder.config, "eos_ids", ())],
        "platforms": PLATFORMS,
        "jax": jax.__version__,
    }
    with replacing(folder) as new:
        write_tensors(new and new / "model.safetensors", decoder)
        if new is not None:
            for key, content in programs.items():
                (new / f"{key}.bin").write_bytes(content)
            (new / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
            (new / RUN.name).write_text(RUN.read_text())
            if tokenizer is not None:
                tokenizer.save(new)
            checksums.write(new)


def _programs(decoder: Any, prompts: list[int], length: int) -> dict[str, bytes]:
    """The serialized programs by name."""
    leaves, structure, rest = _parts(decoder)
    whole = lambda leaves: eqx.combine(structure.unflatten(leaves), rest)  # noqa: E731
    apart, of_apart = _flat(lambda leaves: whole(leaves).for_decoding())
    weights = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    found = {"prepare": _serialized(apart, weights)}
    of_cache: dict[str, Any] = {}
    for room in prompts:

        def prefill(leaves: list, tokens: Any, mask: Any) -> tuple[Any, list]:
            logits, cache = whole(leaves).prefill(tokens, mask, length)
            cache, of_cache["structure"], of_cache["rest"] = _parts(cache)
            return logits, cache

        tokens = jax.ShapeDtypeStruct((1, room), jnp.int32)
        mask = jax.ShapeDtypeStruct((1, room), jnp.bool_)
        found[f"prefill-{room}"] = _serialized(prefill, weights, tokens, mask)
    _, cache = jax.eval_shape(prefill, weights, tokens, mask)

    def decode(leaves: list, tokens: Any, cache: list) -> tuple[Any, list]:
        decoder = eqx.combine(of_apart["structure"].unflatten(leaves), of_apart["rest"])
        there = eqx.combine(of_cache["structure"].unflatten(cache), of_cache["rest"])
        logits, there = decoder.decode(tokens, there)
        return logits, _parts(there)[0]

    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    return found | {"decode": _serialized(decode, jax.eval_shape(apart, weights), one, cache)}


def _parts(tree: Any) -> tuple[list, Any, Any]:
    """The arrays of a tree, their structure, and the rest."""
    arrays, rest = eqx.partition(tree, eqx.is_array)
    leaves, structure = jax.tree.flatten(arrays)
    return leaves, structure, rest


def _flat(function: Callable[[list], Any]) -> tuple[Callable[[list], list], dict[str, Any]]:
    """A function that returns the arrays alone, and what else it returned once it was called."""
    kept: dict[str, Any] = {}

    def flat(leaves: list) -> list:
        found, kept["structure"], kept["rest"] = _parts(function(leaves))
        return found

    return flat, kept


def _serialized(function: Callable[..., Any], *arguments: Any) -> bytes:
    exported = export.export(jax.jit(function), platforms=PLATFORMS)(*arguments)
    try:
        return bytes(exported.serialize())
    except ImportError as error:
        raise PublishError("JAX needs flatbuffers for it: pip install 'zoo[stablehlo]'") from error
