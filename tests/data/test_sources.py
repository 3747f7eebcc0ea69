"""Rows that a program brings: any source gives the same batches, at any time and in any process."""

import threading

import grain
import jax
import numpy as np
import pytest

import zoo
from zoo.common import checksums
from zoo.data.datasets import batch_shapes
from zoo.data.loader import batches as on_devices
from zoo.data.sources import ArrayDataset

ROWS = 10
X = np.arange(3 * ROWS, dtype=np.float32).reshape(ROWS, 3)
Y = np.arange(ROWS)


class MapStyle:
    """As `torch.utils.data.Dataset` has it: rows are pairs."""

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        assert type(i) is int  # as those who look rows up in a file expect
        return X[i], int(Y[i])


SOURCES = {
    "arrays with a transform": {"inputs": X, "labels": Y},
    "list of dicts": [{"inputs": X[i], "labels": Y[i]} for i in range(ROWS)],
    "map-style": MapStyle(),
    "grain MapDataset": grain.MapDataset.source(MapStyle()).map(lambda row: row),
}


def all_batches(dataset, epochs=2):
    return [dataset.batch(k) for k in range(epochs * dataset.batches_per_epoch)]


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert len(one) > 1
    for name in one:
        assert one[name].dtype == other[name].dtype
        assert np.array_equal(one[name], other[name])


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("name", SOURCES)
def test_batches_of_any_source_are_those_of_arrays(name, drop_last):
    options = {"seed": 3, "drop_last": drop_last}
    wanted = ArrayDataset({"inputs": X, "labels": Y}, 4, **options)
    found = zoo.batches(SOURCES[name], 4, transform=lambda row, rng: row, **options)
    assert found.batches_per_epoch == wanted.batches_per_epoch == (2 if drop_last else 3)
    assert found.padding_waste == wanted.padding_waste
    assert found.row(4) == wanted.row(4)
    for one, other in zip(all_batches(found), all_batches(wanted), strict=True):
        assert_same(one, other)
    parts = [found.batch(5, slice(i, i + 2)) for i in (0, 2)]
    assert_same({n: np.concatenate([p[n] for p in parts]) for n in parts[0]}, found.batch(5))


def test_threads_make_the_rows_of_a_batch_at_once():
    noisy = lambda row, rng: {"x": row, "noise": rng.random(dtype=np.float32)}
    met = threading.Barrier(4)
    rows = [np.float32(i) for i in range(8)]

    def together(row, rng):
        if threading.current_thread() is not threading.main_thread():  # which looks at the first
            met.wait(timeout=10)
        return noisy(row, rng)

    wanted = zoo.batches(rows, 4, transform=noisy)
    found = zoo.batches(rows, 4, transform=together, threads=4)
    for one, other in zip(all_batches(found), all_batches(wanted), strict=True):
        assert_same(one, other)


def test_tables_are_read_by_columns_and_by_rows():
    pandas, hugging_face = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    columns = {"a": [1, 2], "b": [3.0, 4.0]}
    wanted = {"a": Y[1:3], "b": np.asarray([3.0, 4.0]), "weights": np.ones(2, np.float32)}
    frame = zoo.batches(pandas.DataFrame(columns), 2, shuffle=False)
    assert_same(frame.batch(0), wanted)
    rows = zoo.batches(hugging_face.Dataset.from_dict(columns), 2, shuffle=False)
    assert_same(rows.batch(0), wanted | {"b": wanted["b"].astype(np.float32)})


def test_transforms_are_drawn_by_seed_epoch_and_row():
    def noisy(row, rng):
        return {"noise": rng.random(dtype=np.float32), "row": row["y"]}

    make = lambda seed: zoo.batches({"y": Y}, 4, seed=seed, transform=noisy)
    by_row = []
    for epoch, dataset in [(0, make(0)), (1, make(0)), (0, make(1))]:
        batches = [dataset.batch(3 * epoch + k) for k in range(3)]
        rows = {int(r): x for b in batches for r, x in zip(b["row"], b["noise"], strict=True)}
        assert len(set(rows.values())) == ROWS
        by_row.append([rows[i] for i in range(ROWS)])
    assert not {*by_row[0]} & {*by_row[1]}
    assert not {*by_row[0]} & {*by_row[2]}
    assert_same(make(0).batch(4), make(0).batch(4))


