"""Labelled pictures of a folder per class, as the batches of a training and of an evaluation."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zoo.common import checksums
from zoo.data.documents import unit_hash
from zoo.data.sources import RowDataset, batches
from zoo.images.augmentation import crop, flip
from zoo.images.pictures import Folder
from zoo.images.processor import FILE_NAME, Processor


@dataclass(frozen=True)
class LabelledPictures:
    """The datasets of the training and the held-out pictures; `classes` are the folders' names."""

    train: RowDataset
    held_out: RowDataset
    classes: tuple[str, ...]
    processor: Processor
    """The processor that makes a model's inputs of pictures, saved beside the model."""

    @property
    def fingerprint(self) -> str:
        """A hash of both parts: another one means other batches."""
        return checksums.of_values([self.train.fingerprint, self.held_out.fingerprint])  # type: ignore[attr-defined]


def read_folder(
    folder: str | Path,
    batch_size: int,
    *,
    model: str | Path,
    size: int,
    channels: int = 3,
    held_out: float = 0.1,
    augment: bool = True,
    skip_damaged: bool = False,
    seed: int = 0,
) -> LabelledPictures:
    """The pictures of a folder per class, as a model's own processor prepares them.

    A picture is held out by a hash of its name. `model` is the model's folder; without a processor
    there, pictures become squares of `size` pixels, with values from -1 to 1. With `augment` the
    pictures to train on are cropped and mirrored by chance. With `skip_damaged` what cannot be
    decoded is left out.

    Raises:
        ValueError: fewer than two classes, or a class without a picture to train on.
    """
    source = Folder(folder, channels=channels, skip_damaged=skip_damaged)
    has_own = (Path(model) / FILE_NAME).is_file()
    processor = Processor.of(model) if has_own else Processor(size=(size, size))
    is_held_out = np.array([unit_hash(name) < held_out for name in source.names])
    trained = source.labels[~is_held_out]
    missing = [x for i, x in enumerate(source.classes) if i not in trained]
    if missing or not is_held_out.any():
        raise ValueError(
            f"folder={str(folder)!r}: of {len(source)} pictures {int(is_held_out.sum())} are held "
            f"out, and of the classes {missing} all are; give more pictures, or another held_out "
            f"than {held_out}"
        )
    cropped, cores = crop(size), os.cpu_count() or 1  # two batches are made at a time

    def augmented(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return processor(flip(cropped(row, rng), rng))

    def part(rows: Any, transform: Any, shuffle: bool) -> RowDataset:
        chosen = source.chosen(np.flatnonzero(rows))
        options: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "threads": cores // 2 or 1}
        return batches(chosen, batch_size, transform=transform, **options)

    train = part(~is_held_out, augmented if augment else processor, True)
    return LabelledPictures(train, part(is_held_out, processor, False), source.classes, processor)
