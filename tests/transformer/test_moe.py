"""zoo.transformer.moe: an independent formula, meshes, the load balance, and training with it."""

import functools
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    Batch,
    arrays,
    assert_trees_close,
    copy,
    covering,
    drawn_transformer,
    loss_and_gradient,
    make_transformer,
    pad_tokens,
    small_config,
    state_and_step,
    token_batch,
    value_and_gradients,
)

import zoo
from zoo import lora, losses, optimizers, sharding, transformer
from zoo.nn.parameters import unshard
from zoo.nn.precision import in_precision
from zoo.nn.stateful import cast
from zoo.publishing import models
from zoo.sharding.rules import is_matrix
from zoo.tasks.finetuning.training import merge
from zoo.training import state as state_module
from zoo.transformer import ExpertsConfig, moe
from zoo.transformer import dispatch as exchanges

EXPERTS, CHOICES = 8, 3
OPTIONS: dict[str, Any] = {"experts.num_experts": EXPERTS, "experts.per_token": CHOICES, "d_ff": 12}


def layer(mlp: Any = "swiglu", bias: bool = False, **changes: Any) -> moe.MoE:
    experts = ExpertsConfig(**{"num_experts": EXPERTS, "per_token": CHOICES, **changes})
    config = transformer.Config(1, 16, num_layers=1, d_ff=12, experts=experts, mlp=mlp, bias=bias)
    return moe.MoE(config, key=jax.random.key(1))


