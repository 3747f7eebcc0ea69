"""Plans over a prepared part, whose memory does not grow with it: orders are computed, not stored.

Batches are equal on any number of processes, as every plan's are.
"""

import bisect
import itertools
import math
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

from zoo.base.files import local_path
from zoo.data.packing import Piece
from zoo.data.permutation import Permutation, hashed_integer
from zoo.data.prepared.parts import Part
from zoo.data.prepared.rows import row_index
from zoo.data.token_plans import Ends, TokenPlan, describe_bucket


class PreparedPlan(TokenPlan):
    """A `TokenPlan` over a part of a prepared corpus."""

    def __init__(self, part: Part, ends: Ends, batch_size: int, seed: int, shuffle: bool):
        super().__init__(part, ends, batch_size, seed, shuffle)
        if self.frame != part.frame:
            raise ValueError(
                f"begin and end {ends} are {self.frame} tokens, and the corpus was prepared for "
                f"{part.frame} per document: take those of its tokenizer"
            )
        if not part.num_positions:
            raise ValueError("no document has a token that follows another: there is no target")
        self.part = part
        self._permutation = lru_cache(maxsize=64)(self._make_permutation)

    def _place(self, size: int, epoch: int, what: str, i: int) -> int:
        """Place i in the order of `size` things named `what` in an epoch."""
        return self._permutation(size, epoch, what)[i] if self.shuffle else i

    def _make_permutation(self, size: int, epoch: int, what: str) -> Permutation:
        return Permutation(size, (self.seed, epoch, what))


class PreparedPackedPlan(PreparedPlan):
    """Rows of `seq_len` tokens, packed with documents end to end, as those of a `PackedPlan`.

    All documents of the part, in the order in which they are stored, are a circle of positions. An
    epoch cuts it into rows from a place of its own on, and permutes the rows. Each token of a
    document, and the end after it, is a target once per epoch. Only one row of an epoch is padded.
    """

    def __init__(
        self,
        part: Part,
        ends: Ends,
        seq_len: int,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
    ):
        super().__init__(part, ends, batch_size, seed, shuffle)
        if seq_len < 1:
            raise ValueError(f"seq_len={seq_len} must be at least 1")
        self.seq_len = seq_len
        self.buckets = (seq_len,)
        self.num_rows = math.ceil(part.num_positions / seq_len)
        self.batches_per_epoch = math.ceil(self.num_rows / batch_size)
        places = self.batches_per_epoch * batch_size * seq_len
        self.padding_waste = 1 - part.num_positions / places

    def row_pieces(self, epoch: int, row: int) -> list[Piece]:
        """The pieces in a row of an epoch, from left to right."""
        total = self.part.num_positions
        begin = self._place(self.num_rows, epoch, "rows", row) * self.seq_len
        length = min(self.seq_len, total - begin)
        if self.shuffle:
            begin = (begin + hashed_integer(total, (self.seed, epoch, "shift"))) % total
        last = min(begin + length, total)
        pieces = self.part.pieces(begin, last)
        return pieces + (self.part.pieces(0, rest) if (rest := begin + length - last) else [])


