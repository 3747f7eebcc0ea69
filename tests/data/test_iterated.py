"""Rows of an iterator with a state: equal batches at any time, and few rows read again."""

import contextlib
import json
import os

import grain
import numpy as np
import pytest
from absl import flags

import zoo
from zoo.data import iterated
from zoo.data.loader import batches as on_devices

ROWS = 300


class Counted:
    """Squares by number; counts what is read."""

    def __init__(self):
        self.read = 0

    def __len__(self):
        return 3 * ROWS

    def __getitem__(self, i):
        self.read += 1
        return {"x": np.int32(i)}


def of_iterator(source, path, **options):
    """The rows but every third, which nobody knows the places of."""
    rows = grain.MapDataset.source(source).to_iter_dataset(grain.ReadOptions(num_threads=0))
    rows = rows.filter(lambda row: row["x"] % 3 != 0)
    given = {"num_rows": ROWS, "states": path, "shuffle": False, "drop_last": True} | options
    return zoo.batches(rows, 4, **given)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(iterated, "EVERY", 8)
    monkeypatch.setattr(iterated, "KEPT", 4)


def noisy(row, rng):
    return {"x": row["x"], "noise": rng.random(dtype=np.float32)}


def test_batches_are_those_of_the_list_in_any_order_and_after_a_resume(tmp_path):
    listed = [{"x": np.int32(x)} for x in range(3 * ROWS) if x % 3][:ROWS]
    wanted = zoo.batches(listed, 4, shuffle=False, transform=noisy)
    first, path = Counted(), tmp_path / "run" / "states.json"
    dataset = of_iterator(first, path, transform=noisy)
    assert dataset.batches_per_epoch == wanted.batches_per_epoch == 75
    fingerprint = dataset.fingerprint
    assert first.read < 3 * 64  # of its first rows
    with contextlib.closing(on_devices(dataset, stop=220)) as found:  # in threads, of three epochs
        assert all(np.array_equal(x["x"], wanted.batch(k)["x"]) for k, x in found)
    assert first.read < 3 / 2 * 4 * 260  # hardly any of them twice
    for k in (69, 68, 75, 76, 3):  # 75 is the second epoch's first
        for rows in (slice(0, 2), slice(2, 4)):
            found, want = dataset.batch(k, rows), wanted.batch(k, rows)
            assert found.keys() == want.keys() == {"x", "noise", "weights"}
            assert all(np.array_equal(found[name], want[name]) for name in want)
    again = Counted()
    resumed = of_iterator(again, path, transform=noisy)
    assert resumed.fingerprint == fingerprint
    begun = again.read
    assert np.array_equal(resumed.batch(66)["x"], wanted.batch(66)["x"])
    assert again.read - begun < 3 * (8 + 4)  # from the state of row 264, not from the first
    assert np.array_equal(resumed.batch(20)["x"], wanted.batch(20)["x"])  # an older checkpoint's


def test_states_are_few(tmp_path):
    dataset = of_iterator(Counted(), tmp_path / "states.json")
    for k in range(75):
        dataset.batch(k)
    kept = [int(x) for x in json.loads((tmp_path / "states.json").read_text())["states"]]
    assert kept == [0, 128, 192, 224, 256, 272, 280, 288, 296]


def test_what_no_run_could_resume_is_refused(tmp_path):
    path = tmp_path / "states.json"
    with pytest.raises(TypeError, match="generator has no row i, and no iterator that saves"):
        zoo.batches((x for x in range(3)), 4)
    with pytest.raises(TypeError, match="int has no row i"):
        zoo.batches(3, 4)
    with pytest.raises(ValueError, match="num_rows=None, states='s':"):
        of_iterator(Counted(), "s", num_rows=None)
    with pytest.raises(ValueError, match="shuffle=True, lengths=None:"):
        of_iterator(Counted(), path, shuffle=True)
    with pytest.raises(ValueError, match="num_rows=3, states=None:"):
        zoo.batches([1, 2, 3], 1, num_rows=3)
    with pytest.raises(ValueError, match=r"num_rows=604: .* 600 rows"):
        of_iterator(Counted(), path, num_rows=604).batch(150)
    assert path.is_file()  # from here on of rows 1, 2, 4, …
    others = [{"x": np.int32(7)}] * 3 * ROWS
    with pytest.raises(ValueError, match="are of other rows; remove the file"):
        of_iterator(others, path)


@pytest.mark.slow
def test_worker_processes_give_the_rows_of_threads(tmp_path):
    def noted(i):
        (tmp_path / f"made by {os.getpid()}").touch()
        return {"x": np.int32(i)}

    flags.FLAGS.mark_as_parsed()
    rows = grain.MapDataset.range(20 * ROWS).shuffle(seed=1).to_iter_dataset().map(noted)
    options = {"shuffle": False, "num_rows": ROWS, "states": tmp_path / "states"}
    wanted = zoo.batches(rows, 4, **options | {"states": tmp_path / "of threads"}).batch(10)
    (tmp_path / f"made by {os.getpid()}").unlink()
    workers = rows.mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
    first = zoo.batches(workers, 4, **options)
    assert [first.batch(k)["x"].tolist() for k in range(11)][10] == wanted["x"].tolist()
    assert zoo.batches(workers, 4, **options).batch(10)["x"].tolist() == wanted["x"].tolist()
    made_by = {path.name for path in tmp_path.glob("made by *")}
    assert len(made_by) == 4  # two each time
    assert f"made by {os.getpid()}" not in made_by


class Workers:
    """An iterator with the state of that many workers, as Grain's has it."""

    def __init__(self, count):
        self.state = {"workers": [{"next": 0}] * count, "exhausted": [0] * count, "x": None}

    def __iter__(self):
        return self

    def __next__(self):
        self.state = {**self.state, "x": (self.state["x"] or 0) + 1}
        return {"x": np.int32(self.state["x"])}

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def test_states_of_another_number_of_workers_are_refused(tmp_path):
    make = lambda count: zoo.batches(
        Workers(count), 4, shuffle=False, num_rows=ROWS, states=tmp_path / "states"
    )
    wanted = make(2).batch(9)["x"].tolist()
    assert wanted == [37, 38, 39, 40]
    assert make(2).batch(9)["x"].tolist() == wanted
    with pytest.raises(ValueError, match="are of an iterator with another number of workers"):
        make(3)