def numpy_experts(made: moe.MoE, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token by token and expert by expert: the output, the probabilities and the choices."""
    w = {name: np.asarray(value, np.float64) for name, value in arrays(made).items()}
    w = {"b_router": np.zeros(EXPERTS)} | dict.fromkeys(BIASES, np.zeros((EXPERTS, 1))) | w
    logits = x @ w["router"] + w["b_router"]
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    out, scores, groups = np.zeros_like(x), probabilities.copy(), made.config.num_groups
    if groups > 1:
        in_groups = scores.reshape(*x.shape[:-1], groups, -1)
        best = np.sort(in_groups, -1)[..., -made.config.group_score :].sum(-1)
        left = np.argsort(best, -1)[..., : groups - made.config.groups_per_token]
        np.put_along_axis(in_groups, left[..., None], -1.0, axis=-2)
    chosen = np.argsort(-scores, -1)[..., : made.config.per_token]
    for place in np.ndindex(x.shape[:-1]):
        weights = probabilities[place][chosen[place]]
        weights = weights / weights.sum() if made.config.normalize else weights
        for expert, weight in zip(chosen[place], weights, strict=True):
            gate = x[place] @ w["w_gate"][expert] + w["b_gate"][expert]
            up = x[place] @ w["w_up"][expert] + w["b_up"][expert]
            steepness = 1.0
            if made.kind == "swiglu_clamped":
                gate, up, steepness = np.minimum(gate, 7), np.clip(up, -7, 7) + 1, 1.702
            hidden = gate / (1 + np.exp(-steepness * gate)) * up
            out[place] += weight * (hidden @ w["w_down"][expert] + w["b_down"][expert])
    return out, probabilities, chosen


BIASES = ("b_gate", "b_up", "b_down")
GROUPS = {"num_groups": 4, "groups_per_token": 2}
IN_GROUPS = {f"experts.{name}": value for name, value in GROUPS.items()}


@pytest.mark.parametrize(
    ("choices", "changes"),
    [
        (1, {"normalize": False}),
        (CHOICES, {}),
        (CHOICES, {**GROUPS, "group_score": 1}),
        (CHOICES, {**GROUPS, "bias": True, "mlp": "swiglu_clamped"}),
    ],
    ids=str,
)
def test_experts_match_independent_numpy_formula(choices: int, changes: dict):
    made = layer(per_token=choices, **changes)
    rng = np.random.default_rng(0)
    names = [name for name in ("b_router", *BIASES) if getattr(made, name) is not None]
    assert len(names) == 4 * ("bias" in changes)
    for name in names:
        drawn = jnp.asarray(rng.normal(size=getattr(made, name).shape), jnp.float32)
        made = eqx.tree_at(lambda made: getattr(made, name), made, drawn)  # noqa: B023
    x = rng.normal(size=(2, 7, 16)) * (1 + 5 * ("bias" in changes))  # beyond the bounds
    counted = np.arange(7)[None] < np.array([[7], [1]])
    got, balance = eqx.filter_jit(made)(
        jnp.asarray(x, jnp.float32), jnp.asarray(counted, jnp.float32)
    )
    want, probabilities, chosen = numpy_experts(made, x)
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
    for row in range(2):
        n = counted[row].sum()
        taken = np.bincount(chosen[row, :n].ravel(), minlength=EXPERTS) / (n * choices)
        expected = n * EXPERTS * (taken * probabilities[row, :n].mean(0)).sum()
        assert float(balance.load[row]) == pytest.approx(expected, rel=1e-4)


def test_even_load_scores_one_per_token():
    probabilities = jnp.full((1, EXPERTS, EXPERTS), 1 / EXPERTS)
    even = jnp.arange(EXPERTS, dtype=jnp.int32)[None, :, None]
    sure = jnp.zeros_like(probabilities).at[:, :, 2].set(1.0)
    for chosen, p, load in ((even, probabilities, 1), (jnp.full_like(even, 2), sure, EXPERTS)):
        route = moe.Route(jnp.ones(chosen.shape), chosen, p)
        found = moe.balance(jnp.zeros(p.shape), None, route, jnp.ones((1, EXPERTS)))
        assert float(found.load[0]) == pytest.approx(load * EXPERTS)


def test_a_step_sorts_each_tokens_experts_once():
    """There and back; not again where a layer is computed again, nor for a gradient."""
    options = {**OPTIONS, "experts.dispatch": "all_to_all", "experts.buffer": 1.0}
    model = drawn_transformer(**options, num_layers=2, remat="full")
    batch, loss = jax.tree.map(jnp.asarray, token_batch(8, 12)), losses.balanced_next_token(0.1)
    with sharding.use(mesh := zoo.make_mesh("expert=4")):
        function = eqx.filter_jit(eqx.filter_grad(lambda model: loss(model, batch, None)[0]))
        program = function.lower(jax.device_put(model, sharding.shardings(model, mesh)))
        # At once, and in rounds.
        assert program.compile().compiled.as_text().count(" sort(") == 2 * 2


def value_and_gradient(options: dict, spec: str, **rules: Any) -> Any:
    """Of a model that lies on the mesh as the changed rules have it."""
    layout = zoo.Layout(spec, {**sharding.RULES, **rules})
    loss = losses.balanced_next_token(0.1)
    return loss_and_gradient(drawn_transformer(**options), token_batch(8, 12), layout, loss)


ONE_LAYER = {**OPTIONS, "num_layers": 1, "remat": "full"}
ON_ONE_DEVICE = functools.cache(lambda: value_and_gradient(ONE_LAYER, ""))
CUBE = "data=2,fsdp=2,tensor=2"


def assert_alike(many: Any, one: Any) -> None:
    np.testing.assert_allclose(many[0], one[0], rtol=1e-5)
    assert_trees_close(many[1], one[1], rtol=1e-4)
    for path, grad in arrays(one[1]).items():
        assert np.abs(grad).max() > 1e-6, path


@pytest.mark.parametrize(
    ("spec", "rules"),
    [
        (CUBE, {}),
        # Axes that split the batch too, where each device needs every expert for its rows.
        ("data=2,fsdp=2", {"experts": ("data", "fsdp")}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("fsdp=2,tensor=4", {"experts": None}),  # "mlp" is on the tensor axis then
                (CUBE, {"experts": ("fsdp", "tensor")}),
                (CUBE, {"batch": ("data", "tensor")}),
            ]
        ),
    ],
    ids=str,
)
def test_mesh_gradients_match_one_device(spec: str, rules: dict):
    assert_alike(value_and_gradient(ONE_LAYER, spec, **rules), ON_ONE_DEVICE())


VARIANT: dict[str, Any] = {
    **{**OPTIONS, "bias": True, "mlp": "swiglu_clamped", "num_layers": 4, **IN_GROUPS},
    **{"experts.first_dense": 1, "experts.interval": 2, "experts.dense_d_ff": 20},
    **{"experts.num_shared": 1, "experts.router": "sigmoid", "experts.bias_rate": 0.1},
}


def test_dense_layers_groups_and_biases_on_a_mesh_are_as_on_one_device():
    """And layers in a loop as one after another."""
    one = value_and_gradient({**VARIANT, "scan_layers": False}, "")
    assert_alike(value_and_gradient(VARIANT, "tensor=2"), one)


def test_layers_before_the_experts_and_between_them_have_one_mlp():
    model = drawn_transformer(**VARIANT)
    assert model.config.has_experts == (False, True) * 2
    found = {x: y.shape[:2] for x, y in arrays(model.blocks).items() if x.endswith("w_up")}
    assert found == {"mlp.w_up": (2, 8), "dense_mlp.w_up": (2, 32), "shared_mlp.w_up": (2, 32)}
    assert model.blocks.dense_mlp.w_up.shape[2] == 20
    model = drawn_transformer(**{**VARIANT, "experts.interval": 1})
    assert model.config.has_experts == (False, *[True] * 3)
    balance = eqx.filter_jit(type(model).hidden_and_balance)(model, jnp.zeros((1, 4), jnp.int32))[1]
    assert float(balance.load[0]) >= 4  # the mean of the layers with experts, 1 per token if even


def of_layer(spec: str, skewed: int, rules: dict, **options: Any) -> Any:
    """A layer's output, its balance, and the gradients of both for its input and parameters.

    The tokens of the first `skewed` rows all go to the same experts.
    """
    made, rng = layer(**options), np.random.default_rng(0)
    x_BTE, g_BTE = (jnp.asarray(rng.normal(size=(8, 6, 16)), jnp.float32) for _ in range(2))
    lengths = jnp.asarray([6, 1, 3, 6, 2, 6, 6, 5])[:, None]
    counted = (jnp.arange(6)[None] < lengths).astype(jnp.float32)
    if skewed:
        x_BTE = x_BTE.at[..., 0].set(jnp.where(jnp.arange(8) < skewed, 4.0, 0.0)[:, None])
        router = made.router.at[0].set(jnp.arange(EXPERTS, dtype=jnp.float32))
        made = eqx.tree_at(lambda made: made.router, made, router)
    mesh = zoo.make_mesh(spec)

    @eqx.filter_jit
    def run(made: moe.MoE, x_BTE: Any) -> Any:
        def forward(made: moe.MoE, x_BTE: Any) -> Any:
            x_BTE = sharding.constrain(x_BTE, "batch", "inner_seq", "embed")
            return unshard(made)(x_BTE, counted)

        out, backward = eqx.filter_vjp(forward, made, x_BTE)
        return out, backward((g_BTE, jax.tree.map(jnp.ones_like, out[1])))

    with sharding.use(zoo.Layout(mesh, {**sharding.RULES, **rules})):
        placed = jax.device_put(made, sharding.shardings(made, mesh))
        return copy(run(placed, x_BTE))


OF_LAYER_ON_ONE_DEVICE = functools.cache(lambda skewed: of_layer("", skewed, {}))
DISPATCHES = ["all_to_all", "all_reduce"]


EXPERT_MESHES = [
    ("expert=8", {}),
    ("fsdp=2,expert=4", {}),
    ("fsdp=2,expert=2,tensor=2", {"experts": "expert"}),  # and each expert over the tensor axis
    ("data=2,expert=2,context=2", {}),
    ("expert=2,tensor=4", {"experts": ("tensor", "expert")}),
]


@pytest.mark.parametrize(
    ("placed", "dispatch", "skewed"),
    [
        *((("fsdp=2,expert=2,tensor=2", {}), dispatch, 8) for dispatch in DISPATCHES),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in covering(EXPERT_MESHES, DISPATCHES, [0, 8])
        ),
    ],
    ids=str,
)
def test_an_expert_axis_gives_one_devices_gradients(
    placed: tuple[str, dict], dispatch: Any, skewed: int
):
    spec, rules = placed
    one = OF_LAYER_ON_ONE_DEVICE(skewed)
    many = of_layer(spec, skewed, rules, dispatch=dispatch, buffer=1.0)
    assert len(arrays(one)) == 4 + 4 + 1
    assert_trees_close(many, one, rtol=2e-5)
    taken = [bool(each.any()) for each in one[1][0].w_down]
    assert taken == [not skewed] * (EXPERTS - CHOICES) + [True] * CHOICES


@pytest.mark.parametrize(
    ("spec", "skewed", "at_once"),
    [
        ("data=2,expert=4", 0, True),
        ("data=2,expert=4", 4, False),  # one of the two exchanges has too many for a device
        pytest.param("expert=4,tensor=2", 8, False, marks=pytest.mark.slow),
    ],
)
def test_rows_go_in_rounds_only_where_a_device_gets_too_many(
    spec: str, skewed: int, at_once: bool, monkeypatch: Any
):
    """On all devices alike: what the other branch gives is no number, and no device takes it."""
    cond, calls = jax.lax.cond, []

    def spoiled(fits: Any, all_at_once: Any, in_rounds: Any, routed: Any) -> Any:
        def nothing(branch: Any) -> Any:
            return lambda routed: branch(routed) * jnp.nan

        calls.append(fits)
        if at_once:
            return cond(fits, all_at_once, nothing(in_rounds), routed)
        return cond(fits, nothing(all_at_once), in_rounds, routed)

    monkeypatch.setattr(jax.lax, "cond", spoiled)
    many = of_layer(spec, skewed, {}, dispatch="all_to_all", buffer=2.0)
    assert calls
    assert_trees_close(many, OF_LAYER_ON_ONE_DEVICE(skewed), rtol=1e-5)


def test_members_of_an_ensemble_have_loads_of_their_own():
    """One of the two has too many rows for a device, which `vmap` computes both branches for."""
    x_BTE = jax.random.normal(jax.random.key(0), (8, 6, 16)).at[..., 0].set(4.0)
    made = [layer(dispatch="all_to_all", buffer=2.0)] * 2
    skewed = made[1].router.at[0].set(jnp.arange(EXPERTS, dtype=jnp.float32))
    made[1] = eqx.tree_at(lambda made: made.router, made[1], skewed)
    both = jax.tree.map(lambda *x: jnp.stack(x), *(eqx.filter(x, eqx.is_array) for x in made))
    static = eqx.filter(made[0], eqx.is_array, inverse=True)

    def loss(arrays: Any) -> jax.Array:
        made = eqx.combine(arrays, static)
        return jnp.sin(unshard(made)(x_BTE, jnp.ones((8, 6)))[0]).sum()

    def run(spec: str) -> Any:
        with sharding.use(zoo.make_mesh(spec)):
            return copy(jax.jit(jax.vmap(jax.value_and_grad(loss)))(both))

    assert_trees_close(run("fsdp=2,expert=4"), run(""), rtol=1e-5)


def exchange_as_documented(
    operand: Any, output: Any, *offsets_and_sizes: Any, axis_name: Any
) -> jax.Array:
    """`jax.lax.ragged_all_to_all` as its documentation says it, which XLA for CPU lacks."""
    begins_D, sent_D, places_D, got_S = offsets_and_sizes
    swap = functools.partial(jax.lax.all_to_all, axis_name=axis_name, tiled=True)
    swapped = [swap(x, split_axis=0, concat_axis=0) for x in (begins_D, sent_D, places_D)]
    sources = jax.lax.all_gather(operand, axis_name)
    index = jnp.arange(len(output), dtype=jnp.int32)
    for source, begin, sent, place, got in zip(sources, *swapped, got_S, strict=True):
        rows = source[jnp.clip(index - place + begin, 0, len(source) - 1)]
        rows = jnp.where(sent == got, rows, jnp.full_like(rows, jnp.nan))
        output = jnp.where(((index >= place) & (index < place + got))[:, None], rows, output)
    return output


def test_the_documented_exchange_gives_its_documentations_example():
    operand = jnp.asarray([[1, 2, 2], [3, 4, 0]], jnp.float32)
    begins, sent = jnp.asarray([[0, 1], [0, 1]]), jnp.asarray([[1, 2], [1, 1]])
    places, got = jnp.asarray([[0, 0], [1, 2]]), jnp.asarray([[1, 1], [2, 1]])

    def one(operand: Any, *arguments: Any) -> jax.Array:
        output = jnp.zeros((4, 1), jnp.float32)
        arguments = tuple(x[0] for x in arguments)
        return exchange_as_documented(operand[0][:, None], output, *arguments, axis_name="data")

    spec, mesh = jax.sharding.PartitionSpec("data"), jax.make_mesh((2,), ("data",))
    run = jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    placed = jax.device_put(
        (operand, begins, sent, places, got), jax.sharding.NamedSharding(mesh, spec)
    )
    found = np.asarray(jax.jit(run)(*placed)).reshape(2, 4)
    assert found.tolist() == [[1, 3, 0, 0], [2, 2, 4, 0]]


@pytest.mark.parametrize(
    ("spec", "skewed"),
    [("fsdp=2,expert=2,tensor=2", 0), pytest.param("expert=8", 8, marks=pytest.mark.slow)],
)
def test_rows_of_the_exchange_of_accelerators_match_one_device(
    spec: str, skewed: int, monkeypatch: Any
):
    calls: list[Any] = []

    def exchange(*args: Any, axis_name: Any) -> jax.Array:
        calls.append(axis_name)
        return exchange_as_documented(*args, axis_name=axis_name)

    monkeypatch.setattr(exchanges, "platform", lambda: "tpu")
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", exchange)
    many = of_layer(spec, skewed, {}, dispatch="all_to_all", buffer=1.0)
    assert len(calls) >= 4  # there and back, forward and backward
    assert_trees_close(many, OF_LAYER_ON_ONE_DEVICE(skewed), rtol=2e-5)


@pytest.mark.parametrize(("kind", "calls"), [("TPU v5 lite", 0), ("TPU v5p", 1)])
def test_rows_are_exchanged_where_the_compiler_can(kind: str, calls: int, monkeypatch: Any):
    monkeypatch.setattr(exchanges, "device_kind", lambda: kind)
    seen, exchange = [], exchanges._by_all_to_all
    monkeypatch.setattr(
        exchanges, "_by_all_to_all", lambda *args: seen.append(args) or exchange(*args)
    )
    made, x_BTE, all_BT = layer(), jnp.ones((8, 6, 16)), jnp.ones((8, 6))
    with sharding.use(zoo.make_mesh("expert=8")):
        jax.eval_shape(lambda x: made(x, all_BT)[0], x_BTE)
        assert len(seen) == calls
        if not calls:
            with pytest.raises(ValueError, match=r"'all_to_all': .* TPU v5 lite has"):
                jax.eval_shape(lambda x: layer(dispatch="all_to_all")(x, all_BT)[0], x_BTE)


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


def with_prompts(batch: Batch) -> Batch:
    """A batch of which only the last quarter of each row counts, by weights of all sizes."""
    rows, size = batch["weights"].shape
    counted = np.random.default_rng(1).uniform(0.5, 2, (rows, size)).astype(np.float32)
    answer = np.arange(size)[None] >= size * 3 // 4
    return {**batch, "weights": np.where(answer & (batch["segment_ids"] > 0), counted, 0)}


@pytest.mark.slow
def test_balance_is_the_mean_over_the_positions_that_count(monkeypatch: pytest.MonkeyPatch):
    model, routes = drawn_transformer(**OPTIONS, scan_layers=False), []
    batch, real = with_prompts(token_batch(8, 16)), moe.route
    monkeypatch.setattr(moe, "route", lambda *given: routes.append(real(*given)) or routes[-1])
    loss, given = losses.balanced_next_token(0.5, 0.25), jax.tree.map(jnp.asarray, batch)

    @eqx.filter_jit
    def run(model: Any) -> Any:
        return loss(model, given, None), [*routes], losses.next_token(model, given, None)[0]

    (total, weight, metrics), routes, plain = run(model)
    monkeypatch.undo()
    w, expected = batch["weights"].astype(np.float64), []
    assert (w == 0).mean() > 0.7
    for route in routes[:2]:
        for row, share in enumerate(w):
            if not share.any():
                continue
            chosen, p = np.asarray(route.chosen[row]), np.asarray(route.probabilities[row])
            taken = np.stack([(chosen == expert).sum(-1) for expert in range(EXPERTS)], -1)
            f, p = (share @ taken / CHOICES / share.sum(), share @ p / share.sum())
            expected.append(share.sum() * EXPERTS * (f * p).sum() / 2)
    assert float(metrics["balance"]) == pytest.approx(sum(expected), rel=1e-4)
    assert 1 < sum(expected) / w.sum() < 2.5
    terms = 0.5 * metrics["balance"] + 0.25 * metrics["router_z"]
    assert float(total - plain) == pytest.approx(float(terms), rel=1e-3)
    even = eqx.tree_at(lambda m: m.blocks.mlp.router, model, replace_fn=jnp.zeros_like)
    _, weight, metrics = eqx.filter_jit(loss)(even, jax.tree.map(jnp.asarray, batch), None)
    assert float(metrics["balance"] / weight) == pytest.approx(1, rel=1e-5)
    assert float(metrics["router_z"] / weight) == pytest.approx(np.log(EXPERTS) ** 2, rel=1e-5)


@pytest.mark.slow
def test_balance_depends_on_neither_mesh_microbatches_nor_padding():
    batch = with_prompts(token_batch(8, 16))
    padded = {name: np.pad(x, ((0, 8), (0, 0))) for name, x in pad_tokens(batch).items()}
    found = []
    for given, spec, accumulate in [(batch, "", 1), (padded, "", 1), (batch, "data=2,fsdp=2", 2)]:
        mesh, optimizer = zoo.make_mesh(spec), optax.sgd(0.0)
        options: dict = {"mesh": mesh, "precision": "fp32", "accumulate": accumulate}
        make_model = lambda key: drawn_transformer(**OPTIONS)
        state = zoo.init_state(make_model, optimizer, key=jax.random.key(0), mesh=mesh)
        loss = losses.balanced_next_token(0.5, 0.25)
        _, metrics = zoo.make_train_step(loss, optimizer, **options)(state, given)
        found.append([float(metrics[x]) for x in ("balance", "router_z", "loss", "grad_norm")])
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=2e-4)
    assert found[0][0] > 1


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
    x, counted = jax.random.normal(jax.random.key(0), (2, 7, 16)), jnp.ones((2, 7))
    want, balance = eqx.filter_jit(made)(x, counted)
    monkeypatch.setattr(jax.lax, "ragged_dot", ragged_dot)
    with sharding.use(mesh):
        placed = eqx.filter_shard(made, sharding.shardings(made, mesh))
        got = eqx.filter_jit(lambda made: made(x, counted))(placed)
    assert set(shapes) == {(EXPERTS // 4, 16, 12), (EXPERTS // 4, 12, 16)}
    assert_trees_close(got, (want, balance), rtol=1e-5)


ROUTER: dict[str, Any] = {"experts.router": "sigmoid", "experts.bias_rate": 0.5}
BIASED: dict[str, Any] = {**OPTIONS, **ROUTER}
PARTS = ("gate", "up", "down")  # of a gated MLP


GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "deepseek.npz")


def layer_of_transformers() -> tuple[moe.MoE, Any]:
    """The experts and the shared ones of a transformer's block, with the golden weights."""
    sizes = {"d_model": 16, "num_heads": 2, "num_layers": 1, **OPTIONS}
    model = drawn_transformer(**sizes, **ROUTER, **{"experts.num_shared": 2, "experts.scale": 2.5})
    block = jax.tree.map(lambda x: x[0] if eqx.is_array(x) else x, model.blocks)
    gate, up = np.split(GOLDEN["experts.gate_up_proj"].swapaxes(1, 2), 2, axis=2)
    weights = {
        "router": GOLDEN["gate.weight"].T,
        "w_gate": gate,
        "w_up": up,
        "w_down": GOLDEN["experts.down_proj"].swapaxes(1, 2),
    }
    routed = with_weights(block.mlp, weights)
    routed = eqx.tree_at(lambda made: made.bias.value, routed, jnp.asarray(GOLDEN["bias"]))
    shared = {f"w_{name}": GOLDEN[f"shared_experts.{name}_proj.weight"].T for name in PARTS}
    return routed, with_weights(block.shared_mlp, shared)


def with_weights(made: Any, weights: dict[str, np.ndarray]) -> Any:
    for name, value in weights.items():
        assert getattr(made, name).shape == value.shape
    values = [jnp.asarray(value) for value in weights.values()]
    return eqx.tree_at(lambda made: [getattr(made, name) for name in weights], made, values)


def test_sigmoid_routers_and_shared_experts_match_transformers():
    routed, shared = layer_of_transformers()
    x, counted = jnp.asarray(GOLDEN["x"]), jnp.ones((1, 7))

    def layer(made: tuple[moe.MoE, Any], x: jax.Array) -> jax.Array:
        return made[0](x, counted)[0] + made[1](x)

    y, (d_routed, d_shared), d_x = value_and_gradients(
        layer, jnp.asarray(GOLDEN["d_y"]), (routed, shared), x
    )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    close(y, GOLDEN["y"])
    close(d_x, GOLDEN["d_x"])
    close(d_routed.router.T, GOLDEN["d_gate.weight"])
    d_gate_up = jnp.concatenate([d_routed.w_gate, d_routed.w_up], -1)
    close(d_gate_up.swapaxes(1, 2), GOLDEN["d_experts.gate_up_proj"])
    close(d_routed.w_down.swapaxes(1, 2), GOLDEN["d_experts.down_proj"])
    for name in PARTS:
        close(getattr(d_shared, f"w_{name}").T, GOLDEN[f"d_shared_experts.{name}_proj.weight"])


def test_a_bias_chooses_the_experts_that_transformers_does():
    routed, _ = layer_of_transformers()
    logits = jnp.asarray(GOLDEN["x"]) @ routed.router
    wanted = np.sort(GOLDEN["chosen"].reshape(2, 7, CHOICES))
    found, unbiased = (
        np.sort(moe.route(logits, bias, routed.config).chosen) for bias in (routed.bias.value, None)
    )
    np.testing.assert_array_equal(found, wanted)
    assert (unbiased != wanted).any()


def test_router_z_loss_matches_independent_numpy_formula():
    made, rng = layer(), np.random.default_rng(0)
    x, counted = rng.normal(size=(2, 5, 16)).astype(np.float32), np.arange(5)[None] < [[5], [2]]
    _, balance = eqx.filter_jit(made)(jnp.asarray(x), jnp.asarray(counted, jnp.float32))
    z = np.log(np.exp(x @ np.asarray(made.router)).sum(-1)) ** 2
    np.testing.assert_allclose(balance.z, (z * counted).sum(1), rtol=1e-4)
    model, batch = drawn_transformer(**OPTIONS), jax.tree.map(jnp.asarray, token_batch(4, 8))
    both = lambda m: [losses.balanced_next_token(0.1, x)(m, batch, None) for x in (0.0, 0.5)]
    run = eqx.filter_jit(both)
    (without, *_), (total, _, metrics) = run(model)
    assert float(total - without) == pytest.approx(0.5 * float(metrics["router_z"]), rel=1e-3)
    even = eqx.tree_at(lambda m: m.blocks.mlp.router, model, replace_fn=jnp.zeros_like)
    _, (_, weight, metrics) = run(even)
    assert float(metrics["router_z"] / weight) == pytest.approx(np.log(EXPERTS) ** 2, rel=1e-5)
    assert float(metrics["balance"] / weight) == pytest.approx(1, rel=1e-5)


@functools.cache
def biases_after(spec: str, accumulate: int) -> list[np.ndarray]:
    """The biases after each of two steps, and the gradient's norm in the last."""
    options: dict = {"mesh": zoo.make_mesh(spec), "accumulate": accumulate}
    make_model, loss, found = make_transformer(**BIASED), losses.balanced_next_token(0.0), []
    state, step = state_and_step(make_model, loss, optax.sgd(0.0), **options)
    for _ in range(2):
        state, metrics = step(state, token_batch(8, 16))
        found.append(np.asarray(state.model.blocks.mlp.bias.value))
    return [*found, np.asarray(metrics["grad_norm"])]


@pytest.mark.slow
def test_a_step_moves_biases_against_the_load():
    first, second, _ = biases_after("", 1)
    make = eqx.filter_jit(make_transformer(**BIASED, scan_layers=False))
    model = make(jax.random.split(jax.random.key(0))[0])
    batch = jax.tree.map(jnp.asarray, token_batch(8, 16))
    counts: list[Any] = []

    def counted(logits: Any, bias: Any, *rest: Any) -> Any:
        found = routing_route(logits, bias, *rest)
        taken = jax.nn.one_hot(found.chosen, EXPERTS).sum(2)
        taken = jnp.where(batch["segment_ids"][..., None] > 0, taken, 0.0)
        counts.append(taken.sum((0, 1)))
        return found

    @eqx.filter_jit
    def run(model: Any) -> list[Any]:
        model.hidden(batch["tokens"], **{x: batch[x] for x in ("segment_ids", "positions")})
        return counts

    routing_route = moe.route
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "route", counted)
        load = np.stack(run(model))
    np.testing.assert_array_equal(first, -0.5 * np.sign(load - load.mean(-1, keepdims=True)))
    assert (first != 0).any()
    assert (first != second).any()


