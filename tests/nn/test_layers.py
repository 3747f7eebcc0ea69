"""zoo.nn.layers: gradients written out by hand are those of the plain formulas."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import value_and_gradients
from jaxtyping import Array

import zoo
from zoo import sharding
from zoo.nn import layers
from zoo.planning import collectives, hlo

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = jnp.asarray(3 * RNG.normal(size=(2, 5, 8)) + 1, jnp.float32)
SCALE, BIAS, G = (jnp.asarray(RNG.normal(size=n), jnp.float32) for n in (8, 8, (2, 5, 8)))


def rms_norm(x: Array, scale: Array) -> Array:
    norm = eqx.tree_at(lambda n: n.scale, layers.RMSNorm(8, eps=1e-3), scale)
    return norm(x)


def layer_norm(x: Array, scale: Array, bias: Array) -> Array:
    norm = layers.LayerNorm(8, eps=1e-3)
    return eqx.tree_at(lambda n: (n.scale, n.bias), norm, (scale, bias))(x)


def plain_rms_norm(x: Array, scale: Array) -> Array:
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-3) * scale[None, None]


def plain_layer_norm(x: Array, scale: Array, bias: Array) -> Array:
    variance = jnp.square(x - x.mean(-1, keepdims=True)).mean(-1, keepdims=True)
    centred = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(variance + 1e-3)
    return centred * scale[None, None] + bias[None, None]


def plain_gelu(x: Array) -> Array:
    return 0.5 * x * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (x + 0.044715 * x**3)))


FORMULAS: dict[str, tuple[Callable[..., Array], Callable[..., Array], tuple[Array, ...]]] = {
    "rms_norm": (rms_norm, plain_rms_norm, (X, SCALE)),
    "layer_norm": (layer_norm, plain_layer_norm, (X, SCALE, BIAS)),
    "gelu": (layers.gelu, plain_gelu, (X,)),
    "add_bias": (layers.add_bias, lambda x, bias: x + bias[None, None], (X, BIAS)),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_match_plain_formulas(name: str, dtype: str):
    function, plain, arguments = FORMULAS[name]
    rounded = tuple(a.astype(dtype) for a in arguments)
    exact = tuple(a.astype(jnp.float32) for a in rounded)
    g = G.astype(dtype)
    expected = value_and_gradients(plain, g.astype(jnp.float32), *exact)
    results = value_and_gradients(function, g, *rounded)
    assert {y.dtype for y in results} == {jnp.dtype(dtype)}
    for y, want in zip(results, expected, strict=True):
        scale = np.abs(want).max()
        # One rounding of the result: what is inside is fp32.
        tolerance = 2e-6 if dtype == "float32" else 2**-8
        np.testing.assert_allclose(y.astype(jnp.float32), want, rtol=0, atol=tolerance * scale)


def test_fp16_norms_do_not_overflow():
    x = jnp.full((1, 8), 3e4, jnp.float16) * jnp.asarray([[1, -1] * 4], jnp.float16)
    scale = jnp.ones(8, jnp.float16)
    np.testing.assert_allclose(np.abs(rms_norm(x, scale)), 1, rtol=1e-3)


@pytest.mark.parametrize("kind", [layers.RMSNorm, layers.LayerNorm])
def test_an_offset_is_added_in_fp32(kind: Callable[..., layers.Norm]):
    scaled = lambda scale: eqx.tree_at(lambda n: n.scale, kind(8, offset=1.0), scale)(X)
    low = jnp.full(8, 2.0**-9, jnp.bfloat16)  # which one is too large for
    np.testing.assert_allclose(scaled(low), scaled(jnp.zeros(8)) * (1 + 2.0**-9), rtol=1e-5)


def test_the_gradient_behind_a_frozen_scale_has_the_dtype_of_the_input():
    x, scale = jnp.ones((1, 8), jnp.bfloat16), jnp.ones(8)
    alone = jax.make_jaxpr(jax.vjp(lambda x: rms_norm(x, scale), x)[1])(x)
    assert [y.dtype for y in alone.out_avals] == [jnp.bfloat16]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_accumulate_in_fp32(dtype: str):
    g = jnp.asarray(RNG.normal(size=(8, 512, 4)) + 0.3, dtype)
    ids = jnp.asarray(RNG.integers(0, 3, (8, 512)), jnp.int32)
    table = layers.Embedding(3, 4, key=KEY).weight.astype(dtype)
    look_up = lambda w: eqx.tree_at(lambda e: e.weight, layers.Embedding(3, 4, key=KEY), w)(ids)
    exact = np.zeros((3, 4))
    np.add.at(exact, np.asarray(ids), np.asarray(g, np.float64))
    got = value_and_gradients(look_up, g, table)[1]
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2**-8)
    add = lambda bias: layers.add_bias(jnp.zeros_like(g), bias)
    got = value_and_gradients(add, g, jnp.zeros(4, dtype))[1]
    exact = np.asarray(g, np.float64).sum((0, 1))
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2**-8)


def test_linear_with_and_without_bias():
    linear = layers.Linear(8, 3, in_axis="embed", out_axis="mlp", key=KEY)
    assert linear.weight.std() == pytest.approx(8**-0.5, rel=0.4)
    linear = eqx.tree_at(lambda m: m.bias, linear, jnp.arange(3.0))
    np.testing.assert_allclose(
        linear(X), np.asarray(X) @ np.asarray(linear.weight) + np.arange(3), rtol=1e-5, atol=1e-5
    )
    assert layers.Linear(8, 3, in_axis="embed", out_axis="mlp", bias=False, key=KEY).bias is None


def test_ids_beyond_embedding_table_are_clamped():
    table = layers.Embedding(5, 4, key=KEY)
    got = table(jnp.array([4, 5, 99]))
    np.testing.assert_array_equal(got, np.tile(table.weight[4], (3, 1)))


# Dropout


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_keeps_rate_and_mean(rate: float):
    x = jnp.full((100, 1000), 2.0)
    y = np.asarray(layers.dropout(x, rate, KEY))
    dropped = (y == 0).mean()
    assert dropped == pytest.approx(rate, abs=5 * (rate * (1 - rate) / x.size) ** 0.5)
    np.testing.assert_allclose(y[y != 0], 2 / (1 - rate), rtol=1e-6)
    # Neither rows nor columns drop together.
    assert 0 < (y == 0).mean(0).min() < (y == 0).mean(0).max() < 1


def test_disabled_dropout_is_the_identity():
    assert layers.dropout(X, 0.5, None) is X
    assert layers.dropout(X, 0.0, KEY) is X


def test_dropout_keeps_dtype_and_zeroes_nan():
    x = jnp.array([jnp.nan] * 64, jnp.bfloat16)
    y = layers.dropout(x, 0.5, KEY)
    assert y.dtype == jnp.bfloat16
    assert 0 < np.isnan(y.astype(jnp.float32)).sum() < 64


def test_no_device_has_a_whole_table_or_its_gradient():
    """Each has all tokens' vectors in its own columns; the rows of its own tokens were a table."""
    mesh = zoo.make_mesh("fsdp=8")
    ids = jnp.zeros((8, 16), jnp.int32)
    embedding = layers.Embedding(4096, 64, key=KEY)

    def loss(embedding: layers.Embedding) -> Array:
        rows = sharding.constrain(embedding(ids), "batch", "seq", None)
        return jnp.square(rows).sum()

    placed = sharding.shardings(embedding, mesh)
    with sharding.use(mesh):
        step = jax.jit(jax.grad(loss), in_shardings=(placed,), out_shardings=placed)
        text = step.lower(embedding).compile().as_text()
    found = collectives.bytes_by_kind(collectives.collectives(hlo.read(text)))
    assert found["all-to-all"] > 0
    others = ("all-gather", "all-reduce", "reduce-scatter")
    assert sum(found.get(kind, 0) for kind in others) < embedding.weight.nbytes / 8
    assert "[4096,8]" in text
    assert "[4096,64]" not in text


