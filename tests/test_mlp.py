import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drawn_model, on_mesh

from zoo import losses, mlp, sharding
from zoo.sharding.axes import keystr, logical_axes
from zoo.sharding.rules import is_matrix
from zoo.training.step import make_eval_step

KEY = jax.random.key(0)


def make(**changes) -> mlp.MLP:
    sizes = {"in_size": 12, "out_size": 5, "hidden_size": 32, "num_layers": 3}
    return drawn_model(lambda key: mlp.MLP(mlp.Config(**{**sizes, **changes}), key=key))


def inputs() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(8, 12)), jnp.float32)


def loss_fn(model, batch, key):
    total, weight = losses.cross_entropy(
        model(batch["x"], key=key), batch["targets"], batch["weights"]
    )
    return total, weight, {}


def make_batch() -> dict[str, jax.Array]:
    targets = jnp.arange(8, dtype=jnp.int32) % 5
    return {"x": inputs(), "targets": targets, "weights": jnp.linspace(0.5, 1, 8)}


def test_plain_mlp_matches_its_formula():
    model = make(activation="tanh", norm="layer", num_layers=4)
    h = inputs()
    up, down = (jax.tree.map(lambda x: x[0], b) for b in (model.blocks.up, model.blocks.down))
    for layer in (model.first, up, down, model.last):
        h = jnp.tanh(layer.norm(h @ layer.linear.weight + layer.linear.bias[None]))
    expected = h @ model.head.weight + model.head.bias[None]
    np.testing.assert_allclose(eqx.filter_jit(model)(inputs()), expected, atol=1e-5)


def test_residual_mlp_matches_its_formula():
    model = make(activation="relu", residual=True, norm="rms", num_layers=2)
    first, blocks = model.first.linear, model.blocks
    assert model.first.norm is None
    h = jax.nn.relu(inputs() @ first.weight + first.bias[None])
    for i in range(2):
        normed = jax.tree.map(lambda x: x[i], blocks.norm)(h)  # noqa: B023
        up = jax.nn.relu(normed @ blocks.w_up[i] + blocks.b_up[i][None])
        h = h + up @ blocks.w_down[i] + blocks.b_down[i][None]
    np.testing.assert_allclose(
        model(inputs()), model.final_norm(h) @ model.head.weight + model.head.bias[None], atol=1e-5
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 1},
        {"num_layers": 2, "activation": "relu", "norm": "layer"},
        {"activation": "silu", "norm": "rms", "dropout": 0.3, "remat": "full", "num_layers": 4},
        {"residual": True, "num_layers": 1},
        {"residual": True, "norm": "layer", "dropout": 0.3, "remat": "dots", "activation": "tanh"},
    ],
    ids=["one", "two", "four", "block", "blocks"],
)
def test_every_parameter_gets_a_gradient(changes):
    loss = eqx.filter_jit(eqx.filter_grad(lambda m: (m(inputs(), key=KEY) ** 2).sum()))
    for path, leaf in jax.tree_util.tree_leaves_with_path(loss(make(**changes))):
        assert np.isfinite(leaf).all(), keystr(path)
        assert np.abs(leaf).max() > 0, keystr(path)


