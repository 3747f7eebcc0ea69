"""The rows of each bucket of a prepared part: found once, and kept on disk."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int64

from zoo.common.files import made_once
from zoo.data.packing import ROOM_IN_BUCKETS, Piece, cut_lengths, too_long_error
from zoo.data.prepared.format import Shard, write_sums
from zoo.data.prepared.parts import Part

VERSION = 1
_SLICE = 2**15  # documents at a time
_ROW = 3 * 8  # bytes: document, start, stop


class RowIndex:
    """`BucketRows` on disk."""

    def __init__(self, folder: Path):
        found = json.loads((folder / "index.json").read_text())
        self.lengths: list[int] = found["lengths"]
        self.counts: list[int] = found["counts"]
        self.tokens: list[int] = found["tokens"]
        self._first = np.cumsum([0, *self.counts]).tolist()
        remedy = f"remove {folder}, which is made again"
        sizes = {".rows": _ROW * self._first[-1]}
        self._files = Shard(folder / "index", sizes, found["digest"], remedy)

    def row(self, bucket: int, i: int) -> Piece:
        """Row i of the bucket of that number."""
        begin = (self._first[bucket] + i) * _ROW
        return Piece(*self._files.read(".rows", begin, begin + _ROW).view("<i8").tolist())


def row_index(
    part: Part, lengths: Int64[np.ndarray, "buckets"], too_long: str, cache: Path
) -> RowIndex:
    """The index of a part's rows, from the folder `cache` where it is there already.

    Raises:
        ValueError: a document is longer than the largest bucket and `too_long` is "error".
    """
    if too_long not in ("error", "truncate", "split"):
        raise ValueError(f"too_long={too_long!r}: choose 'error', 'truncate' or 'split'")
    key = json.dumps([VERSION, part.fingerprint, lengths.tolist(), too_long])
    entry = cache / "rows" / hashlib.sha256(key.encode()).hexdigest()
    return RowIndex(
        made_once(entry, lambda folder: _write(folder, part, lengths, too_long), "data.cache")
    )


def _write(folder: Path, part: Part, lengths: Int64[np.ndarray, "_"], too_long: str) -> None:
    """Twice through the part's documents: to count, and to put each row at its place."""
    counts, tokens = _count(part, lengths, too_long)
    rows = np.memmap(folder / "index.rows", "<i8", "w+", shape=(int(counts.sum()), 3))
    free = np.cumsum(counts) - counts
    for pieces in _pieces(part, int(lengths[-1]), too_long):
        bucket = np.searchsorted(lengths, pieces[:, 2] - pieces[:, 1])
        for number in np.unique(bucket).tolist():
            here = pieces[bucket == number]
            rows[free[number] : free[number] + len(here)] = here
            free[number] += len(here)
    rows.flush()
    digest = write_sums(folder / "index", [".rows"])
    found = {"lengths": lengths.tolist(), "counts": counts.tolist(), "tokens": tokens.tolist()}
    (folder / "index.json").write_text(json.dumps({**found, "digest": digest}))


def _count(
    part: Part, lengths: Int64[np.ndarray, "buckets"], too_long: str
) -> tuple[Int64[np.ndarray, "buckets"], Int64[np.ndarray, "buckets"]]:
    """The rows and the tokens of each bucket."""
    longest, size = int(lengths[-1]), len(lengths)
    counts, tokens = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for rows in _pieces(part, longest, too_long):
        stops = rows[:, 2] - rows[:, 1]
        bucket = np.searchsorted(lengths, stops)
        counts += np.bincount(bucket, minlength=size)
        np.add.at(tokens, bucket, stops)
    return counts, tokens


def _pieces(part: Part, longest: int, too_long: str) -> Iterator[Int64[np.ndarray, "rows 3"]]:
    """The documents of a slice after the other as rows (document, start, stop)."""
    number_cut, first = 0, (0, 0)
    for documents in part.slices(_SLICE):
        positions = part.positions(documents.start, documents.stop)
        cut = np.flatnonzero(positions > longest)
        if not number_cut and len(cut):
            first = documents.start + int(cut[0]), int(positions[cut[0]])
        number_cut += len(cut)
        if too_long == "truncate":
            positions = np.minimum(positions, longest)
        yield cut_lengths(positions, longest) + np.array([documents.start, 0, 0])
    if too_long == "error" and number_cut:
        raise too_long_error(part, *first, number_cut, ROOM_IN_BUCKETS.format(longest))
