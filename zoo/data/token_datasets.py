"""Datasets over tokens: documents packed into rows, or padded to the length of a bucket."""

import bisect
import functools
import hashlib
import itertools
import json
import logging
import math
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Integer

from zoo.common import checksums
from zoo.common.files import local_path, made_once
from zoo.data.corpus import Corpus, Piece
from zoo.data.datasets import HostBatch, Row, SeededDataset, hashed_integer
from zoo.data.packing import (
    RowIndex,
    Rows,
    Whole,
    bucket_lengths,
    cut_documents,
    fill_batches,
    write_index,
)

logger = logging.getLogger(__name__)

TOKEN_BATCH = {
    "tokens": np.int32,  # the input of the model
    "targets": np.int32,  # the token after each of them
    "weights": np.float32,  # 1 where the target counts; 0 for padding, and for prompts
    "segment_ids": np.int32,  # 1, 2, ... within the row; 0 for padding
    "positions": np.int32,  # from 0 in each segment
}

Ends = int | tuple[int | None, int | None]  # a separator, or a begin and an end; None is no token


def check_ids(dataset: Any, vocab_size: int) -> None:
    """Raise a ValueError where a dataset's tokens are not ids of a model with `vocab_size` of them.

    Those of documents lie within their corpus' vocabulary; arrays are searched. A dataset that has
    neither is not checked.
    """
    corpus, tokens = getattr(dataset, "corpus", None), getattr(dataset, "arrays", {}).get("tokens")
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


class TokenDataset(SeededDataset):
    """Batches of token rows [batch, seq] (see `TOKEN_BATCH`), each made of pieces of documents.

    Each document begins and ends with the separator, or with the first and the second of a pair
    of ids. Without a begin the first token of a document is an input and no target. The documents
    of a corpus that is `framed` have both already. The end is a target alone, unless rows are
    `closed`: then it is an input too.

    A mixture takes rows one by one: `num_rows` are in an epoch, in the order of its batches.
    """

    num_rows: int
    closed: bool = False

    def __init__(
        self, corpus: Corpus, separator_id: Ends, batch_size: int, seed: int, shuffle: bool
    ):
        super().__init__(batch_size, seed, shuffle)
        pair = separator_id if isinstance(separator_id, tuple) else (separator_id, separator_id)
        for id in pair:
            if id is not None and not 0 <= id < corpus.vocab_size:
                raise ValueError(
                    f"separator_id={id} is outside the vocabulary: vocab_size={corpus.vocab_size}"
                )
        self.begin_id, self.end_id = (None, None) if corpus.framed else pair
        self.frame = (self.begin_id is not None) + (self.end_id is not None)
        self.frame += self.closed  # as if one more token followed
        self.corpus = corpus.with_frame(self.frame)
        if not self.corpus.num_positions:
            raise ValueError("no document has a token that follows another: there is no target")

    def _cut(self, longest: int, too_long: str, room: str, left_out: list[str]) -> Iterator[Rows]:
        """The documents as rows (document, start, stop), slice by slice."""
        first = int(self.begin_id is not None)
        return cut_documents(self.corpus, longest, too_long, first, room, left_out)

    @property
    def fingerprint(self) -> str:
        """A hash of the data and of the arguments: equal ones mean equal batches."""
        return checksums.of_values(self._content())

    def _content(self) -> Iterator[Any]:
        """The values that the batches depend on."""
        yield from (self.batch_size, self.seed, self.shuffle, self.buckets, self.num_rows)
        yield from (self.begin_id, self.end_id, self.padding_waste, self.corpus.fingerprint)

    def row_pieces(self, epoch: int, row: int) -> list[Piece]:
        """The pieces in a row of an epoch, from left to right; none in a row of padding."""
        raise NotImplementedError(f"{type(self).__name__} has no documents of its own")

    def _pieces(self, k: int, row: int) -> list[Piece]:
        epoch, batch = divmod(k, self.batches_per_epoch)
        index = batch * self.batch_size + row
        return self.row_pieces(epoch, index) if index < self.num_rows else []

    def describe_buckets(self) -> str:
        """One line per bucket if the dataset has several; else none."""
        return ""

    def row(self, bucket: int) -> Row:
        """The arrays of one row of a bucket."""
        return {name: ((bucket,), dtype) for name, dtype in TOKEN_BATCH.items()}

    def _build(self, k: int, rows: range) -> HostBatch:
        shape = (len(rows), self.bucket(k))
        batch = {name: np.zeros(shape, dtype) for name, dtype in TOKEN_BATCH.items()}
        for i, row in enumerate(rows):
            self._fill({name: array[i] for name, array in batch.items()}, k, row)
        return batch

    def _fill(self, arrays: HostBatch, k: int, row: int) -> None:
        """Write a row of batch k into arrays that have zeros everywhere."""
        self.fill_row(arrays, self._pieces(k, row))

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


