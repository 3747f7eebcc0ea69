"""Packing: which pieces of documents share a row, and where documents are cut."""

import itertools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from zoo.data.corpus import Corpus, Tokenized

logger = logging.getLogger(__name__)


class Piece(NamedTuple):
    """Positions [start, stop) of a document between its begin and its end."""

    document: int
    start: int
    stop: int


class EndToEnd:
    """Documents of some lengths end to end, in memory."""

    def __init__(self, lengths: Int64[np.ndarray, "documents"]):
        self._begins = np.concatenate([[0], np.cumsum(lengths)])
        self.num_positions = int(self._begins[-1])

    def pieces(self, begin: int, end: int) -> list[Piece]:
        """The pieces of documents that positions [begin, end) consist of, in order."""
        first = int(np.searchsorted(self._begins, begin, side="right")) - 1
        last = int(np.searchsorted(self._begins, end, side="left"))
        bounds = self._begins[first : last + 1].tolist()
        return [
            Piece(first + i, max(begin - start, 0), min(end, stop) - start)
            for i, (start, stop) in enumerate(itertools.pairwise(bounds))
            if start < stop
        ]


class Whole:
    """Documents that are never cut: each in the first row that has room, the longest first.

    The lengths alone decide which fit together, so that every epoch has as many rows; among
    documents of a length `arrange`, by an epoch's order, decides. `pieces` are rows (document,
    start, stop).
    """

    def __init__(self, pieces: Int64[np.ndarray, "pieces 3"], seq_len: int):
        self._pieces = pieces
        self._lengths = pieces[:, 2] - pieces[:, 1]
        row_of = first_fit(self._lengths, seq_len)
        self._slots = np.argsort(row_of, kind="stable")  # of the pieces, the longest first
        self._bounds = np.searchsorted(row_of[self._slots], np.arange(row_of.max() + 2))
        self.num_positions = int(self._lengths.sum())
        self.num_rows = len(self._bounds) - 1

    def __len__(self) -> int:
        return len(self._pieces)

    def arrange(self, order: np.ndarray) -> np.ndarray:
        """The pieces in the order of the rows."""
        by_length = order[np.argsort(-self._lengths[order], kind="stable")]
        return by_length[self._slots]

    def pieces(self, arrangement: Any, row: int) -> list[Piece]:
        """The pieces in a row, from left to right."""
        chosen = arrangement[self._bounds[row] : self._bounds[row + 1]]
        return [Piece(*map(int, self._pieces[i])) for i in chosen]


