import json

import numpy as np
import PIL.Image
import pytest

from zoo import images
from zoo.images import Processor, read_folder


@pytest.fixture
def folder(tmp_path):
    """Forty pictures of two classes, of one grey each."""
    for number in range(40):
        path = tmp_path / "photos" / ("dark", "light")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        grey = (40 + number) if number % 2 == 0 else (200 + number)
        PIL.Image.fromarray(np.full((20, 24, 3), grey, np.uint8)).save(path)
    return tmp_path / "photos"


def read(folder, **options):
    return read_folder(folder, 4, model=folder.parent, size=16, held_out=0.25, **options)


def greys(dataset):
    """The value of each picture in an epoch, with its label."""
    found = set()
    for k in range(dataset.batches_per_epoch):
        batch = dataset.batch(k)
        for image, label, weight in zip(*(batch[x] for x in ("inputs", "labels", "weights"))):  # noqa: B905
            if weight:
                assert image.shape == (16, 16, 3)
                found.add((round(float((image.mean() * 0.5 + 0.5) * 255)), int(label)))
    return found


def test_each_picture_is_in_one_part_with_its_folders_label(folder):
    data = read(folder)
    assert data.classes == ("dark", "light")
    train, held_out = greys(data.train), greys(data.held_out)
    assert len(train) + len(held_out) == 40
    assert not train & held_out
    assert 3 < len(held_out) < 20
    for number in range(40):
        assert ((40 if number % 2 == 0 else 200) + number, number % 2) in train | held_out
    # The part that a picture is in stays when others are added.
    PIL.Image.fromarray(np.full((20, 24, 3), 7, np.uint8)).save(folder / "dark" / "new.png")
    assert greys(read(folder).held_out) - {(7, 0)} == held_out


def test_only_the_pictures_to_train_on_are_shuffled(folder):
    def in_order(dataset, epoch):
        numbers = range(epoch * dataset.batches_per_epoch, (epoch + 1) * dataset.batches_per_epoch)
        return np.concatenate([dataset.batch(k)["inputs"][:, 0, 0, 0] for k in numbers])

    data = read(folder, augment=False)
    assert (in_order(data.train, 0) != in_order(data.train, 1)).any()
    np.testing.assert_array_equal(in_order(data.held_out, 0), in_order(data.held_out, 1))


def test_only_the_pictures_to_train_on_are_augmented(folder):
    wide = np.repeat(np.arange(24, dtype=np.uint8)[None, :, None] * 10, 20, 0).repeat(3, 2)
    for path in folder.glob("*/*.png"):
        PIL.Image.fromarray(wide).save(path)
    plain, augmented = read(folder, augment=False), read(folder)
    same = lambda data: len({x.tobytes() for x in data.batch(0)["inputs"]}) == 1
    assert same(plain.train)
    assert same(plain.held_out)
    assert same(augmented.held_out)
    assert not same(augmented.train)
    assert plain.fingerprint != augmented.fingerprint
    assert read(folder).fingerprint == augmented.fingerprint


def test_the_models_own_processor_is_taken_and_saved(folder, tmp_path):
    own = Processor(size=(16, 16), crop=None, resample=3, mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 3.0))
    own.save(tmp_path)
    assert read(folder).processor == own == Processor.of(tmp_path)
    for processor in (Processor(size=20, crop=(16, 16)), Processor(size=None)):
        processor.save(tmp_path / "other")
        assert Processor.of(tmp_path / "other") == processor
    values = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert (values["size"], values["resample"]) == ({"height": 16, "width": 16}, 3)


def test_folders_that_hold_out_nothing_or_a_class_are_refused(folder):
    with pytest.raises(ValueError, match=r"of 40 pictures 0 .* \[\]"):
        read_folder(folder, 4, model=folder, size=16, held_out=1e-9)
    with pytest.raises(ValueError, match=r"\['dark', 'light'\] all are"):
        read_folder(folder, 4, model=folder, size=16, held_out=1.0)
    for path in (folder / "dark").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match=r"dark has .* picture"):
        read(folder)
    (folder / "dark").rmdir()
    with pytest.raises(ValueError, match="two at least, each a folder"):
        read(folder)
    assert images.read_folder is read_folder
