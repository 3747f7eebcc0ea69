"""The token ids of a model's folder: those that end a text, read from files and chosen for them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zoo.base.configuration import check_ids, check_value
from zoo.publishing.errors import PublishError
from zoo.publishing.folder import CONFIG, read_json

GENERATION = "generation_config.json"


def with_eos_ids(config: Any, folder: Path, values: Mapping[str, Any]) -> Any:
    """The configuration of a model in Hugging Face's format with the ids that end its texts.

    Those are in `generation_config.json`, or else among the `values` of `config.json`. A family
    without such a field keeps its configuration.

    Raises:
        PublishError: a damaged file, or ids that the vocabulary does not have.
    """
    if not hasattr(config, "eos_ids"):
        return config
    try:
        return dataclasses.replace(config, eos_ids=read_eos_ids(folder, values))
    except ValueError as error:
        raise PublishError(f"{folder}: eos_token_id of {GENERATION} or {CONFIG}: {error}") from None


def read_eos_ids(folder: Path, values: Mapping[str, Any]) -> tuple[int, ...]:
    """As `with_eos_ids`, the ids alone; a ValueError if they are no integers."""
    for source in (read_generation(folder), values):
        given = source.get("eos_token_id")
        if given is not None:
            ids = tuple(given) if isinstance(given, list) else (given,)
            check_value("eos_token_id", ids, tuple[int, ...])
            return ids
    return ()


def read_generation(folder: Path) -> dict[str, Any]:
    """The content of `generation_config.json`; empty if there is no such file."""
    path = folder / GENERATION
    return read_json(path) if path.is_file() else {}


def choose_eos_ids(config: Any, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a model's texts: its configuration's, or if it has none the tokenizer's.

    Raises:
        PublishError: the tokenizer's are not in the model's vocabulary.
    """
    if not hasattr(config, "eos_ids") or config.vocab_size is None:
        return ()
    ids = config.eos_ids or tokenizer_eos_ids(tokenizer)
    try:
        check_ids("the tokenizer", ids, config.vocab_size)
    except ValueError as error:
        raise PublishError(f"{error}: it is not the tokenizer of this model") from None
    return ids


def tokenizer_eos_ids(tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a text by a tokenizer: its `eos_ids`, or else its separator."""
    separator = getattr(tokenizer, "separator_id", None)
    return tuple(getattr(tokenizer, "eos_ids", () if separator is None else (separator,)))