@pytest.mark.parametrize("residual", [False, True])
def test_remat_saves_memory_with_equal_gradients(residual):
    def gradient(remat):
        model = make(remat=remat, num_layers=15, residual=residual, norm="layer")
        arrays, static = eqx.partition(model, eqx.is_array)
        x = jnp.tile(inputs(), (32, 1))

        def loss(arrays):
            return (eqx.combine(arrays, static)(x, key=KEY) ** 2).sum()

        compiled = jax.jit(jax.grad(loss)).lower(arrays).compile()
        return compiled(arrays), compiled.memory_analysis().temp_size_in_bytes

    plain, plain_bytes = gradient("none")
    recomputed, fewer_bytes = gradient("full")
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(recomputed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    assert fewer_bytes < 0.8 * plain_bytes


def test_layers_draw_independent_dropout_masks():
    sizes = {"in_size": 64, "hidden_size": 64, "out_size": 64, "num_layers": 5}
    model = make(dropout=0.5, activation="relu", **sizes)
    # Layers that copy: a feature comes through if no mask drops it.
    copying = jax.tree.map(
        lambda x: jnp.broadcast_to(jnp.eye(64), x.shape) if x.shape[-2:] == (64, 64) else 0 * x,
        eqx.filter(model, eqx.is_array),
    )
    outputs = eqx.combine(copying, model)(jnp.ones((64, 64)), key=KEY)
    assert 0.02 < (outputs != 0).mean() < 0.05  # 1/2 to the power of 5
    np.testing.assert_allclose(outputs[outputs != 0], 32.0, rtol=1e-5)


def gradient(mesh: str) -> tuple:
    model = make(num_layers=4, residual=True, norm="layer", dropout=0.2)
    loss = lambda model: loss_fn(model, make_batch(), KEY)[0]
    return on_mesh(model, sharding.make_mesh(mesh), eqx.filter_value_and_grad(loss))


def test_mesh_gives_equal_gradients():
    found, wanted = (gradient(spec) for spec in ("data=2,fsdp=2,tensor=2", ""))
    for sharded, plain in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(sharded, plain, atol=1e-5)


@pytest.mark.parametrize("residual", [False, True])
def test_tensor_parallelism_reduces_every_second_layer(residual):
    mesh = sharding.make_mesh("tensor=4")
    model = make(num_layers=5, residual=residual)
    model = eqx.filter_shard(model, sharding.shardings(eqx.filter(model, eqx.is_array), mesh))
    matrices = [x for x in jax.tree.leaves(model.blocks) if x.shape[-2:] == (32, 32)]
    assert matrices
    for matrix in matrices:
        assert matrix.size == 4 * np.prod(matrix.sharding.shard_shape(matrix.shape))
    step = make_eval_step(loss_fn, mesh=mesh, precision="fp32")
    text = step.lower(model, make_batch()).compiled.as_text()
    # The blocks run in one loop, which holds their one reduction.
    assert text.count(" all-reduce(") == 1
    assert "all-gather" not in text
    assert "all-to-all" not in text


def test_blocks_begin_with_biases_of_zero_and_matrices_of_their_own():
    config = mlp.Config(12, 5, hidden_size=32, num_layers=2, residual=True)
    blocks = eqx.filter_jit(lambda key: mlp.MLP(config, key=key))(KEY).blocks
    assert not np.any([blocks.b_up, blocks.b_down])
    drawn = np.concatenate([blocks.w_up, 2**0.5 * blocks.w_down])  # divided by both blocks
    np.testing.assert_allclose(drawn.std((1, 2)), 32**-0.5, rtol=0.1)
    assert len(np.unique(drawn.round(5)[:, 0, 0])) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"activation": "sine"}, "activation='sine'.*gelu"),
        ({"remat": "save:query"}, "remat='save:query'.*block_input, mlp_hidden"),
    ],
)
def test_invalid_fields_are_named(changes, message):
    # Not by the constructor, whose annotations are checked in tests alone.
    config = dataclasses.replace(make().config)
    for name, value in changes.items():
        object.__setattr__(config, name, value)
    with pytest.raises(ValueError, match=message):
        config.__post_init__()


@pytest.mark.parametrize("residual", [False, True])
def test_flops_are_six_per_weight(residual):
    model = make(residual=residual, num_layers=4)
    names = logical_axes(model)
    is_axes = lambda x: isinstance(x, tuple)
    matrices = jax.tree.map(is_matrix, names, is_leaf=is_axes)
    weights = eqx.filter(model, matrices)
    expected = 6 * sum(x.size for x in jax.tree.leaves(weights))
    assert mlp.num_flops_per_example(model.config) == expected