@pytest.mark.parametrize("mesh", ["fsdp=8", "fsdp=4,tensor=2", "data=2,fsdp=2,context=2"])
def test_look_ups_on_a_mesh_match_one_device(mesh: str):
    """Ids that it cuts evenly, and one row, three, or steps that it does not; all are clamped."""
    embedding = layers.Embedding(48, 64, key=KEY)
    ids = {shape: jax.random.randint(KEY, shape, 0, 60) for shape in [(8, 16), (1, 16), (3, 5)]}

    def loss(embedding: layers.Embedding) -> tuple[Array, list[Array]]:
        found = [embedding(each) for each in ids.values()]
        return sum((jnp.sin(x).sum() for x in found), jnp.float32(0)), found

    step = jax.grad(loss, has_aux=True)
    with sharding.use(zoo.make_mesh(mesh)):
        placed = jax.device_put(embedding, sharding.shardings(embedding, zoo.make_mesh(mesh)))
        gradient, found = jax.jit(step)(placed)
    for each, got in zip(ids.values(), found, strict=True):
        np.testing.assert_array_equal(got, np.asarray(embedding.weight)[np.minimum(each, 47)])
    expected = np.zeros((48, 64))
    for each, got in zip(ids.values(), found, strict=True):
        np.add.at(expected, np.minimum(each, 47), np.cos(got))
    np.testing.assert_allclose(gradient.weight, expected, rtol=1e-5, atol=1e-6)