@pytest.mark.slow
def test_biases_depend_on_neither_mesh_nor_microbatches():
    *one, norm = biases_after("", 1)
    *other, other_norm = biases_after("expert=2,tensor=2", 4)
    np.testing.assert_array_equal(other, one)
    np.testing.assert_allclose(other_norm, norm, rtol=1e-4)


def test_a_merged_model_keeps_biases_and_states_as_they_were():
    """Though all else is of one dtype, as sampling needs."""
    kept = 1 / jnp.arange(2.0, 2 + 2 * EXPERTS).reshape(2, EXPERTS)
    model = cast(drawn_transformer(**BIASED), jnp.bfloat16)
    model = eqx.tree_at(lambda x: x.blocks.mlp.bias.value, model, kept)
    model = lora.adapt(model, lora.Config(targets=("blocks.attention.*",)), key=jax.random.key(0))
    _, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="ema", momentum=0.3)
    run = Mock(zoo.Run, layout=zoo.Layout(zoo.make_mesh("")))
    merged, same = merge(run, (model, state))
    assert not lora.has_adapters(merged)
    bias = merged.blocks.mlp.bias.value
    assert (bias.dtype, bias.tolist()) == (jnp.float32, kept.tolist())
    dtypes = [str(x.dtype) for x in jax.tree.leaves(merged)]
    assert (dtypes.count("float32"), dtypes.count("bfloat16")) == (1, len(dtypes) - 1)
    assert any(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(state))
    assert_trees_close(same, state, rtol=0)
    trained = eqx.tree_at(
        lambda x: x.embedding.weight, model, replace_fn=lambda x: x.astype(jnp.float32)
    )
    assert {str(x.dtype) for x in jax.tree.leaves(merge(run, trained))} == {"float32"}


