"""zoo.transformer.latent: its formula written out, its cache, meshes, adapters and operations."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    arrays,
    assert_trees_close,
    drawn_transformer,
    loss_and_gradient,
    small_config,
    token_batch,
)

import zoo
from zoo import lora, sharding
from zoo.decoding.decoder import decoder_of
from zoo.transformer.flops import num_flops_per_token

SIZES: dict[str, Any] = {"num_heads": 4, "attention.head_dim": 10, "attention.latent.kv_rank": 16}
SIZES |= {"attention.latent.q_rank": 8, "attention.latent.rotary_dim": 4}
LATENT: dict[str, Any] = {**SIZES, "attention.latent.value_dim": 6, "num_layers": 2}


def numpy_rotated(x: np.ndarray) -> np.ndarray:
    """[T, 4] rotated: pairs half of the features apart, by the position times 1 and 0.01."""
    angles = np.arange(len(x))[:, None] * np.array([1.0, 0.01])
    pairs = x[:, :2] + 1j * x[:, 2:]
    turned = pairs * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], -1)


def numpy_norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


@pytest.mark.parametrize("q_rank", [8, None])
def test_latent_attention_is_the_formula_of_its_paper(q_rank: int | None):
    """Head by head and query by query, as in DeepSeek-V2's equations 9 to 19."""
    model = drawn_transformer(**{**LATENT, "num_layers": 1, "attention.latent.q_rank": q_rank})
    made = jax.tree.map(lambda x: x[0], eqx.filter(model.blocks.attention, eqx.is_array))
    made = eqx.combine(made, eqx.filter(model.blocks.attention, eqx.is_array, inverse=True))
    x = np.random.default_rng(0).normal(size=(1, 7, 32))
    _, rotaries = model.embed(jnp.zeros((1, 7), jnp.int32), jnp.arange(7, dtype=jnp.int32)[None])
    call = eqx.filter_jit(lambda made, x: made(x, None, rotaries["global"], None))
    got = call(made, jnp.asarray(x, jnp.float32))
    w = {name: np.asarray(value, np.float64) for name, value in arrays(made).items()}
    if q_rank is None:
        q = np.einsum("te,enh->tnh", x[0], w["wq"])
    else:
        q = np.einsum("tc,cnh->tnh", numpy_norm(x[0] @ w["wq_down"], w["q_norm.scale"]), w["wq_up"])
    c, shared = numpy_norm(x[0] @ w["w_down"], w["kv_norm.scale"]), x[0] @ w["w_rotary"]
    want = np.zeros((7, 32))
    for head in range(4):
        keys, values = c @ w["wk"][:, head], c @ w["wv"][:, head]
        rotary = numpy_rotated(q[:, head, :4]) @ numpy_rotated(shared).T
        logits = (rotary + q[:, head, 4:] @ keys.T) / math.sqrt(10)
        for t in range(7):
            weights = np.exp(logits[t, : t + 1] - logits[t, : t + 1].max())
            want[t] += weights @ values[: t + 1] / weights.sum() @ w["wo"][head]
    np.testing.assert_allclose(got[0], want, atol=1e-5 * np.abs(want).max())


def test_absorbed_products_over_a_small_cache_give_the_same():
    model = drawn_transformer(**LATENT)
    tokens = jnp.asarray(token_batch(2, 12)["tokens"])

    @eqx.filter_jit
    def run(model: Any) -> Any:
        decoder = decoder_of(model)
        _, cache = decoder.prefill(tokens[:, :8], jnp.ones((2, 8), bool), 12)
        assert [(x.keys.shape, x.values) for x in cache.layers] == [((2, 12, 4 + 16), None)] * 2
        return decoder.for_decoding().extend(tokens[:, 8:], cache)[0], model(tokens)[:, 8:]

    np.testing.assert_allclose(*run(model), atol=2e-5)


def gradients(spec: str) -> Any:
    """Of packed rows, in place on the mesh."""
    return loss_and_gradient(drawn_transformer(**LATENT), token_batch(8, 16), spec)


@pytest.mark.parametrize(
    "spec", ["fsdp=2,tensor=2", pytest.param("context=2,tensor=4", marks=pytest.mark.slow)]
)
def test_latent_attention_on_a_mesh_is_that_of_one_device(spec: str):
    one, many = gradients(""), gradients(spec)
    assert_trees_close(many, one, rtol=1e-4)
    for path, grad in arrays(one[1]).items():
        assert np.abs(grad).max() > 1e-5, path


def test_adapters_of_its_matrices_decode_as_what_they_are_merged_into():
    model = drawn_transformer(**{**LATENT, "num_layers": 1})
    adapted = lora.adapt(model, lora.Config(rank=2), key=jax.random.key(0))
    names = {x.removesuffix(".up") for x in arrays(adapted.blocks.attention) if x.endswith(".up")}
    assert names == {"wq_down", "wq_up", "w_down", "w_rotary", "wk", "wv", "wo"}
    drawn = lambda x: jnp.full_like(x, 0.1)
    adapted = eqx.tree_at(lambda m: [m.blocks.attention.wk.up], adapted, replace_fn=drawn)
    prompt = jnp.asarray(token_batch(2, 6)["tokens"])
    with sharding.use(mesh := zoo.make_mesh("tensor=2")):
        placed = [
            jax.device_put(x, sharding.shardings(x, mesh)) for x in (adapted, lora.merge(adapted))
        ]
        found = [zoo.generate(x, prompt, max_new_tokens=6, temperature=0.0) for x in placed]
    np.testing.assert_array_equal(*found)


def test_its_operations_are_six_per_weight_and_twelve_per_pair():
    config, length = small_config(**LATENT, tie_embeddings=False), 24
    skeleton = eqx.filter_eval_shape(
        lambda: zoo.transformer.Transformer(config, key=jax.random.key(0))
    )
    weights = sum(math.prod(x.shape) for x in jax.tree.leaves(skeleton) if len(x.shape) > 1)
    norms = 2 * (2 * 32 + 8 + 16)  # stacked, but no products
    products = 6 * (weights - math.prod(skeleton.embedding.weight.shape) - norms)
    pairs = 2 * 4 * (10 + 6) * 6 * length / 2
    assert num_flops_per_token(config, length) == products + pairs


def test_what_latent_attention_has_not_is_refused():
    assert small_config(**{**LATENT, "attention.latent.value_dim": 10}).value_size == 10  # all
    for name, value in (
        *[("qkv_bias", True), ("qk_norm", "per_head"), ("sinks", True), ("num_kv_heads", 2)],
        *[("out_bias", True), ("clip", 5.0)],
        *[("latent.rotary_dim", 10), ("latent.rotary_dim", 3), ("latent.value_dim", 11)],
    ):
        with pytest.raises(ValueError, match=rf"attention\.{name}={value!r}"):
            small_config(**{**LATENT, f"attention.{name}": value})
    with pytest.raises(ValueError, match=r"attention\.latent\.q_rank=8"):
        small_config(**{"attention.latent.q_rank": 8})
