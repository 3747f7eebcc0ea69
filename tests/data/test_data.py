import functools
import gc
import subprocess
import sys
import threading
import time
import traceback

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import zoo
from zoo.alignment.pairs import PairDataset
from zoo.data import labelled, loader, packing, token_datasets
from zoo.data.corpus import Corpus
from zoo.data.datasets import batch_shapes
from zoo.data.mixtures import MixtureDataset, Stage
from zoo.sharding import batch_sharding, make_mesh

VOCAB, SEPARATOR = 50, 49


def make_corpus(lengths, seed=0):
    rng = np.random.default_rng(seed)
    arrays = [rng.integers(0, SEPARATOR, n) for n in lengths]
    names = [f"doc{i}" for i in range(len(lengths))]
    return Corpus.from_arrays(arrays, VOCAB, num_bytes=sum(lengths), names=names)


LENGTHS = [5, 0, 17, 1, 40, 8, 8, 3, 100, 2, 9]


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


# --- What every dataset keeps to


def test_batches_have_the_announced_shapes(make_dataset):
    dataset = make_dataset()
    shapes = batch_shapes(dataset)
    assert sorted(shapes) == list(dataset.buckets)
    for k in range(dataset.batches_per_epoch):
        batch = dataset.batch(k)
        expected = shapes[dataset.bucket(k)]
        assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
            name: (shape.shape, shape.dtype) for name, shape in expected.items()
        }


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
    with pytest.raises(ValueError, match=r"separator_id=50 .* vocab_size=50"):
        token_datasets.PackedDataset(make_corpus([3]), 50, seq_len=8, batch_size=1, seed=0)
    with pytest.raises(ValueError, match="seq_len=0 must be at least 1"):
        packed(seq_len=0)
    with pytest.raises(IndexError, match="batch -1"):
        packed().batch(-1)


# --- Packing


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


# --- Buckets


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


def test_overlong_documents_are_refused():
    with pytest.raises(ValueError, match="document 'doc4' has 41 tokens") as error:
        bucketed(too_long="error")
    for part in ("largest bucket 32", "'truncate'", "'split'", "'error'", "2 of 11 documents"):
        assert part in str(error.value)
    bucketed(buckets=(8, 101), too_long="error")
    with pytest.raises(ValueError, match="document 'doc1' has 9 tokens"):
        bucketed([7, 8], buckets=(8,), too_long="error")  # the first just fits


@pytest.mark.parametrize("buckets", [(), (0, 8), (8, 8)])
def test_invalid_buckets_are_refused(buckets):
    with pytest.raises(ValueError, match="must be different positive lengths"):
        bucketed(buckets=buckets)
    assert packing.bucket_lengths((8, 1)).tolist() == [1, 8]


# --- Loading


def as_numpy(batch):
    return {name: np.asarray(array) for name, array in batch.items()}


@pytest.mark.parametrize("spec", [None, "data=2,fsdp=2,tensor=2"])
def test_loaded_batches_match_on_any_mesh(make_dataset, spec):
    dataset = make_dataset(batch_size=8)
    mesh = None if spec is None else make_mesh(spec)
    loaded = list(loader.batches(dataset, mesh, start=1, stop=5))
    assert [k for k, _ in loaded] == [1, 2, 3, 4]
    for k, batch in loaded:
        expected = dataset.batch(k)
        assert batch.keys() == expected.keys()
        for name, array in batch.items():
            assert isinstance(array, jax.Array)
            assert array.dtype == expected[name].dtype
            np.testing.assert_array_equal(array, expected[name])
            if mesh is not None:
                assert array.sharding.is_equivalent_to(batch_sharding(mesh, 2), 2)
                shape = batch_shapes(dataset, mesh)[dataset.bucket(k)][name]
                assert shape.sharding.is_equivalent_to(array.sharding, 2)


def test_batches_lie_as_their_layout_says():
    dataset = zoo.ArrayDataset({"x": np.arange(16.0, dtype=np.float32)}, batch_size=8, seed=0)
    layout = zoo.Layout("data=2,tensor=4", {"batch": "tensor"})
    [(_, batch)] = loader.batches(dataset, layout, stop=1)
    assert batch["x"].sharding.spec == P("tensor")
    assert batch_shapes(dataset, layout)[dataset.bucket(0)]["x"].sharding == batch["x"].sharding
    np.testing.assert_array_equal(batch["x"], dataset.batch(0)["x"])


