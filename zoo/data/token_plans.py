"""Plans over tokens: documents packed into rows, or padded to the length of a bucket."""

import abc
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from zoo.data.corpus import Corpus
from zoo.data.plans import HostBatch, Row, SeededPlan

TOKEN_BATCH = {
    "tokens": np.int32,  # the input of the model
    "targets": np.int32,  # the token after each of them
    "weights": np.float32,  # 1 where the target counts; 0 for padding, and for prompts
    "segment_ids": np.int32,  # 1, 2, ... within the row; 0 for padding
    "positions": np.int32,  # from 0 in each segment
}
EMPTY_ROW = -1


class Piece(NamedTuple):
    """Tokens [start, stop) of a document; token 0 is the separator before it."""

    document: int
    start: int
    stop: int


class TokenPlan(SeededPlan):
    """Batches of token rows [batch, seq] (see `TOKEN_BATCH`), each made of pieces of documents."""

    def __init__(
        self, corpus: Corpus, separator_id: int, batch_size: int, seed: int, shuffle: bool
    ):
        super().__init__(batch_size, seed, shuffle)
        if not 0 <= separator_id < corpus.vocab_size:
            raise ValueError(
                f"separator_id={separator_id} is outside the vocabulary: "
                f"vocab_size={corpus.vocab_size}"
            )
        self.corpus = corpus
        self.separator_id = separator_id

    @abc.abstractmethod
    def _pieces(self, k: int, row: int) -> list[Piece]:
        """The pieces in one row of batch k, from left to right; none in a row of padding."""

    def row(self, bucket: int) -> Row:
        """The arrays of one row of a bucket."""
        return {name: ((bucket,), dtype) for name, dtype in TOKEN_BATCH.items()}

    def _build(self, k: int, rows: range) -> HostBatch:
        shape = (len(rows), self.bucket(k))
        batch = {name: np.zeros(shape, dtype) for name, dtype in TOKEN_BATCH.items()}
        for i, row in enumerate(rows):
            self._fill({name: array[i] for name, array in batch.items()}, self._pieces(k, row))
        return batch

    def _fill(self, row: HostBatch, pieces: Sequence[Piece]) -> None:
        begin = 0
        for segment, (document, start, stop) in enumerate(pieces, start=1):
            # The document between its separator and the next one; the targets are one ahead.
            here = slice(begin, begin + stop - start)
            text = self.corpus[document]
            follow = text[start:stop]
            row["targets"][here] = self.separator_id
            row["targets"][begin : begin + len(follow)] = follow
            first = int(start == 0)
            row["tokens"][begin] = self.separator_id
            row["tokens"][begin + first : here.stop] = text[start + first - 1 : stop - 1]
            row["weights"][here] = 1
            if self.corpus.counts is not None:  # the separator after the document always does
                offset = self.corpus.offsets[document] + start
                counted = self.corpus.counts[offset : offset + len(follow)]
                row["weights"][begin : begin + len(follow)] = counted
            row["segment_ids"][here] = segment
            row["positions"][here] = np.arange(stop - start)
            begin = here.stop


