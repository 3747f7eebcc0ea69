"""Processors of checkpoints: golden pictures of transformers, and refused settings."""

import json
from pathlib import Path

import numpy as np
import pytest

from zoo import images

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "images.npz")
NAMES = [name.removesuffix(" settings") for name in GOLDEN if name.endswith(" settings")]


@pytest.mark.parametrize("name", NAMES)
def test_pictures_are_processed_as_by_transformers(name: str, tmp_path: Path):
    path = tmp_path / "preprocessor_config.json"
    path.write_text(str(GOLDEN[f"{name} settings"]))
    processor, want = images.Processor.of(tmp_path), GOLDEN[name]
    got = processor({"image": GOLDEN["picture"], "label": np.int32(1)})
    assert got["labels"] == 1
    assert got["inputs"].shape == want.shape
    level = processor.scale / min(processor.std)  # one grey level
    assert np.abs(got["inputs"] - want).max() <= 1.001 * level
    assert np.abs(got["inputs"] - want).mean() < 0.1 * level


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": {"longest_edge": 3}}, "size=.*longest_edge"),
        ({"resample": 9}, "resample=9"),
        ({"image_std": [0.5, 0.0, 0.5]}, r"std=\(0.5, 0.0, 0.5\)"),
    ],
)
def test_settings_that_are_not_supported_are_refused(changes: dict, message: str, tmp_path: Path):
    values = {"size": {"height": 4, "width": 4}, **changes}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        images.Processor.of(tmp_path)


def test_a_crop_that_is_larger_is_refused():
    with pytest.raises(ValueError, match=r"crop=\(9, 9\): a picture of 4 x 4 is smaller"):
        images.Processor(size=(4, 4), crop=(9, 9)).resized(np.zeros((6, 6, 3), np.uint8))


def test_another_size_keeps_the_rest():
    processor = images.Processor(size=30, crop=(24, 24), resample=3).for_size(8)
    assert (processor.size, processor.crop, processor.resample) == ((8, 8), None, 3)
