"""Folders and columns of pictures: what is read, and what is named and refused."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

import zoo
from zoo import images


def encoded(array: Any, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    picture = array if isinstance(array, PIL.Image.Image) else PIL.Image.fromarray(array)
    picture.save(stream, kind, **options)
    return stream.getvalue()


def pixels(seed: int = 0, height: int = 6, width: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for label, name in enumerate(("ant", "bee", "cow")):
        (tmp_path / name / "inner").mkdir(parents=True)
        for i in range(3):
            path = tmp_path / name / ("inner" if i else "") / f"{i}.png"
            path.write_bytes(encoded(pixels(3 * label + i)))
        (tmp_path / name / "notes.txt").write_text("no picture")
    return tmp_path


def test_a_folder_has_a_class_per_folder(folder: Path):
    source = images.Folder(folder)
    assert source.classes == ("ant", "bee", "cow")
    assert source.labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    for i, row in enumerate(source[i] for i in range(9)):
        np.testing.assert_array_equal(row["image"], pixels(i))
        assert row["label"] == i // 3
    grey = images.Folder(folder, channels=1)[4]["image"]
    assert grey.shape == (6, 8, 1)
    assert abs(grey.mean() - pixels(4).mean()) < 20


def test_batches_of_a_folder_are_processed_rows(folder: Path):
    source, processor = images.Folder(folder), images.Processor(size=(4, 4))

    def transform(row: Any, rng: np.random.Generator) -> Any:
        return processor(images.flip(images.crop(5)(row, rng), rng))

    data = zoo.batches(source, 4, transform=transform, seed=3)
    again = zoo.batches(images.Folder(folder), 4, transform=transform, seed=3)
    found = [data.batch(k) for k in range(2 * data.batches_per_epoch)]
    for k, batch in enumerate(found):
        assert (batch["inputs"].shape, batch["inputs"].dtype) == ((4, 4, 4, 3), np.float32)
        other = again.batch(k, slice(1, 3))
        np.testing.assert_array_equal(other["inputs"], batch["inputs"][1:3])
    epoch = found[: data.batches_per_epoch]
    labels = np.concatenate([x["labels"][x["weights"] > 0] for x in epoch])
    assert sorted(labels) == [0] * 3 + [1] * 3 + [2] * 3
    assert data.fingerprint == again.fingerprint


def frames() -> bytes:
    rest = [PIL.Image.fromarray(pixels(1))]
    return encoded(pixels(), "GIF", save_all=True, append_images=rest)


def deep() -> bytes:
    """A PNG of 16 bits per colour, which Pillow cannot write."""

    def chunk(name: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)
    row = zlib.compress(b"\0" + bytes(12))
    chunks = (b"IHDR", header), (b"IDAT", row), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*x) for x in chunks)


BAD = {
    "cut.jpg": (encoded(np.tile(pixels(), (8, 8, 1)), "JPEG")[:-200], "is damaged, or no picture"),
    "text.png": (b"no picture at all", "is damaged, or no picture: its content has no"),
    "empty.png": (b"", "is damaged, or no picture"),
    "print.jpg": (encoded(PIL.Image.new("CMYK", (4, 4)), "JPEG"), "is of mode CMYK"),
    "deep.png": (encoded(pixels()[:, :, 0].astype(np.uint16)), "is of mode I;16"),
    "deep_colours.png": (deep(), "is of mode RGB;16B"),
    "film.gif": (frames(), "has 2 frames: choose one"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_pictures_are_named(name: str, folder: Path):
    content, message = BAD[name]
    (folder / "bee" / name).write_bytes(content)
    source = images.Folder(folder)
    assert len(source) == 10
    with pytest.raises(ValueError, match=f"bee/{name}.*{message}"):
        [source[i] for i in range(10)]
    processor = images.Processor(size=(4, 4))
    with pytest.raises(ValueError, match=f"row [0-9] of the source.*bee/{name}"):
        [zoo.batches(source, 10, transform=processor).batch(k) for k in range(1)]


def test_bad_pictures_are_skipped_and_counted(folder: Path, caplog: Any):
    for name, (content, _) in BAD.items():
        (folder / "bee" / name).write_bytes(content)
    source = images.Folder(folder, skip_damaged=True)
    assert (len(source), source.num_skipped) == (9, len(BAD))
    assert f"{len(BAD)} of {9 + len(BAD)} pictures are skipped, the first as" in caplog.text
    assert [row["label"] for row in (source[i] for i in range(9))] == [0] * 3 + [1] * 3 + [2] * 3


def test_palettes_and_transparency_have_a_reading():
    palette = encoded(PIL.Image.fromarray(pixels()).convert("P"))
    assert images.decode(palette, "a").shape == (6, 8, 3)
    clear = np.zeros((2, 2, 4), np.uint8)
    clear[0, 0] = 255, 0, 0, 255
    found = images.decode(encoded(clear), "a")
    np.testing.assert_array_equal(found[:, :, 1], [[0, 255], [255, 255]])
    with pytest.raises(ValueError, match="channels=4: must be 1"):
        images.decode(palette, "a", channels=4)


def test_photos_are_turned_upright():
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # the camera was turned: the first row is the right side
    lying = pixels()
    found = images.decode(encoded(lying, "PNG", exif=exif), "photo.png")
    np.testing.assert_array_equal(found, np.rot90(lying, -1))


def test_folders_that_are_no_classes_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"nowhere.*no such folder"):
        images.Folder(tmp_path / "nowhere")
    (tmp_path / "ant").mkdir()
    (tmp_path / "ant" / "0.png").write_bytes(encoded(pixels()))
    with pytest.raises(ValueError, match=r"classes \['ant'\]"):
        images.Folder(tmp_path)
    (tmp_path / "bee").mkdir()
    with pytest.raises(ValueError, match="bee has no picture"):
        images.Folder(tmp_path)
    (tmp_path / "stray.png").write_bytes(encoded(pixels()))
    with pytest.raises(ValueError, match=r"1 .* stray\.png"):
        images.Folder(tmp_path)


def test_a_column_of_encoded_pictures(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    column = [encoded(pixels(i)) for i in range(4)]
    for given in (column, [{"bytes": x, "path": None} for x in column], pyarrow.array(column)):
        source = images.Encoded(given, ["b", "a", "b", "a"])
        assert source.classes == ("a", "b")
        assert source.labels.tolist() == [1, 0, 1, 0]
        np.testing.assert_array_equal(source[2]["image"], pixels(2))
    held_out = images.Encoded(column, [0, 2, 3, 2])  # none of class 1
    assert (held_out.labels.tolist(), held_out.classes) == ([0, 2, 3, 2], ("0", "1", "2", "3"))
    with pytest.raises(ValueError, match=r"column has 4 .* 3"):
        images.Encoded(column, [0, 1, 0])
    with pytest.raises(ValueError, match=r"labels=\[0\]: two classes"):
        images.Encoded(column, [0] * 4)
    with pytest.raises(ValueError, match=r"row 1 .* damaged"):
        images.Encoded([column[0], b"x"], [0, 1])[1]
    kept = images.Encoded([column[0], b"x", column[2], None], [0, 1, 1, 0], skip_damaged=True)
    assert (len(kept), kept.num_skipped, kept.labels.tolist()) == (2, 2, [0, 1])
    np.testing.assert_array_equal(kept[1]["image"], pixels(2))
