"""Plans over tokens: documents packed into rows, or padded to the length of a bucket."""

import abc
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Int32, Int64, Integer

from zoo.base import checksums
from zoo.data.corpus import Corpus, Tokenized
from zoo.data.packing import EndToEnd, Piece, Whole, cut_documents
from zoo.data.plans import HostBatch, Row, SeededPlan

TOKEN_BATCH = {
    "tokens": np.int32,  # the input of the model
    "targets": np.int32,  # the token after each of them
    "weights": np.float32,  # 1 where the target counts; 0 for padding, and for prompts
    "segment_ids": np.int32,  # 1, 2, ... within the row; 0 for padding
    "positions": np.int32,  # from 0 in each segment
}
EMPTY_ROW = -1


Ends = int | tuple[int | None, int | None]  # a separator, or a begin and an end; None is no token


def check_ids(plan: Any, vocab_size: int) -> None:
    """Raise a ValueError where tokens of a plan are not ids of a model with `vocab_size` of them.

    Those of documents lie within their corpus' vocabulary; arrays are searched. A plan that has
    neither is not checked.
    """
    corpus, tokens = getattr(plan, "corpus", None), getattr(plan, "arrays", {}).get("tokens")
    if corpus is not None and corpus.vocab_size > vocab_size:
        raise ValueError(
            f"the data has vocab_size={corpus.vocab_size}, and the model vocab_size={vocab_size}: "
            "it would take an id beyond its own for another; make the model's as large"
        )
    if tokens is not None and (wrong := (tokens < 0) | (tokens >= vocab_size)).any():
        place = tuple(map(int, np.argwhere(wrong)[0]))
        raise ValueError(
            f"tokens{[*place]} is {tokens[place]}, and the model has vocab_size={vocab_size}: "
            "correct the arrays, or make the vocabulary larger"
        )


class TokenPlan(SeededPlan):
    """Batches of token rows [batch, seq] (see `TOKEN_BATCH`), each made of pieces of documents.

    Each document begins and ends with the separator, or with the first and the second of a pair
    of ids. Without a begin the first token of a document is an input and no target. The documents
    of a corpus that is `framed` have both already.

    A mixture takes rows one by one: `num_rows` are in an epoch, in the order of its batches.
    """

    num_rows: int

    def __init__(
        self, corpus: Tokenized, separator_id: Ends, batch_size: int, seed: int, shuffle: bool
    ):
        super().__init__(batch_size, seed, shuffle)
        pair = separator_id if isinstance(separator_id, tuple) else (separator_id, separator_id)
        for id in pair:
            if id is not None and not 0 <= id < corpus.vocab_size:
                raise ValueError(
                    f"separator_id={id} is outside the vocabulary: vocab_size={corpus.vocab_size}"
                )
        self.corpus = corpus
        self.begin_id, self.end_id = (None, None) if corpus.framed else pair
        self.frame = (self.begin_id is not None) + (self.end_id is not None)

    def _positions(self, corpus: Corpus) -> Int64[np.ndarray, "documents"]:
        """The positions of each document; a position has an input and a target."""
        positions = np.maximum(np.diff(corpus.offsets) + self.frame - 1, 0)
        if not positions.any():
            raise ValueError("no document has a token that follows another: there is no target")
        return positions

    def _cut(
        self, corpus: Corpus, longest: int, too_long: str, room: str
    ) -> Int64[np.ndarray, "rows 3"]:
        """The documents as rows (document, start, stop)."""
        first = int(self.begin_id is not None)
        return cut_documents(corpus, self._positions(corpus), longest, too_long, first, room)

    @property
    def fingerprint(self) -> str:
        """A hash of the data and of the arguments: equal ones mean equal batches."""
        return checksums.of_values(self._content())

    def _content(self) -> Iterator[Any]:
        """The values that the batches depend on."""
        yield from (self.batch_size, self.seed, self.shuffle, self.buckets, self.num_rows)
        yield from (self.begin_id, self.end_id, self.padding_waste, self.corpus.fingerprint)

    @abc.abstractmethod
    def row_pieces(self, epoch: int, row: int) -> list[Piece]:
        """The pieces in a row of an epoch, from left to right; none in a row of padding."""

    def _pieces(self, k: int, row: int) -> list[Piece]:
        epoch, batch = divmod(k, self.batches_per_epoch)
        index = batch * self.batch_size + row
        return self.row_pieces(epoch, index) if index < self.num_rows else []

    def describe_buckets(self) -> str:
        """One line per bucket, of the plans that have several; else none."""
        return ""

    def row(self, bucket: int) -> Row:
        """The arrays of one row of a bucket."""
        return {name: ((bucket,), dtype) for name, dtype in TOKEN_BATCH.items()}

    def _build(self, k: int, rows: range) -> HostBatch:
        shape = (len(rows), self.bucket(k))
        batch = {name: np.zeros(shape, dtype) for name, dtype in TOKEN_BATCH.items()}
        for i, row in enumerate(rows):
            self.fill_row({name: array[i] for name, array in batch.items()}, self._pieces(k, row))
        return batch

    def fill_row(self, row: HostBatch, pieces: Sequence[Piece]) -> None:
        """Write the pieces into a row of `TOKEN_BATCH` that has zeros everywhere."""
        begin, first = 0, int(self.begin_id is not None)
        for segment, (document, start, stop) in enumerate(pieces, start=1):
            here = slice(begin, begin + stop - start)
            ids = self._framed(document, start, stop + 1)
            row["tokens"][here], row["targets"][here] = ids[:-1], ids[1:]
            row["weights"][here] = 1
            if (counts := self.corpus.counted(document)) is not None:
                counted = counts[start + 1 - first : stop + 1 - first]
                row["weights"][begin : begin + len(counted)] = counted  # the end always counts
            row["segment_ids"][here] = segment
            row["positions"][here] = np.arange(stop - start)
            begin = here.stop

    def _framed(self, document: int, start: int, stop: int) -> Integer[np.ndarray, "ids"]:
        """Ids [start, stop) of a document between its begin and its end."""
        first = int(self.begin_id is not None)
        ids = np.full(stop - start, self.end_id or 0, np.int32)
        inside = self.corpus.ids(document, max(start - first, 0), stop - first)
        before = int(first and start == 0)
        ids[:before] = self.begin_id or 0
        ids[before : before + len(inside)] = inside
        return ids


