"""Packing: documents that stay whole, rows that fill up batches, documents that are too long."""

import numpy as np
import pytest
from prepared_parts import make_parts
from test_token_datasets import bucketed, counted_dataset, epoch_of

from zoo.data import packing, token_datasets
from zoo.data.corpus import Corpus


def prompted_corpus(lengths):
    """Documents of their own number, of which the last two tokens count."""
    documents = [np.full(n, i) for i, n in enumerate(lengths)]
    lengths = list(map(int, lengths))
    counts = [np.arange(n) >= n - 2 for n in lengths]
    names = [f"doc{i}" for i in range(len(lengths))]
    return Corpus.from_arrays(documents, 1000, sum(lengths), names, counts)


def test_documents_with_prompts_are_packed_whole():
    lengths = np.random.default_rng(0).integers(2, 60, 500)
    dataset = token_datasets.PackedDataset(prompted_corpus(lengths), (None, 999), 64, 4, seed=0)
    orders = []
    for epoch in (0, 3):
        seen = []
        for batch in epoch_of(dataset, epoch):
            for tokens, ids in zip(batch["tokens"], batch["segment_ids"], strict=True):
                for segment in range(1, ids.max() + 1):
                    [document] = set(tokens[ids == segment].tolist())
                    assert (ids == segment).sum() == lengths[document]
                    seen.append(document)
        assert sorted(seen) == list(range(500))
        orders.append(seen)
    assert orders[0] != orders[1]
    assert dataset.padding_waste == pytest.approx(
        1 - lengths.sum() / (dataset.batches_per_epoch * 256)
    )
    assert dataset.padding_waste < 0.06  # 0.2 where the rows are closed in order
    again = token_datasets.PackedDataset(prompted_corpus(lengths), (None, 999), 64, 4, seed=0)
    k = dataset.batches_per_epoch + 2
    np.testing.assert_array_equal(again.batch(k)["tokens"], dataset.batch(k)["tokens"])


def test_items_go_into_the_first_row_with_room():
    lengths = np.sort(np.random.default_rng(1).integers(1, 30, 300))[::-1]
    left, rows = [], []
    for length in lengths:  # one by one
        row = next((i for i, room in enumerate(left) if room >= length), len(left))
        left[row:row] = [40] if row == len(left) else []
        left[row] -= length
        rows.append(row)
    assert packing.first_fit(lengths, 40).tolist() == rows
    assert len(left) > 10


def test_left_over_rows_fill_larger_buckets():
    assert token_datasets.fill_batches([5, 0, 9], 4) == (
        [1, 0, 3],
        {2: [(2, 8), (0, 4), None, None]},
    )
    assert token_datasets.fill_batches([7, 6], 4) == (
        [2, 2],
        {1: [(1, 4), (1, 5), None, None], 0: [(0, 4), (0, 5), (0, 6), None]},
    )
    assert token_datasets.fill_batches([8, 4], 4) == ([2, 1], {})


@pytest.mark.parametrize("buckets", [(), (0, 8), (8, 8)])
def test_invalid_buckets_are_refused(buckets):
    with pytest.raises(ValueError, match="must be different positive lengths"):
        bucketed(buckets=buckets)
    assert packing.bucket_lengths((8, 1)).tolist() == [1, 8]


def test_a_way_with_long_documents_that_there_is_not(tmp_path):
    (part, _), _ = make_parts(tmp_path / "framed")
    with pytest.raises(ValueError, match=r"too_long='drop': .*'error', 'truncate'"):
        next(packing.cut_documents(part, 8, "drop", 1, "", []))


def test_overlong_documents_are_refused():
    with pytest.raises(ValueError, match="document 'doc4' has 41 tokens") as error:
        bucketed(too_long="error")
    for part in ("largest bucket 32", "'truncate'", "'split'", "'error'", "2 of 11 documents"):
        assert part in str(error.value)
    bucketed(buckets=(8, 101), too_long="error")
    with pytest.raises(ValueError, match="document 'doc1' has 9 tokens"):
        bucketed([7, 8], buckets=(8,), too_long="error")  # the first just fits


def test_prompts_too_long_for_a_packed_row():
    corpus = prompted_corpus([5, 30, 12])
    with pytest.raises(
        ValueError, match=r"'doc1' has 31 tokens .* seq_len=16: raise it.*1 of 3 doc"
    ):
        counted_dataset(corpus, 999, 16)
    dataset = counted_dataset(corpus, 999, 16, too_long="split")
    targets = [t for batch in epoch_of(dataset) for t in batch["targets"][batch["weights"] > 0]]
    assert sorted(targets) == [0, 0, 1, 1, 2, 2, 999, 999, 999]


@pytest.mark.parametrize("ends", [999, (None, 999)])
def test_truncation_never_leaves_only_a_prompt(ends, caplog):
    corpus = prompted_corpus([5, 30, 12])
    for kind, room in ((token_datasets.PackedDataset, 16), (token_datasets.BucketedDataset, (16,))):
        dataset = kind(corpus, ends, room, 1, seed=0, too_long="truncate")
        assert "1 of 3 documents, 'doc1' the first, have no token that counts" in caplog.text
        caplog.clear()
        batches = epoch_of(dataset)
        assert not any((batch["tokens"] == 1).any() for batch in batches)
        assert sum(batch["weights"].sum() for batch in batches) == 6
    with pytest.raises(ValueError, match="3 of 3 documents, 'doc0' the first"):
        counted_dataset(corpus, ends, 2, too_long="truncate")
    # The cut is just behind the first token that counts, or before it.
    position = 28 + (ends == 999)
    counted_dataset(prompted_corpus([30]), ends, position, too_long="truncate")
    with pytest.raises(ValueError, match="1 of 1 documents"):
        counted_dataset(prompted_corpus([30]), ends, position - 1, too_long="truncate")
