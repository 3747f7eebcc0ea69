"""Preferences: pairs of answers to a prompt, of which one was chosen and the other rejected.

A pair is two neighbouring documents of a corpus, the chosen example first.
"""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Float32, Int, Int64, Shaped

from zoo.data.corpus import Corpus, Piece
from zoo.data.datasets import HostBatch, Row
from zoo.data.packing import Rows
from zoo.data.token_datasets import BucketedDataset


class PairDataset(BucketedDataset):
    """One pair per row, in two segments: 1 is the chosen example, 2 the rejected one.

    `corpus` has the two examples of pair i as its documents 2i and 2i + 1. A batch is a
    `BucketedDataset`'s, of whole pairs, with `reference`, float32[batch, 2], once `with_reference`,
    and `labels`, int32[batch], once `with_labels`.
    A pair too long for the largest bucket is an error, or its longer example is truncated, then
    both. One whose examples do not differ then, or have no token that counts, is left out, with a
    warning.

    Raises:
        ValueError: an odd number of documents; a pair that is too long, or `too_long` "split".
    """

    unit = "examples"
    columns: Mapping[str, Shaped[np.ndarray, "pairs *_"]] = MappingProxyType({})
    """Further values of pairs, by their names in a batch."""
    _owner: "PairDataset | None" = None

    def _cut(self, longest: int, too_long: str, room: str, left_out: list[str]) -> Iterator[Rows]:
        """The pairs as rows (pair, 0, length), slice by slice."""
        corpus = self.corpus
        assert isinstance(corpus, Corpus)
        if len(corpus) % 2:
            raise ValueError(f"{len(corpus)} documents are no pairs: their number must be even")
        if too_long not in ("error", "truncate"):
            raise ValueError(
                f"too_long={too_long!r}: a pair is in one row: choose 'error' or 'truncate'"
            )
        number_cut, example, useless = 0, (0, 0), list[int]()
        for documents in corpus.slices():
            lengths = corpus.positions(documents.start, documents.stop).reshape(-1, 2)
            cut, first = np.flatnonzero(lengths.sum(1) > longest).tolist(), documents.start // 2
            if cut and not number_cut:
                example = first + cut[0], int(lengths[cut[0]].sum())
            number_cut += len(cut)
            lengths = _fitting(lengths, longest)
            wrong = [i for i in cut if not self._is_of_use(corpus, first + i, lengths[i])]
            useless += [first + i for i in wrong]
            pairs = np.delete(np.arange(len(lengths)), wrong)
            yield np.stack([first + pairs, 0 * pairs, lengths[pairs].sum(1)], 1)
        if too_long == "error" and number_cut:
            raise ValueError(
                f"the pair {corpus.name(2 * example[0])} has {example[1]} tokens in both of its "
                f"examples, and {room}, or set too_long to 'truncate' (now 'error'); {number_cut} "
                f"of {self.num_pairs} pairs are too long"
            )
        if useless:
            left_out.append(
                f"{len(useless)} of {self.num_pairs} pairs, {corpus.name(2 * useless[0])} the "
                f"first, have no answers that differ once they are truncated: {room}"
            )
        if len(useless) == self.num_pairs:
            raise ValueError(left_out[0])

    def _is_of_use(self, corpus: Corpus, pair: int, lengths: Int64[np.ndarray, "2"]) -> bool:
        """Whether the examples of a truncated pair have tokens that count, and differ."""
        first, kept = int(self.begin_id is not None), []
        for document, length in zip((2 * pair, 2 * pair + 1), lengths, strict=True):
            counted = corpus.counted(document)
            stop = int(length) + 1 - first
            if counted is not None and not counted[1 - first : stop].any():
                return False
            kept.append(corpus.ids(document, 0, stop))
        chosen, rejected = kept
        return not np.array_equal(chosen, rejected)

    def row_pieces(self, epoch: int, row: int) -> list[Piece]:
        """The two pieces in a row of an epoch; none in a row of padding."""
        pieces = super().row_pieces(epoch, row)
        if not pieces:
            return []
        assert isinstance(self.corpus, Corpus)
        pair, longest = pieces[0].document, self._rows.lengths[-1]
        lengths = _fitting(self.corpus.positions(2 * pair, 2 * pair + 2)[None], longest)[0]
        return [Piece(2 * pair + side, 0, int(length)) for side, length in enumerate(lengths)]

    @property
    def num_pairs(self) -> int:
        """Pairs of the corpus, including the ones that are left out."""
        return len(self.corpus) // 2

    def pairs(self, k: int) -> Int64[np.ndarray, "batch"]:
        """The pair in each row of batch k; -1 in a row of padding."""
        pieces = [self._pieces(k, row) for row in range(self.batch_size)]
        return np.asarray([row[0].document // 2 if row else -1 for row in pieces])

    def with_reference(self, reference: Float32[np.ndarray, "pairs 2"]) -> "PairDataset":
        """The same dataset, whose batches have their rows of `reference` too: the log-probabilities
        of the chosen and the rejected examples under a reference model."""
        return self._with("reference", reference.astype(np.float32), (2,))

    def with_labels(self, labels: Int[np.ndarray, "pairs"]) -> "PairDataset":
        """The same dataset, whose batches have the `labels` of their rows too."""
        return self._with("labels", labels.astype(np.int32), ())

    def _with(self, name: str, values: np.ndarray, shape: tuple[int, ...]) -> "PairDataset":
        if values.shape != (self.num_pairs, *shape):
            raise ValueError(f"{name}{values.shape}: there are {self.num_pairs} pairs")
        dataset = copy.copy(self)
        dataset.columns = {**self.columns, name: values}
        dataset._owner = self  # the index of rows on disk goes with it
        return dataset

    def _content(self) -> Iterator[Any]:
        yield from super()._content()
        yield from self.columns.values() or [None]

    def row(self, bucket: int) -> Row:
        """The arrays of one row of a bucket."""
        more: Row = {name: (x.shape[1:], x.dtype.type) for name, x in self.columns.items()}
        return super().row(bucket) | more

    def _build(self, k: int, rows: range) -> HostBatch:
        batch = super()._build(k, rows)
        if self.columns:
            pairs = self.pairs(k)[rows.start : rows.stop : rows.step]
            for name, values in self.columns.items():
                batch[name] = values[pairs]
                batch[name][pairs < 0] = 0
        return batch


def labelled_examples(corpus: Corpus, *options: Any, cache: Path | None = None) -> PairDataset:
    """One example per row, as segment 1, its prompt with another's answer as segment 2, and in
    `labels` whether its answer is desirable: the rows of `unpaired` preferences."""
    return PairDataset(corpus, *options, cache=cache).with_labels(corpus.labels()[::2])


def _fitting(lengths: Int64[np.ndarray, "pairs 2"], longest: int) -> Int64[np.ndarray, "pairs 2"]:
    """The lengths of pairs: of one that is too long, the longer example's is cut, then both."""
    room_left = np.maximum(longest - lengths[:, ::-1], longest // 2)
    cut = lengths.sum(1, keepdims=True) > longest
    return np.where(cut, np.minimum(lengths, room_left), lengths)
