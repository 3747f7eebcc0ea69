"""Text for language models: from files to a tokenizer and the plans of both parts of a corpus."""

import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro

from zoo.corpus import (
    Corpus,
    Document,
    compressed_size,
    held_out_split,
    read_documents,
    standard_library,
    tokenize,
)
from zoo.plans import BucketPlan, PackedPlan, TokenPlan
from zoo.tokenizer import BPETokenizer, Tokenizer, get_tokenizer, load_tokenizer


@dataclass(frozen=True)
class Config:
    """Where text comes from, and how it becomes batches."""

    files: Annotated[str, tyro.conf.arg(aliases=("--data",))] = ""
    """Glob of .txt, .py, … (a document each), .jsonl, .parquet or .array_record; several with
    commas. Empty: the source code of this Python's standard library."""
    field: str = "text"
    """Field of a JSON line, or column of a Parquet file, that holds the text."""
    tokenizer: str = "bytes"
    """bytes, bpe (byte pairs, trained on the corpus at the start), or a path to tokenizer.json."""
    vocab_size: int = 2048
    """Number of ids that bpe trains."""
    rows: Literal["packed", "bucketed"] = "packed"
    """Documents packed end to end into rows of seq_len, or each in a row padded to a bucket."""
    seq_len: int = 256
    """Tokens in a packed row."""
    batch_size: int = 16
    """Rows in a global batch, over all devices and microbatches."""
    buckets: tuple[int, ...] = (128, 256, 512)
    """Row lengths that bucketed rows are padded to."""
    too_long: Literal["error", "truncate", "split"] = "error"
    """What becomes of a document longer than the largest bucket."""
    held_out: float = 0.05
    """Share of the documents kept from training, to evaluate on."""
    cache: Path | None = Path("~/.cache/zoo/corpus")
    """Folder that keeps tokenized corpora."""


@dataclass(frozen=True)
class Text:
    """A tokenizer, the plans of the training and the held-out part, and the latter's documents."""

    tokenizer: Tokenizer
    train: TokenPlan
    held_out: TokenPlan
    held_out_documents: list[Document]

    @property
    def fingerprint(self) -> str:
        """A hash of every token of both parts: equal fingerprints mean equal batches."""
        digest = hashlib.sha256()
        for plan in (self.train, self.held_out):
            for array in (plan.corpus.tokens, plan.corpus.offsets):
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def vocab_size(self, at_least: int = 0) -> int:
        """A model's vocabulary: all ids of the tokenizer, in a multiple of 64 to be sharded."""
        return max(at_least, 64 * math.ceil(self.tokenizer.vocab_size / 64))

    def bits_per_byte(self, loss: float) -> float:
        """Bits a byte of held-out text, from a mean loss in nats a token.

        The separators between documents count as tokens to predict, and not as bytes.
        """
        corpus = self.held_out.corpus
        num_targets = len(corpus.tokens) + len(corpus)
        return loss / math.log(2) * num_targets / corpus.num_bytes

    @functools.cached_property
    def compressors(self) -> dict[str, float]:
        """Bits a byte of `gzip -9` and `xz -9` on the held-out documents, one by one."""
        num_bytes = self.held_out.corpus.num_bytes
        return {
            f"{method} -9": 8 * compressed_size(self.held_out_documents, method) / num_bytes
            for method in ("gzip", "xz")
        }


def load(config: Config, *, seed: int, tokenizer_folder: Callable[..., Path]) -> Text:
    """Read, split and tokenize; `tokenizer_folder(make)` keeps what `make(folder)` writes.

    A run keeps its tokenizer, so that it does not change under the run when the corpus does.
    """
    documents = (
        read_documents(config.files, field=config.field) if config.files else standard_library()
    )
    train, held_out = held_out_split(documents, config.held_out)

    def make(folder: Path) -> None:
        if config.tokenizer == "bpe":
            BPETokenizer.train((d.text for d in train), config.vocab_size).save(folder)
        else:
            get_tokenizer(config.tokenizer).save(folder)

    tokenizer = load_tokenizer(tokenizer_folder(make))
    corpora = [tokenize(part, tokenizer, config.cache) for part in (train, held_out)]
    plans = [_plan(config, corpus, tokenizer, seed) for corpus in corpora]
    return Text(tokenizer, plans[0], plans[1], held_out)


def _plan(config: Config, corpus: Corpus, tokenizer: Tokenizer, seed: int) -> TokenPlan:
    separator, batch_size = tokenizer.separator_id, config.batch_size
    if config.rows == "packed":
        return PackedPlan(corpus, separator, config.seq_len, batch_size, seed)
    return BucketPlan(corpus, separator, config.buckets, batch_size, seed, config.too_long)
