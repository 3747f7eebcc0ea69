"""Masked tokens: batch k of a token dataset, with some tokens hidden that a model is to fill in."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from jaxtyping import Bool, Int32
from tokenizers import AddedToken

from zoo.common import checksums, configuration
from zoo.common.configuration import require
from zoo.data.datasets import Dataset, HostBatch, Row, fingerprint
from zoo.data.tokenizer import BPETokenizer, Tokenizer

MASK = "<|mask|>"  # of a tokenizer that has none


@dataclass(frozen=True)
class Config:
    """Which tokens are hidden, and by what."""

    rate: Annotated[float, tyro.conf.arg(aliases=("--mask-rate",))] = 0.15
    """Share of the tokens that the loss is over; each is chosen by itself, special ones never."""
    replace: Literal["mixed", "mask"] = "mixed"
    """The tokens in their places: the mask for 80%, a random token for 10% and the token itself for
    10% (BERT, Devlin et al. 2018); or always the mask."""
    whole_words: bool = False
    """Choose words, all of whose tokens are hidden together."""

    def __post_init__(self) -> None:
        configuration.check(self, "mask.")
        require(0 < self.rate < 1, f"mask.rate={self.rate}: must lie between 0 and 1")


class MaskedDataset:
    """A token dataset whose targets are the tokens themselves, some of which are hidden.

    `weights` is 1 where a token was chosen, and 0 elsewhere. The choice is a function of the seed,
    k and the row, so that any mesh, number of processes and resume sees the same, and an evaluation
    of the first epoch always hides the same tokens.

    Raises:
        ValueError: rows without segment_ids.
    """

    def __init__(
        self, dataset: Dataset, config: Config, tokenizer: BPETokenizer, mask_id: int, seed: int
    ):
        missing = {"tokens", "targets", "segment_ids"} - dataset.row(dataset.buckets[0]).keys()
        require(not missing, f"{type(dataset).__name__} has no {sorted(missing)} to mask by")
        self._dataset, self._config, self._mask_id, self._seed = dataset, config, mask_id, seed
        self.unit, self.batch_size = dataset.unit, dataset.batch_size
        self.buckets, self.batches_per_epoch = dataset.buckets, dataset.batches_per_epoch
        self._special = np.zeros(tokenizer.vocab_size, bool)
        self._special[[*tokenizer.special_ids, mask_id]] = True
        self._others = np.flatnonzero(~self._special).astype(np.int32)
        self._goes_on, self._is_open = parts_of_words(tokenizer)

    @property
    def fingerprint(self) -> str:
        """A hash of the data and of the masks: equal ones mean equal batches."""
        return checksums.of_values([fingerprint(self._dataset), self._config, self._seed])

    def row(self, bucket: int) -> Row:
        """The arrays of one row of a bucket."""
        return self._dataset.row(bucket)

    def batch(self, k: int, rows: slice | None = None) -> HostBatch:
        """Batch k as numpy arrays [batch, seq], or only some of its rows."""
        batch = self._dataset.batch(k, rows)
        targets = batch["tokens"]
        tokens, weights = targets.copy(), np.zeros(targets.shape, np.float32)
        numbers = range(self.batch_size)[rows or slice(None)]
        for i, number in enumerate(numbers):
            rng = np.random.default_rng([self._seed, k, number])
            chosen = self._chosen(rng, targets[i], batch["segment_ids"][i])
            tokens[i, chosen] = self._replaced(rng, targets[i, chosen])
            weights[i] = chosen
        return {**batch, "tokens": tokens, "targets": targets, "weights": weights}

    def _chosen(
        self, rng: np.random.Generator, tokens: Int32[np.ndarray, "seq"], segments: Any
    ) -> Bool[np.ndarray, "seq"]:
        """Which tokens of a row are hidden."""
        words = np.arange(len(tokens))
        if self._config.whole_words:
            joined = self._is_open[tokens[:-1]] & self._goes_on[tokens[1:]]
            joined &= segments[:-1] == segments[1:]
            words = np.cumsum([True, *~joined]) - 1
        drawn = rng.random(len(tokens)) < self._config.rate
        return drawn[words] & (segments > 0) & ~self._special[tokens]

    def _replaced(self, rng: np.random.Generator, tokens: Any) -> Any:
        """The tokens that replace hidden ones."""
        if self._config.replace == "mask":
            return np.full_like(tokens, self._mask_id)
        kind, random = rng.random(len(tokens)), rng.choice(self._others, len(tokens))
        return np.where(kind < 0.8, self._mask_id, np.where(kind < 0.9, random, tokens))


def with_mask(tokenizer: Tokenizer) -> tuple[BPETokenizer, int]:
    """The tokenizer with a token for what is hidden, its own or a new one, and that token's id.

    Raises:
        ValueError: a tokenizer of bytes, which takes no new token.
    """
    if not isinstance(tokenizer, BPETokenizer):
        raise ValueError(
            "data.tokenizer='bytes' has no token for what is masked, and takes no new one: give "
            "bpe, or a tokenizer.json"
        )
    name = tokenizer.tokens.get("mask_token")
    if name is None:
        name = MASK
        tokenizer.tokenizer.add_special_tokens([AddedToken(name, normalized=False)])
        config = {**tokenizer.config, "mask_token": name}
        tokenizer = BPETokenizer(tokenizer.tokenizer, None, config, tokenizer.files)
    id = tokenizer.tokenizer.token_to_id(name)
    if id is None:
        raise ValueError(f"mask_token={name!r} is no token of the tokenizer: correct its files")
    return tokenizer, id


def parts_of_words(
    tokenizer: BPETokenizer,
) -> tuple[Bool[np.ndarray, "vocab"], Bool[np.ndarray, "vocab"]]:
    """By id: whether a token continues a word that is open before it, and leaves one open after it.

    WordPiece marks the tokens that continue a word, by `##`. Others mark a blank before a word, by
    `Ġ` or `▁`: there a token that begins with a letter, a digit or _ continues one.
    """
    vocabulary = tokenizer.tokenizer.get_vocab(with_added_tokens=False)
    pieces = any(token.startswith("##") for token in vocabulary)
    goes_on, is_open = np.zeros((2, tokenizer.vocab_size), bool)
    for token, id in vocabulary.items():
        text = token.replace("Ġ", " ")  # a letter to Python, which ▁ is not
        goes_on[id] = text.startswith("##") if pieces else re.match(r"\w", text) is not None
        is_open[id] = pieces or re.search(r"\w$", text) is not None
    return goes_on, is_open