class PreparedBucketPlan(PreparedPlan):
    """One document per row, padded to the smallest bucket that holds it, as a `BucketPlan`'s.

    In each epoch the rows of a bucket are permuted and grouped into batches, and the batches of
    all buckets are permuted. A bucket's remaining rows fill up the last batches of larger buckets,
    if those have room for all of them; else they form a batch with empty rows.

    The rows of each bucket are found once, and kept on disk: in the folder `cache`, or else in a
    temporary one that goes with the plan.
    """

    def __init__(
        self,
        part: Part,
        ends: Ends,
        buckets: Sequence[int],
        batch_size: int,
        seed: int,
        too_long: Literal["error", "truncate", "split"] = "error",
        shuffle: bool = True,
        *,
        cache: Path | None,
    ):
        super().__init__(part, ends, batch_size, seed, shuffle)
        if cache is None:
            cache = Path(tempfile.mkdtemp(prefix="zoo-rows-"))
            weakref.finalize(self, shutil.rmtree, cache, ignore_errors=True)
        folder = local_path(cache, "data.cache")
        self._index = row_index(part, buckets, too_long, folder)
        lengths = self._index.lengths
        self._num_batches, self._last = fill_batches(self._index.counts, batch_size)
        self._ends = list(itertools.accumulate(self._num_batches))
        self.batches_per_epoch = self._ends[-1]
        self.num_rows = self.batches_per_epoch * batch_size  # those of padding too
        used = [pair for pair in zip(lengths, self._num_batches, strict=True) if pair[1]]
        self.buckets = tuple(length for length, _ in used)
        places = batch_size * sum(length * count for length, count in used)
        self.padding_waste = 1 - sum(self._index.tokens) / places

    def bucket(self, k: int) -> int:
        """The sequence length of batch k."""
        return self._index.lengths[self._batch(*divmod(k, self.batches_per_epoch))[0]]

    def row_pieces(self, epoch: int, row: int) -> list[Piece]:
        """The piece in a row of an epoch; none in a row of padding."""
        batch, place = divmod(row, self.batch_size)
        bucket, number = self._batch(epoch, batch)
        if number == self._num_batches[bucket] - 1 and bucket in self._last:
            held = self._last[bucket][place]
        else:
            held = bucket, number * self.batch_size + place
        return [] if held is None else [self._index.row(held[0], self._row(epoch, *held))]

    def _batch(self, epoch: int, batch: int) -> tuple[int, int]:
        """(the number of a batch's bucket, its number among the bucket's batches)."""
        place = self._place(self.batches_per_epoch, epoch, "batches", batch)
        bucket = bisect.bisect_right(self._ends, place)
        return bucket, place - self._ends[bucket] + self._num_batches[bucket]

    def _row(self, epoch: int, bucket: int, i: int) -> int:
        length, count = self._index.lengths[bucket], self._index.counts[bucket]
        return self._place(count, epoch, f"rows of {length}", i)

    def describe_buckets(self) -> str:
        """One line per bucket: its rows and batches in an epoch, and its padding."""
        rows, tokens = list(self._index.counts), list(self._index.tokens)
        for bucket, batch in self._last.items():
            for source, i in filter(None, batch):  # those of smaller buckets are here instead
                piece = self._index.row(source, self._row(0, source, i))
                for where, sign in ((bucket, 1), (source, -1)):
                    rows[where] += sign
                    tokens[where] += sign * (piece.stop - piece.start)
        return "\n".join(
            describe_bucket(length, rows[i], count, tokens[i] / (count * self.batch_size))
            for i, (length, count) in enumerate(
                zip(self._index.lengths, self._num_batches, strict=True)
            )
            if count
        )


Held = tuple[int, int] | None  # (bucket, row of it), or padding


def fill_batches(counts: Sequence[int], batch_size: int) -> tuple[list[int], dict[int, list[Held]]]:
    """(batches of each bucket, the last batch of each bucket that has not rows enough for it).

    `counts` are the rows of the buckets, in ascending order of their lengths.
    """
    num_batches = [0] * len(counts)
    last: dict[int, list[Held]] = {}
    free: list[tuple[int, int]] = []  # (bucket, place in its last batch)
    for bucket in reversed(range(len(counts))):
        num_batches[bucket], left = divmod(counts[bucket], batch_size)
        remaining = [(bucket, counts[bucket] - left + i) for i in range(left)]
        if left <= len(free):
            for (larger, place), row in zip(free, remaining, strict=False):
                last[larger][place] = row
            free = free[left:]
        else:
            num_batches[bucket] += 1
            last[bucket] = [*remaining, *[None] * (batch_size - left)]
            free = [*((bucket, place) for place in range(left, batch_size)), *free]
    return num_batches, last
