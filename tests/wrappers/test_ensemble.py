import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zoo import ensemble, losses, mlp, optimizers, rnn, sharding, transformer
from zoo.sharding.axes import logical_axes
from zoo.sharding.rules import is_matrix
from zoo.training.state import init_state
from zoo.training.step import make_train_step
from zoo.wrappers.ensemble import Ensemble

KEY = jax.random.key(0)
NUM_MEMBERS = 8
RNG = np.random.default_rng(0)
TOKENS = jnp.asarray(RNG.integers(0, 16, (8, 6)), jnp.int32)
POINTS = jnp.asarray(RNG.normal(size=(8, 4)), jnp.float32)


def make_mlp(key, **changes):
    config = mlp.Config(in_size=4, out_size=3, hidden_size=8, num_layers=2, **changes)
    return mlp.MLP(config, key=key)


def make_rnn(key):
    return rnn.RNN(rnn.Config(vocab_size=16, hidden_size=8, num_layers=1), key=key)


def make_transformer(key):
    config = transformer.Config(vocab_size=16, d_model=8, num_layers=2, num_heads=2)
    return transformer.Transformer(config, key=key)


MODELS = [(make_mlp, POINTS), (make_rnn, TOKENS), (make_transformer, TOKENS)]


def loss_fn(model, batch, key):
    total, weight = losses.cross_entropy(model(batch["x"], key=key), batch["y"], batch["weights"])
    return total, weight, {"half": (total, 2 * weight)}


def make_batch(x=POINTS) -> dict[str, np.ndarray]:
    shape = (8,) if x.ndim == 2 and x.dtype == jnp.float32 else (8, 6)
    return {
        "x": np.asarray(x),
        "y": np.arange(np.prod(shape), dtype=np.int32).reshape(shape) % 3,
        "weights": np.linspace(0.1, 1, np.prod(shape), dtype=np.float32).reshape(shape),
    }


@functools.cache
def ensemble_of(make_model):
    return eqx.filter_jit(lambda key: Ensemble(make_model, NUM_MEMBERS, key=key))(KEY)


@pytest.mark.parametrize(("make_model", "x"), MODELS, ids=["mlp", "rnn", "transformer"])
def test_members_match_separately_built_models(make_model, x):
    model = ensemble_of(make_model)
    call = eqx.filter_jit(lambda model: model(x))
    make_one = eqx.filter_jit(make_model)
    outputs = call(model)
    assert model.num_members == NUM_MEMBERS
    assert outputs.shape[0] == NUM_MEMBERS
    keys = jax.random.split(KEY, NUM_MEMBERS)
    for i in (0, 5):
        np.testing.assert_allclose(outputs[i], call(make_one(keys[i])), atol=1e-5)
        np.testing.assert_allclose(outputs[i], call(model[i]), atol=1e-5)


# SGD sees the scale of a gradient; the other's clip bites, and is each member's own.
OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "muon": optax.chain(
        optax.clip_by_global_norm(0.1),
        optimizers.make_optimizer(optimizers.Config(name="muon", learning_rate=0.02), steps=3),
    ),
}


