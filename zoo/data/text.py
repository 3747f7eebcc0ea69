"""Text for language models: from files to a tokenizer and the datasets of a corpus' two parts."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from zoo.common import configuration, plugins
from zoo.common.configuration import may_differ, require
from zoo.common.files import local_path
from zoo.data.corpus import Corpus
from zoo.data.documents import Document, compressed_size
from zoo.data.labelled import LabelledDataset, TaggedDataset
from zoo.data.prepared.opening import (
    Prepared,
    check_tokenizer,
    first_documents,
    open_text,
    prepared_folder,
    same_ids,
)
from zoo.data.token_datasets import BucketedDataset, PackedDataset, TokenDataset
from zoo.data.tokenizer import Reading, Tokenizer, begin_id, end_id, load_tokenizer


@dataclass(frozen=True)
class Source:
    """Where text comes from, and how it becomes batches of some tokenizer's ids."""

    files: Annotated[str, tyro.conf.arg(aliases=("--data",))] = may_differ("")
    """Glob of .txt, .py, … (a document each), .jsonl, .csv, .parquet or .fasta; several, with
    commas. Sources by name are mixed by their weights, as in code=src/*.py:0.7,help=*.txt:0.3, or
    in a table in a .toml file. Empty: text that comes with Python (source code; for fine-tuning,
    help texts)."""
    # What they hold may not differ: a run compares the fingerprint of the tokens.
    field: str = "text"
    """Field of a JSON line, or column of a CSV or Parquet file, that holds the text."""
    documents: Literal["files", "functions"] = "files"
    """A document is a file, line or row, or each function of a Python file."""
    rows: Literal["packed", "bucketed"] = "packed"
    """Documents packed into rows of seq_len, end to end, or with prompts in one piece; or each in a
    row padded to a bucket."""
    seq_len: int = 256
    """Tokens in a packed row."""
    batch_size: int = 16
    """Rows in a global batch, over all devices and microbatches."""
    buckets: tuple[int, ...] = (128, 256, 512)
    """Row lengths that bucketed rows are padded to."""
    too_long: Literal["error", "truncate", "split"] = "error"
    """For a document longer than the largest bucket or, with a prompt, than a packed row: an error,
    its beginning, or its pieces."""
    held_out: float = 0.05
    """Share of the documents kept from training, to evaluate on."""
    special_tokens: Reading | None = may_differ(None)
    """Reading of special tokens' names in the text, such as <|im_end|>: parse, as those tokens; or
    text, as plain characters. If not given, parse for prompts, completions and pairs of texts, and
    text for documents and for the messages of chats."""
    cache: Path | None = may_differ(Path("~/.cache/zoo/corpus"))
    """Folder that keeps tokenized corpora, and copies of corpora at addresses; None keeps none."""

    def __post_init__(self) -> None:
        configuration.check(self, "data.")
        require(0 < self.held_out < 1, f"data.held_out={self.held_out}: must lie between 0 and 1")
        if self.cache is not None:
            local_path(self.cache, "data.cache")

    @property
    def row_lengths(self) -> Mapping[str, tuple[int, ...]]:
        """The tokens that rows may have, by the field that says so."""
        bucketed = self.rows == "bucketed"
        return {"data.buckets": self.buckets} if bucketed else {"data.seq_len": (self.seq_len,)}


@dataclass(frozen=True)
class Config(Source):
    """Where text and its tokenizer come from, and how it becomes batches."""

    tokenizer: str = "bytes"
    """bytes, bpe (byte pairs, trained on the corpus at the start), or a path to tokenizer.json."""
    vocab_size: int = 2048
    """Number of ids that bpe trains."""

    def __post_init__(self) -> None:
        super().__post_init__()
        local_path(self.tokenizer, "data.tokenizer")


_DEFAULT = Config()


