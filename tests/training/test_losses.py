"""zoo.losses: exact sums in fp32, and padding that counts nothing."""

import math
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close, drawn_rnn, equations, token_batch
from jaxtyping import Array, Float

import zoo
from zoo import losses, sharding
from zoo.nn.layers import Embedding, Readout
from zoo.nn.parameters import unshard
from zoo.training.tiled_loss import num_tiles

RNG = np.random.default_rng(0)
LOGITS = jnp.asarray(5 * RNG.normal(size=(3, 4, 7)), jnp.float32)
TARGETS = jnp.asarray(RNG.integers(0, 7, (3, 4)), jnp.int32)
WEIGHTS = jnp.asarray(RNG.uniform(size=(3, 4)), jnp.float32)


@jax.jit
def total(logits: Array, weights: Array = WEIGHTS) -> Array:
    return losses.cross_entropy(logits, TARGETS, weights)[0]


@jax.jit
def plain(logits: Array, weights: Array = WEIGHTS) -> Array:
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    each = -jnp.take_along_axis(log_probabilities, TARGETS[..., None], axis=-1)[..., 0]
    return (each * weights).sum()


def test_cross_entropy_matches_plain_formula():
    got, weight = losses.cross_entropy(LOGITS, TARGETS, WEIGHTS)
    assert float(weight) == pytest.approx(float(WEIGHTS.sum()))
    np.testing.assert_allclose(got, plain(LOGITS), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(total)(LOGITS), jax.grad(plain)(LOGITS), atol=1e-6)
    np.testing.assert_allclose(
        jax.grad(total, argnums=1)(LOGITS, WEIGHTS),
        jax.grad(plain, argnums=1)(LOGITS, WEIGHTS),
        rtol=1e-5,
        atol=1e-6,
    )


def test_bf16_logits_are_reduced_in_fp32():
    logits = LOGITS.astype(jnp.bfloat16)
    got = losses.cross_entropy(logits, TARGETS, WEIGHTS)[0]
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, plain(logits.astype(jnp.float32)), rtol=1e-6)
    assert jax.grad(total)(logits).dtype == jnp.bfloat16


def test_large_logits_do_not_overflow():
    assert float(total(LOGITS + 1e4)) == pytest.approx(float(total(LOGITS)), rel=1e-2)
    assert np.isfinite(jax.grad(total)(1e4 * LOGITS)).all()


def test_zero_weight_positions_are_ignored():
    weights, clean = WEIGHTS.at[1, 2].set(0.0), LOGITS.at[1, 2].set(0.0)
    expected = np.array(jax.grad(plain)(clean, weights))
    for bad in (np.nan, np.inf, -np.inf):
        logits = LOGITS.at[1, 2].set(bad)
        np.testing.assert_array_equal(total(logits, weights), total(clean, weights))
        np.testing.assert_allclose(jax.grad(total)(logits, weights), expected, atol=1e-6)


def test_nan_at_weighted_positions_propagates():
    logits = LOGITS.at[1, 2, 0].set(np.nan)
    assert np.isnan(total(logits))
    assert np.isnan(jax.grad(total)(logits)[1, 2]).all()


def readout_and_inputs(vocab: int = 40) -> tuple[Readout, Array, Array, Array]:
    """A head with a bias and a soft cap; 4 rows of 12 steps, a third of which weigh nothing."""
    rng = np.random.default_rng(3)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    readout = Readout(normal(8, vocab), normal(vocab), soft_cap=4.0)
    targets = jnp.asarray(rng.integers(0, vocab, (4, 12)), jnp.int32)
    weights = jnp.asarray(np.maximum(rng.uniform(size=(4, 12)) - 1 / 3, 0), jnp.float32)
    return readout, normal(4, 12, 8), targets, weights


def whole_and_chunked(monkeypatch: pytest.MonkeyPatch, function: Any, *args: Any) -> tuple:
    """What a function gives with all logits at once, and with those of two steps of four rows."""
    whole = jax.jit(lambda *args: function(*args))(*args)
    monkeypatch.setattr(losses, "LOGITS_BYTES", 4 * 4 * 2 * 40)
    return whole, jax.jit(lambda *args: function(*args))(*args)


