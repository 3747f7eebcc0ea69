"""zoo.transformer.moe: an independent formula, meshes, the load balance, and training with it."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    arrays,
    assert_trees_close,
    copy,
    drawn_transformer,
    make_transformer,
    token_batch,
)

import zoo
from zoo import losses, optimizers, sharding
from zoo.sharding.kinds import is_matrix
from zoo.transformer import moe

EXPERTS, CHOICES = 8, 3
OPTIONS: dict[str, Any] = {"num_experts": EXPERTS, "experts_per_token": CHOICES, "d_ff": 12}


def layer(**changes: Any) -> moe.MoE:
    options = {"num_experts": EXPERTS, "experts_per_token": CHOICES, "normalize": True, **changes}
    made = moe.MoE(16, 12, activation=jax.nn.silu, num_layers=1, key=jax.random.key(1), **options)
    return made


def numpy_experts(made: moe.MoE, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token by token and expert by expert: the output, the probabilities and the choices."""
    w = {name: np.asarray(value, np.float64) for name, value in arrays(made).items()}
    logits = x @ w["router"]
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    out, chosen = np.zeros_like(x), np.argsort(-probabilities, -1)[..., : made.experts_per_token]
    for place in np.ndindex(x.shape[:-1]):
        weights = probabilities[place][chosen[place]]
        weights = weights / weights.sum() if made.normalize else weights
        for expert, weight in zip(chosen[place], weights, strict=True):
            gate = x[place] @ w["w_gate"][expert]
            hidden = gate / (1 + np.exp(-gate)) * (x[place] @ w["w_up"][expert])
            out[place] += weight * (hidden @ w["w_down"][expert])
    return out, probabilities, chosen


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("choices", [1, CHOICES])
def test_experts_match_independent_numpy_formula(choices: int, normalize: bool):
    made = layer(experts_per_token=choices, normalize=normalize)
    x = np.random.default_rng(0).normal(size=(2, 7, 16))
    counted = np.arange(7)[None] < np.array([[7], [1]])
    got, balance = eqx.filter_jit(made)(jnp.asarray(x, jnp.float32), jnp.asarray(counted))
    want, probabilities, chosen = numpy_experts(made, x)
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
    for row in range(2):
        n = counted[row].sum()
        taken = np.bincount(chosen[row, :n].ravel(), minlength=EXPERTS) / (n * choices)
        expected = n * EXPERTS * (taken * probabilities[row, :n].mean(0)).sum()
        assert float(balance[row]) == pytest.approx(expected, rel=1e-4)


def test_even_load_scores_one_per_token():
    probabilities = jnp.full((1, EXPERTS, EXPERTS), 1 / EXPERTS)
    even = jnp.arange(EXPERTS, dtype=jnp.int32)[None, :, None]
    counted = jnp.ones((1, EXPERTS), bool)
    assert float(moe.load_balance(probabilities, even, counted)[0]) == pytest.approx(EXPERTS)
    sure = jnp.zeros_like(probabilities).at[:, :, 2].set(1.0)
    alike = jnp.full_like(even, 2)
    assert float(moe.load_balance(sure, alike, counted)[0]) == pytest.approx(EXPERTS * EXPERTS)


def value_and_gradient(spec: str, **rules: Any) -> Any:
    """Of a model that lies on the mesh as the changed rules have it."""
    model = drawn_transformer(**OPTIONS, num_layers=1, remat="full")
    batch = jax.tree.map(jnp.asarray, token_batch(8, 12))
    loss = losses.balanced_next_token(0.1)
    mesh, rules = zoo.make_mesh(spec), {**sharding.RULES, **rules}
    with sharding.use(mesh, rules):
        function = eqx.filter_jit(eqx.filter_value_and_grad(lambda m: loss(m, batch, None)[0]))
        return copy(function(jax.device_put(model, sharding.shardings(model, mesh, rules))))


ON_ONE_DEVICE = functools.cache(lambda: value_and_gradient(""))
CUBE = "data=2,fsdp=2,tensor=2"


@pytest.mark.parametrize(
    ("spec", "rules"),
    [
        (CUBE, {}),
        # Axes that split the batch too, where each device needs every expert for its rows.
        ("data=2,fsdp=2", {"experts": ("data", "fsdp")}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("fsdp=2,tensor=2", {}),
                ("tensor=8", {}),
                ("fsdp=8", {}),
                ("fsdp=8", {"experts": "fsdp"}),
                ("fsdp=2,tensor=4", {"experts": None}),  # "mlp" is on the tensor axis then
                (CUBE, {"experts": "data"}),
                (CUBE, {"experts": ("fsdp", "tensor")}),
                (CUBE, {"experts": None, "mlp": "data"}),
                (CUBE, {"experts": "tensor", "mlp": ("tensor", "fsdp")}),
                (CUBE, {"batch": "data", "experts": ("fsdp", "tensor")}),
                (CUBE, {"batch": ("data", "tensor")}),
            ]
        ),
    ],
    ids=str,
)
def test_mesh_gradients_match_one_device(spec: str, rules: dict):
    one, many = ON_ONE_DEVICE(), value_and_gradient(spec, **rules)
    np.testing.assert_allclose(many[0], one[0], rtol=1e-5)
    assert_trees_close(many[1], one[1], rtol=1e-4)
    for path, grad in arrays(one[1]).items():
        assert np.abs(grad).max() > 1e-5, path


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["fsdp=2,tensor=2", "tensor=8", CUBE])
def test_mesh_steps_match_one_device(spec: str):
    """By plain gradient descent: Adam hides how large a gradient is."""

    def three_steps(spec: str) -> list[tuple[float, float]]:
        mesh, optimizer = zoo.make_mesh(spec), optax.sgd(0.3)
        make_model = make_transformer(**{**OPTIONS, "d_ff": 16})
        state = zoo.init_state(make_model, optimizer, key=jax.random.key(0), mesh=mesh)
        options: dict = {"mesh": mesh, "precision": "fp32", "clip_norm": None}
        step, found = zoo.make_train_step(losses.next_token, optimizer, **options), []
        for _ in range(3):
            state, metrics = step(state, token_batch(8, 16))
            found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        return found

    expected = three_steps("")
    np.testing.assert_allclose(three_steps(spec), expected, rtol=1e-4)
    assert expected[2][0] < 0.9 * expected[0][0]


