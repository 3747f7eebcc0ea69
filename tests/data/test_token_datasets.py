"""Datasets over tokens: packed and bucketed rows, of arrays and of the same documents in shards."""

import functools
import itertools

import numpy as np
import pytest
from model_folders import flip_bit
from prepared_parts import LENGTHS, SEPARATOR, VOCAB, make_parts

from zoo.alignment.pairs import PairDataset
from zoo.data import labelled, token_datasets
from zoo.data.corpus import Corpus
from zoo.data.datasets import batch_shapes
from zoo.data.mixtures import MixtureDataset, Stage


def make_corpus(lengths, seed=0):
    rng = np.random.default_rng(seed)
    arrays = [rng.integers(0, SEPARATOR, n) for n in lengths]
    names = [f"doc{i}" for i in range(len(lengths))]
    return Corpus.from_arrays(arrays, VOCAB, num_bytes=sum(lengths), names=names)


def packed(lengths=LENGTHS, seq_len=16, batch_size=4, seed=0, **kwargs):
    return token_datasets.PackedDataset(
        make_corpus(lengths), SEPARATOR, seq_len, batch_size, seed, **kwargs
    )


def bucketed(lengths=LENGTHS, buckets=(8, 16, 32), batch_size=4, seed=0, **kwargs):
    kwargs = {"too_long": "split"} | kwargs
    return token_datasets.BucketedDataset(
        make_corpus(lengths), SEPARATOR, buckets, batch_size, seed, **kwargs
    )


def epoch_of(dataset, epoch=0):
    start = epoch * dataset.batches_per_epoch
    return [dataset.batch(k) for k in range(start, start + dataset.batches_per_epoch)]


PLANS = {
    "packed": packed,
    "packed in order": functools.partial(packed, shuffle=False),
    "bucketed": bucketed,
    "bucketed in order": functools.partial(bucketed, shuffle=False),
}


@pytest.fixture(params=PLANS.values(), ids=PLANS)
def make_dataset(request):
    return request.param


def test_batches_depend_on_seed_and_index():
    for make_dataset in (packed, bucketed):
        dataset, again, other = make_dataset(), make_dataset(), make_dataset(seed=1)
        total = 3 * dataset.batches_per_epoch
        forwards = [dataset.batch(k)["tokens"].tobytes() for k in range(total)]
        backwards = [again.batch(k)["tokens"].tobytes() for k in reversed(range(total))]
        assert forwards == backwards[::-1]
        assert forwards != [other.batch(k)["tokens"].tobytes() for k in range(total)]
        assert forwards[: total // 3] != forwards[total // 3 : 2 * total // 3]


def test_invalid_arguments_are_refused(make_dataset):
    for wrong in ({"batch_size": 0}, {"seed": -1}):
        [(name, value)] = wrong.items()
        with pytest.raises(ValueError, match=f"{name}={value}"):
            make_dataset(**wrong)
    with pytest.raises(ValueError, match=r"separator_id=300 .* vocab_size=300"):
        token_datasets.PackedDataset(make_corpus([3]), VOCAB, seq_len=8, batch_size=1, seed=0)
    with pytest.raises(ValueError, match=r"seq_len=0 .* 1"):
        packed(seq_len=0)
    with pytest.raises(IndexError, match="batch -1"):
        packed().batch(-1)


def test_packed_rows_match_a_worked_example():
    corpus = Corpus.from_arrays([np.array([1, 2, 3]), np.array([4]), np.array([5, 6])], 10, 6)
    dataset = token_datasets.PackedDataset(
        corpus, 9, seq_len=4, batch_size=2, seed=0, shuffle=False
    )
    first, second = epoch_of(dataset)
    assert first["tokens"].tolist() == [[9, 1, 2, 3], [9, 4, 9, 5]]
    assert first["targets"].tolist() == [[1, 2, 3, 9], [4, 9, 5, 6]]
    assert first["segment_ids"].tolist() == [[1, 1, 1, 1], [1, 1, 2, 2]]
    assert first["positions"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 1]]
    assert second["tokens"].tolist() == [[6, 0, 0, 0], [0, 0, 0, 0]]
    assert second["targets"].tolist() == [[9, 0, 0, 0], [0, 0, 0, 0]]
    assert second["weights"].tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]
    assert dataset.padding_waste == 7 / 16


