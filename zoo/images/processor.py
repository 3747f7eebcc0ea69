"""The pictures that a checkpoint wants: their size and the range of their values."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8

from zoo.common.configuration import require
from zoo.images.pictures import Pixels

FILE_NAME = "preprocessor_config.json"
RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}


@dataclass(frozen=True)
class Processor:
    """Resizes, crops and normalises pictures as Hugging Face's processors do."""

    size: tuple[int, int] | int | None = (224, 224)
    """Height and width that a picture gets, or one number for its shorter side; None leaves it."""
    crop: tuple[int, int] | None = None
    """Height and width that are cut out of the middle."""
    resample: int = 2
    """Pillow's number of the filter: 0 nearest, 1 lanczos, 2 bilinear, 3 bicubic, 4 box."""
    scale: float = 1 / 255
    """Factor of the values."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    """The mean of each channel, which is taken off."""
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    """The divisor of each channel."""

    def __post_init__(self) -> None:
        require(self.resample in RESAMPLING, f"resample={self.resample}: choose of {RESAMPLING}")
        require(min(self.std) > 0, f"std={self.std}: must be positive")

    @classmethod
    def of(cls, folder: str | Path) -> "Processor":
        """The processor of a model's folder, by its `preprocessor_config.json`.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: settings that are not supported.
        """
        path = Path(folder)
        path = path if path.is_file() else path / FILE_NAME
        values = json.loads(path.read_text())
        crop = _pair(values.get("crop_size")) if values.get("do_center_crop") else None
        require(isinstance(crop, tuple | None), f"{path}: crop_size={values.get('crop_size')!r}")
        none = (0.0,) * 3, (1.0,) * 3
        normalises = values.get("do_normalize", True)
        mean, std = (values.get("image_mean"), values.get("image_std")) if normalises else none
        return cls(
            size=_pair(values.get("size")) if values.get("do_resize", True) else None,
            crop=crop,
            resample=values.get("resample", 2),
            scale=values.get("rescale_factor", 1 / 255) if values.get("do_rescale", True) else 1.0,
            mean=tuple(mean or cls.mean),
            std=tuple(std or cls.std),
        )

    def save(self, folder: Path) -> None:
        """Write the file that `of` and transformers read."""
        sides = lambda x: {"height": x[0], "width": x[1]}  # noqa: E731
        size: Any = {"shortest_edge": self.size}
        if not isinstance(self.size, int):
            size = None if self.size is None else sides(self.size)
        values = {
            "do_resize": self.size is not None,
            "size": size,
            "resample": self.resample,
            "do_center_crop": self.crop is not None,
            **({} if self.crop is None else {"crop_size": sides(self.crop)}),
            "do_rescale": True,
            "rescale_factor": self.scale,
            "do_normalize": True,
            "image_mean": self.mean,
            "image_std": self.std,
            "image_processor_type": "ViTImageProcessor",
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE_NAME).write_text(json.dumps(values, indent=1) + "\n")

    def resized(self, image: Pixels) -> UInt8[np.ndarray, "rows columns channels"]:
        """A picture in the size that the model wants, in 8 bits."""
        import PIL.Image

        height, width = image.shape[:2]
        if self.size is not None:
            size = self.size
            if isinstance(size, int):  # the shorter side, the longer one rounded down
                short = min(height, width)
                size = int(size * height / short), int(size * width / short)
            picture = PIL.Image.fromarray(image.squeeze(2) if image.shape[2] == 1 else image)
            filtered = picture.resize(size[::-1], PIL.Image.Resampling(self.resample))
            image = np.asarray(filtered).reshape(*size, image.shape[2])
        if self.crop is None:
            return image
        height, width = self.crop
        require(
            image.shape[0] >= height and image.shape[1] >= width,
            f"crop={self.crop}: a picture of {image.shape[0]} x {image.shape[1]} is smaller",
        )
        top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
        return image[top : top + height, left : left + width]

    def __call__(self, row: dict[str, Any], rng: Any = None) -> dict[str, Any]:
        """A row of `Folder` as a model takes it: `inputs`, float32, and `labels`, int32.

        It is a transform of `zoo.batches`.
        """
        inputs = self.normalised(self.resized(row["image"]))
        return {"inputs": inputs, "labels": row["label"]}

    def normalised(self, image: Pixels) -> Float32[np.ndarray, "height width channels"]:
        """The values as the model takes them."""
        height, width, channels = image.shape
        mean, std = (np.asarray(x[:channels]) for x in (self.mean, self.std))
        # Row by row, as NumPy is slow in loops over three channels.
        factor, less = (
            np.tile(x, width).astype(np.float32) for x in (self.scale / std, mean / std)
        )
        rows = np.multiply(image.reshape(height, -1), factor, dtype=np.float32)
        rows -= less
        return rows.reshape(image.shape)


def _pair(size: Any) -> Any:
    """A size of the file: a number, or names of sides."""
    if isinstance(size, dict) and size.keys() == {"height", "width"}:
        return size["height"], size["width"]
    if isinstance(size, dict) and size.keys() == {"shortest_edge"}:
        return size["shortest_edge"]
    if isinstance(size, int):
        return size, size
    raise ValueError(f"size={size!r}: is not supported, only height and width, or shortest_edge")
