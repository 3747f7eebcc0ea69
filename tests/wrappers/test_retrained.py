import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import arrays, assert_trees_close, drawn_rnn, drawn_transformer, state_and_step

import zoo
from zoo import lora, losses
from zoo.nn.layers import look_up
from zoo.nn.products import matmul, transposed
from zoo.publishing.models import with_paths

KEY = jax.random.key(0)
NEW = (9, 2, 15)
forward = eqx.filter_jit(lambda model: model(TOKENS))
TOKENS = jnp.asarray([[2, 3, 9, 4], [15, 0, 1, 9]], jnp.int32)


def small(**fields):
    return drawn_transformer(vocab_size=16, num_layers=1, num_heads=2, d_model=8, **fields)


def adapted(model, **fields):
    return lora.adapt(model, lora.Config(rank=2, **fields), key=KEY)


def changed(model, **fields):
    """With other values in the place of those of the base."""
    draw = lambda x: x + jnp.asarray(np.random.default_rng(0).normal(size=x.shape), x.dtype)
    nodes = lambda m: [
        x.new for x in jax.tree.leaves(m, is_leaf=lora.is_adapted) if hasattr(x, "new")
    ]
    model = adapted(model, **fields)
    assert nodes(model)
    return eqx.tree_at(nodes, model, [draw(x) for x in nodes(model)])


def batch():
    targets = jnp.roll(TOKENS, 1, 1)
    return {"tokens": TOKENS, "targets": targets, "weights": jnp.ones(TOKENS.shape)}


def test_rows_products_and_values_are_those_of_the_whole_matrix():
    table = changed(small(), tokens=NEW).embedding.weight
    whole = np.array(table.weight)
    whole[list(NEW)] = table.new
    np.testing.assert_array_equal(table.value(), whole)
    ids = jnp.asarray([[0, 2, 15], [9, 10, 99]], jnp.int32)  # 99 takes the last row, which is new
    np.testing.assert_array_equal(look_up(table, ids), whole[np.minimum(ids, 15)])
    x = jnp.ones((3, 8))
    np.testing.assert_allclose(matmul(x, transposed(table)), x @ whole.T, rtol=1e-6)
    np.testing.assert_allclose(matmul(x[:, :8], small().head.weight), x @ small().head.weight)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_computes_with_the_new_rows_and_its_base_without(tied):
    model = changed(small(tie_embeddings=tied), tokens=NEW)
    merged, before = lora.merge(model), small(tie_embeddings=tied)
    found, plain = forward(model), forward(before)
    np.testing.assert_allclose(found, forward(merged), rtol=1e-5, atol=1e-5)
    assert np.abs(found - plain).max() > 0.1
    np.testing.assert_array_equal(forward(lora.base(model)), plain)
    whole = changed(before, whole=("embedding.weight",) + (() if tied else ("head.weight",)))
    found = forward(whole)
    np.testing.assert_allclose(found, forward(lora.merge(whole)), rtol=1e-5, atol=1e-5)
    assert np.abs(found - plain).max() > 0.1


def test_training_changes_the_chosen_rows_alone():
    make = lambda key, model: adapted(model, tokens=NEW, whole=("head.weight",))
    options = {"pretrained": small(), "trainable": lora.trainable, "clip_norm": 1.0}
    options |= {"mesh": zoo.make_mesh("fsdp=2,tensor=2")}
    state, step = state_and_step(make, losses.next_token, optax.adam(0.1), **options)
    for _ in range(3):
        state, metrics = step(state, batch())
    before, after = arrays(small()), arrays(lora.merge(state.model))
    moved = np.abs(after["embedding.weight"] - before["embedding.weight"]).max(1) > 0.01
    assert np.flatnonzero(moved).tolist() == sorted(NEW)
    assert np.abs(after["head.weight"] - before["head.weight"]).min() > 0
    assert (after["final_norm.scale"] == before["final_norm.scale"]).all()
    assert float(metrics["loss"]) == pytest.approx(2.40971, abs=1e-4)  # with and without


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"tokens": (3, 3)}, r"tokens=\(3, 3\):"),
        ({"tokens": (-1,)}, r"tokens=\(-1,\):"),
        ({"tokens": (16,)}, r"tokens=\(16,\): embedding.weight has 16 rows"),
        ({"whole": ("blocks.mlp.w_up",)}, r"whole='blocks.mlp.w_up'"),
        ({"tokens": (1,), "whole": ("embedding.weight",)}, r"both are of embedding.weight"),
        ({"targets": ("head.*",), "whole": ("head.weight",)}, r"head.weight is in both"),
    ],
)
def test_what_cannot_be_retrained_is_refused(fields, match):
    with pytest.raises(ValueError, match=match):
        adapted(small(), **fields)


def test_the_names_of_peft_are_paths():
    model = small()
    config = with_paths(lora.Config(whole=("embedding.weight", "head.weight")), model)
    assert config.whole == ("embedding.weight", "head.weight")
    with pytest.raises(ValueError, match="whole='none'"):
        with_paths(lora.Config(whole=("none",)), model)


@pytest.mark.parametrize(
    ("make", "fields"),
    [(small, {"tokens": NEW}), (lambda: drawn_rnn("lstm"), {"whole": ("embedding.weight",)})],
)
def test_they_are_saved_and_loaded_with_the_adapters(make, fields, tmp_path):
    zoo.save(tmp_path / "base", make())
    model = changed(make(), **fields)
    config = lora.config_of(model)
    assert (config.tokens, config.whole) == (fields.get("tokens", ()), fields.get("whole", ()))
    zoo.save_adapters(tmp_path / "adapters", model, base=tmp_path / "base")
    again = zoo.load(tmp_path / "adapters")
    assert lora.config_of(again) == config
    assert_trees_close(again, model, rtol=0)
