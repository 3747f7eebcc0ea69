"""The `Corpus`: token ids of documents in memory."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int64, Integer

from zoo.common import checksums
from zoo.data.documents import Document
from zoo.data.special_tokens import unframed
from zoo.data.tokenizer import Tokenizer


@runtime_checkable
class Tokenized(Protocol):
    """The interface of tokenized documents for the plans: a `Corpus`, or `prepared` on disk."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; each is below it."""
        ...

    @property
    def num_bytes(self) -> int:
        """Size of the text in UTF-8."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        ...

    @property
    def counts(self) -> Bool[np.ndarray, "num_tokens"] | None:
        """Which tokens count, if not all do."""
        ...

    @property
    def framed(self) -> bool:
        """Whether documents have their begin and their end among their tokens."""
        ...

    @property
    def fingerprint(self) -> str:
        """A hash of all of it."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Integer[np.ndarray, "length"]: ...

    def ids(self, i: int, start: int, stop: int) -> Integer[np.ndarray, "part"]:
        """Ids [start, stop) of document i, or those of them that it has."""
        ...

    def counted(self, i: int) -> Bool[np.ndarray, "length"] | None:
        """Which tokens of document i count; None: all."""
        ...

    def name(self, i: int) -> str:
        """The name of document i for messages."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids of all documents end to end, without separators.

    `tokens` has any integer dtype and is kept in the smallest unsigned one. Document i is
    `tokens[offsets[i]:offsets[i + 1]]`, or `corpus[i]`. `num_bytes` is the size of the text in
    UTF-8, for bits per byte. `names` are for messages. `counts`, if given, is True for the tokens
    that count in a loss and in `num_bytes`, such as those of completions. `framed` documents have
    their begin and their end among their tokens, as chats do.

    Raises:
        ValueError: there is no token, the offsets do not fit, or a token is outside the vocabulary.
    """

    tokens: Integer[np.ndarray, "num_tokens"]
    offsets: Int64[np.ndarray, "num_offsets"]
    num_bytes: int
    vocab_size: int
    names: Sequence[str] | None = None
    counts: Bool[np.ndarray, "num_tokens"] | None = None
    framed: bool = False

    def __post_init__(self):
        if len(self.tokens) == 0:
            raise ValueError("the corpus is empty: it has no tokens")
        ends = (self.offsets[0], self.offsets[-1])
        if ends != (0, len(self.tokens)) or np.any(np.diff(self.offsets) < 0):
            raise ValueError(
                f"offsets must rise from 0 to {len(self.tokens)}, the number of tokens; they go "
                f"from {ends[0]} to {ends[1]}"
            )
        if self.tokens.max() >= self.vocab_size or self.tokens.min() < 0:
            wrong = (self.tokens < 0) | (self.tokens >= self.vocab_size)
            position = int(np.argmax(wrong))
            document = int(np.searchsorted(self.offsets, position, side="right")) - 1
            raise ValueError(
                f"token id {self.tokens[position]} at position "
                f"{position - self.offsets[document]} of document {self.name(document)} is outside "
                f"the vocabulary: vocab_size={self.vocab_size}"
            )
        dtype = np.min_scalar_type(self.vocab_size - 1)
        object.__setattr__(self, "tokens", self.tokens.astype(dtype, copy=False))

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the tokens, of where documents begin, and of which tokens count."""
        return checksums.of_values([self.tokens, self.offsets, self.counts, self.framed])

    @classmethod
    def from_arrays(
        cls,
        documents: Sequence[Integer[np.ndarray, "_"]],
        vocab_size: int,
        num_bytes: int,
        names: Sequence[str] | None = None,
        counts: Sequence[Bool[np.ndarray, "_"]] | None = None,
        framed: bool = False,
    ) -> "Corpus":
        """A corpus of one array of ids per document and, optionally, one of booleans, `counts`."""
        offsets = np.cumsum([0, *map(len, documents)], dtype=np.int64)
        tokens = np.concatenate(documents) if documents else np.zeros(0, np.int32)
        counted = np.concatenate(counts) if counts else None
        return cls(tokens, offsets, num_bytes, vocab_size, names, counted, framed)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> Integer[np.ndarray, "length"]:
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return len(self.tokens)

    def ids(self, i: int, start: int, stop: int) -> Integer[np.ndarray, "part"]:
        """Ids [start, stop) of document i, or those of them that it has."""
        return self[i][start:stop]

    def counted(self, i: int) -> Bool[np.ndarray, "length"] | None:
        """Which tokens of document i count; None: all."""
        return None if self.counts is None else self.counts[slice(*self.offsets[i : i + 2])]

    def name(self, i: int) -> str:
        """The name of document i, or else its number."""
        return str(i) if self.names is None else repr(self.names[i])


def tokenize(documents: Sequence[Document], tokenizer: Tokenizer) -> Corpus:
    """The corpus of the documents.

    A begin and an end of text that a document has are left out, as rows have their own.
    """
    arrays: list[np.ndarray] = []
    for start in range(0, len(documents), 1024):  # to bound the memory of the encodings
        encoded = tokenizer.encode_batch([d.text for d in documents[start : start + 1024]])
        arrays += [ids[unframed(tokenizer, ids)] for ids in encoded]
    num_bytes = sum(len(document.text.encode()) for document in documents)
    names = [document.name for document in documents]
    return Corpus.from_arrays(arrays, tokenizer.vocab_size, num_bytes, names)