def test_each_device_holds_its_experts():
    mesh = zoo.make_mesh("tensor=8")
    model = drawn_transformer(**OPTIONS)
    placed = jax.device_put(model, sharding.shardings(model, mesh))
    w = placed.blocks.mlp.w_gate
    assert {shard.data.shape for shard in w.addressable_shards} == {(2, 1, 32, 12)}


def test_balancing_loss_evens_out_load():
    """From a router that likes few experts best of all."""
    model = drawn_transformer(**OPTIONS, num_layers=1)
    model = eqx.tree_at(lambda m: m.blocks.mlp.router, model, replace_fn=lambda w: w * 5)
    batch, loss, optimizer = token_batch(8, 16), losses.balanced_next_token(1.0), optax.adam(5e-3)
    state = zoo.init_state(lambda key: model, optimizer, key=jax.random.key(0))
    step = zoo.make_train_step(loss, optimizer, precision="fp32")
    balances = []
    for _ in range(30):
        state, metrics = step(state, batch)
        balances.append(float(metrics["balance"]))
    # Without its part in the loss it stays at 1.5.
    assert balances[0] > 1.45
    assert 0.95 < balances[-1] < 1.2


def test_balance_sums_over_rows():
    """So that a gradient depends on neither microbatches nor mesh."""
    model, batch = drawn_transformer(**OPTIONS, num_layers=1), token_batch(8, 16)
    loss = eqx.filter_jit(losses.balanced_next_token(0.5))
    parts = [{name: jnp.asarray(x[rows::2]) for name, x in batch.items()} for rows in (0, 1)]
    (total, weight, metrics), *halves = (
        loss(model, part, None) for part in (jax.tree.map(jnp.asarray, batch), *parts)
    )
    assert float(total) == pytest.approx(sum(float(half[0]) for half in halves), rel=1e-5)
    assert float(weight) == sum(float(half[1]) for half in halves)
    balance = sum(float(half[2]["balance"]) for half in halves)
    assert float(metrics["balance"]) == pytest.approx(balance, rel=1e-5)


def test_balance_without_experts_is_refused():
    batch, model = jax.tree.map(jnp.asarray, token_batch(2, 8)), drawn_transformer()
    loss = losses.balanced_next_token(0.1)
    with pytest.raises(ValueError, match="set num_experts"):
        loss(model, batch, None)


def test_optimizers_see_experts_as_matrices():
    skeleton = eqx.filter(drawn_transformer(**OPTIONS), eqx.is_array)
    mlp = optimizers.muon_dimensions(skeleton).blocks.mlp
    for weight in (mlp.w_gate, mlp.w_down):  # [layers, experts, in, out]
        assert (weight.reduction_axis, weight.output_axis) == ((2,), (3,))
    assert (mlp.router.reduction_axis, mlp.router.output_axis) == ((1,), (2,))
    assert is_matrix((None, "experts", "embed", "mlp"))
    assert not is_matrix((None, "experts", "embed"))


def test_devices_multiply_only_their_experts(monkeypatch: pytest.MonkeyPatch):
    """And leaves alone the rows behind its groups, of which a kernel may make anything."""
    exact, shapes = jax.lax.ragged_dot, []

    def ragged_dot(rows: Any, weights: Any, group_sizes: Any) -> Any:
        shapes.append(weights.shape)
        behind = jnp.arange(rows.shape[0], dtype=jnp.int32) >= group_sizes.sum()
        return jnp.where(behind[:, None], jnp.nan, exact(rows, weights, group_sizes))

    made, mesh = layer(), zoo.make_mesh("tensor=4")
    x, counted = jax.random.normal(jax.random.key(0), (2, 7, 16)), jnp.ones((2, 7), bool)
    want, balance = eqx.filter_jit(made)(x, counted)
    monkeypatch.setattr(jax.lax, "ragged_dot", ragged_dot)
    with sharding.use(mesh):
        placed = eqx.filter_shard(made, sharding.shardings(made, mesh))
        got = eqx.filter_jit(lambda made: made(x, counted))(placed)
    assert set(shapes) == {(EXPERTS // 4, 16, 12), (EXPERTS // 4, 12, 16)}
    assert_trees_close(got, (want, balance), rtol=1e-5)
