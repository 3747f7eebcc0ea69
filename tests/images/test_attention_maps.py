"""What the class token reads, against a formula in numpy, and the picture of it."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest
from helpers import drawn_model, with_config

from zoo import images, transformer


def test_weights_are_those_of_the_last_block(tmp_path):
    config = transformer.VisionConfig(
        image_size=8, patch_size=4, d_model=16, num_layers=2, num_heads=2, num_registers=2,
        layer_scale=0.5,
    )  # fmt: skip
    model = drawn_model(lambda key: transformer.VisionTransformer(config, key=key))
    # The first block adds nothing, so that the last one sees the embedded tokens.
    scales = lambda model: (model.blocks.attention_scale, model.blocks.mlp_scale)
    model = eqx.tree_at(scales, model, tuple(x.at[0].set(0) for x in scales(model)))
    pixels = np.random.default_rng(1).normal(size=(3, 8, 12, 3)).astype(np.float32)
    found = np.asarray(eqx.filter_jit(images.class_attention)(model, pixels))

    attention = jax.tree.map(np.asarray, model.blocks.attention)
    norm = jax.tree.map(np.asarray, model.blocks.attention_norm)
    embedded = eqx.filter_jit(lambda model, pixels: model.embedded(pixels)[0])
    x = np.asarray(embedded(model, jnp.asarray(pixels)))
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + config.norm_eps)
    x = x * norm.scale[1] + norm.bias[1]
    q = np.einsum("be,enh->bnh", x[:, 0], attention.wq[1]) + attention.bq[1]
    k = np.einsum("bte,enh->btnh", x, attention.wk[1]) + attention.bk[1]
    weights = np.exp(np.einsum("bnh,btnh->bnt", q, k) / np.sqrt(8))
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(found, weights[:, :, 3:].reshape(3, 2, 2, 3), atol=1e-5)
    assert np.ptp(found) > 0.01
    alone = with_config(model, dataclasses.replace(config, num_layers=1))
    last = jax.tree.map(lambda stacked: stacked[1:], model.blocks)
    alone = eqx.tree_at(lambda model: model.blocks, alone, last)
    found_alone = eqx.filter_jit(images.class_attention)(alone, pixels)
    np.testing.assert_allclose(found_alone, found, atol=1e-5)

    images.draw_attention(tmp_path / "maps.png", np.clip(pixels, 0, 1), found, ["a", "b", "c"])
    with PIL.Image.open(tmp_path / "maps.png") as picture:
        assert picture.size == (520, 435)  # three pictures, each with a mean and two heads
    headless = transformer.VisionConfig(
        image_size=8, patch_size=4, d_model=16, num_layers=1, num_heads=2, class_token=False,
        pooling="mean",
    )  # fmt: skip
    with pytest.raises(ValueError, match="class_token=False: nothing reads"):
        images.class_attention(
            transformer.VisionTransformer(headless, key=jax.random.key(0)), jnp.asarray(pixels)
        )
