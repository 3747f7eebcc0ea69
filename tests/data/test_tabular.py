import sys
from pathlib import Path

import numpy as np
import pytest

from zoo import tabular
from zoo.data.documents import unit_hash


def write(tmp_path, text):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    return path


def flowers(tmp_path, num_rows=60):
    rows = [f"{i},{'iris' if i % 3 else 'rose'},{i / 2}" for i in range(num_rows)]
    return write(tmp_path, "\n".join(["width,species,height", *rows]))


def load(path, seed=0, **options):
    config = tabular.Config(file=str(path), label="species", batch_size=8, **options)
    return tabular.read_table(config, seed=seed)


def test_rows_come_with_their_labels(tmp_path):
    table = load(flowers(tmp_path))
    assert table.in_size == 2
    assert table.classes == ("iris", "rose")
    parts = [dataset.arrays for dataset in (table.train, table.held_out)]
    widths = np.concatenate([part["inputs"][:, 0] for part in parts])
    assert sorted(widths) == list(range(60))
    for part in parts:
        width, height = part["inputs"].T
        assert np.array_equal(height, width / 2)
        assert np.array_equal(part["labels"], (width % 3 == 0).astype(np.int32))
    assert 5 <= len(parts[1]["labels"]) <= 20


def test_split_is_stable_under_additions(tmp_path):
    few, many = (load(flowers(tmp_path, n)).held_out.arrays["inputs"][:, 0] for n in (60, 200))
    assert np.array_equal(few, many[many < 60])


def test_fingerprint_covers_inputs_and_labels(tmp_path):
    path = flowers(tmp_path)
    before = load(path).fingerprint
    assert load(path, seed=1).fingerprint == before
    path.write_text(path.read_text().replace("7,iris,3.5", "7,iris,3.6"))
    assert load(path).fingerprint != before
    path.write_text(path.read_text().replace("7,iris,3.6", "7,rose,3.5"))
    assert load(path).fingerprint != before


def test_digits_come_from_scikit_learn(monkeypatch):
    pytest.importorskip("sklearn")
    table = tabular.read_table(tabular.Config(), seed=0)
    assert table.classes == tuple("0123456789")
    assert table.in_size == 64
    num_rows = [len(dataset.arrays["labels"]) for dataset in (table.train, table.held_out)]
    assert sum(num_rows) == 1797
    assert table.train.arrays["inputs"].max() == 1.0
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"zoo\[recipes\]"):
        tabular.read_table(tabular.Config(), seed=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2", r"rows\.csv, line 2 .* 'species': .* \['a', 'b'\]"),
        ("a,species\n1,x\none,y", r"line 3: .* 'one'; all columns"),
        ("a,a,species\n1,2,x", r"rows\.csv has 2 columns named 'a'"),
        ("a,species\nnan,x", "all of them finite"),
        ("a,species\n", "all of them finite"),
        ("a,species\n1,x\n2,x\n3,x\n4,x\n5,x\n6,x", "that needs two classes"),
    ],
)
def test_malformed_tables_are_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path, text), held_out=0.5)


def test_classes_without_training_rows_are_refused(tmp_path):
    first = min(range(20), key=lambda row: unit_hash(str(row)))
    rows = [f"1,{'y' if row == first else 'x'}" for row in range(20)]
    path = write(tmp_path, "\n".join(["a,species", *rows]))
    with pytest.raises(ValueError, match="class 'y'"):
        load(path, held_out=unit_hash(str(first)) + 1e-6)


def test_holding_out_everything_is_refused():
    with pytest.raises(ValueError, match=r"data\.held_out=1"):
        tabular.Config(held_out=1.0)


def test_missing_files_are_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"data\.file='.*rows\.csv':"):
        tabular.read_rows(tmp_path / "rows.csv", "kind")
