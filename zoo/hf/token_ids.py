"""The token ids and the settings of generation of Hugging Face's folders, read and written.

They are no maths, and so no fields of a `Config`, but for the ids that end a text.
"""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zoo.common.configuration import check_value
from zoo.publishing import PublishError
from zoo.publishing.families import choose_eos_ids, tokenizer_eos_ids
from zoo.publishing.formats import CONFIG, read_json

GENERATION = "generation_config.json"
EOS = "eos_token_id"
IDS = ("bos_token_id", EOS, "pad_token_id")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
logger = logging.getLogger(__name__)


def with_eos_ids(config: Any, folder: Path, *values: Mapping[str, Any]) -> Any:
    """The configuration of a model in Hugging Face's format with the ids that end its texts.

    Those are in `generation_config.json`, or else among the `values` of `config.json`, of which a
    part's come after the whole model's. A family without such a field keeps its configuration.

    Ids that the vocabulary does not have are left out with a warning: they are never drawn.

    Raises:
        PublishError: a damaged file.
    """
    if not hasattr(config, "eos_ids"):
        return config
    try:
        ids = _listed(read_generation(folder), *values)
    except ValueError as error:
        raise PublishError(f"{folder}: {EOS} of {GENERATION} or {CONFIG}: {error}") from None
    known = _known(ids, config)
    if known != ids:
        logger.warning(
            f"{folder}: {EOS}={[*ids]} has ids beyond vocab_size={config.vocab_size}, which the "
            "model never draws: no text ends with them"
        )
    return dataclasses.replace(config, eos_ids=known)


def read_generation(folder: Path) -> dict[str, Any]:
    """The content of `generation_config.json`; empty if there is no such file."""
    path = folder / GENERATION
    return read_json(path) if path.is_file() else {}


def read_sampling(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The file `generation_config.json` and its settings of sampling; None if it is not there.

    With `do_sample` false the temperature is 0, as for transformers.
    """
    if not (folder / GENERATION).is_file():
        return None
    values = read_generation(folder)
    if values.get("do_sample") is False:
        values["temperature"] = 0.0
    found = {name: values[name] for name in SAMPLING if values.get(name) is not None}
    return folder / GENERATION, found


def describe_ids(
    config: Any, tokenizer: Any, values: Mapping[str, Any], generation: Mapping[str, Any]
) -> dict[str, Any]:
    """The token ids of `config.json`: the ones of the folder that the model came from, as they are.

    `values` and `generation` are that folder's files. What they do not say is the tokenizer's; the
    ends of a text are the model's own, in the form that the files have if they are the same.
    """
    separator = getattr(tokenizer, "separator_id", None)
    ends = choose_eos_ids(config, tokenizer) or tokenizer_eos_ids(tokenizer)
    ids = {
        "bos_token_id": getattr(tokenizer, "bos_id", separator),
        EOS: _as_field(ends),
        "pad_token_id": getattr(tokenizer, "pad_id", None),
    }
    kept = {name: values[name] for name in ids if name in values}
    if {*_known(_listed(generation, values), config)} != {*ends}:
        kept.pop(EOS, None)
    return ids | kept


def describe_generation(
    config: Any, ids: Mapping[str, Any], generation: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of `generation_config.json`, given another; empty if it says nothing.

    `ids` are those of `config.json`. The ends of a text are the model's own.
    """
    if not hasattr(config, "eos_ids"):
        return dict(generation)
    found = {name: x for name, x in ids.items() if x is not None} | dict(generation)
    if config.eos_ids and {*_known(_listed(found), config)} != {*config.eos_ids}:
        found[EOS] = _as_field(config.eos_ids)
    return found


def _listed(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end a text by the first of some files that names any."""
    given = next((x[EOS] for x in sources if x.get(EOS) is not None), ())
    ids = tuple(given) if isinstance(given, list | tuple) else (given,)
    check_value(EOS, ids, tuple[int, ...])
    return ids


def _known(ids: tuple[int, ...], config: Any) -> tuple[int, ...]:
    """The ids that the model's vocabulary has."""
    size = getattr(config, "vocab_size", None)
    return ids if size is None else tuple(id for id in ids if 0 <= id < size)


def _as_field(ids: tuple[int, ...]) -> int | list[int] | None:
    return [*ids] if len(ids) > 1 else next(iter(ids), None)
