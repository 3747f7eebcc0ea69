"""Datasets for classifiers of text: a row per document, with its label or those of its tokens."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int32

from zoo.data.corpus import Corpus, Piece
from zoo.data.datasets import HostBatch, Row
from zoo.data.packing import Held
from zoo.data.token_datasets import BucketedDataset

OF_ROW: Row = {"labels": ((), np.int32), "weights": ((), np.float32)}


class LabelledDataset(BucketedDataset):
    """The rows of a `BucketedDataset` for a classifier, each with its document's label.

    A batch has `inputs`, int32[batch, seq], a separator and then the tokens, and the end too where
    rows are `closed`, as encoders are trained; `mask`, bool[batch, seq], False at padding;
    `labels`, int32[batch]; and `weights`, float32[batch]: 1, or 0 for the rows that fill up a
    bucket's last batch. Those are the first rows of the epoch's order, each with its label: the
    bucket's, then rows of smaller buckets, and the batch's own only where there are no others. A
    loss does not count them, and statistics of a batch, such as a batch norm's, are of different
    rows. All parts of a document that was split have its label.
    """

    unit = "examples"

    def __init__(
        self,
        corpus: Corpus,
        labels: Int32[np.ndarray, "documents"],
        *arguments: Any,
        closed: bool = False,
        **named: Any,
    ):
        if len(labels) != len(corpus):
            raise ValueError(f"{len(labels)} labels for {len(corpus)} documents: give one for each")
        self.closed = closed
        super().__init__(corpus, *arguments, **named)
        self.labels = labels
        self._fillers = {bucket: self._others(bucket, held) for bucket, held in self._last.items()}

    def _others(self, bucket: int, batch: list[Held]) -> list[tuple[int, int]]:
        """Rows that may fill up a batch, in the order of preference."""
        counts = self._rows.counts
        fitting = ((b, i) for b in range(bucket, -1, -1) for i in range(counts[b]))
        first = list(itertools.islice(fitting, 2 * self.batch_size))
        return sorted(first, key=lambda row: row in batch)

    def _content(self) -> Iterator[Any]:
        yield from super()._content()
        yield from (self.labels, self.closed)

    def row(self, bucket: int) -> Row:
        """The arrays of one row of a bucket."""
        return {"inputs": ((bucket,), np.int32), "mask": ((bucket,), np.bool_), **OF_ROW}

    def row_pieces(self, epoch: int, row: int) -> list[Piece]:
        """The piece in a row of an epoch; in a row that fills up a batch too."""
        if pieces := super().row_pieces(epoch, row):
            return pieces
        batch, place = divmod(row, self.batch_size)
        bucket, _ = self._batch(epoch, batch)
        others, number = self._fillers[bucket], self._last[bucket][:place].count(None)
        return [self._row(epoch, *others[number % len(others)])]

    def _build(self, k: int, rows: range) -> HostBatch:
        batch = super()._build(k, rows)
        epoch, number = divmod(k, self.batches_per_epoch)
        places = [number * self.batch_size + row for row in rows]
        labels = [self.labels[self.row_pieces(epoch, place)[0].document] for place in places]
        weights = [bool(super(LabelledDataset, self).row_pieces(epoch, place)) for place in places]
        return {
            "inputs": batch["tokens"],
            "mask": batch["segment_ids"] > 0,
            "labels": np.asarray(labels, np.int32),
            "weights": np.asarray(weights, np.float32),
        }


class TaggedDataset(BucketedDataset):
    """The rows of a `BucketedDataset`, begin and end included, with labels for their tokens.

    A batch has `inputs` and `labels`, int32[batch, seq]; `mask`, bool[batch, seq], False at
    padding; and `weights`, float32[batch, seq]: 1 where a token has a label, as a word's first
    token does.
    """

    unit, closed = "tokens", True

    def row(self, bucket: int) -> Row:
        """The arrays of one row of a bucket."""
        dtypes = {"inputs": np.int32, "mask": np.bool_, "labels": np.int32, "weights": np.float32}
        return {name: ((bucket,), dtype) for name, dtype in dtypes.items()}

    def _build(self, k: int, rows: range) -> HostBatch:
        shape, first = (len(rows), self.bucket(k)), int(self.begin_id is not None)
        layout = self.row(shape[1])
        batch: HostBatch = {name: np.zeros(shape, dtype) for name, (_, dtype) in layout.items()}
        for i, row in enumerate(rows):
            for document, start, stop in self._pieces(k, row):
                batch["inputs"][i, : stop - start] = self._framed(document, start, stop)
                batch["mask"][i, : stop - start] = True
                codes = self.corpus.codes(document)[max(start - first, 0) : stop - first]
                tagged = slice(before := int(first and start == 0), before + len(codes))
                batch["labels"][i, tagged] = np.maximum(codes, 1) - 1
                batch["weights"][i, tagged] = codes > 0
        return batch
