"""Vision transformers: sizes, positions, meshes, and what is refused."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import drawn_model, one_step

import zoo
from zoo import losses, transformer
from zoo.nn.stateful import cast
from zoo.transformer.patches import bicubic, sines_of_patches

SIZES: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 4,
    "num_classes": 8,
    "d_model": 32,
    "num_layers": 2,
    "num_heads": 4,
    "layer_scale": 0.5,
}
KINDS: dict[str, dict[str, Any]] = {
    "registers": {"num_registers": 3, "pooler": True, "positions": "rotary", "key_bias": False},
    "attention": {"class_token": False, "pooling": "attention", "positions": "sincos"},
}


def make(**changes: Any) -> transformer.VisionTransformer:
    config = transformer.VisionConfig(**{**SIZES, **changes})
    return drawn_model(lambda key: transformer.VisionTransformer(config, key=key))


def pixels(rows: int, height: int = 16, width: int = 16) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(rows, height, width, 3)).astype(np.float32)


def batch() -> dict[str, np.ndarray]:
    labels = np.arange(8, dtype=np.int32)
    return {"inputs": pixels(8), "labels": labels, "weights": np.ones(8, np.float32)}


def gradients(kind: str, mesh: str) -> dict[str, np.ndarray]:
    make_model = lambda key: make(**KINDS[kind])
    return one_step(make_model, losses.classification, batch(), mesh=zoo.make_mesh(mesh))[1]


@pytest.mark.parametrize("kind", ["registers", pytest.param("attention", marks=pytest.mark.slow)])
def test_gradients_on_meshes_are_those_of_one_device(kind: str):
    want = gradients(kind, "")
    # A bias on keys makes no difference to a softmax over them.
    assert all(np.abs(x).max() > 0 for path, x in want.items() if not path.endswith("bk"))
    got = gradients(kind, "fsdp=2,context=2,tensor=2")
    for path, x in want.items():
        np.testing.assert_allclose(got[path], x, atol=1e-5, err_msg=path)


def test_heads_that_a_mesh_does_not_divide_are_refused():
    config = transformer.VisionConfig(**{**SIZES, "num_heads": 3, "d_model": 24})
    init = lambda key: transformer.VisionTransformer(config, key=key)
    with pytest.raises(ValueError, match=r"blocks\.attention\.wq .* size 3 is not .* tensor=2"):
        zoo.init_state(init, optax.sgd(1.0), key=jax.random.key(0), mesh=zoo.make_mesh("tensor=2"))


def test_images_and_configurations_that_do_not_fit_are_refused():
    for shape, message in (
        ((1, 18, 16, 3), "images of 18 x 16 pixels: patch_size=4 does not divide"),
        ((1, 16, 16, 1), "images have 1 channels, and the model channels=3"),
    ):
        with pytest.raises(ValueError, match=message):
            make()(jnp.zeros(shape))
    for changes, message in (
        ({"patch_size": 5}, "patch_size=5 does not divide image_size=16"),
        ({"class_token": False}, "pooling='first': is the class token's"),
        ({"positions": "rotary", "num_heads": 16}, "a head has 2 features"),
        ({"num_classes": -1}, "num_classes=-1: must be 0 at least"),
    ):
        with pytest.raises(ValueError, match=message):
            transformer.VisionConfig(**{**SIZES, **changes})


def test_positions_are_interpolated_without_a_change_of_the_mean():
    matrix = bicubic(5, 9)
    assert matrix.shape == (9, 5)
    np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-6)
    np.testing.assert_allclose(bicubic(5, 5), np.eye(5), atol=1e-6)
    model, images = make(), jnp.asarray(pixels(1, 8, 20))
    want = model(images)
    assert want.shape == (1, 8)
    np.testing.assert_allclose(cast(model, jnp.bfloat16)(images), want, atol=0.1, rtol=0.1)


def test_sines_tell_rows_and_columns_apart():
    table = sines_of_patches((2, 3), 8).reshape(2, 3, 8)
    np.testing.assert_array_equal(table[0, 0], [0, 0, 1, 1, 0, 0, 1, 1])
    np.testing.assert_allclose(
        table[1, 2, ::2], np.sin([1, 1 + np.pi / 2, 2, 2 + np.pi / 2]), atol=1e-6
    )


def test_masked_patches_make_no_difference():
    model = make(mask_token=True)
    images, masked = pixels(1), np.zeros((1, 16), bool)
    masked[0, 5] = True  # the patch of rows 4 to 8, columns 4 to 8
    other = images.copy()
    other[0, 4:8, 4:8] += 1
    call = eqx.filter_jit(lambda x, masked: model(x, masked=masked))
    np.testing.assert_array_equal(call(images, masked), call(other, masked))
    assert np.abs(call(images, None) - call(other, None)).max() > 1e-3
    with pytest.raises(ValueError, match="masked: mask_token=False"):
        make()(jnp.asarray(images), masked=jnp.asarray(masked))


def test_a_model_survives_save_and_load(tmp_path):
    model = make(**KINDS["attention"])
    zoo.save(tmp_path / "model", model)
    again = zoo.load(tmp_path / "model")
    assert again.config == model.config
    assert eqx.tree_equal(again, model)
    body = model.without_head()
    assert jax.eval_shape(body, jnp.asarray(pixels(2))).shape == (2, 16, 32)
