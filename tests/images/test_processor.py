"""Processors of checkpoints: golden pictures of transformers, and refused settings."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo import images

GOLDENS = Path(__file__).parents[1] / "golden"
GOLDEN = np.load(GOLDENS / "images.npz")
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


def test_a_file_gets_the_logits_that_transformers_gives_it(tmp_path: Path):
    (tmp_path / "preprocessor_config.json").write_text(str(GOLDEN["jpeg processor"]))
    for label in ("one", "other"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        (tmp_path / "photos" / label / "1.jpg").write_bytes(GOLDEN["jpeg"].tobytes())
    rows = images.Folder(tmp_path / "photos")
    batch = zoo.batches(rows, 2, transform=images.Processor.of(tmp_path)).batch(0)
    found = zoo.load(GOLDENS / "hf" / "vit_classes")(jnp.asarray(batch["inputs"]))
    np.testing.assert_allclose(found, np.stack([GOLDEN["jpeg logits"]] * 2), atol=1e-3)


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
    with pytest.raises(ValueError, match=r"crop=\(9, 9\): .* 4 x 4 is smaller"):
        images.Processor(size=(4, 4), crop=(9, 9)).resized(np.zeros((6, 6, 3), np.uint8))


@pytest.mark.parametrize(
    "processor",
    [
        images.Processor(),
        images.Processor(size=None, scale=1.0, mean=(0.0, 0.1, 0.2), std=(1.0, 2.0, 3.0)),
        images.Processor(size=8, crop=(6, 4), resample=3),
    ],
    ids=["default", "no size", "crop"],
)
def test_a_processor_is_read_as_it_was_written(processor: images.Processor, tmp_path: Path):
    processor.save(tmp_path)
    assert images.Processor.of(tmp_path) == processor
    size = json.loads((tmp_path / "preprocessor_config.json").read_text())["size"]
    assert size is None or {*size} in ({"height", "width"}, {"shortest_edge"})  # to transformers


def test_without_settings_values_are_from_minus_one_to_one():
    processor = images.Processor(size=None, crop=(1, 2))  # as large as the picture
    picture = np.asarray([[[0, 51, 255], [255, 204, 0]]], np.uint8)
    got = processor.normalised(processor.resized(picture))
    np.testing.assert_allclose(got, [[[-1, -0.6, 1], [1, 0.6, -1]]], atol=1e-6)
