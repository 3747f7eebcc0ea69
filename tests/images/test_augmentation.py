"""Augmentation: functions of a row and a generator."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo import images

ROW = {"image": np.random.default_rng(0).integers(0, 256, (20, 30, 3)).astype(np.uint8), "label": 2}


@pytest.mark.parametrize(
    "change", [images.crop(8), images.flip, images.colour()], ids=["crop", "flip", "colour"]
)
def test_the_same_generator_gives_the_same_picture(change):
    made = [change(ROW, np.random.default_rng([3, i]))["image"] for i in range(8)]
    again = [change(ROW, np.random.default_rng([3, i]))["image"] for i in range(8)]
    for x, y in zip(made, again, strict=True):
        np.testing.assert_array_equal(x, y)
    assert len({x.tobytes() for x in made}) > 1
    assert all(x.dtype == np.uint8 for x in made)


def test_crops_are_parts_of_the_picture():
    rows = np.broadcast_to(np.arange(20)[:, None, None], (20, 30, 1)).astype(np.uint8)
    for seed in range(20):
        found = images.crop(8)({"image": rows}, np.random.default_rng(seed))["image"]
        assert found.shape == (8, 8, 1)
        assert (np.diff(found[:, 0, 0].astype(int)) >= 0).all()
        assert np.ptp(found[0]) == 0
    whole = images.crop(20, smallest=1.0)({"image": rows}, np.random.default_rng(0))["image"]
    assert np.ptp(whole) > 12
    with pytest.raises(ValueError, match="smallest=0"):
        images.crop(8, smallest=0.0)


def test_a_picture_of_one_pixel_is_cropped():
    for seed in range(20):
        dot = {"image": np.full((1, 1, 1), 9, np.uint8)}
        np.testing.assert_array_equal(images.crop(2)(dot, np.random.default_rng(seed))["image"], 9)


class Given(np.random.Generator):
    """A generator that gives numbers of one's own."""

    factors = (1.0, 1.0, 1.0)

    def uniform(self, low, high, size):
        assert (low, high, size) == (0.5, 1.5, 3)
        return np.asarray(self.factors)


def test_colours_are_changed_by_their_factors():
    x = ROW["image"] // 4 + 80.0
    mean, grey = x.mean(), x.mean(-1, keepdims=True)
    for factors, want in (
        ((1.5, 1, 1), 1.5 * x),
        ((1, 0.5, 1), mean + 0.5 * (x - mean)),
        ((1, 1, 0.5), grey + 0.5 * (x - grey)),
    ):
        rng = Given(np.random.PCG64())
        rng.factors = factors
        found = images.colour(0.5)({"image": x.astype(np.uint8)}, rng)["image"]
        np.testing.assert_allclose(found, want, atol=0.51)


def test_half_of_the_pictures_are_mirrored():
    rng = np.random.default_rng(0)
    flipped = [images.flip(ROW, rng)["image"] is not ROW["image"] for _ in range(400)]
    assert 150 < sum(flipped) < 250
    mirrored = next(x for x in (images.flip(ROW, rng)["image"] for _ in range(99))
                    if x is not ROW["image"])  # fmt: skip
    np.testing.assert_array_equal(mirrored, ROW["image"][:, ::-1])


def test_mixed_pictures_have_mixed_classes():
    inputs = jnp.arange(4.0).reshape(4, 1, 1, 1)
    labels = jnp.asarray([0, 1, 2, 0])
    mixed, shares = images.mixed_up(inputs, labels, 3, alpha=1.0, key=jax.random.key(0))
    np.testing.assert_allclose(shares.sum(1), 1, rtol=1e-6)
    share = shares[1, 1]  # of its own class
    assert 0 < share < 1
    np.testing.assert_allclose(mixed[1, 0, 0, 0], share * 1 + (1 - share) * 0, rtol=1e-5)
    np.testing.assert_allclose(shares[1], [1 - share, share, 0], rtol=1e-5)
