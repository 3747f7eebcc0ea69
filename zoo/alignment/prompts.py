"""Prompts: rows of files, each with the fields that a reward needs, as a dataset."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import tyro

from zoo.alignment import puzzles
from zoo.common import checksums, configuration
from zoo.common.configuration import may_differ, require
from zoo.data.chats import ChatTemplate, messages_of
from zoo.data.datasets import HostBatch, Row, SeededDataset, hashed_integer
from zoo.data.formats import reader_of, text_of
from zoo.data.splits import plan_splits
from zoo.data.tokenizer import Tokenizer
from zoo.tasks.generation import encode_prompt


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
    """A row of a file, and its prompt as text and as ids."""

    row: Mapping[str, Any]
    text: str
    ids: list[int]


class Prompts(SeededDataset):
    """The rows of updates as a `zoo.Dataset`, `group` for each prompt, which a step fills."""

    padding_waste = 0.0

    def __init__(
        self, prompts: Sequence[Prompt], batch_size: int, seed: int, *, group: int, empty: HostBatch
    ):
        """`batch_size` counts prompts; `empty` is an update of one row."""
        super().__init__(batch_size * group, seed, shuffle=True)
        self._prompts, self._count, self._empty = prompts, batch_size, empty
        self.buckets = empty["tokens"].shape[1:]
        self.batches_per_epoch = -(-len(prompts) // batch_size)

    @property
    def fingerprint(self) -> str:
        """A hash of the prompts and of the fields of their rows, in their order."""
        return checksums.of_values([self._count, self.seed, *self._prompts])

    def chosen(self, k: int) -> list[Prompt]:
        """The prompts of batch k: an epoch has each once, and goes over into the next."""
        size, numbers = len(self._prompts), range(k * self._count, (k + 1) * self._count)
        places = (divmod(number, size) for number in numbers)
        return [self._prompts[self._place(size, epoch, "prompts", i)] for epoch, i in places]

    def row(self, bucket: int) -> Row:
        """The arrays of a row."""
        return {name: (x.shape[1:], x.dtype.type) for name, x in self._empty.items()}

    def _build(self, k: int, rows: range) -> HostBatch:
        return {name: np.repeat(x, len(rows), 0) for name, x in self._empty.items()}


def read_prompts(config: Data, tokenizer: Tokenizer) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts to train on, and the held-out ones: by a hash of the prompt's text.

    Raises:
        ValueError: a row without a prompt, a prompt of too many tokens, too few of them.
    """
    parts: tuple[list[Prompt], list[Prompt]] = [], []
    template = None
    for where, row in _rows(config.files):
        try:
            if isinstance(row.get(config.prompt), list):
                template = template or ChatTemplate(tokenizer)
                messages = messages_of(row, config.prompt)
                text = template(messages, add_generation_prompt=True)
                ids = template.encode(messages).tolist()
            else:
                text = text_of(row, config.prompt)
                ids = encode_prompt(tokenizer, text)
        except ValueError as error:
            raise ValueError(f"{where}: {error}; --data.prompt is the field of prompts") from error
        require(
            len(ids) <= config.max_prompt_tokens,
            f"{where}: a prompt of {len(ids)} tokens, and data.max_prompt_tokens="
            f"{config.max_prompt_tokens}: raise it, or leave the row out",
        )
        is_held_out = hashed_integer(10**6, (text,)) < config.held_out * 10**6
        parts[is_held_out].append(Prompt(row, text, ids))
    for part, what in zip(parts, ("train on", "hold out"), strict=True):
        require(bool(part), f"data.files={config.files!r}: no prompt to {what}; give more rows")
    return parts


def _rows(files: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of files, or else the puzzles, with where each is."""
    if not files:
        made = itertools.islice(puzzles.puzzles(), puzzles.NUM_PROMPTS)
        yield from ((f"puzzle {number}", {**row}) for number, row in enumerate(made, 1))
        return
    for split in plan_splits(files, shard_bytes=2**62):
        for piece in split.pieces:
            yield from (record[1:] for record in reader_of(piece.path)(piece))