def test_biases_are_stored_but_not_trained(tmp_path: Any):
    model = drawn_transformer(**BIASED, **{"experts.num_shared": 1})
    bias = model.blocks.mlp.bias.value
    assert cast(model, jnp.bfloat16).blocks.mlp.bias.value.dtype == jnp.float32
    assert not state_module.trained_leaves(model, None).blocks.mlp.bias.value
    assert not state_module.frozen_leaves(model, None).blocks.mlp.bias.value
    assert state_module.balanced_leaves(model, None).blocks.mlp.bias.value
    zoo.save(tmp_path / "m", model)
    loaded = zoo.load(tmp_path / "m").blocks
    np.testing.assert_array_equal(loaded.mlp.bias.value, bias)
    np.testing.assert_array_equal(loaded.shared_mlp.w_up, model.blocks.shared_mlp.w_up)


def with_low_biases(model: Any) -> Any:
    low = lambda x: x.astype(jnp.bfloat16)
    return eqx.tree_at(lambda model: model.blocks.mlp.bias.value, model, replace_fn=low)


def test_biases_are_in_fp32_whatever_a_model_is_loaded_saved_or_computed_in(tmp_path: Any):
    model = drawn_transformer(**BIASED)
    bias = np.asarray(model.blocks.mlp.bias.value)
    assert (bias != bias.astype(jnp.bfloat16).astype(np.float32)).any()
    zoo.save(tmp_path / "m", model)
    loaded, skeleton = (
        function(tmp_path / "m", dtype="bf16") for function in (zoo.load, models.skeleton)
    )
    zoo.save(tmp_path / "low", loaded)
    zoo.save(tmp_path / "like", model, like=tmp_path / "low")
    zoo.save(tmp_path / "stored low", with_low_biases(loaded))
    for name in ("low", "like"):
        found = zoo.load(tmp_path / name).blocks.mlp
        np.testing.assert_array_equal(found.bias.value, bias, err_msg=name)
        assert found.w_up.dtype == jnp.bfloat16
    np.testing.assert_array_equal(loaded.blocks.mlp.bias.value, bias)
    with in_precision((model, 0), "bf16") as computed:  # in a model of no class of the zoo
        pass
    of_state = state_module.Blueprint(
        lambda key, model: model,
        optax.sgd(0.1),
        key=jax.random.key(0),
        pretrained=with_low_biases(loaded),
    ).skeleton.model
    others = [skeleton, computed[0], zoo.load(tmp_path / "stored low"), of_state]
    others += [zoo.load(tmp_path / "m", dtype="bf16", quantize="int8")]
    assert [x.blocks.mlp.bias.value.dtype for x in others] == [jnp.float32] * 5
    assert {x.blocks.mlp.w_up.dtype for x in others[:3]} == {jnp.dtype(jnp.bfloat16)}