def first_fit(lengths: Int64[np.ndarray, "items"], room: int) -> Int64[np.ndarray, "items"]:
    """The row of each item, the longest first: the first one with enough room left."""
    row_of = np.zeros(len(lengths), np.int64)
    left = np.zeros(0, np.int64)
    sizes, counts = np.unique(lengths, return_counts=True)
    done = 0
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        # All items of a size at once: each row in turn takes as many as it has room for.
        new = np.full(-(-count // (room // size)), room)
        left = np.concatenate([left, new])
        candidates = np.flatnonzero(left >= size)
        taken = left[candidates] // size
        taken = np.diff(np.minimum(np.cumsum(taken), count), prepend=0)
        row_of[done : done + count] = np.repeat(candidates, taken)
        left[candidates] -= taken * size
        left = left[: row_of[: done + count].max() + 1]  # without rows that nothing needed
        done += count
    return row_of


def cut_documents(
    corpus: Corpus,
    lengths: Int64[np.ndarray, "documents"],
    longest: int,
    too_long: str,
    first: int,
    room: str,
) -> Int64[np.ndarray, "pieces 3"]:
    """The documents as rows (document, start, stop), none longer than `longest`.

    A document of which nothing that counts is left after a truncation is dropped, with a warning.
    `first` is the position of a document's first token in `lengths`, and `room` says in an error
    what is too small, and what to do about it.

    Raises:
        ValueError: a document is too long and `too_long` is "error", or all are dropped.
    """
    if too_long not in ("error", "truncate", "split"):
        raise ValueError(f"too_long={too_long!r}: choose 'error', 'truncate' or 'split'")
    cut = lengths > longest
    if too_long == "error" and cut.any():
        row = int(np.argmax(cut))
        raise too_long_error(corpus, row, int(lengths[row]), int(cut.sum()), room)
    if too_long == "truncate":
        lengths = np.minimum(lengths, longest)
        lengths = np.where(cut & ~_counts_within(corpus, longest, first), 0, lengths)
        _warn_of_dropped(corpus, cut & (lengths == 0), room)
    return cut_lengths(lengths, longest)


ROOM_IN_BUCKETS = "the largest bucket {}: add a larger bucket"


def bucket_lengths(buckets: Sequence[int]) -> Int64[np.ndarray, "buckets"]:
    """The buckets in ascending order; a ValueError unless they are different and positive."""
    if not buckets or min(buckets) < 1 or len(set(buckets)) < len(buckets):
        raise ValueError(f"buckets={tuple(buckets)} must be different positive lengths")
    return np.sort(np.asarray(buckets, np.int64))


class BucketRows:
    """Rows of pieces by bucket, those of the shortest one first.

    `counts` and `tokens` are of each of the `lengths`: its rows, and all of their tokens.
    """

    def __init__(self, rows: Int64[np.ndarray, "rows 3"], lengths: Int64[np.ndarray, "buckets"]):
        sizes = rows[:, 2] - rows[:, 1]
        bucket = np.searchsorted(lengths, sizes)
        self.lengths: list[int] = lengths.tolist()
        self.counts: list[int] = np.bincount(bucket, minlength=len(lengths)).tolist()
        self.tokens = [int(sizes[bucket == i].sum()) for i in range(len(lengths))]
        self._rows = rows[np.argsort(bucket, kind="stable")]
        self._first = np.cumsum([0, *self.counts]).tolist()

    def row(self, bucket: int, i: int) -> Piece:
        """Row i of the bucket of that number."""
        return Piece(*self._rows[self._first[bucket] + i].tolist())


def too_long_error(
    corpus: Tokenized, document: int, length: int, count: int, room: str
) -> ValueError:
    """The error that a document, the first of `count`, is too long."""
    return ValueError(
        f"document {corpus.name(document)} has {length} tokens with its separator, and {room}, or "
        f"set too_long to 'truncate' or 'split' (now 'error'); {count} of {len(corpus)} documents "
        "are too long"
    )


def cut_lengths(
    lengths: Int64[np.ndarray, "documents"], longest: int
) -> Int64[np.ndarray, "pieces 3"]:
    """Things of some lengths as rows (number, start, stop), none longer than `longest`."""
    counts = -(-lengths // longest)
    documents = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = number * longest
    return np.stack([documents, starts, np.minimum(starts + longest, lengths[documents])], 1)


def _counts_within(corpus: Corpus, longest: int, first: int) -> np.ndarray:
    """Whether a target that counts is at the first `longest` positions of each document."""
    if corpus.counts is None:
        return np.ones(len(corpus), bool)
    counted = np.concatenate([[0], np.cumsum(corpus.counts)])
    begins, ends = corpus.offsets[:-1], corpus.offsets[1:]
    begins, ends = (np.minimum(begins + n + 1 - first, ends) for n in (0, longest))
    return counted[ends] > counted[begins]


def _warn_of_dropped(corpus: Corpus, dropped: np.ndarray, room: str) -> None:
    if not dropped.any():
        return
    first = corpus.name(int(np.argmax(dropped)))
    message = (
        f"{dropped.sum()} of {len(dropped)} documents, {first} the first, have no token that "
        f"counts before they are truncated: {room}"
    )
    if dropped.all():
        raise ValueError(message)
    logger.warning("%s; they are left out", message)
