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

    A fifth is held out, the same for every seed. The rest comes in whole batches, as rows that fill
    up a batch would be part of a batch norm's statistics.
    """
    from sklearn.datasets import load_digits

    given = load_digits()
    images = (given.images[:, None] / 16).astype(np.float32)
    labels = given.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    train, held_out = (
        {"images": images[rows], "labels": labels[rows]}
        for rows in np.split(order, [len(labels) * 4 // 5])
    )
    digest = hashlib.sha256(images.tobytes() + labels.tobytes())
    return Data(
        zoo.batches(train, batch_size, seed=seed, drop_last=True),
        zoo.batches(held_out, batch_size, shuffle=False),
        digest.hexdigest(),
    )


def dates(batch_size: int, seed: int) -> Data:
    """Days of sixty years as people write them, and in ISO 8601; each fifth day is held out."""
    days = [FIRST + datetime.timedelta(days=i) for i in range((LAST - FIRST).days + 1)]
    train = [day for i, day in enumerate(days) if i % 5]
    return Data(
        zoo.batches(train, batch_size, seed=seed, transform=translation),
        zoo.batches(days[::5], batch_size, transform=translation),
        f"{FIRST} {LAST} {FORMATS}",
    )


def translation(day: datetime.date, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A day in a random format, `source` int32[28], and in ISO 8601, `targets` int32[10].

    `prefix` is the latter behind a start token and without its end.
    """
    written = day.strftime(FORMATS[rng.integers(len(FORMATS))])
    source, targets = encode(written, SOURCE_LENGTH), encode(day.isoformat(), TARGET_LENGTH)
    prefix = np.concatenate([[START], targets[:-1]]).astype(np.int32)
    return {"source": source, "prefix": prefix, "targets": targets}


def encode(text: str, length: int) -> np.ndarray:
    """An ASCII text as int32[length], padded with 0."""
    return np.frombuffer(text.ljust(length, "\0").encode("ascii"), np.uint8).astype(np.int32)