def test_gradients_of_a_table_are_added_up_over_a_mesh_in_its_dtype():
    """Each part of `data` adds up its own in fp32 and rounds once; `fsdp` splits the columns."""
    table, ids = jax.random.normal(KEY, (4, 32)), jax.random.randint(KEY, (8, 16), 0, 4)
    given = jax.random.normal(jax.random.key(1), (8, 16, 32))

    def loss(table: Array, ids: Array, given: Array) -> Array:
        rows = layers.look_up(table.astype(jnp.bfloat16), ids, ("vocab", "embed"))
        return (sharding.constrain(rows, "batch", "seq", None) * given.astype(rows.dtype)).sum()

    by_part = [
        jax.jit(jax.grad(loss))(table, ids, given).astype(jnp.bfloat16).astype(jnp.float32)
        for ids, given in zip(np.split(ids, 2), np.split(given, 2), strict=True)
    ]
    with sharding.use(zoo.make_mesh("data=2,fsdp=2,tensor=2")):
        found = jax.jit(jax.grad(loss))(table, ids, given)
    # As XLA adds up bf16 on this CPU.
    wanted = sum(by_part).astype(jnp.bfloat16)
    unrounded = np.asarray(jax.jit(jax.grad(loss))(table, ids, given))
    np.testing.assert_array_equal(found, wanted)
    assert np.mean(np.asarray(found) == unrounded) < 0.9
    np.testing.assert_allclose(found, unrounded, atol=0.1)


def test_a_table_whose_rows_are_stored_where_tokens_are_cut_has_its_gradient():
    """Rules may give one mesh axis to both: each device then holds rows, and tokens whole."""
    rules = dict.fromkeys(sharding.RULES, None) | {"inner_seq": "tensor", "vocab": "tensor"}
    table, ids = jax.random.normal(KEY, (8, 4)), jax.random.randint(KEY, (2, 6), 0, 8)

    def loss(table: Array, ids: Array) -> Array:
        return (layers.look_up(table, ids, ("vocab", "embed")) ** 2).sum()

    with sharding.use(zoo.Layout("tensor=2", rules)):
        found = jax.jit(jax.grad(loss))(table, ids)
    times = np.bincount(np.ravel(ids), minlength=8).astype(np.float32)
    np.testing.assert_allclose(found, 2 * table * times[:, None], rtol=1e-6)
