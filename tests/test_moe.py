"""zoo.moe: an independent formula, meshes, the load balance, and training with it."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import arrays, assert_trees_close, copy, drawn_transformer, token_batch

import zoo
from zoo import losses, moe, optimizers, sharding
from zoo.axes import is_matrix

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
def test_each_token_gets_the_weighted_sum_of_its_experts(choices: int, normalize: bool):
    made = layer(experts_per_token=choices, normalize=normalize)
    x = np.random.default_rng(0).normal(size=(2, 7, 16))
    counted = np.arange(7)[None] < np.array([[7], [4]])
    got, balance = eqx.filter_jit(made)(jnp.asarray(x, jnp.float32), jnp.asarray(counted))
    want, probabilities, chosen = numpy_experts(made, x)
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
    for row in range(2):
        n = counted[row].sum()
        taken = np.bincount(chosen[row, :n].ravel(), minlength=EXPERTS) / (n * choices)
        expected = n * EXPERTS * (taken * probabilities[row, :n].mean(0)).sum()
        assert float(balance[row]) == pytest.approx(expected, rel=1e-4)


def test_an_even_load_is_one_a_token():
    probabilities = jnp.full((1, EXPERTS, EXPERTS), 1 / EXPERTS)
    even = jnp.arange(EXPERTS, dtype=jnp.int32)[None, :, None]
    counted = jnp.ones((1, EXPERTS), bool)
    assert float(moe.load_balance(probabilities, even, counted)[0]) == pytest.approx(EXPERTS)
    sure = jnp.zeros_like(probabilities).at[:, :, 2].set(1.0)
    alike = jnp.full_like(even, 2)
    assert float(moe.load_balance(sure, alike, counted)[0]) == pytest.approx(EXPERTS * EXPERTS)


@pytest.mark.parametrize(
    ("spec", "experts_axis"),
    [
        ("data=2,fsdp=2,tensor=2", "tensor"),
        pytest.param("tensor=8", "tensor", marks=pytest.mark.slow),
        pytest.param("fsdp=8", "tensor", marks=pytest.mark.slow),
        pytest.param("fsdp=2,tensor=4", None, marks=pytest.mark.slow),
    ],
)
def test_a_mesh_gives_the_loss_and_the_gradient_of_one_device(spec: str, experts_axis: str | None):
    model = drawn_transformer(**OPTIONS, num_layers=1, remat="full")
    batch = jax.tree.map(jnp.asarray, token_batch(8, 12))
    loss = losses.balanced_next_token(0.1)

    def value_and_grad(model: Any, batch: Any) -> Any:
        return eqx.filter_value_and_grad(lambda m: loss(m, batch, None)[0])(model)

    one, mesh = eqx.filter_jit(value_and_grad)(model, batch), zoo.make_mesh(spec)
    rules = {**sharding.RULES, "experts": experts_axis}
    placed = jax.device_put(model, sharding.shardings(model, mesh, rules))
    with sharding.use(mesh, rules):
        many = eqx.filter_jit(value_and_grad)(placed, batch)
    np.testing.assert_allclose(many[0], one[0], rtol=1e-5)
    assert_trees_close(copy(many[1]), copy(one[1]), rtol=1e-4)
    for path, grad in arrays(one[1]).items():
        assert np.abs(grad).max() > 1e-5, path


def test_each_device_holds_its_experts():
    mesh = zoo.make_mesh("tensor=8")
    model = drawn_transformer(**OPTIONS)
    placed = jax.device_put(model, sharding.shardings(model, mesh))
    w = placed.blocks.mlp.w_gate
    assert {shard.data.shape for shard in w.addressable_shards} == {(2, 1, 32, 12)}


def test_the_balancing_loss_evens_out_the_load():
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


def test_the_balance_is_a_sum_over_rows():
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


def test_a_model_without_experts_has_no_balance():
    batch = jax.tree.map(jnp.asarray, token_batch(2, 8))
    with pytest.raises(ValueError, match="set num_experts"):
        losses.balanced_next_token(0.1)(drawn_transformer(), batch, None)


def test_each_expert_is_a_matrix_of_its_own_to_the_optimizer():
    skeleton = eqx.filter(drawn_transformer(**OPTIONS), eqx.is_array)
    mlp = optimizers.muon_dimensions(skeleton).blocks.mlp
    for weight in (mlp.w_gate, mlp.w_down):  # [layers, experts, in, out]
        assert (weight.reduction_axis, weight.output_axis) == ((2,), (3,))
    assert (mlp.router.reduction_axis, mlp.router.output_axis) == ((1,), (2,))
    assert is_matrix((None, "experts", "embed", "mlp"))
    assert not is_matrix((None, "experts", "embed"))