def test_each_row_range_is_built_once():
    asked = set()

    class Watched(token_datasets.PackedDataset):
        def batch(self, k, rows=None):
            asked.add((rows.start, rows.stop))
            return super().batch(k, rows)

    dataset = Watched(make_corpus(LENGTHS), SEPARATOR, 16, 8, 0)
    list(loader.batches(dataset, make_mesh("data=2,fsdp=2,tensor=2"), stop=2))
    assert asked == {(0, 2), (2, 4), (4, 6), (6, 8)}  # each once, whatever the tensor axis


def test_indivisible_batch_sizes_are_refused():
    with pytest.raises(ValueError, match=r"batch_size=6 .* divisible by 4.*fsdp.*a multiple of 4"):
        loader.batches(packed(batch_size=6), make_mesh("data=2,fsdp=2"))
    loader.batches(packed(batch_size=6), make_mesh("data=2,tensor=2")).close()


@pytest.mark.parametrize("make_dataset", [packed, bucketed])
def test_resume_at_any_batch(make_dataset):
    dataset = make_dataset()
    stop = 2 * dataset.batches_per_epoch + 1
    whole = [(k, as_numpy(batch)) for k, batch in loader.batches(dataset, stop=stop)]
    for start in (stop // 2, stop):
        tail = [
            (k, as_numpy(batch))
            for k, batch in loader.batches(make_dataset(), start=start, stop=stop)
        ]
        np.testing.assert_equal(tail, whole[start:])
    with pytest.raises(ValueError, match="start=3 and stop=2"):
        loader.batches(dataset, start=3, stop=2)


def test_plan_errors_reach_the_caller():
    class Broken(token_datasets.PackedDataset):
        def batch(self, k, rows=None):
            if k == 3:
                raise RuntimeError("the disk is gone")
            return super().batch(k, rows)

    dataset = Broken(make_corpus(LENGTHS), SEPARATOR, 16, 4, 0)
    stream = loader.batches(dataset)
    assert [next(stream)[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RuntimeError, match="the disk is gone") as raised:
        next(stream)
    assert traceback.format_exception_only(raised.value) == ["RuntimeError: the disk is gone\n"]
    assert "grain" not in "".join(traceback.format_exception(raised.value)).lower()


def test_a_bad_value_is_reported_by_row_and_field_alone():
    rows = np.ones((16, 4), np.float32)
    rows[13, 2] = np.nan
    dataset = zoo.ArrayDataset({"x": rows}, batch_size=8, seed=0, shuffle=False)
    with pytest.raises(ValueError, match=r"batch 1: x\[5, 2\] is nan") as raised:
        list(loader.batches(dataset, stop=2))
    (line,) = traceback.format_exception_only(raised.value)
    assert line.startswith("ValueError: batch 1: x[5, 2] is nan")
    assert line.count("\n") == 1


def test_batches_are_prefetched_to_the_device(monkeypatch):
    third = threading.Event()
    placed = []
    place = loader.place_batch

    def watched(*arguments):
        placed.append(place(*arguments))
        if len(placed) == 3:
            third.set()
        return placed[-1]

    monkeypatch.setattr(loader, "place_batch", watched)
    stream = loader.batches(packed())
    next(stream)
    assert third.wait(60)  # although nobody has asked for the second
    stream.close()


def test_a_dropped_iterator_ends_its_threads():
    def working():
        return [t for t in threading.enumerate() if "grain" in t.name]

    before = len(working())
    for _ in range(5):
        for _ in loader.batches(packed()):
            break
    gc.collect()
    deadline = time.monotonic() + 60
    while len(working()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(working()) <= before


SCRIPT = """
import numpy as np
from zoo.data import loader, token_datasets
from zoo.data.corpus import Corpus
corpus = Corpus.from_arrays([np.arange(40)], 50, 40)
stream = loader.batches(token_datasets.PackedDataset(corpus, 49, 8, 2, 0))
next(stream)
print("done")
"""


def test_open_iterators_allow_clean_exit():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "done\n"
    assert "Exception" not in done.stderr


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


# --- Labelled rows


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
