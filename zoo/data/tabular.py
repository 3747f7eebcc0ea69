"""Datasets of numbers with labels, from a file or from the digits that scikit-learn brings."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from jaxtyping import Float32

from zoo.common import checksums, configuration
from zoo.common.configuration import may_differ, require
from zoo.common.files import local_path
from zoo.data.documents import unit_hash
from zoo.data.formats import read_csv
from zoo.data.sources import ArrayDataset
from zoo.data.splits import whole_file


@dataclass(frozen=True)
class Config:
    """Where labelled rows of numbers come from, and how they become batches."""

    file: Annotated[str, tyro.conf.arg(aliases=("--data",))] = may_differ("")
    """CSV file of numbers, scaled to the order of one, whose first line names the columns. Empty:
    scikit-learn's 1,797 handwritten digits of 8 by 8 pixels (extra: recipes)."""
    # What it holds may not differ: a run compares the fingerprint of the rows.
    label: str = "label"
    """Column of the file that holds the label; the others are the model's inputs."""
    batch_size: int = 64
    """Rows in a global batch, over all devices and microbatches."""
    held_out: float = 0.2
    """Share of the rows kept from training, to evaluate on."""

    def __post_init__(self) -> None:
        configuration.check(self, "data.")
        require(0 < self.held_out < 1, f"data.held_out={self.held_out}: must lie between 0 and 1")


@dataclass(frozen=True)
class Table:
    """The datasets of the training and the held-out rows; `classes` names the labels 0, 1, …"""

    train: ArrayDataset
    held_out: ArrayDataset
    classes: tuple[str, ...]

    @property
    def in_size(self) -> int:
        """Features of a row."""
        return self.train.arrays["inputs"].shape[1]

    @property
    def fingerprint(self) -> str:
        """A hash of every number of both parts: equal fingerprints mean equal batches."""
        return checksums.of_values(
            array for part in (self.train, self.held_out) for array in part.arrays.values()
        )


def read_table(config: Config, *, seed: int) -> Table:
    """Read the rows and split them; a hash of its number decides whether a row is held out.

    Raises:
        ImportError: the digits without scikit-learn.
        ValueError: a file that holds something else, with its line, or too little.
    """
    if config.file:
        inputs, names = read_rows(local_path(config.file, "data"), config.label)
    else:
        inputs, names = digits()
    classes = tuple(sorted(set(names)))
    labels = np.asarray([classes.index(name) for name in names], np.int32)
    held_out = np.asarray([unit_hash(str(row)) < config.held_out for row in range(len(names))])
    if missing := set(range(len(classes))) - set(labels[~held_out].tolist()):
        raise ValueError(
            f"{config.file}: no row to train on of class {classes[missing.pop()]!r}: give more "
            f"rows, or a smaller data.held_out than {config.held_out}"
        )
    if len(classes) < 2 or not held_out.any():
        raise ValueError(
            f"{config.file}: {len(names)} rows of the classes {classes}, {held_out.sum()} held "
            "out: that needs two classes, and a row held out"
        )
    train, held = (
        ArrayDataset({"inputs": inputs[rows], "labels": labels[rows]}, config.batch_size, seed)
        for rows in (~held_out, held_out)
    )
    return Table(train, held, classes)


def digits() -> tuple[Float32[np.ndarray, "rows 64"], list[str]]:
    """The pixels, in [0, 1], and labels of scikit-learn's handwritten digits (Alpaydin 1998)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the digits come with scikit-learn: pip install 'zoo[recipes]', or give --data a file"
        ) from error
    found = load_digits()
    return (found.data / 16).astype(np.float32), [str(label) for label in found.target]


def read_rows(path: Path, label: str) -> tuple[Float32[np.ndarray, "rows features"], list[str]]:
    """The numbers of a CSV file in the order of its columns, and its labels."""
    if not path.is_file():
        raise FileNotFoundError(f"data.file='{path}': there is no such file in {Path.cwd()}")
    rows, labels = [], []
    for _, where, record in read_csv(whole_file(path)):
        if label not in record:
            raise ValueError(f"{where} has no field {label!r}: its fields are {sorted(record)}")
        labels.append(record.pop(label))
        try:
            rows.append([float(value) for value in record.values()])
        except ValueError as error:
            raise ValueError(f"{where}: {error}; all columns but {label!r} are numbers") from error
    numbers = np.asarray(rows, np.float32).reshape(len(rows), len(rows[0]) if rows else 0)
    if not numbers.size or not np.isfinite(numbers).all():
        raise ValueError(
            f"{path} has {numbers.shape[0]} rows of {numbers.shape[1]} numbers: it needs some, and "
            "all of them finite"
        )
    return numbers, labels