TEXTS = [np.arange(1, n + 1) for n in (3, 8, 1, 5, 2, 4, 7, 4, 6)]


def of_texts(texts=TEXTS, **options):
    rows = [{"tokens": x, "row": i} for i, x in enumerate(texts)]
    given = {"lengths": lambda row: len(row["tokens"]), "buckets": (8, 4), "padded": ["tokens"]}
    return zoo.batches(rows, 2, **given | options)


def test_rows_of_several_lengths_are_in_the_smallest_bucket_that_holds_them():
    dataset = of_texts(seed=1)
    assert dataset.buckets == (4, 8)
    assert dataset.batches_per_epoch == 5  # five rows of up to 4, and four of more
    orders = []
    for epoch in range(2):
        batches = all_batches(dataset)[5 * epoch : 5 * (epoch + 1)]
        seen = [int(i) for b in batches for i, w in zip(b["row"], b["weights"], strict=True) if w]
        assert sorted(seen) == list(range(len(TEXTS)))
        orders.append(seen)
        for k, batch in enumerate(batches, 5 * epoch):
            bucket = dataset.bucket(k)
            assert batch["tokens"].shape == batch["mask"].shape == (2, bucket)
            for row, tokens, mask in zip(batch["row"], batch["tokens"], batch["mask"], strict=True):
                text = TEXTS[row]
                assert bucket == (4 if len(text) <= 4 else 8)
                assert np.array_equal(tokens, np.pad(text, (0, bucket - len(text))))
                assert np.array_equal(mask, np.arange(bucket) < len(text))
    assert orders[0] != orders[1]
    assert dataset.padding_waste == 1 - 40 / (2 * (3 * 4 + 2 * 8))
    dropped = of_texts(drop_last=True)
    assert dropped.batches_per_epoch == 4
    assert all(b["weights"].all() for b in all_batches(dropped))
    same = of_texts(seed=1, lengths=[len(x) for x in TEXTS])
    assert_same(same.batch(7), dataset.batch(7))


def test_a_mesh_gets_the_rows_of_the_host():
    mesh = zoo.make_mesh("data=4,fsdp=2")
    dataset = zoo.batches(MapStyle(), 8, seed=0)
    [(_, placed)] = on_devices(dataset, mesh, start=1, stop=2)
    assert_same(
        jax.tree.map(np.asarray, placed), jax.tree.map(np.asarray, jax.device_put(dataset.batch(1)))
    )


def test_fingerprints_tell_rows_transforms_and_arguments():
    base = [{"x": np.float32(i)} for i in range(9)]
    changed = [*base[:4], {"x": np.float32(0.5)}, *base[5:]]
    make = lambda rows=base, size=3, **options: zoo.batches(rows, size, **options).fingerprint
    others = [make(changed), make(base[:8]), make(size=4), make(seed=1), make(shuffle=False)]
    others += [make(drop_last=True), make(transform=lambda row, rng: {"x": row["x"] + 1})]
    assert make() == make([*base])
    assert len({make(), *others}) == 8


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        ([], {}, "list has no rows"),
        ([1.0], {"drop_last": True}, r"batch_size=2, drop_last=True.*\{2: 1\}"),
        (["a"], {}, r"row 0 .* inputs='a'"),
        ([{"weights": 1}], {}, r"\['weights'\]"),
        (TEXTS, {"buckets": (4,)}, r"buckets=\(4,\)"),
        (TEXTS, {"buckets": (4,), "lengths": len, "padded": ["inputs"]}, r"\(4,\): row 1.* 8"),
        (TEXTS, {"buckets": (8,), "lengths": len, "padded": ["x"]}, r"padded=\['x'\]"),
        ([1], {"transform": lambda row, rng: 1 / 0}, r"row 0 .* ZeroDivisionError"),
    ],
)
def test_bad_rows_are_named_before_any_compute(rows, options, said):
    with pytest.raises(ValueError, match=said):
        zoo.batches(rows, 2, **options)


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        ([TEXTS[0], TEXTS[1]], {}, r"row 1 .* inputs is int64\[8\].*int64\[3\]"),
        ([{"x": 1}, {"y": 1}], {}, r"row 1 .* x is nothing"),
        ([1, 2.0], {}, r"inputs is float32\[\], .* int64\[\]"),
        (
            [TEXTS[0], TEXTS[1]],
            {"buckets": (4,), "lengths": [3, 4], "padded": ["inputs"]},
            r"row 1 .* inputs is int64\[8\]",
        ),
    ],
)
def test_rows_unlike_the_first_are_named(rows, options, said):
    dataset = zoo.batches(rows, 2, shuffle=False, **options)
    with pytest.raises(ValueError, match=said):
        dataset.batch(0)


