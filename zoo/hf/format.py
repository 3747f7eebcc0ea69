"""Hugging Face's format as one of the zoo's formats of folders."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from zoo.common.checksums import Digest
from zoo.hf import hub, token_ids
from zoo.hf.folder import announced_skeleton, describe, read_model, read_skeleton, write_model
from zoo.hf.weights import are_present, weight_files
from zoo.publishing import formats
from zoo.publishing.errors import PublishError
from zoo.publishing.families import reconfigured
from zoo.publishing.folder import CONFIG, json_object, read_json
from zoo.publishing.formats import Format, Options
from zoo.sharding.axes import is_parameter, keystr


class _HuggingFace(Format):
    """Folders and hub ids that transformers opens, with a `model_type` in `config.json`."""

    def describes(self, content: bytes) -> bool:
        return "model_type" in json_object(content)

    def load(self, folder: Path, options: Options) -> PyTree:
        if options.like is not None:
            raise PublishError(f"like: {folder} is in Hugging Face's format, and needs none")
        values = read_json(folder / CONFIG)
        model = reconfigured(read_model(folder, values, options), options.overrides)
        token_ids.remember(model.config, folder, values)
        return model

    def skeleton(self, folder: Path, options: Options, *, weights: bool) -> PyTree:
        are_read = weights or are_present(folder)
        read = read_skeleton if are_read else announced_skeleton
        return reconfigured(read(folder, read_json(folder / CONFIG), options), options.overrides)

    def dtypes(self, folder: Path) -> tuple[Mapping[str, Any], Any]:
        values = read_json(folder / CONFIG)
        plain = read_skeleton(folder, values, Options(ignore=None))
        found = jax.tree_util.tree_leaves_with_path(plain)
        stored = {keystr(path): leaf.dtype for path, leaf in found if is_parameter(leaf)}
        # Of quantised weights, which other parameters stand for, it is that of their computation.
        dtype = values.get("dtype") or values.get("torch_dtype")
        return stored, jnp.dtype(dtype) if dtype in ("bfloat16", "float16", "float32") else None

    def write(
        self,
        folder: Path | None,
        model: PyTree,
        dtypes: Mapping[str, Any],
        *,
        tokenizer: Any,
        like: Path | None,
    ) -> dict[str, Digest]:
        family, description = describe(model)
        values, generation = {}, {}
        if like is not None and formats.of(like) is self:
            values, generation = read_json(like / CONFIG), token_ids.read_generation(like)
        ids = token_ids.describe_ids(model.config, tokenizer, values, generation)
        dtype = str(next(iter(dtypes.values())))
        # In the words of version 5 of transformers and of earlier ones.
        description |= {**ids, "dtype": dtype, "torch_dtype": dtype}
        written = write_model(folder, model, family, dtypes)
        if folder is not None:
            (folder / CONFIG).write_text(json.dumps(description, indent=1) + "\n")
            # The tokenizer may have brought the settings along.
            given = generation or token_ids.read_generation(folder)
            settings = token_ids.describe_generation(model.config, ids, given)
            if like is None:
                token_ids.warn_of_lost(model.config, {**ids, **settings})
            if settings:
                text = json.dumps(settings, indent=1) + "\n"
                (folder / token_ids.GENERATION).write_text(text)
        return written

    def weight_files(self, folder: Path) -> list[str]:
        return weight_files(folder)

    def sampling(self, folder: Path) -> tuple[Path, dict[str, Any]] | None:
        return token_ids.read_sampling(folder)

    def is_id(self, name: str) -> bool:
        return hub.is_hub_id(_without_scheme(name))

    def fetch(self, name: str, *, revision: str | None, weights: bool) -> Path:
        return hub.snapshot(_without_scheme(name), revision=revision, weights=weights)

    def cached(self, name: str) -> Path | None:
        return hub.cached(_without_scheme(name))

    def revision(self, folder: Path) -> str | None:
        return folder.name if folder.parent.name == "snapshots" else None


def _without_scheme(name: str) -> str:
    """The hub id of `hf://organisation/model`."""
    return re.sub("^hf:/+", "", name)


HUGGING_FACE = _HuggingFace()
