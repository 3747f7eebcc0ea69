"""Batches on the devices: on any mesh, from any batch on, ahead of the step, and their errors."""

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
from prepared_parts import LENGTHS, SEPARATOR
from test_token_datasets import bucketed, make_corpus, make_dataset, packed

import zoo
from zoo.data import loader, token_datasets
from zoo.data.datasets import batch_shapes
from zoo.sharding import batch_sharding, make_mesh

__all__ = ["make_dataset"]


def as_numpy(batch):
    return {name: np.asarray(array) for name, array in batch.items()}


@pytest.mark.parametrize("spec", [None, "data=2,fsdp=2,tensor=2"])
def test_loaded_batches_match_on_any_mesh(make_dataset, spec):
    dataset = make_dataset(batch_size=8)
    mesh = None if spec is None else make_mesh(spec)
    shapes = batch_shapes(dataset, mesh)
    assert [*shapes] == [*dataset.buckets] == sorted(shapes)
    loaded = list(loader.batches(dataset, mesh, start=1, stop=5))
    assert [k for k, _ in loaded] == [1, 2, 3, 4]
    for k, batch in loaded:
        expected = dataset.batch(k)
        assert batch.keys() == expected.keys() == shapes[dataset.bucket(k)].keys()
        for name, array in batch.items():
            assert isinstance(array, jax.Array)
            assert array.dtype == expected[name].dtype
            np.testing.assert_array_equal(array, expected[name])
            shape = shapes[dataset.bucket(k)][name]
            assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
            if mesh is not None:
                assert array.sharding.is_equivalent_to(batch_sharding(mesh, 2), 2)
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
