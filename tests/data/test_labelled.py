"""Labelled rows: their labels, and the rows that fill up a batch."""

import numpy as np
import pytest

from zoo.data import labelled
from zoo.data.corpus import Corpus


@pytest.mark.parametrize(
    ("lengths", "counted", "added"),
    [
        ((2, 3, 2, 3, 2), [[0, 1, 2, 3], [4]], [0, 1, 2]),
        # A bucket without rows enough takes those of the smaller one.
        ((2, 2, 2, 2, 6), [[0, 1, 2, 3], [4]], [0, 1, 2]),
        # A row of the smaller bucket lies in the larger one's batch already.
        ((6, 6, 6, 6, 6, 2), [[0, 1, 2, 3], [4, 5]], [0, 1]),
        # Rows of the batch itself come again where there are no others.
        ((2, 2, 2), [[0, 1, 2]], [0]),
        ((6, 2), [[0, 1]], [0, 1]),
    ],
)
def test_labelled_batches_are_filled_up_with_other_rows(lengths, counted, added):
    corpus = Corpus.from_arrays([np.full(n, i) for i, n in enumerate(lengths)], 50, 47)
    labels = np.arange(len(lengths), dtype=np.int32)
    dataset = labelled.LabelledDataset(corpus, labels, 49, (4, 8), 4, shuffle=False)
    assert dataset.batches_per_epoch == len(counted)
    for k, rows in enumerate(counted):
        batch = dataset.batch(k)
        fill = added if k == len(counted) - 1 else []
        assert batch["labels"].tolist() == [*rows, *fill]
        assert batch["weights"].tolist() == [1.0] * len(rows) + [0.0] * len(fill)
        for inputs, mask, document in zip(
            batch["inputs"], batch["mask"], [*rows, *fill], strict=True
        ):
            count = lengths[document]
            assert inputs[: count + 1].tolist() == [49] + [document] * count
            assert mask.sum() == count + 1


def test_rows_that_fill_up_a_batch_change_with_the_epoch():
    corpus = Corpus.from_arrays([np.full(3, i) for i in range(20)], 50, 47)
    dataset = labelled.LabelledDataset(corpus, np.arange(20, dtype=np.int32), 49, (4,), 8)
    added = []
    for epoch in range(4):
        held = [dataset.batch(3 * epoch + k) for k in range(3)]
        assert sorted(x for b in held for x in b["labels"][b["weights"] > 0]) == [*range(20)]
        (last,) = [b["labels"].tolist() for b in held if not b["weights"].all()]
        assert len({*last}) == 8
        added.append(tuple(last[4:]))
    assert len({*added}) == 4


def test_each_document_needs_a_label():
    corpus = Corpus.from_arrays([np.arange(3), np.arange(4)], 50, 7)
    with pytest.raises(ValueError, match="1 labels for 2 documents"):
        labelled.LabelledDataset(corpus, np.zeros(1, np.int32), 49)
