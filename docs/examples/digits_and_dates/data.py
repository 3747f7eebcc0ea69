"""The data of both networks: scikit-learn's digits, and dates as people write them."""

import datetime
import hashlib
from typing import NamedTuple

import numpy as np

import zoo

SOURCE_LENGTH, TARGET_LENGTH = 28, 10  # "Wednesday, 30 September 2026", "2026-09-30"
NUM_TOKENS = 128  # ASCII; 0 pads
START = 1
FORMATS = ("%A, %-d %B %Y", "%a %-d %b %Y", "%-d %B %Y", "%B %-d, %Y", "%-m/%-d/%Y", "%d.%m.%y")
FIRST, LAST = datetime.date(1970, 1, 1), datetime.date(2029, 12, 31)


class Data(NamedTuple):
    """Batches to train and to evaluate on, and a hash of all of it."""

    train: zoo.Dataset
    held_out: zoo.Dataset
    fingerprint: str


def digits(batch_size: int, seed: int) -> Data:
    """1,797 handwritten digits: images float32[batch, 1, 8, 8] in [0, 1], labels int32[batch].

    A fifth is held out, the same for every seed. The rest is cut to whole batches, as rows that pad
    a batch would be part of a batch norm's statistics.
    """
    from sklearn.datasets import load_digits

    given = load_digits()
    images = (given.images[:, None] / 16).astype(np.float32)
    labels = given.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    train, held_out = np.split(order, [len(labels) * 4 // 5])
    train = train[: len(train) // batch_size * batch_size]

    def dataset(rows: np.ndarray, shuffle: bool) -> zoo.ArrayDataset:
        arrays = {"images": images[rows], "labels": labels[rows]}
        return zoo.ArrayDataset(arrays, batch_size, seed, shuffle)

    digest = hashlib.sha256(images.tobytes() + labels.tobytes())
    return Data(dataset(train, True), dataset(held_out, False), digest.hexdigest())


def dates(batch_size: int, seed: int) -> Data:
    """Days of sixty years as people write them, and in ISO 8601; each fifth day is held out."""
    days = [FIRST + datetime.timedelta(days=i) for i in range((LAST - FIRST).days + 1)]
    train = DateDataset([day for i, day in enumerate(days) if i % 5], batch_size, seed)
    held_out = DateDataset(days[::5], batch_size, seed=0)
    return Data(train, held_out, f"{FIRST} {LAST} {FORMATS}")


class DateDataset:
    """Random days, each in a random format: batch k is drawn from the seed and k alone.

    It is a `zoo.Dataset` by its members. `source` is int32[batch, 28], `targets` int32[batch, 10],
    and `prefix` is the same behind a start token and without its end.
    """

    unit = "examples"
    buckets = (TARGET_LENGTH,)

    def __init__(self, days: list[datetime.date], batch_size: int, seed: int):
        self._days, self._seed = days, seed
        self.batch_size = batch_size
        self.batches_per_epoch = len(days) // batch_size

    def row(self, bucket: int) -> dict[str, tuple[tuple[int, ...], type]]:
        """The shape and the dtype of each array, without the batch."""
        target = ((TARGET_LENGTH,), np.int32)
        source = ((SOURCE_LENGTH,), np.int32)
        return {"source": source, "prefix": target, "targets": target, "weights": ((), np.float32)}

    def batch(self, k: int, rows: slice | None = None) -> dict[str, np.ndarray]:
        """Batch k, or some of its rows."""
        generator = np.random.default_rng([self._seed, k])
        places = generator.integers(0, len(self._days), self.batch_size)[rows or slice(None)]
        formats = generator.integers(0, len(FORMATS), self.batch_size)[rows or slice(None)]
        days = [self._days[i] for i in places]
        written = [day.strftime(FORMATS[i]) for day, i in zip(days, formats, strict=True)]
        targets = encode([day.isoformat() for day in days], TARGET_LENGTH)
        prefix = np.concatenate([np.full_like(targets[:, :1], START), targets[:, :-1]], axis=1)
        source, weights = encode(written, SOURCE_LENGTH), np.ones(len(days), np.float32)
        return {"source": source, "prefix": prefix, "targets": targets, "weights": weights}


def encode(texts: list[str], length: int) -> np.ndarray:
    """ASCII texts as int32[texts, length], padded with 0."""
    padded = "".join(text.ljust(length, "\0") for text in texts)
    return np.frombuffer(padded.encode("ascii"), np.uint8).reshape(-1, length).astype(np.int32)