def test_bucketed_rows_match_a_worked_example():
    corpus = Corpus.from_arrays([np.array([1, 2, 3]), np.array([4]), np.array([5, 6])], 10, 6)
    dataset = token_datasets.BucketedDataset(
        corpus, 9, buckets=(2, 4, 100), batch_size=1, seed=0, shuffle=False
    )
    assert dataset.buckets == (2, 4)  # no row needs 100
    assert [dataset.bucket(k) for k in range(3)] == [2, 4, 4]
    small, long, short = epoch_of(dataset)
    assert (small["tokens"].tolist(), small["targets"].tolist()) == ([[9, 4]], [[4, 9]])
    assert (long["tokens"].tolist(), long["targets"].tolist()) == ([[9, 1, 2, 3]], [[1, 2, 3, 9]])
    assert short["tokens"].tolist() == [[9, 5, 6, 0]]
    assert short["targets"].tolist() == [[5, 6, 9, 0]]
    assert short["weights"].tolist() == [[1, 1, 1, 0]]
    assert dataset.padding_waste == pytest.approx(1 / 10)


def test_emptied_buckets_are_dropped():
    # Both rows of 8, in every epoch, take the places that one row of 16 leaves in a batch.
    dataset = bucketed([5, 15, 6])
    assert dataset.buckets == (16,)
    assert list(batch_shapes(dataset)) == [16]
    assert dataset.describe_buckets() == "bucket 16: 3 rows in 1 batches, 54.7% padding"
    for k in range(3):
        [batch] = epoch_of(dataset, k)
        assert sorted(batch["weights"].sum(1)) == [0, 6, 7, 16]


def test_bucket_order_is_shuffled():
    dataset = bucketed([7] * 40 + [15] * 40)
    order = [dataset.bucket(k) for k in range(dataset.batches_per_epoch)]
    assert sorted(order) == [8] * 10 + [16] * 10
    assert order != sorted(order)
    following = range(dataset.batches_per_epoch, 2 * dataset.batches_per_epoch)
    assert order != [dataset.bucket(k) for k in following]


def counted_dataset(corpus, ends, seq_len, **options):
    return token_datasets.PackedDataset(corpus, ends, seq_len, 1, seed=0, shuffle=False, **options)


def test_documents_may_lack_a_begin_or_an_end():
    corpus = Corpus.from_arrays([np.array([1, 2, 3]), np.array([4]), np.array([5, 6])], 10, 6)
    dataset = counted_dataset(corpus, (None, 9), 4)
    first, second = epoch_of(dataset)
    assert (first["tokens"].tolist(), first["targets"].tolist()) == ([[1, 2, 3, 4]], [[2, 3, 9, 9]])
    assert second["tokens"].tolist() == [[5, 6, 0, 0]]
    assert second["targets"].tolist() == [[6, 9, 0, 0]]
    assert first["segment_ids"].tolist() == [[1, 1, 1, 2]]
    dataset = counted_dataset(corpus, (8, 9), 9)
    [batch] = epoch_of(dataset)
    assert batch["tokens"].tolist() == [[8, 1, 2, 3, 8, 4, 8, 5, 6]]
    assert batch["targets"].tolist() == [[1, 2, 3, 9, 4, 9, 5, 6, 9]]
    # A document of one token has no target: nothing is in its place, and no segment is left out.
    whole = Corpus.from_arrays(
        [np.array([5, 6]), np.array([4]), np.array([7, 8])], 10, 6, framed=True
    )
    [batch] = epoch_of(counted_dataset(whole, 9, 3))
    assert batch["tokens"].tolist() == [[5, 7, 0]]
    assert batch["targets"].tolist() == [[6, 8, 0]]
    assert batch["segment_ids"].tolist() == [[1, 2, 0]]
    with pytest.raises(ValueError, match="there is no target"):
        counted_dataset(Corpus.from_arrays([np.array([4])], 10, 1, framed=True), 9, 3)
    with pytest.raises(ValueError, match=r"separator_id=10 .* vocab_size=10"):
        counted_dataset(corpus, (None, 10), 4)


def made_datasets():
    """Datasets over the same documents, but for one thing each."""

    def make(cls=token_datasets.PackedDataset, last=3, counts=None, seed=0, **options):
        documents = [np.arange(n) % 5 + 1 for n in (4, 6, 8, 2)]
        documents[-1][-1] = last
        corpus = Corpus.from_arrays(documents, 50, 47, counts=counts)
        if cls is labelled.LabelledDataset:
            return cls(corpus, options.pop("labels"), 0, (16,), 2, seed)
        return cls(corpus, 0, batch_size=2, seed=seed, **options)

    counts = [np.ones(n, bool) for n in (4, 6, 8, 2)]
    rows, first, other = {"buckets": (16,)}, np.arange(4, dtype="i4"), np.ones(4, "i4")
    return [
        *(make(seq_len=8), make(seq_len=8, last=4), make(seq_len=8, seed=1), make(seq_len=4)),
        make(seq_len=16, counts=counts),
        make(seq_len=16, counts=[*counts[:3], np.asarray([True, False])]),
        *(make(token_datasets.BucketedDataset, **rows), make(PairDataset, **rows)),
        make(PairDataset, **rows).with_reference(np.zeros((2, 2), "f4")),
        *(make(labelled.LabelledDataset, labels=labels) for labels in (first, other)),
        MixtureDataset({"a": make(seq_len=8), "b": make(seq_len=8, last=4)}, [Stage(0, (1, 1))]),
        MixtureDataset({"a": make(seq_len=8), "b": make(seq_len=8, last=4)}, [Stage(0, (1, 2))]),
    ]


