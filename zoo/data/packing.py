"""Packing: which pieces of documents share a row, where documents are cut, and rows by bucket."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Int64

from zoo.data.corpus import Corpus, Piece
from zoo.data.prepared.format import Shard, write_sums

Rows: TypeAlias = Int64[np.ndarray, "rows 3"]  # document, start, stop
_ROW = 3 * 8  # bytes


class Whole:
    """Documents that are never cut: each in the first row that has room, the longest first.

    Only the lengths decide which fit together, so that every epoch has the same number of rows;
    among documents of equal length `arrange` decides, by an epoch's order. `pieces` are rows
    (document, start, stop).
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
    corpus: Corpus, longest: int, too_long: str, first: int, room: str, left_out: list[str]
) -> Iterator[Rows]:
    """The documents as rows (document, start, stop), none longer than `longest`, slice by slice.

    A document is dropped if truncation leaves nothing of it that counts; in the end `left_out` says
    so. `first` is the position of a document's first token in its positions, and `room` says in an
    error what is too small, and what to do about it.

    Raises:
        ValueError: a document is too long and `too_long` is "error", or all are dropped.
    """
    if too_long not in ("error", "truncate", "split"):
        raise ValueError(f"too_long={too_long!r}: choose 'error', 'truncate' or 'split'")
    number_cut, example, dropped = 0, (0, 0), list[int]()
    for documents in corpus.slices():
        lengths = corpus.positions(documents.start, documents.stop)
        cut = np.flatnonzero(lengths > longest).tolist()
        if cut and not number_cut:
            example = documents.start + cut[0], int(lengths[cut[0]])
        number_cut += len(cut)
        if too_long == "truncate":
            lengths = np.minimum(lengths, longest)
            for i in cut:
                counted = corpus.counted(documents.start + i)
                if counted is not None and not counted[1 - first : longest + 1 - first].any():
                    dropped.append(documents.start + i)
                    lengths[i] = 0
        yield cut_lengths(lengths, longest) + np.array([documents.start, 0, 0])
    if too_long == "error" and number_cut:
        raise ValueError(
            f"document {corpus.name(example[0])} has {example[1]} tokens with its separator, and "
            f"{room}, or set too_long to 'truncate' or 'split' (now 'error'); {number_cut} of "
            f"{len(corpus)} documents are too long"
        )
    if dropped:
        left_out.append(
            f"{len(dropped)} of {len(corpus)} documents, {corpus.name(dropped[0])} the first, have "
            f"no token that counts before they are truncated: {room}"
        )
    if len(dropped) == len(corpus):
        raise ValueError(left_out[0])


def cut_lengths(
    lengths: Int64[np.ndarray, "documents"], longest: int
) -> Int64[np.ndarray, "pieces 3"]:
    """Things of some lengths as rows (number, start, stop), none longer than `longest`."""
    counts = -(-lengths // longest)
    documents = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = number * longest
    return np.stack([documents, starts, np.minimum(starts + longest, lengths[documents])], 1)


def bucket_lengths(buckets: Sequence[int]) -> Int64[np.ndarray, "buckets"]:
    """The buckets in ascending order; a ValueError unless they are different and positive."""
    if not buckets or min(buckets) < 1 or len(set(buckets)) < len(buckets):
        raise ValueError(f"buckets={tuple(buckets)} must be different positive lengths")
    return np.sort(np.asarray(buckets, np.int64))


Held = tuple[int, int] | None  # (bucket, row of it), or padding


def fill_batches(counts: Sequence[int], batch_size: int) -> tuple[list[int], dict[int, list[Held]]]:
    """(batches of each bucket, the last batch of each bucket that lacks rows for it).

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


class RowIndex:
    """Rows of pieces by bucket on disk, the shortest bucket first.

    `counts` and `tokens` are, for each of the `lengths`, its rows and all of their tokens.
    `left_out` says which documents have none.
    """

    def __init__(self, folder: Path):
        found = json.loads((folder / "index.json").read_text())
        self.lengths: list[int] = found["lengths"]
        self.counts: list[int] = found["counts"]
        self.tokens: list[int] = found["tokens"]
        self.left_out: list[str] = found["left_out"]
        self._first = np.cumsum([0, *self.counts]).tolist()
        remedy = f"remove {folder}, which is made again"
        sizes = {".rows": _ROW * self._first[-1]}
        self._files = Shard(folder / "index", sizes, found["digest"], remedy)

    def row(self, bucket: int, i: int) -> Piece:
        """Row i of the bucket of that number."""
        begin = (self._first[bucket] + i) * _ROW
        return Piece(*self._files.read(".rows", begin, begin + _ROW).view("<i8").tolist())


def write_index(
    folder: Path, lengths: Int64[np.ndarray, "buckets"], cut: Callable[[list[str]], Iterator[Rows]]
) -> None:
    """Write the index of the rows that `cut(left_out)` makes, slice by slice."""
    counts, tokens, left_out = np.zeros_like(lengths), np.zeros_like(lengths), list[str]()
    found = folder / "found.rows"
    with open(found, "wb") as file:
        for rows in cut(left_out):
            sizes = rows[:, 2] - rows[:, 1]
            bucket = np.searchsorted(lengths, sizes)
            counts += np.bincount(bucket, minlength=len(lengths))
            np.add.at(tokens, bucket, sizes)
            file.write(rows.astype("<i8").tobytes())
    total = int(counts.sum())
    rows = np.memmap(folder / "index.rows", "<i8", "w+", shape=(total, 3))
    free = np.cumsum(counts) - counts
    with open(found, "rb") as file:
        while content := file.read(2**15 * _ROW):
            pieces = np.frombuffer(content, "<i8").reshape(-1, 3)
            bucket = np.searchsorted(lengths, pieces[:, 2] - pieces[:, 1])
            for number in np.unique(bucket).tolist():
                here = pieces[bucket == number]
                rows[free[number] : free[number] + len(here)] = here
                free[number] += len(here)
    rows.flush()
    found.unlink()
    sizes = {"lengths": lengths.tolist(), "counts": counts.tolist(), "tokens": tokens.tolist()}
    digest = write_sums(folder / "index", [".rows"])
    index = {**sizes, "left_out": left_out, "digest": digest}
    (folder / "index.json").write_text(json.dumps(index))