@dataclass(frozen=True)
class Text:
    """A tokenizer, and the datasets of the training and the held-out part.

    `classes` names the labels 0, 1, … of labelled rows or tokens. `special_tokens` says how many of
    them the text has, and how their names are read.
    """

    tokenizer: Tokenizer
    train: TokenDataset
    held_out: TokenDataset
    classes: tuple[str, ...] = ()
    prepared: Prepared | None = None
    special_tokens: str = ""

    @property
    def fingerprint(self) -> str:
        """A hash of all tokens, targets and labels of both parts: equal ones mean equal batches."""
        assert self.prepared is not None  # of a mixture each source has its own
        return self.prepared.fingerprint

    @functools.cached_property
    def held_out_documents(self) -> list[Document]:
        """A sample of the documents that are held out."""
        return first_documents(self.held_out.corpus, self.tokenizer)

    def vocab_size(self, at_least: int = 0) -> int:
        """A model's vocabulary: all ids of the tokenizer, in a multiple of 64 to be sharded."""
        return max(at_least, 64 * math.ceil(self.tokenizer.vocab_size / 64))

    def bits_per_byte(self, loss: float) -> float:
        """Bits per byte of held-out text, from a mean loss in nats per token.

        The ends of documents count as tokens to predict, and not as bytes. A document's first token
        that nothing precedes, so that the loss leaves it out, is charged with the mean.
        """
        corpus, ends = self.held_out.corpus, self.held_out.end_id is not None
        num_tokens = corpus.num_counted + len(corpus) * ends
        return loss / math.log(2) * num_tokens / corpus.num_bytes

    @functools.cached_property
    def compressors(self) -> dict[str, float]:
        """Bits per byte of `gzip -9` and `xz -9` on the held-out documents, one by one."""
        num_bytes = sum(len(document.text.encode()) for document in self.held_out_documents)
        return {
            f"{method} -9": 8 * compressed_size(self.held_out_documents, method) / num_bytes
            for method in ("gzip", "xz")
        }


def read_text(
    config: Config,
    *,
    seed: int,
    tokenizer_folder: Callable[..., Path],
    label: str | None = None,
    default: Source | None = None,
) -> Text:
    """Split and tokenize text, once; `tokenizer_folder(make)` keeps the files of `make(folder)`.

    A run keeps its tokenizer, so that it does not change under the run when the corpus does. With
    `label`, the field of a row's label, the datasets are `LabelledDataset`s. A prepared corpus
    brings its tokenizer and its held-out part: a field that has another value than `default` must
    name the same.

    Raises:
        ValueError: rows, files or labels that do not go together, with what to change.
    """
    check_label(config, label)
    open_with = functools.partial(open_text, config, default or _DEFAULT, label=label)
    prepared = open_with(config.tokenizer, config.vocab_size)
    folder = tokenizer_folder(prepared.tokenizer.save)
    tokenizer = load_tokenizer(folder)
    if not same_ids(tokenizer, prepared.tokenizer):  # the text has changed since it was trained
        prepared = open_with(tokenizer)
        check_tokenizer(prepared, tokenizer, str(folder))
    return prepared_text(config, prepared, seed=seed)


def prepared_text(config: Source, prepared: Prepared, *, seed: int, closed: bool = False) -> Text:
    """The datasets of both parts of a prepared corpus; labelled rows may be `closed`."""
    tokenizer, manifest = prepared.tokenizer, prepared.manifest
    ends = begin_id(tokenizer), end_id(tokenizer)

    def dataset(corpus: Corpus) -> TokenDataset:
        if config.rows == "packed":
            packed = (config.seq_len, config.batch_size, seed)
            return PackedDataset(corpus, ends, *packed, too_long=config.too_long)
        bucketed = (ends, config.buckets, config.batch_size, seed, config.too_long)
        rows = manifest.options.get("rows", {}).get("format", "")
        if rows == "tags":
            return TaggedDataset(corpus, *bucketed, cache=config.cache)
        kind = plugins.find("zoo.row_datasets", rows)
        if manifest.classes and kind is None:
            labels = corpus.labels()
            return LabelledDataset(corpus, labels, *bucketed, closed=closed, cache=config.cache)
        return (kind or BucketedDataset)(corpus, *bucketed, cache=config.cache)

    train, held_out = dataset(prepared.train), dataset(prepared.held_out)
    found = manifest.describe_special_tokens("--data.special-tokens")
    return Text(tokenizer, train, held_out, manifest.classes, prepared, found)


def check_label(config: Source, label: str | None) -> None:
    """Raise a ValueError where rows are to be classified and the data has none."""
    if label is None:
        return
    if config.rows != "bucketed" or not config.files:
        raise ValueError(
            f"label={label!r} classifies rows: it needs data.rows='bucketed' (now {config.rows!r}) "
            f"and labelled data.files (now {config.files!r})"
        )
    if prepared_folder(config.files) is not None:
        raise ValueError(
            f"label={label!r}: data.files={config.files!r} is prepared, and has no labels; give "
            "the files themselves"
        )