class PackedPlan(TokenPlan):
    """Rows of `seq_len` tokens, cut from the documents end to end with nothing left out.

    In each epoch the documents are permuted, each with a separator before it, and cut into rows,
    which are permuted in turn. Each token of a document, and the separator after it, is a target
    once per epoch. A row's documents are segments; the parts of a document that a cut splits are
    segments of different rows. Only the last row is padded, and the last batch with empty rows.
    Memory: 16 bytes per document and 8 per row, for each of two epochs.
    """

    def __init__(
        self,
        corpus: Corpus,
        separator_id: int,
        seq_len: int,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
    ):
        super().__init__(corpus, separator_id, batch_size, seed, shuffle)
        if seq_len < 1:
            raise ValueError(f"seq_len={seq_len} must be at least 1")
        self.seq_len = seq_len
        self._num_tokens = len(corpus.tokens) + len(corpus)
        self._num_rows = math.ceil(self._num_tokens / seq_len)
        self.buckets = (seq_len,)
        self.batches_per_epoch = math.ceil(self._num_rows / batch_size)
        self.padding_waste = 1 - self._num_tokens / (self.batches_per_epoch * batch_size * seq_len)
        # Two, because the prefetching threads cross from one epoch into the next.
        self._epoch_order = functools.lru_cache(maxsize=2)(self._make_epoch_order)

    def _make_epoch_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(documents in order, where each begins and the last ends, rows in order)."""
        documents = self._order(len(self.corpus), epoch, "documents")
        lengths = np.diff(self.corpus.offsets)[documents] + 1
        begins = np.concatenate([[0], np.cumsum(lengths)])
        return documents, begins, self._order(self._num_rows, epoch, "rows")

    def _pieces(self, k: int, row: int) -> list[Piece]:
        epoch, batch = divmod(k, self.batches_per_epoch)
        index = batch * self.batch_size + row
        if index >= self._num_rows:
            return []
        documents, begins, rows = self._epoch_order(epoch)
        begin = int(rows[index]) * self.seq_len
        end = min(begin + self.seq_len, self._num_tokens)
        first = int(np.searchsorted(begins, begin, side="right")) - 1
        last = int(np.searchsorted(begins, end, side="left"))
        return [
            Piece(
                int(documents[i]),
                max(begin - int(begins[i]), 0),
                min(end, int(begins[i + 1])) - int(begins[i]),
            )
            for i in range(first, last)
        ]


class BucketPlan(TokenPlan):
    """One document per row, padded to the smallest bucket that holds it and its separator.

    In each epoch the rows of a bucket are permuted and grouped into batches, and the batches of
    all buckets are permuted. A bucket's remaining rows fill up the batches of larger buckets, if
    those have room for all of them; else they form a batch with empty rows.

    A document too long for the largest bucket is an error, is truncated, or is split into rows.
    Memory: 32 bytes per row, and 8 more for each of two epochs.
    """

    def __init__(
        self,
        corpus: Corpus,
        separator_id: int,
        buckets: Sequence[int] = (128, 256, 512),
        batch_size: int = 8,
        seed: int = 0,
        too_long: Literal["error", "truncate", "split"] = "error",
        shuffle: bool = True,
    ):
        super().__init__(corpus, separator_id, batch_size, seed, shuffle)
        if not buckets or min(buckets) < 1 or len(set(buckets)) < len(buckets):
            raise ValueError(f"buckets={tuple(buckets)} must be different positive lengths")
        if too_long not in ("error", "truncate", "split"):
            raise ValueError(f"too_long={too_long!r}: choose 'error', 'truncate' or 'split'")
        self._lengths = np.sort(np.asarray(buckets, np.int64))
        self._rows = self._make_rows(int(self._lengths[-1]), too_long)
        starts, stops = self._rows[:, 1], self._rows[:, 2]
        self._row_bucket = self._lengths[np.searchsorted(self._lengths, stops - starts)]
        self._epoch_order = functools.lru_cache(maxsize=2)(self._make_epoch_order)
        batch_lengths, _ = self._epoch_order(0)  # every epoch has as many of each length
        self.buckets = tuple(np.unique(batch_lengths).tolist())
        self.batches_per_epoch = len(batch_lengths)
        self.padding_waste = float(1 - (stops - starts).sum() / (batch_lengths.sum() * batch_size))

    def _make_rows(self, longest: int, too_long: str) -> Int64[np.ndarray, "rows 3"]:
        """The rows as (document, start, stop)."""
        lengths = np.diff(self.corpus.offsets) + 1
        if too_long == "error" and (lengths > longest).any():
            row = int(np.argmax(lengths > longest))
            raise ValueError(
                f"document {self.corpus.name(row)} has {lengths[row]} tokens with its separator, "
                f"and the largest bucket {longest}: add a larger bucket, or set too_long to "
                f"'truncate' or 'split' (now 'error'); {(lengths > longest).sum()} of "
                f"{len(lengths)} documents are too long"
            )
        if too_long == "truncate":
            lengths = np.minimum(lengths, longest)
        counts = -(-lengths // longest)
        documents = np.repeat(np.arange(len(lengths)), counts)
        number = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = number * longest
        return np.stack([documents, starts, np.minimum(starts + longest, lengths[documents])], 1)

    def _make_epoch_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(the bucket of each batch, the rows of each batch); `EMPTY_ROW` is a row of padding."""
        order = self._order(len(self._rows), epoch, "rows")
        lengths, table = np.zeros(0, np.int64), np.zeros((0, self.batch_size), np.int64)
        for length in self._lengths[::-1]:
            rows = order[self._row_bucket[order] == length]
            places = np.flatnonzero(table.ravel() == EMPTY_ROW)  # in batches of larger buckets
            left_over = len(rows) % self.batch_size
            if left_over <= len(places):
                table.ravel()[places[:left_over]] = rows[len(rows) - left_over :]
                rows = rows[: len(rows) - left_over]
            rows = np.pad(rows, (0, -len(rows) % self.batch_size), constant_values=EMPTY_ROW)
            added = rows.reshape(-1, self.batch_size)
            table = np.concatenate([added, table])
            lengths = np.concatenate([np.full(len(added), length), lengths])
        order = self._order(len(table), epoch, "batches")
        return lengths[order], table[order]

    def describe_buckets(self) -> str:
        """One line per bucket: its rows and batches in an epoch, and its padding."""
        lengths, table = self._epoch_order(0)
        lines = []
        for bucket in self.buckets:
            rows = table[lengths == bucket]
            held = rows[rows != EMPTY_ROW]
            filled = (self._rows[held, 2] - self._rows[held, 1]).sum()
            lines.append(
                f"bucket {bucket}: {held.size:,} rows in {len(rows):,} batches, "
                f"{1 - filled / (rows.size * bucket):.1%} padding"
            )
        return "\n".join(lines)

    def bucket(self, k: int) -> int:
        """The sequence length of batch k."""
        epoch, batch = divmod(k, self.batches_per_epoch)
        return int(self._epoch_order(epoch)[0][batch])

    def _pieces(self, k: int, row: int) -> list[Piece]:
        epoch, batch = divmod(k, self.batches_per_epoch)
        index = self._epoch_order(epoch)[1][batch, row]
        return [] if index == EMPTY_ROW else [Piece(*map(int, self._rows[index]))]


