import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    VOCAB,
    arrays,
    assert_trees_close,
    drawn_model,
    drawn_rnn,
    drawn_transformer,
    make_bert,
    one_step,
)

import zoo
from zoo import losses, mlp, rnn
from zoo.nn.layers import Embedding, Linear
from zoo.nn.precision import in_precision
from zoo.wrappers.classifier import Classifier, TokenClassifier

KEY = jax.random.key(0)
BODIES = {
    "decoder": lambda: drawn_transformer(num_layers=1),
    "bert": lambda: drawn_model(make_bert(VOCAB, d_model=32, max_seq_len=32)),
    "rnn": lambda: drawn_rnn("lstm", num_layers=1),
    "two-way rnn": lambda: drawn_rnn("lstm", num_layers=1, bidirectional=True),
}
forward = eqx.filter_jit(lambda model, *inputs, **options: model(*inputs, **options))
TOKENS = jnp.asarray(np.random.default_rng(0).integers(1, VOCAB, (2, 8)), jnp.int32)
MASK = jnp.asarray([[True] * 5 + [False] * 3, [True] * 8])


@pytest.mark.parametrize("name", BODIES)
def test_head_pools_positions_without_padding(name):
    model = Classifier(BODIES[name](), 3, key=KEY)
    assert model.pooling == ("last" if name in ("decoder", "rnn") else "mean")
    hidden = np.asarray(forward(model.body.hidden, TOKENS, mask=MASK))
    pooled = {
        "mean": [hidden[0, :5].mean(0), hidden[1].mean(0)],
        "last": [hidden[0, 4], hidden[1, 7]],
    }[model.pooling]
    expected = np.stack(pooled) @ np.asarray(model.head.weight) + np.asarray(model.head.bias)
    found = forward(model, TOKENS, mask=MASK)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    # What stands in padding makes no difference, nor do fewer columns of it.
    other = jnp.where(MASK, TOKENS, 1)
    np.testing.assert_allclose(forward(model, other, mask=MASK), found, atol=1e-5)
    np.testing.assert_allclose(forward(model, TOKENS[:1, :5]), found[:1], atol=1e-5)
    one = forward(model, TOKENS, mask=MASK & (jnp.arange(8)[None] < 1))
    np.testing.assert_allclose(one, forward(model, TOKENS[:, :1]), atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "rnn"])
def test_each_token_has_logits_that_survive_save_and_load(name, tmp_path):
    model = TokenClassifier(BODIES[name](), 3, key=KEY)
    hidden = np.asarray(forward(model.body.hidden, TOKENS, mask=MASK))
    expected = hidden @ np.asarray(model.head.weight) + np.asarray(model.head.bias)
    found = forward(model, TOKENS, mask=MASK)
    assert found.shape == (2, 8, 3)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(forward(model, TOKENS[:1, :5]), found[:1, :5], atol=1e-5)
    zoo.save(tmp_path / "model", model)
    loaded = zoo.load(tmp_path / "model")
    assert type(loaded) is zoo.TokenClassifier
    np.testing.assert_array_equal(forward(loaded, TOKENS, mask=MASK), found)


@pytest.mark.parametrize("name", BODIES)
def test_classifier_bodies_use_the_step_precision(name):
    model = Classifier(BODIES[name](), 3, key=KEY)
    with in_precision(model, "bf16") as given:
        # An RNN leaves the cast to the step; the others cast a layer at a time.
        expected = jnp.bfloat16 if "rnn" in name else jnp.float32
        assert given.body.embedding.weight.dtype == expected
        assert given.head.weight.dtype == expected
        assert jax.eval_shape(given.body.hidden, TOKENS).dtype == jnp.bfloat16
        assert jax.eval_shape(given, TOKENS).dtype == jnp.float32


@pytest.mark.parametrize("name", BODIES)
def test_classifier_survives_save_and_load(name, tmp_path):
    model = Classifier(BODIES[name](), 3, pooling="first", key=KEY)
    zoo.save(tmp_path / "model", model)
    loaded = zoo.load(tmp_path / "model")
    assert isinstance(loaded, Classifier)
    assert getattr(loaded.body, "head", None) is getattr(loaded.body, "pooler", None) is None
    assert (loaded.pooling, loaded.num_classes) == ("first", 3)
    assert arrays(loaded).keys() == arrays(model).keys()
    np.testing.assert_array_equal(forward(loaded, TOKENS), forward(model, TOKENS))


@pytest.mark.slow
def test_training_on_a_mesh_matches_one_device():
    batch = {
        "inputs": np.tile(np.asarray(TOKENS), (4, 1)),
        "mask": np.tile(np.asarray(MASK), (4, 1)),
        "labels": np.asarray([0, 1] * 4, np.int32),
        "weights": np.ones(8, np.float32),
    }
    make = lambda key, body: Classifier(body, 2, key=key)
    found, wanted = (
        one_step(
            make,
            losses.classification,
            batch,
            mesh=zoo.make_mesh(mesh),
            pretrained=BODIES["decoder"](),
        )
        for mesh in ("data=2,fsdp=2,tensor=2", "")
    )
    assert found[0]["loss"] == pytest.approx(wanted[0]["loss"], rel=1e-5)
    assert_trees_close(found[1], wanted[1], rtol=1e-4)
    assert all(np.abs(x).max() > 0 for x in wanted[1].values())


def test_custom_bodies_are_accepted():
    class Bag(eqx.Module):
        """A vector per token that depends on nothing else, and a head that is not used."""

        embedding: Embedding
        head: Linear | None
        config: None = None
        width: int = 5
        is_causal: bool = False
        is_pooled: bool = False

        def hidden(self, tokens, **options):
            return self.embedding(tokens)

        def without_head(self):
            return eqx.tree_at(lambda bag: bag.head, self, None)

    head = Linear(5, VOCAB, in_axis="embed", out_axis="vocab", key=KEY)
    body = Bag(Embedding(VOCAB, 5, key=KEY), head)
    model = Classifier(body, 3, key=KEY)
    assert model.body.head is None
    mean = np.asarray(body.embedding.weight)[np.asarray(TOKENS)].mean(1)
    expected = mean @ np.asarray(model.head.weight) + np.asarray(model.head.bias)
    np.testing.assert_allclose(model(TOKENS), expected, atol=1e-5)


def test_bodies_without_token_vectors_are_refused():
    pooled = rnn.RNN(rnn.Config(VOCAB, out_size=2, pooling="mean", hidden_size=8), key=KEY)
    for body in (mlp.MLP(mlp.Config(4, 2), key=KEY), pooled):
        with pytest.raises(ValueError, match="gives no vector per token: take a transformer"):
            Classifier(body, 2, key=KEY)
    with pytest.raises(ValueError, match=r"^pooling='pooler':"):
        Classifier(BODIES["decoder"](), 2, pooling="pooler", key=KEY)