# --- Arrays


def array_dataset(rows=10, batch_size=4, **kwargs):
    arrays = {"x": np.arange(rows * 3, dtype=np.float32).reshape(rows, 3), "y": np.arange(rows)}
    return ArrayDataset(arrays, batch_size, seed=3, **kwargs)


@pytest.mark.parametrize(("rows", "batch_size"), [(10, 4), (8, 4), (1, 4), (5, 1)])
def test_array_rows_come_once_per_epoch(rows, batch_size):
    dataset = array_dataset(rows, batch_size)
    for epoch in range(2):
        first = epoch * dataset.batches_per_epoch
        batches = [dataset.batch(first + k) for k in range(dataset.batches_per_epoch)]
        seen = np.concatenate([batch["y"][batch["weights"] > 0] for batch in batches])
        assert sorted(seen) == list(range(rows))
        for batch in batches:
            assert np.array_equal(batch["x"][:, 0], 3.0 * batch["y"])  # the arrays stay together
            structs = batch_shapes(dataset)[dataset.bucket(0)]
            assert {n: (x.shape, x.dtype) for n, x in batch.items()} == {
                n: (x.shape, x.dtype) for n, x in structs.items()
            }
    parts = [array_dataset(rows, batch_size).batch(1, slice(i, i + 1)) for i in range(batch_size)]
    for name, array in dataset.batch(1).items():
        assert np.array_equal(array, np.concatenate([part[name] for part in parts]))
    assert dataset.padding_waste == 1 - rows / (dataset.batches_per_epoch * batch_size)


def test_inconsistent_arrays_are_refused():
    with pytest.raises(ValueError, match="'x': 2, 'y': 3"):
        ArrayDataset({"x": np.zeros(2), "y": np.zeros(3)}, 1, seed=0)
    with pytest.raises(ValueError, match="'weights' is taken"):
        ArrayDataset({"weights": np.zeros(2)}, 1, seed=0)


def test_lists_become_arrays_and_anything_else_is_refused_by_name():
    dataset = ArrayDataset({"x": [[1.0, 2.0], [3.0, 4.0]], "y": [1, 0]}, 2, seed=0, shuffle=False)
    assert np.array_equal(dataset.batch(0)["x"], [[1, 2], [3, 4]])
    assert dataset.row(2)["x"] == ((2,), np.float64)
    for wrong in ([[1], [2, 3]], ["a", "b"], 3, [None, 1], np.asarray(["2026-01-01"], "M8[D]")):
        with pytest.raises(ValueError, match=r"arrays\['x'\]"):
            ArrayDataset({"x": wrong}, 1, seed=0)


def test_fingerprints_of_arrays_tell_all_that_batches_depend_on():
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)

    def print_of(x=rows, name="x", batch_size=2, seed=0, **options):
        return ArrayDataset({name: x}, batch_size, seed, **options).fingerprint

    changed = rows.copy()
    changed[3, 2] += 1e-6
    same = {print_of(x) for x in (rows, rows.copy(), rows.T.copy().T, rows.tolist())}
    assert len(same) == 2  # the list's are float64
    others = [print_of(changed), print_of(rows.astype("f8") + 1), print_of(name="y")]
    others += [print_of(batch_size=4), print_of(seed=1), print_of(shuffle=False)]
    others += [print_of(rows.reshape(4, 3, 1)), print_of(rows[:3])]
    assert len({*same, *others}) == 10


def test_large_arrays_have_fingerprints_of_blocks(monkeypatch, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((2**12, 64), np.float32))
    monkeypatch.setattr(checksums, "WHOLE", 2**18)
    monkeypatch.setattr(checksums, "SAMPLES", 3)  # of 256 rows: at the begin, middle and end

    def print_of(row):
        array = np.load(tmp_path / "x.npy", mmap_mode="c")
        array[row] = row + 1
        return ArrayDataset({"x": array}, 8, seed=0).fingerprint

    assert len({print_of(row) for row in (0, 255, 2048, 4095)}) == 4
    assert len({print_of(row) for row in (256, 1800, 3839)}) == 1