class LabelledPlan(BucketPlan):
    """The rows of a `BucketPlan` for a classifier, each with its document's label.

    A batch has `inputs`, int32[batch, seq], a separator and then the tokens; `mask`,
    bool[batch, seq], False at padding; `labels`, int32[batch]; and `weights`, float32[batch]: 1,
    or 0 for empty rows. All parts of a document that was split have its label.
    """

    unit = "examples"

    def __init__(
        self, corpus: Corpus, labels: Int32[np.ndarray, "documents"], *arguments: Any, **named: Any
    ):
        if len(labels) != len(corpus):
            raise ValueError(f"{len(labels)} labels for {len(corpus)} documents: give one for each")
        super().__init__(corpus, *arguments, **named)
        self.labels = labels

    def row(self, bucket: int) -> Row:
        """The arrays of one row of a bucket."""
        return {
            "inputs": ((bucket,), np.int32),
            "mask": ((bucket,), np.bool_),
            "labels": ((), np.int32),
            "weights": ((), np.float32),
        }

    def _build(self, k: int, rows: range) -> HostBatch:
        batch = super()._build(k, rows)
        mask = batch["segment_ids"] > 0
        pieces = [self._pieces(k, row) for row in rows]
        labels = [self.labels[row[0].document] if row else 0 for row in pieces]
        return {
            "inputs": batch["tokens"],
            "mask": mask,
            "labels": np.asarray(labels, np.int32),
            "weights": np.asarray(mask.any(1), np.float32),
        }