def test_chunked_loss_matches_whole_loss(monkeypatch: pytest.MonkeyPatch):
    readout, x, targets, weights = readout_and_inputs()

    def mean(readout: Readout, x: Array, weights: Array) -> Array:
        total, weight = losses.readout_cross_entropy(readout, x, targets, weights)
        return 3.0 * total / weight

    gradient = jax.value_and_grad(mean, (0, 1, 2))
    whole, chunked = whole_and_chunked(monkeypatch, gradient, readout, x, weights)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(chunked), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=1e-6)
    value, no_gradient = whole_and_chunked(monkeypatch, mean, readout, x, weights)
    assert float(value) == pytest.approx(float(no_gradient), rel=1e-6)
    assert float(value) == pytest.approx(float(whole[0]), rel=1e-6)


def test_zero_weight_nan_is_ignored_in_chunks(monkeypatch: pytest.MonkeyPatch):
    readout, x, targets, weights = readout_and_inputs()
    x = jnp.where(weights[..., None] > 0, x, jnp.nan)

    def total(x: Array) -> Array:
        return losses.readout_cross_entropy(readout, x, targets, weights)[0]

    whole, chunked = whole_and_chunked(monkeypatch, jax.value_and_grad(total), x)
    assert np.isfinite(chunked[0])
    kept = np.asarray(weights) > 0
    np.testing.assert_allclose(chunked[1][kept], whole[1][kept], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("limit", [12, 5, 1, 0])
def test_no_more_logits_than_the_limit_are_made(limit: int, monkeypatch: pytest.MonkeyPatch):
    readout, x, targets, weights = readout_and_inputs()
    monkeypatch.setattr(losses, "LOGITS_BYTES", 4 * 4 * limit * 40)

    def total(x: Array, weights: Array) -> Array:
        return losses.readout_cross_entropy(readout, x, targets, weights)[0]

    values = lambda x, _: losses.token_values(losses.token_losses, readout, x, targets)
    for function in (jax.grad(total), values):
        found = [*equations(jax.make_jaxpr(function)(x, weights))]
        shapes = {v.aval.shape for e in found for v in e.outvars} - {readout.weight.shape}
        sizes = {math.prod(shape) // 40 for shape in shapes if shape[-1:] == (40,)}
        # A divisor of twelve steps of four rows, and at least one.
        assert max(sizes) == 4 * {5: 4, 0: 1}.get(limit, limit)


@pytest.mark.parametrize(
    ("bias", "spread", "scale"),
    [
        (0.0, 0.1, 2.0**10),  # the sum over all tokens is too large for fp16 without the mean
        (17.0, 1.0, 2.0**24),  # each token's gradient is too small for fp16 without the scale
    ],
)
def test_fp16_chunked_gradients_stay_accurate(
    bias: float, spread: float, scale: float, monkeypatch: pytest.MonkeyPatch
):
    keys = jax.random.split(jax.random.key(4), 2)
    x = jax.random.uniform(keys[0], (4, 20_000, 2), minval=1.0, maxval=3.0)
    targets, weights = jnp.zeros((4, 20_000), jnp.int32), jnp.ones((4, 20_000))
    weight = spread * jax.random.normal(keys[1], (2, 3))
    readout = Readout(weight, jnp.asarray([bias, 0.0, 0.0]))

    def gradient(dtype: Any) -> Any:
        def mean(readout: Readout, x: Array) -> Array:
            total, weight = losses.readout_cross_entropy(readout, x, targets, weights)
            return total / weight * scale

        cast = lambda tree: jax.tree.map(lambda a: a.astype(jnp.float16).astype(dtype), tree)
        return jax.jit(jax.grad(mean, (0, 1)))(cast(readout), cast(x))

    exact = gradient(jnp.float32)
    monkeypatch.setattr(losses, "LOGITS_BYTES", 4 * 4 * 2_000 * 3)
    found = gradient(jnp.float16)
    assert {a.dtype for a in jax.tree.leaves(found)} == {jnp.dtype("float16")}
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        largest = float(jnp.abs(want).max())
        assert largest > 0
        np.testing.assert_allclose(got, want, rtol=0, atol=0.02 * largest)


def test_malformed_batches_are_refused():
    batch = jax.tree.map(jnp.asarray, token_batch(2, 8))
    for change, message in (
        ({"tokens": batch["tokens"]}, r"the batch has \['tokens'\], and no 'targets'"),
        (
            {name: x for name, x in batch.items() if name != "weights"},
            "no 'weights': the loss takes tokens, targets",
        ),
        ({name: x[0] for name, x in batch.items()}, r"\(8,\).*\[batch, seq\]"),
        (batch | {"weights": batch["weights"][:1]}, r"'weights': \(1, 8\)"),
    ):
        for loss in (losses.next_token, losses.balanced_next_token(0.1)):
            with pytest.raises(ValueError, match=message):
                loss(None, change, None)
    with pytest.raises(ValueError, match=r"no 'labels': .* inputs, labels, weights"):
        losses.classification(None, {"inputs": jnp.ones((2, 3))}, None)
    with pytest.raises(ValueError, match="balanced_next_token: a RNN has no experts"):
        losses.balanced_next_token(0.1)(drawn_rnn("gru"), batch, None)


def test_next_token_passes_all_batch_fields():
    batch = jax.tree.map(jnp.asarray, token_batch(2, 8))
    seen: dict[str, Any] = {}

    def model(tokens: Any, **options: Any) -> Array:
        seen.update(options, tokens=tokens)
        return jnp.zeros((2, 8, 4))

    targets = jnp.zeros((2, 8), jnp.int32)
    got, weight, metrics = losses.next_token(model, batch | {"targets": targets}, None)
    assert seen["tokens"] is batch["tokens"]
    assert seen["positions"] is batch["positions"]
    assert seen["segment_ids"] is batch["segment_ids"]
    assert float(weight) == float(batch["weights"].sum())
    assert float(got) == pytest.approx(np.log(4) * float(weight), rel=1e-6)
    assert metrics == {}


def test_classification_uses_weights_and_mask():
    def model(inputs: Array, key: Any = None, mask: Array | None = None) -> Array:
        return inputs if mask is None else jnp.where(mask, inputs, 0.0)

    batch = {
        "inputs": jnp.asarray([[3.0, 1.0], [2.0, 1.0], [0.0, 5.0]]),
        "labels": jnp.asarray([0, 1, 0]),
        "weights": jnp.asarray([1.0, 0.5, 0.25]),
    }
    loss, weight, metrics = losses.classification(model, batch, None)
    expected = jnp.logaddexp(0.0, jnp.asarray([-2.0, 1.0, 5.0]))
    assert float(loss) == pytest.approx(float((expected * batch["weights"]).sum()), rel=1e-6)
    assert (float(weight), float(metrics["accuracy"])) == (1.75, 1.0)
    masked = batch | {"mask": jnp.asarray([[True, True], [False, True], [True, False]])}
    _, _, metrics = losses.classification(model, masked, None)
    assert float(metrics["accuracy"]) == 1.75


# Tiles of the vocabulary


class Tied(eqx.Module):
    """A model of one product: the table of its inputs is its output head."""

    embedding: Embedding
    bias: Float[Array, "vocab"]
    soft_cap: float | None = eqx.field(static=True)

    def hidden(self, tokens: Array, **options: Any) -> Array:
        return jnp.tanh(3 * self.embedding(tokens))

    def readout(self) -> Readout:
        weight = unshard(self.embedding).weight.T
        return Readout(weight, unshard(self).bias, soft_cap=self.soft_cap)


@pytest.mark.parametrize(
    ("spec", "outputs", "least", "tiles"),
    [
        ("fsdp=8", 96, 2, 2),
        ("fsdp=8", 96, 5, 6),
        ("fsdp=4,tensor=2", 26, 4, 13),  # of a device's half
        ("fsdp=4,tensor=2", 34, 4, None),  # more than four times as many
        ("data=8", 96, 2, None),  # it is stored whole
        ("", 96, 2, None),
    ],
)
def test_a_stored_head_has_the_fewest_tiles_that_divide_it(
    spec: str, outputs: int, least: int, tiles: int | None
):
    with sharding.use(zoo.make_mesh(spec)):
        assert num_tiles(Readout(jnp.zeros((8, outputs)), None), least) == tiles


def test_a_stored_head_is_cut_where_logits_are_large(monkeypatch: pytest.MonkeyPatch):
    model = Tied(Embedding(96, 32, key=jax.random.key(0)), jnp.zeros(96), None)
    batch = {"tokens": jnp.zeros((8, 16), jnp.int32), "targets": jnp.zeros((8, 16), jnp.int32)}
    loops = []
    for most in (4 * 16 * 96, 4 * 16 * 96 - 1):  # a device's logits, in bytes
        monkeypatch.setattr(losses, "LOGITS_BYTES", most)
        step = lambda model: losses.next_token(model, batch | {"weights": jnp.ones((8, 16))}, None)
        with sharding.use(zoo.make_mesh("fsdp=8")):
            loops.append("scan" in str(jax.make_jaxpr(step)(model)))
    assert loops == [False, True]


@pytest.mark.parametrize(
    ("spec", "soft_cap", "spread", "dtype"),
    [
        ("fsdp=8", 4.0, 1.0, jnp.float32),
        ("fsdp=4,tensor=2", None, 40.0, jnp.float32),  # exponentials overflow but for the largest
        ("data=2,fsdp=2,context=2", 4.0, 1.0, jnp.bfloat16),
    ],
)
def test_tiles_of_a_stored_head_match_one_device(
    spec: str, soft_cap: float | None, spread: float, dtype: Any, monkeypatch: pytest.MonkeyPatch
):
    keys = jax.random.split(jax.random.key(5), 5)
    bias = spread * jax.random.normal(keys[1], (96,))
    model = Tied(Embedding(96, 32, key=keys[0]), bias, soft_cap)
    model = eqx.tree_at(lambda x: x.embedding.weight, model, replace_fn=lambda x: 30 * x)
    model = jax.tree.map(lambda x: x.astype(dtype), model)
    tokens, targets = jax.random.randint(keys[2], (2, 8, 16), 0, 96)
    weights = jnp.maximum(jax.random.uniform(keys[3], (8, 16)) - 1 / 3, 0.0).at[1].set(1.0)
    sources = jax.nn.one_hot(jax.random.randint(keys[4], (8,), 0, 3), 3)
    batch = {"tokens": tokens, "targets": targets.at[0, 0].set(96), "weights": weights}
    batch = {**batch, "weights": weights.at[0, 0].set(0.0), "source": sources}

    def loss(model: Tied) -> tuple[Array, dict[str, Any]]:
        total, _, metrics = losses.next_token(model, batch, None)
        return total, metrics

    step = jax.value_and_grad(loss, has_aux=True)
    expected = jax.jit(step)(model)
    # A device's logits are [1, 16, 96] at most, of which a sixth is in memory.
    monkeypatch.setattr(losses, "LOGITS_BYTES", 4 * 16 * 96 // 6)
    mesh = zoo.make_mesh(spec)
    with sharding.use(mesh):
        placed = sharding.shardings(model, mesh)
        compiled = (
            jax.jit(step, out_shardings=(None, placed))
            .lower(jax.device_put(model, placed))
            .compile()
        )
        found = compiled(jax.device_put(model, placed))
        alone, _ = jax.jit(loss)(jax.device_put(model, placed))  # without a gradient
    assert_trees_close(found, expected, rtol=1e-5 if dtype == jnp.float32 else 0.02)
    assert float(alone) == pytest.approx(float(found[0][0]), rel=1e-6)
    assert {x.dtype for x in jax.tree.leaves(found[1])} == {jnp.dtype(dtype)}
    parts = mesh.shape["tensor"]
    assert not re.search(rf"f\d+\[(32,{96 // parts}|{96 // parts},32)\]", compiled.as_text())
