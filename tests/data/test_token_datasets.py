"""Datasets over stored parts: the same batches as over the same documents in one shard."""

import concurrent.futures
import itertools
import time

import numpy as np
import pytest
from helpers import flip_bit
from prepared_parts import LENGTHS, SEPARATOR, make_parts

from zoo.common import files
from zoo.data import packing, token_datasets

BUCKETS = (8, 16, 32)


@pytest.fixture
def make_dataset(tmp_path, kind):
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


both = pytest.mark.parametrize("kind", ["packed", "bucketed"])
bucketed = pytest.mark.parametrize("kind", ["bucketed"])
packed = pytest.mark.parametrize("kind", ["packed"])


def epoch_of(dataset, epoch=0):
    first = epoch * dataset.batches_per_epoch
    return [dataset.batch(k) for k in range(first, first + dataset.batches_per_epoch)]


def assert_equal(batch, other):
    assert batch.keys() == other.keys()
    for name, array in batch.items():
        np.testing.assert_array_equal(array, other[name])


def random_lengths(seed):
    rng = np.random.default_rng(seed)
    return [*rng.integers(0, rng.integers(20, 60), rng.integers(12, 24)).tolist(), 1]


@both
@pytest.mark.parametrize("ends", [SEPARATOR, (None, 298), (297, None)])
def test_rows_are_those_in_one_shard(make_dataset, ends):
    """Both cut the same documents at the same places, in the same order."""
    for seed, batch_size in ((0, 4), (1, 1)):
        options = {"seed": seed, "shuffle": seed == 0, "ends": ends, "batch_size": batch_size}
        dataset = make_dataset(random_lengths(seed), **options)
        wanted = make_dataset(random_lengths(seed), in_one_shard=True, **options)
        for name in ("batches_per_epoch", "num_rows", "buckets", "padding_waste"):
            assert getattr(dataset, name) == pytest.approx(getattr(wanted, name)), name
        assert dataset.describe_buckets() == wanted.describe_buckets()
        for k in range(2 * dataset.batches_per_epoch):
            assert dataset.bucket(k) == wanted.bucket(k)
            assert_equal(dataset.batch(k), wanted.batch(k))


@packed
def test_rows_are_cut_elsewhere_in_each_epoch(make_dataset):
    dataset = make_dataset([400] * 4)
    cuts = [
        {
            piece.start % 16
            for row in range(dataset.num_rows)
            for piece in dataset.row_pieces(epoch, row)
        }
        for epoch in range(4)
    ]
    assert len({frozenset(cut) for cut in cuts}) > 2


@bucketed
def test_the_index_of_rows_is_made_once(make_dataset, tmp_path, monkeypatch):
    wanted = epoch_of(make_dataset())
    entries = sorted((tmp_path / "cache" / "rows").rglob("index.rows"))
    assert len(entries) == 1
    with monkeypatch.context() as patch:
        patch.setattr("zoo.data.token_datasets.write_index", None)
        for batch, other in zip(epoch_of(make_dataset()), wanted, strict=True):
            assert_equal(batch, other)
    make_dataset(too_long="truncate")
    make_dataset(LENGTHS[1:])
    assert len(sorted((tmp_path / "cache" / "rows").rglob("index.rows"))) == 3
    flip_bit(entries[0], 17)
    with pytest.raises(ValueError, match=f"index.rows: block 0 .*remove {entries[0].parent}"):
        epoch_of(make_dataset())


def test_a_way_with_long_documents_that_there_is_not(tmp_path):
    (part, _), _ = make_parts(tmp_path / "framed")
    with pytest.raises(ValueError, match="too_long='drop': choose 'error', 'truncate'"):
        next(packing.cut_documents(part, 8, "drop", 1, "", []))


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


def test_a_folder_is_made_once_while_others_wait(tmp_path):
    made = []

    def make(folder):
        made.append(folder)
        time.sleep(0.05)
        (folder / "file").write_text("whole")

    (tmp_path / "entry.part").mkdir()  # of a kill
    (tmp_path / "entry.part" / "file").write_text("half of")
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        futures = [
            threads.submit(files.made_once, tmp_path / "entry", make, "cache") for _ in range(4)
        ]
        folders = {future.result() for future in futures}
    assert folders == {tmp_path / "entry"}
    assert len(made) == 1
    assert (tmp_path / "entry" / "file").read_text() == "whole"
    assert not (tmp_path / "entry.part").exists()
