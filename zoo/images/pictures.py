"""Pictures by their numbers, decoded as they are read: from a folder per class, or from a column.

A source keeps names alone: only the pictures of a batch are read and decoded, in the threads that
make batches ahead of the step.
"""

import copy
import io
import logging
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from zoo.common.configuration import require

logger = logging.getLogger(__name__)
SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
Pixels = UInt8[np.ndarray, "height width channels"]


def decode(content: bytes, name: str, channels: int = 3) -> Pixels:
    """The pixels of a picture, uint8[height, width, channels]; 3 channels are red, green and blue.

    Palettes are looked up, what is transparent becomes white, and a photo is turned upright.

    Raises:
        ValueError: damaged content, or a picture that has no one reading in 8 bits: of several
            frames, in CMYK, or of more than 8 bits per channel. The message has `name`.
    """
    import PIL.Image  # here: a program without pictures need not have it
    import PIL.ImageOps

    try:
        with PIL.Image.open(io.BytesIO(content)) as picture:
            if frames := getattr(picture, "n_frames", 1) - 1:
                raise ValueError(f"{name} has {frames + 1} frames: choose one, and save it alone")
            # Pillow cuts colours of 16 bits as it decodes them: only how they are stored tells.
            deep = re.findall(r"\w+;16[BLN]", str([part[3] for part in picture.tile]))
            if deep or picture.mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA"):
                raise ValueError(
                    f"{name} is of mode {[*deep, picture.mode][0]}, whose colours have no one "
                    "reading in 8 bits per channel: convert it, as by Pillow's convert('RGB')"
                )
            return _as_array(PIL.ImageOps.exif_transpose(picture), channels)
    except (OSError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        unknown = isinstance(error, PIL.UnidentifiedImageError)
        reason = "its content has no known format" if unknown else error
        raise ValueError(f"{name} is damaged, or no picture: {reason}") from error


def _as_array(picture: Any, channels: int) -> Pixels:
    """The pixels of an opened picture of 8 bits per channel."""
    import PIL.Image

    require(channels in (1, 3), f"channels={channels}: must be 1 (grey) or 3 (red, green, blue)")
    if picture.mode in ("LA", "PA", "RGBA") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        white = PIL.Image.new("RGBA", picture.size, (255, 255, 255, 255))
        picture = PIL.Image.alpha_composite(white, picture)
    pixels = np.asarray(picture.convert("RGB" if channels == 3 else "L"))
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


class _Pictures:
    """Rows of a picture and its class, by their numbers."""

    def __init__(self, labels: Sequence[int] | np.ndarray, classes: Sequence[str], channels: int):
        self.labels, self.classes = np.asarray(labels, np.int32), tuple(classes)
        self.channels, self.num_skipped = channels, 0
        self._rows = np.arange(len(labels))  # of the source, which are kept

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: Any) -> dict[str, Any]:
        """Row i: `image`, uint8[height, width, channels], and `label`, int32[]."""
        content, name = self._content(int(self._rows[int(i)]))
        return {"image": decode(content, name, self.channels), "label": self.labels[i]}

    def _content(self, row: int) -> tuple[bytes, str]:
        """The bytes of a picture of the source, and its name in messages."""
        raise NotImplementedError

    def _keep(self, numbers: Sequence[int] | np.ndarray) -> None:
        """Keep these rows alone."""
        self._rows, self.labels = self._rows[numbers], self.labels[numbers]

    def _skip_damaged(self) -> None:
        """Leave out, count and log what cannot be decoded, by decoding all once."""

        def refusal(i: int) -> str:
            try:
                self[i]
            except (ValueError, OSError) as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            refused = list(pool.map(refusal, range(len(self))))
        kept = [i for i, reason in enumerate(refused) if not reason]
        self.num_skipped = len(refused) - len(kept)
        if self.num_skipped:
            first = next(filter(None, refused))
            logger.warning("%d of %d pictures are skipped, the first as %s", self.num_skipped,
                           len(refused), first)  # fmt: skip
        require(len(kept) > 0, "skip_damaged=True: no picture is left")
        self._keep(kept)