def test_shared_experts_are_an_mlp_for_every_token():
    """Times a gate; without one the golden layer has them."""
    shared = {"experts.num_shared": 2, "experts.shared_gate": True}
    model = drawn_transformer(num_layers=1, **OPTIONS, **shared)
    block = jax.tree.map(lambda x: x[0], eqx.filter(model.blocks, eqx.is_array))
    block = eqx.combine(block, eqx.filter(model.blocks, eqx.is_array, inverse=True))
    assert block.shared_mlp.w_up.shape == (32, 24)
    x = jax.random.normal(jax.random.key(0), (2, 5, 32))
    block = eqx.tree_at(lambda block: block.attention.wo, block, replace_fn=jnp.zeros_like)
    call = eqx.filter_jit(lambda block, x, ids: block(x, ids, None, None, None))
    alone = eqx.tree_at(lambda block: block.shared_mlp, block, None)
    ids = jnp.asarray([[1, 1, 2, 0, 0], [1, 1, 1, 1, 1]], jnp.int32)
    (with_, of_all), (without, of_tokens) = call(block, x, None), call(alone, x, ids)
    normed = block.mlp_norm(x)
    gate = 1 / (1 + np.exp(-np.asarray(normed) @ np.asarray(block.shared_gate)))
    want = np.asarray(block.shared_mlp(normed)) * gate
    np.testing.assert_allclose(with_ - without, want, atol=1e-4)
    low = cast(block, jnp.bfloat16)
    assert eqx.filter_eval_shape(call, low, x.astype(jnp.bfloat16), ids)[0].dtype == jnp.bfloat16
    z = np.square(jax.nn.logsumexp(normed @ block.mlp.router, -1))
    np.testing.assert_allclose(of_all.z, z.sum(1), rtol=1e-4)
    np.testing.assert_allclose(of_tokens.z, z.sum(1, where=ids > 0), rtol=1e-4)  # not of padding


