"""zoo.transformer.encoder: masks without an embedding, and a vector per text."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drawn_transformer

from zoo import transformer
from zoo.nn.stateful import cast
from zoo.transformer.encoder import without_masked

IS_MASK = np.array([[0, 1, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0, 1]])
SEGMENTS = np.array([[1] * 3 + [2] * 3 + [0] * 2, [1] * 3 + [2] * 4 + [3], [1] * 4 + [7] * 4])


@pytest.mark.parametrize("packed", [False, True])
def test_masks_are_zero_and_other_tokens_scaled_up_for_them(packed: bool):
    """Text by text, or row by row; a text of masks alone is zeros."""
    x = np.random.default_rng(0).normal(size=(3, 8, 5)).astype(np.float32)
    texts, want = SEGMENTS if packed else np.ones((3, 8)), np.zeros_like(x)
    for row, position in np.argwhere(IS_MASK == 0):
        of_text = IS_MASK[row][texts[row] == texts[row, position]]
        want[row, position] = x[row, position] * (1 - 0.15 * 0.8) / (1 - of_text.mean())
    segment_ids = jnp.asarray(SEGMENTS, jnp.int32) if packed else None
    call = jax.jit(lambda x: without_masked(x, jnp.asarray(IS_MASK == 1), segment_ids))
    np.testing.assert_allclose(call(jnp.asarray(x)), want, rtol=1e-6)
    assert jax.eval_shape(call, jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


def test_the_vector_of_a_text_is_the_normed_mean_over_its_tokens():
    model = drawn_transformer(causal=False, num_layers=1)
    tokens = np.random.default_rng(0).integers(0, 64, (3, 6)).astype(np.int32)
    mask = np.arange(6)[None] < np.array([[6], [2], [0]])
    call = eqx.filter_jit(lambda model, *inputs: transformer.embed(model, *inputs))
    found = call(model, tokens, mask)
    hidden = np.asarray(eqx.filter_jit(model.hidden)(tokens, mask=jnp.asarray(mask)))
    for row, count in ((0, 6), (1, 2)):
        mean = hidden[row, :count].mean(0)
        np.testing.assert_allclose(found[row], mean / np.linalg.norm(mean), atol=1e-6)
    assert not np.asarray(found[2]).any()  # of no token
    # Whatever the model computes in.
    low = eqx.filter_eval_shape(call, cast(model, jnp.bfloat16), tokens, mask)
    assert low.dtype == jnp.float32
