"""Prompts: rows of files, each with the fields that a reward needs, as a dataset."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import tyro

from zoo.alignment import puzzles
from zoo.common import configuration
from zoo.common.addresses import files_matching
from zoo.common.configuration import may_differ, require
from zoo.data.chats import ChatTemplate, messages_of
from zoo.data.datasets import HostBatch, Row, SeededDataset, hashed_integer
from zoo.data.formats import format_of, whole_file
from zoo.data.tokenizer import Tokenizer, begun, reading


@dataclass(frozen=True)
class Data:
    """Prompts, a row each, with the fields that a reward needs."""

    format: ClassVar = "prompts"  # beside those of fine-tuning
    files: Annotated[str, tyro.conf.arg(aliases=("--data",))] = may_differ("")
    """Glob of .jsonl, .json, .csv or .parquet files; several with commas. Without any there are
    puzzles made in place, 4,000 of three kinds, with a reward of their own."""
    prompt: str = "prompt"
    """Field of a prompt: a text, or a list of messages, for the tokenizer's chat template."""
    batch_size: int = 16
    """Prompts per step, over all devices and microbatches."""
    max_prompt_tokens: int = 256
    """Longest prompt; a longer one is an error."""
    held_out: float = 0.1
    """Share of the prompts kept from training, to evaluate on."""
    tokenizer: str = ""
    """bytes, or a path to tokenizer.json, where the model's folder has none."""
    chat_template: Annotated[str, tyro.conf.arg(aliases=("--chat-template",))] = ""
    """File of a chat template (Jinja) in place of the tokenizer's own, saved with the model."""

    def __post_init__(self) -> None:
        configuration.check(self, "data.")
        require(0 < self.held_out < 1, f"data.held_out={self.held_out}: must lie between 0 and 1")
        for name in ("batch_size", "max_prompt_tokens"):
            value = getattr(self, name)
            require(value >= 1, f"data.{name}={value}: must be at least 1")


class Prompt(NamedTuple):
    """A row, its prompt as text and as ids, and whether it was messages."""

    row: Mapping[str, Any]
    text: str
    ids: list[int]
    is_chat: bool


class Prompts(SeededDataset):
    """Prompts as a `zoo.Dataset`: batch k is their numbers, int32[batch], in a seed's order."""

    unit = "tokens"
    padding_waste = 0.0

    def __init__(self, prompts: Sequence[Prompt], batch_size: int, seed: int, tokens: int = 1):
        """`tokens`: how many an update has per prompt, in the rows of all of its answers."""
        super().__init__(batch_size, seed, shuffle=True)
        self.prompts, self.buckets = prompts, (tokens,)
        self.batches_per_epoch = -(-len(prompts) // batch_size)

    @property
    def fingerprint(self) -> str:
        """A hash of the prompts and of the fields of their rows, in their order."""
        told = json.dumps([self.batch_size, self.seed, self.prompts], default=str)
        return hashlib.sha256(told.encode()).hexdigest()

    def chosen(self, k: int) -> list[int]:
        """The numbers of the prompts of batch k: an epoch has each once, and goes over into the
        next."""
        places = range(k * self.batch_size, (k + 1) * self.batch_size)
        size = len(self.prompts)
        return [int(self._place(size, place // size, "prompts", place % size)) for place in places]

    def row(self, bucket: int) -> Row:
        """The number of a prompt."""
        return {"prompt": ((), np.int32)}

    def _build(self, k: int, rows: range) -> HostBatch:
        chosen = self.chosen(k)
        return {"prompt": np.array([chosen[row] for row in rows], np.int32)}


def read_prompts(
    config: Data, tokenizer: Tokenizer, seed: int, tokens: int = 1
) -> tuple[Prompts, Prompts]:
    """The prompts to train on, and the held-out ones: by a hash of the prompt's text.

    Raises:
        ValueError: a row without a prompt, a prompt of too many tokens, too few of them.
    """
    parts: tuple[list[Prompt], list[Prompt]] = [], []
    for prompt in _read(config, tokenizer):
        is_held_out = hashed_integer(10**6, (prompt.text,)) < config.held_out * 10**6
        parts[is_held_out].append(prompt)
    for part, what in zip(parts, ("train on", "hold out"), strict=True):
        require(bool(part), f"data.files={config.files!r}: no prompt to {what}; give more rows")
    train, held_out = (Prompts(part, config.batch_size, seed, tokens) for part in parts)
    return train, held_out


def _read(config: Data, tokenizer: Tokenizer) -> Iterator[Prompt]:
    parsing, template = reading(tokenizer, "parse"), None
    for where, row in _rows(config.files):
        prompt = row.get(config.prompt)
        if is_chat := isinstance(prompt, list):
            template = template or ChatTemplate(tokenizer)
            messages = messages_of(row, config.prompt)
            text = template(messages, add_generation_prompt=True)
            ids = np.asarray(template.encode(messages)).tolist()
        else:
            require(
                isinstance(prompt, str) and bool(prompt),
                f"{where}: no text and no messages in {config.prompt!r}; its fields are "
                f"{sorted(row)}; name it by --data.prompt",
            )
            text = str(prompt)
            ids = begun(tokenizer, np.asarray(parsing.encode(text)).tolist())
        require(
            len(ids) <= config.max_prompt_tokens,
            f"{where}: a prompt of {len(ids)} tokens, and data.max_prompt_tokens="
            f"{config.max_prompt_tokens}: raise it, or leave the row out",
        )
        yield Prompt(row, text, ids, is_chat)


def _rows(files: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of files, or else the puzzles, with where each is."""
    if not files:
        made = itertools.islice(puzzles.puzzles(), puzzles.NUM_PROMPTS)
        yield from ((f"puzzle {number}", {**row}) for number, row in enumerate(made, 1))
    for pattern in filter(None, files.split(",")):
        for path, name in files_matching(pattern.strip(), "data.files").items():
            for number, _, row in format_of(str(path)).read(whole_file(path, name)):
                yield f"{name}, row {number}", row