class Folder(_Pictures):
    """The pictures in the folders of a folder, one for each class and with its name.

    A row is a dict of `image`, uint8[height, width, channels], and `label`, int32[], the number of
    the class in `classes`, whose order is that of their names. Names are listed, but no picture is
    opened before its row is asked for; with `skip_damaged` all are decoded once, and the ones that
    cannot be are left out and counted, in `num_skipped`.

    Raises:
        ValueError: fewer than two classes, a class without a picture, or a picture without a class.
    """

    def __init__(self, folder: str | Path, *, channels: int = 3, skip_damaged: bool = False):
        self.folder = Path(folder)
        require(
            self.folder.is_dir(),
            f"folder={str(folder)!r}: there is no such folder; give one with a folder per class",
        )
        classes = sorted(x.name for x in os.scandir(folder) if x.is_dir() and x.name[0] != ".")
        require(
            len(classes) > 1,
            f"folder={str(folder)!r} has the classes {classes}: two at least, each a folder "
            "with the pictures of the class of its name",
        )
        if stray := [x.name for x in os.scandir(folder) if x.is_file() and _is_picture(x.name)]:
            raise ValueError(
                f"folder={str(folder)!r}: {len(stray)} pictures are in no class's folder, as "
                f"{stray[0]}; move them, or remove them"
            )
        names, labels = list[str](), list[int]()
        for label, name in enumerate(classes):
            found = sorted(_pictures_in(self.folder / name, name))
            require(len(found) > 0, f"{self.folder / name} has no picture: remove the folder")
            names += found
            labels += [label] * len(found)
        super().__init__(labels, classes, channels)
        self._names = np.array([os.fsencode(name) for name in names])  # without an object each
        if skip_damaged:
            self._skip_damaged()

    @property
    def names(self) -> list[str]:
        """The paths of the pictures in the folder."""
        return [os.fsdecode(bytes(name)) for name in self._names[self._rows]]

    def chosen(self, numbers: Sequence[int] | np.ndarray) -> "Folder":
        """The pictures of these numbers alone."""
        other = copy.copy(self)
        other._keep(numbers)
        return other

    def _content(self, row: int) -> tuple[bytes, str]:
        path = self.folder / os.fsdecode(bytes(self._names[row]))
        return path.read_bytes(), str(path)


def _pictures_in(folder: Path, name: str) -> Iterable[str]:
    """The paths of pictures in a folder and the folders in it, after `name`."""
    for entry in os.scandir(folder):
        path = f"{name}/{entry.name}"
        if entry.is_dir():
            yield from _pictures_in(Path(entry.path), path)
        elif _is_picture(entry.name):
            yield path


def _is_picture(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


class Encoded(_Pictures):
    """Pictures that are encoded in a column, such as a Parquet file's, and their labels.

    `column` gives for i the bytes of picture i, or a dict with them as `bytes`, as Hugging Face's
    data sets have. `labels` are the numbers of classes, of which some may be without a picture, or
    names, whose order gives the numbers. Rows are as `Folder` has them.

    Raises:
        ValueError: another number of pictures than of labels, or fewer than two classes.
    """

    def __init__(
        self,
        column: Sequence[Any] | Any,
        labels: Sequence[Any],
        *,
        channels: int = 3,
        skip_damaged: bool = False,
    ):
        require(
            len(column) == len(labels),
            f"column has {len(column)} pictures, and labels {len(labels)}: give each picture one",
        )
        found = sorted(set(labels))
        require(len(found) > 1, f"labels={found}: two classes at least")
        is_number = np.issubdtype(type(found[0]), np.integer) and found[0] >= 0
        numbers = {x: i for i, x in enumerate(range(found[-1] + 1) if is_number else found)}
        super().__init__([numbers[x] for x in labels], [str(x) for x in numbers], channels)
        self._column = column
        if skip_damaged:
            self._skip_damaged()

    def _content(self, row: int) -> tuple[bytes, str]:
        found = self._column[row]
        found = found.as_py() if hasattr(found, "as_py") else found  # of pyarrow
        content = found.get("bytes") if isinstance(found, dict) else found
        if not isinstance(content, bytes):
            raise ValueError(f"row {row} of column: no bytes of a picture")
        return content, f"row {row} of column"