def test_fingerprints_of_token_datasets_tell_them_apart():
    prints = [dataset.fingerprint for dataset in made_datasets()]
    assert prints == [dataset.fingerprint for dataset in made_datasets()]
    # Pairs are rows of buckets, with the same tokens.
    assert len(prints) == 13
    assert len({*prints}) == 13


# --- In shards: the same batches as over the same documents in one shard ------------------------


BUCKETS = (8, 16, 32)


@pytest.fixture
def make_stored(tmp_path, kind):
    folders = itertools.count()

    def make(lengths=LENGTHS, batch_size=4, seed=0, in_one_shard=False, ends=SEPARATOR, **options):
        folder = tmp_path / f"{next(folders)}"
        frame = 2 if ends == SEPARATOR else sum(id is not None for id in ends)
        (part, _), (corpus, _) = make_parts(folder, lengths, frame=frame)
        if kind == "packed":
            documents = corpus if in_one_shard else part
            return token_datasets.PackedDataset(documents, ends, 16, batch_size, seed, **options)
        options = {"too_long": "split", "cache": tmp_path / "cache"} | options
        documents = corpus if in_one_shard else part
        return token_datasets.BucketedDataset(documents, ends, BUCKETS, batch_size, seed, **options)

    return make


def assert_equal(batch, other):
    assert batch.keys() == other.keys()
    for name, array in batch.items():
        np.testing.assert_array_equal(array, other[name])


def random_lengths(seed):
    rng = np.random.default_rng(seed)
    return [*rng.integers(0, rng.integers(20, 60), rng.integers(12, 24)).tolist(), 1]


@pytest.mark.parametrize("kind", ["packed", "bucketed"])
@pytest.mark.parametrize("ends", [SEPARATOR, (None, 298), (297, None)])
def test_rows_are_those_in_one_shard(make_stored, ends):
    """Both cut the same documents at the same places, in the same order."""
    for seed, batch_size in ((0, 4), (1, 1)):
        options = {"seed": seed, "shuffle": seed == 0, "ends": ends, "batch_size": batch_size}
        dataset = make_stored(random_lengths(seed), **options)
        wanted = make_stored(random_lengths(seed), in_one_shard=True, **options)
        for name in ("batches_per_epoch", "num_rows", "buckets", "padding_waste"):
            assert getattr(dataset, name) == pytest.approx(getattr(wanted, name)), name
        assert dataset.describe_buckets() == wanted.describe_buckets()
        for k in range(2 * dataset.batches_per_epoch):
            assert dataset.bucket(k) == wanted.bucket(k)
            assert_equal(dataset.batch(k), wanted.batch(k))


@pytest.mark.parametrize("kind", ["packed"])
def test_rows_are_cut_elsewhere_in_each_epoch(make_stored):
    dataset = make_stored([400] * 4)
    cuts = [
        {
            piece.start % 16
            for row in range(dataset.num_rows)
            for piece in dataset.row_pieces(epoch, row)
        }
        for epoch in range(4)
    ]
    assert len({frozenset(cut) for cut in cuts}) > 2


@pytest.mark.parametrize("kind", ["bucketed"])
def test_the_index_of_rows_is_made_once(make_stored, tmp_path, monkeypatch):
    wanted = epoch_of(make_stored())
    entries = sorted((tmp_path / "cache" / "rows").rglob("index.rows"))
    assert len(entries) == 1
    with monkeypatch.context() as patch:
        patch.setattr("zoo.data.token_datasets.write_index", None)
        for batch, other in zip(epoch_of(make_stored()), wanted, strict=True):
            assert_equal(batch, other)
    make_stored(too_long="truncate")
    make_stored(LENGTHS[1:])
    assert len(sorted((tmp_path / "cache" / "rows").rglob("index.rows"))) == 3
    flip_bit(entries[0], 17)
    with pytest.raises(ValueError, match=f"index.rows: block 0 .*remove {entries[0].parent}"):
        epoch_of(make_stored())