class PackedDataset(TokenDataset):
    """Rows of `seq_len` tokens, packed with documents, which are the row's segments.

    All documents, each with its begin and its end, in the order of the corpus, are a circle of
    positions. An epoch cuts it into rows from a place of its own on, and permutes the rows. Each
    token of a document, and the end after it, is a target once per epoch. The parts of a document
    that a cut splits are segments of different rows. Only one row of an epoch is padded, and the
    last batch with empty rows.

    Documents of which only some tokens count, such as completions, are not cut from the tokens
    that they depend on: each is in one row, with padding after it. One that is too long for a
    row is an error, is truncated, or is split into rows.
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
        self._whole: Whole | None = None
        total = self.corpus.num_positions
        self.num_rows = math.ceil(total / seq_len)
        if corpus.weighted:
            left_out = list[str]()
            cut = self._cut(seq_len, too_long, f"a row seq_len={seq_len}: raise it", left_out)
            self._whole = Whole(np.concatenate([*cut]), seq_len)
            total, self.num_rows = self._whole.num_positions, self._whole.num_rows
            _warn(left_out)
        self.buckets = (seq_len,)
        self.batches_per_epoch = math.ceil(self.num_rows / batch_size)
        self.padding_waste = 1 - total / (self.batches_per_epoch * batch_size * seq_len)
        # Two, because the prefetching threads cross from one epoch into the next.
        self._arranged = functools.lru_cache(maxsize=2)(self._arrange)

    def _arrange(self, epoch: int) -> np.ndarray:
        """The arrangement of whole documents in an epoch."""
        assert self._whole is not None
        count = len(self._whole)
        return self._whole.arrange(self._place(count, epoch, "documents", np.arange(count)))

    def row_pieces(self, epoch: int, row: int) -> list[Piece]:
        """The pieces in a row of an epoch, from left to right."""
        place = int(self._place(self.num_rows, epoch, "rows", row))
        if self._whole is not None:
            return self._whole.pieces(self._arranged(epoch), place)
        total, begin = self.corpus.num_positions, place * self.seq_len
        length = min(self.seq_len, total - begin)
        if self.shuffle:
            begin = (begin + hashed_integer(total, (self.seed, epoch, "shift"))) % total
        last = min(begin + length, total)
        pieces = self.corpus.pieces(begin, last)
        return pieces + (self.corpus.pieces(0, rest) if (rest := begin + length - last) else [])


class BucketedDataset(TokenDataset):
    """One document per row, padded to the smallest bucket that holds it and its separator.

    In each epoch the rows of a bucket are permuted and grouped into batches, and the batches of
    all buckets are permuted. A bucket's remaining rows fill up the last batches of larger buckets,
    if all of them find room there; else they form a batch with empty rows.

    A document too long for the largest bucket is an error, is truncated, or is split into rows.
    The rows are found once, and kept on disk: in the folder `cache`, or else in a temporary one
    that goes with the dataset.
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
        *,
        cache: Path | None = None,
    ):
        super().__init__(corpus, separator_id, batch_size, seed, shuffle)
        lengths = bucket_lengths(buckets)
        room = f"the largest bucket {lengths[-1]}: add a larger bucket"
        cut = functools.partial(self._cut, int(lengths[-1]), too_long, room)
        make = lambda folder: write_index(folder, lengths, cut)  # noqa: E731
        if cache is None:
            folder = Path(tempfile.mkdtemp(prefix="zoo-rows-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            make(folder)
        else:
            version = [2, type(self).__name__, self.corpus.fingerprint, self.frame, self.begin_id]
            key = json.dumps([*version, lengths.tolist(), too_long])
            name = hashlib.sha256(key.encode()).hexdigest()
            rows = local_path(cache, "data.cache") / "rows"
            folder = made_once(rows / name, make, "data.cache")
        self._rows = RowIndex(folder)
        _warn(self._rows.left_out)
        self._num_batches, self._last = fill_batches(self._rows.counts, batch_size)
        self._ends = list(itertools.accumulate(self._num_batches))
        self.batches_per_epoch = self._ends[-1]
        self.num_rows = self.batches_per_epoch * batch_size  # padding included
        used = [pair for pair in zip(self._rows.lengths, self._num_batches, strict=True) if pair[1]]
        self.buckets = tuple(length for length, _ in used)
        places = batch_size * sum(length * count for length, count in used)
        self.padding_waste = 1 - sum(self._rows.tokens) / places

    def bucket(self, k: int) -> int:
        """The sequence length of batch k."""
        return self._rows.lengths[self._batch(*divmod(k, self.batches_per_epoch))[0]]

    def row_pieces(self, epoch: int, row: int) -> list[Piece]:
        """The piece in a row of an epoch; none in a row of padding."""
        batch, place = divmod(row, self.batch_size)
        bucket, number = self._batch(epoch, batch)
        if number == self._num_batches[bucket] - 1 and bucket in self._last:
            held = self._last[bucket][place]
        else:
            held = bucket, number * self.batch_size + place
        return [] if held is None else [self._row(epoch, *held)]

    def _batch(self, epoch: int, batch: int) -> tuple[int, int]:
        """(the number of a batch's bucket, its number among the bucket's batches)."""
        place = int(self._place(self.batches_per_epoch, epoch, "batches", batch))
        bucket = bisect.bisect_right(self._ends, place)
        return bucket, place - self._ends[bucket] + self._num_batches[bucket]

    def _row(self, epoch: int, bucket: int, i: int) -> Piece:
        length, count = self._rows.lengths[bucket], self._rows.counts[bucket]
        return self._rows.row(bucket, int(self._place(count, epoch, f"rows of {length}", i)))

    def describe_buckets(self) -> str:
        """One line per bucket: its rows and batches in an epoch, and its padding."""
        rows, tokens = list(self._rows.counts), list(self._rows.tokens)
        for bucket, batch in self._last.items():
            for source, i in filter(None, batch):  # rows of smaller buckets are here instead
                piece = self._row(0, source, i)
                for where, sign in ((bucket, 1), (source, -1)):
                    rows[where] += sign
                    tokens[where] += sign * (piece.stop - piece.start)
        lines = []
        for i, (length, count) in enumerate(
            zip(self._rows.lengths, self._num_batches, strict=True)
        ):
            if count:
                padding = 1 - tokens[i] / (count * self.batch_size * length)
                lines.append(
                    f"bucket {length}: {rows[i]:,} rows in {count:,} batches, {padding:.1%} padding"
                )
        return "\n".join(lines)


def _warn(left_out: list[str]) -> None:
    for message in left_out:
        logger.warning("%s; they are left out", message)