class PackedPlan(TokenPlan):
    """Rows of `seq_len` tokens, packed with documents, which are the row's segments.

    In each epoch the documents are permuted and put end to end, each with its begin and its end,
    and cut into rows, which are permuted in turn. Each token of a document, and the end after it,
    is a target once per epoch. The parts of a document that a cut splits are segments of different
    rows. Only the last row is padded, and the last batch with empty rows.

    Documents of which only some tokens count, such as completions, are not cut from what they
    depend on: each is in one row, with padding after it. One that is too long for a row is an
    error, is truncated, or is split into rows.
    Memory: 16 bytes per document and 8 per row, for each of two epochs.
    """

    def __init__(
        self,
        corpus: Corpus,
        separator_id: Ends,
        seq_len: int,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        too_long: Literal["error", "truncate", "split"] = "error",
    ):
        super().__init__(corpus, separator_id, batch_size, seed, shuffle)
        if seq_len < 1:
            raise ValueError(f"seq_len={seq_len} must be at least 1")
        self.seq_len = seq_len
        if corpus.counts is None:
            self._layout: EndToEnd | Whole = EndToEnd(self._positions(corpus), seq_len)
        else:
            rows = self._cut(corpus, seq_len, too_long, f"a row seq_len={seq_len}: raise it")
            self._layout = Whole(rows, seq_len)
        self.buckets = (seq_len,)
        self.num_rows = self._layout.num_rows
        self.batches_per_epoch = math.ceil(self.num_rows / batch_size)
        places = self.batches_per_epoch * batch_size * seq_len
        self.padding_waste = 1 - self._layout.num_tokens / places
        # Two, because the prefetching threads cross from one epoch into the next.
        self._epoch_order = functools.lru_cache(maxsize=2)(self._make_epoch_order)

    def _make_epoch_order(self, epoch: int) -> tuple[Any, np.ndarray]:
        """(the layout's arrangement, rows in order)."""
        order = self._order(self._layout.num_units, epoch, "documents")
        return self._layout.arrange(order), self._order(self.num_rows, epoch, "rows")

    def row_pieces(self, epoch: int, row: int) -> list[Piece]:
        """The pieces in a row of an epoch, from left to right."""
        arrangement, rows = self._epoch_order(epoch)
        return self._layout.pieces(arrangement, int(rows[row]))


ROOM_IN_BUCKETS = "the largest bucket {}: add a larger bucket"


def bucket_lengths(buckets: Sequence[int]) -> Int64[np.ndarray, "buckets"]:
    """The buckets in ascending order; a ValueError unless they are different and positive."""
    if not buckets or min(buckets) < 1 or len(set(buckets)) < len(buckets):
        raise ValueError(f"buckets={tuple(buckets)} must be different positive lengths")
    return np.sort(np.asarray(buckets, np.int64))


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
        separator_id: Ends,
        buckets: Sequence[int] = (128, 256, 512),
        batch_size: int = 8,
        seed: int = 0,
        too_long: Literal["error", "truncate", "split"] = "error",
        shuffle: bool = True,
    ):
        super().__init__(corpus, separator_id, batch_size, seed, shuffle)
        self._lengths = bucket_lengths(buckets)
        longest = int(self._lengths[-1])
        self._rows = self._cut(corpus, longest, too_long, ROOM_IN_BUCKETS.format(longest))
        starts, stops = self._rows[:, 1], self._rows[:, 2]
        self._row_bucket = self._lengths[np.searchsorted(self._lengths, stops - starts)]
        self._epoch_order = functools.lru_cache(maxsize=2)(self._make_epoch_order)
        batch_lengths, _ = self._epoch_order(0)  # every epoch has as many of each length
        self.buckets = tuple(np.unique(batch_lengths).tolist())
        self.batches_per_epoch = len(batch_lengths)
        self.num_rows = self.batches_per_epoch * batch_size  # those of padding too
        self.padding_waste = float(1 - (stops - starts).sum() / (batch_lengths.sum() * batch_size))

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
            filled = int((self._rows[held, 2] - self._rows[held, 1]).sum())
            lines.append(describe_bucket(bucket, held.size, len(rows), filled / rows.size))
        return "\n".join(lines)

    def bucket(self, k: int) -> int:
        """The sequence length of batch k."""
        epoch, batch = divmod(k, self.batches_per_epoch)
        return int(self._epoch_order(epoch)[0][batch])

    def row_pieces(self, epoch: int, row: int) -> list[Piece]:
        """The piece in a row of an epoch; none in a row of padding."""
        index = self._epoch_order(epoch)[1].ravel()[row]
        return [] if index == EMPTY_ROW else [Piece(*map(int, self._rows[index]))]


def describe_bucket(bucket: int, rows: int, batches: int, mean_length: float) -> str:
    """A line on a bucket: `mean_length` is that of its rows, those of padding too."""
    padding = 1 - mean_length / bucket
    return f"bucket {bucket}: {rows:,} rows in {batches:,} batches, {padding:.1%} padding"


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

    def _content(self) -> Iterator[Any]:
        yield from super()._content()
        yield self.labels

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