@pytest.mark.parametrize("name", ["sgd", pytest.param("muon", marks=pytest.mark.slow)])
def test_members_train_like_separate_models(name):
    optimizer = OPTIMIZERS[name]

    def train(state, step):
        history = []
        for _ in range(3):
            state, metrics = step(state, make_batch())
            history.append([float(metrics[name]) for name in ("loss", "half")])
        return state.model, history

    def make_step(loss, optimizer):
        return make_train_step(loss, optimizer, precision="fp32", clip_norm=None)

    own = ensemble.per_member(optimizer)
    state = init_state(lambda key: Ensemble(make_mlp, NUM_MEMBERS, key=key), own, key=KEY)
    members = [state.model[i] for i in range(NUM_MEMBERS)]
    together, history = train(state, make_step(ensemble.member_loss(loss_fn), own))
    step, histories = make_step(loss_fn, optimizer), []
    for i, member in enumerate(members):
        state = init_state(lambda _, member=member: member, optimizer, key=KEY)
        alone, history_alone = train(state, step)
        histories.append(history_alone)
        for a, b in zip(jax.tree.leaves(together[i]), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
    np.testing.assert_allclose(history, np.mean(histories, axis=0), rtol=1e-5)


@pytest.mark.parametrize(
    ("make_model", "x", "mesh", "rules"),
    [
        (make_mlp, POINTS, "data=2,fsdp=2,tensor=2", {}),
        (make_rnn, TOKENS, "data=2,fsdp=2,tensor=2", {}),
        (make_mlp, POINTS, "data=2,fsdp=4", {"member": "data", "batch": "fsdp"}),
    ],
    ids=["mlp", "rnn", "other rules"],
)
def test_sharded_members_give_equal_gradients(make_model, x, mesh, rules):
    model = ensemble_of(make_model)
    layout = sharding.Layout(mesh, {**sharding.RULES, **rules})
    placed = eqx.filter_shard(model, sharding.shardings(eqx.filter(model, eqx.is_array), layout))
    for leaf in jax.tree.leaves(eqx.filter(placed, eqx.is_array)):
        assert leaf.sharding.shard_shape(leaf.shape)[0] == NUM_MEMBERS // 2
    batch = jax.tree.map(jnp.asarray, make_batch(x))

    def gradient(model):
        loss = lambda model: ensemble.member_loss(loss_fn)(model, batch, KEY)[0]
        return eqx.filter_jit(eqx.filter_value_and_grad(loss))(model)

    with sharding.use(layout):
        sharded = gradient(placed)
        # Members and rows are split whatever the parameters, which lie whole on each device.
        outputs = eqx.filter_jit(lambda model: model(x))(model)
    assert outputs.sharding.shard_shape(outputs.shape)[:2] == (NUM_MEMBERS // 2, 8 // 4)
    for a, b in zip(jax.tree.leaves(sharded), jax.tree.leaves(gradient(model)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_tensor_sharded_members_need_no_gathers():
    mesh = sharding.make_mesh("tensor=4")
    optimizer = ensemble.per_member(optax.sgd(0.01))
    make_model = lambda key: Ensemble(make_rnn, NUM_MEMBERS, key=key)
    state = init_state(make_model, optimizer, key=KEY, mesh=mesh)
    loss = ensemble.member_loss(loss_fn)
    step = make_train_step(loss, optimizer, mesh=mesh, precision="fp32", clip_norm=None)
    text = step.lower(state, make_batch(TOKENS)).compiled.as_text()
    assert "all-gather" not in text
    assert "all-to-all" not in text
    assert "collective-permute" not in text


def test_is_matrix_ignores_the_member_axis():
    names = logical_axes(ensemble_of(make_rnn)).members
    direction = names.layers[0].directions[0]
    assert direction.weight_ih == ("member", "embed", "gates", "hidden")
    assert is_matrix(direction.weight_ih)
    assert not is_matrix(direction.bias)
    assert not is_matrix(names.head.bias)
    stacked = logical_axes(ensemble_of(make_transformer)).members
    assert stacked.blocks.mlp.w_up == ("member", None, "embed", "mlp")


def test_dropout_samples_match_keyed_calls():
    model = make_mlp(KEY, dropout=0.5)
    call = eqx.filter_jit(lambda key: model(POINTS, key=key))
    samples = jax.jit(lambda key: ensemble.sample_dropout(model, POINTS, num_samples=5, key=key))(
        KEY
    )
    assert samples.shape == (5, 8, 3)
    for sample, key in zip(samples, jax.random.split(KEY, 5), strict=True):
        np.testing.assert_allclose(sample, call(key), atol=1e-5)
    assert samples.std(0).min() > 0


def test_members_drop_different_units():
    same = jax.random.split(KEY, 1)[0]
    model = Ensemble(lambda key: make_mlp(same, dropout=0.5), 2, key=KEY)
    batch, loss = jax.tree.map(jnp.asarray, make_batch()), ensemble.member_loss(loss_fn)
    outputs = lambda model, key: model(POINTS, key=key)
    gradient = eqx.filter_grad(lambda model, key: loss(model, batch, key)[0])
    for call in (outputs, lambda model, key: gradient(model, key).members.first.linear.bias):
        for key in (None, KEY):
            one, other = eqx.filter_jit(call)(model, key)
            assert np.allclose(one, other, atol=1e-6) == (key is None)


@pytest.mark.parametrize(
    ("make_model", "x", "mesh"),
    [(make_mlp, POINTS, ""), (make_rnn, TOKENS, "data=2,fsdp=2,tensor=2")],
    ids=["mlp", "rnn"],
)
def test_per_example_gradients_match_single_rows(make_model, x, mesh):
    model, batch = make_model(KEY), jax.tree.map(jnp.asarray, make_batch(x))
    with sharding.use(sharding.make_mesh(mesh)):
        row_losses, gradients = eqx.filter_jit(ensemble.per_example(loss_fn))(model, batch, KEY)
    gradient_of = eqx.filter_jit(
        eqx.filter_value_and_grad(lambda model, batch: loss_fn(model, batch, None)[0])
    )
    for row in (0, 5):
        loss, gradient = gradient_of(model, jax.tree.map(lambda a, i=row: a[i : i + 1], batch))
        np.testing.assert_allclose(row_losses[row], loss, rtol=1e-5)
        for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(gradient), strict=True):
            np.testing.assert_allclose(a[row], b, atol=1e-5)
    np.testing.assert_allclose(row_losses.sum(), gradient_of(model, batch)[0], rtol=1e-5)


def test_each_row_draws_by_a_key_of_its_own():
    def loss(model, batch, key):
        return model * (0.0 if key is None else jax.random.uniform(key)), 1.0, {}

    with_key, without = (
        ensemble.per_example(loss)(jnp.ones(()), jnp.zeros((3, 2)), key)[1] for key in (KEY, None)
    )
    assert len(np.unique(with_key)) == 3
    np.testing.assert_array_equal(without, [0, 0, 0])


def test_zero_members_are_refused():
    with pytest.raises(ValueError, match="num_members=0"):
        Ensemble(make_mlp, 0, key=KEY)