BAD = [
    *[("buffer", 0.5, 8), ("num_shared", -1, 8), ("bias_rate", 0.0, 8), ("per_token", 9, 8)],
    *[("num_shared", 1, None), ("bias_rate", 0.1, None), ("scale", 2.0, None)],
    *[("router", "sigmoid", None), ("shared_gate", True, 8), ("first_dense", 2, 8)],
    *[("num_groups", 3, 8), ("num_groups", 2, None), ("interval", 2, None), ("interval", 3, 8)],
]


def test_bad_settings_of_experts_are_refused():
    for name, value, num_experts in BAD:
        with pytest.raises(ValueError, match=rf"experts\.{name}={value!r}"):
            small_config(**{"experts.num_experts": num_experts, f"experts.{name}": value})
    for name, value in (("groups_per_token", 5), ("groups_per_token", 1), ("group_score", 3)):
        with pytest.raises(ValueError, match=rf"experts\.{name}={value}"):
            small_config(**{**OPTIONS, **IN_GROUPS, f"experts.{name}": value})
    batch = jax.tree.map(jnp.asarray, token_batch(2, 8))
    with pytest.raises(ValueError, match=r"set experts\.num_experts"):
        losses.balanced_next_token(0.1)(drawn_transformer(), batch, None)


def test_experts_that_the_axis_does_not_divide_are_refused():
    mesh = zoo.make_mesh("expert=8")
    make_model = make_transformer(**{**OPTIONS, "experts.num_experts": 12})
    message = r"w_gate of shape .*: the size 12 is not divisible by expert=8 of the mesh"
    with pytest.raises(sharding.ShardingError, match=message):
        zoo.init_state(make_model, optax.sgd(0.1), key=jax.random.key(0), mesh=mesh)
