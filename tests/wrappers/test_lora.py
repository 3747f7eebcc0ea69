import dataclasses
import functools
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    FAMILIES,
    arrays,
    as_subclass,
    assert_trees_close,
    copy,
    drawn_model,
    drawn_transformer,
    equations,
    labelled_batch,
    make_bert,
    make_mlp,
    make_rnn,
    make_transformer,
    one_step,
    state_and_step,
    token_batch,
    value_and_gradients,
)
from jaxtyping import Array, Float
from model_folders import flip_bit

import zoo
from zoo import ensemble, lora, losses, mlp, sharding
from zoo.nn import parameters, products
from zoo.nn.products import matmul
from zoo.publishing import PublishError
from zoo.sharding.axes import keystr, logical_axes
from zoo.tasks.finetuning import frozen
from zoo.training.loss_values import call_loss

CONFIG = lora.Config(rank=4, alpha=8.0)
KEY = jax.random.key(0)
forward = eqx.filter_jit(lambda model, x: model(x))
ADAPTER = (".down", ".up")


@functools.cache
def begun(family):
    """A family's model as it begins."""
    return eqx.filter_jit(family.make_model(0.0))(KEY)


def drawn(model, seed=0, config=CONFIG):
    """The model with adapters that change it: `up` is drawn as `down` is."""
    rng = np.random.default_rng(seed)

    def draw(x):
        if not lora.is_adapted(x) or x.frozen:
            return x
        new = [jnp.asarray(rng.normal(size=y.shape) / 8, jnp.float32) for y in (x.down, x.up)]
        return eqx.tree_at(lambda a: (a.down, a.up), x, new)

    return jax.tree.map(draw, lora.adapt(model, config, key=KEY), is_leaf=lora.is_adapted)


def inputs_of(family):
    batch = family.make_batch(2, 8, 0)
    return jnp.asarray(batch["inputs"] if "inputs" in batch else batch["tokens"])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_merged_adapters_equal_applied_ones(family):
    """And lengths are those of DoRA."""
    plain, inputs = begun(family), inputs_of(family)
    expected = forward(plain, inputs)
    for config in (CONFIG, dataclasses.replace(CONFIG, dora=True, rank_stabilized=True)):
        adapted = forward(lora.adapt(plain, config, key=KEY), inputs)
        np.testing.assert_allclose(adapted, expected, atol=1e-5)
        model = longer(drawn(plain, config=config))
        merged = lora.merge(model)
        assert jax.tree.structure(merged) == jax.tree.structure(plain)
        found = forward(merged, inputs)
        np.testing.assert_allclose(forward(model, inputs), found, atol=1e-5)
        assert np.abs(found - expected).max() > 1e-2  # and they do something
    found = [x for x in jax.tree.leaves(model, is_leaf=lora.is_adapted) if lora.is_adapted(x)]
    whole = arrays_of(merged)
    for node, name in zip(found, lora.config_of(model).targets, strict=True):
        stack = node.down.ndim - node.num_inputs - 1
        axes = tuple(range(stack, stack + node.num_inputs))
        added = np.einsum(
            "lir,lro->lio",
            np.asarray(node.down).reshape(*node.down.shape[:stack] or (1,), -1, 4),
            np.asarray(node.up).reshape(*node.up.shape[:stack] or (1,), 4, -1),
        )
        total = np.asarray(node.weight) + 8 / 4**0.5 * added.reshape(node.weight.shape)
        norm = np.sqrt((total**2).sum(axes, keepdims=True))
        expected = total / norm * np.expand_dims(node.magnitude, axes)
        np.testing.assert_allclose(whole[name], expected, rtol=2e-4, atol=1e-5)


def test_bf16_adapters_merge_in_fp32():
    model = parameters.cast(drawn(drawn_transformer()), jnp.bfloat16)
    wo, mixed = lora.merge(model).blocks.attention.wo, model.blocks.attention.wo
    weight, down, up = (np.asarray(x, np.float32) for x in (mixed.weight, mixed.down, mixed.up))
    expected = weight + 2.0 * np.einsum("lnhr,lre->lnhe", down, up)
    assert wo.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(wo, np.float32), expected, rtol=2**-8, atol=1e-5)


def train(family, mesh=None, steps=3, config=CONFIG, precision="fp32", optimizer=None):
    optimizer = optimizer or optax.adamw(1e-2, mask=zoo.optimizers.matrices)
    options = {"mesh": mesh, "trainable": lora.trainable, "precision": precision}
    base, make, found = begun(family), lambda key, model: lora.adapt(model, config, key=key), []
    options |= {"pretrained": base, "key": jax.random.key(1), "clip_norm": 1.0}
    state, step = state_and_step(make, family.loss, optimizer, **options)
    for _ in range(steps):
        state, metrics = step(state, family.make_batch(8, 16, 0))
        found.append(float(metrics["loss"]))
    return base, state, found


@pytest.mark.parametrize(
    "family",
    [FAMILIES[2], pytest.param(FAMILIES[0], marks=pytest.mark.slow)],
    ids=lambda family: family.name,
)
def test_training_moves_the_adapters_alone_on_any_mesh(family):
    mesh = zoo.make_mesh("data=2,fsdp=2,tensor=2")
    base, alone, losses_alone = train(family)
    assert losses_alone[-1] < losses_alone[0]
    given = arrays(base)
    for name, array in arrays(alone.model).items():
        if name.endswith(ADAPTER):
            assert np.abs(array).max() > 0, name
        else:
            before = given[name] if name in given else given[name.removesuffix(".weight")]
            np.testing.assert_array_equal(array, before, err_msg=name)
    moments = [name for name in arrays(alone.opt_state) if ".mu." in name]
    assert moments
    assert all(name.endswith(ADAPTER) for name in moments)

    _, state, found = train(family, mesh)
    assert found == pytest.approx(losses_alone, rel=1e-5)
    assert_trees_close(state.model, alone.model, rtol=1e-3)
    axes = jax.tree.leaves(logical_axes(state.model), is_leaf=lora.is_adapted)
    adapters = [x for x in axes if lora.is_adapted(x)]
    assert adapters
    for x in adapters:
        assert (*x.down[:-1], *x.up[len(x.up) - (len(x.weight) - len(x.down) + 1) :]) == x.weight
    wanted = arrays_of(sharding.shardings(state.model, mesh))
    for path, array in arrays(state.model).items():
        assert array.sharding.is_equivalent_to(wanted[path], array.ndim), path


def arrays_of(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {keystr(path): leaf for path, leaf in leaves}


def test_targets_are_chosen_by_path():
    model = drawn_transformer()
    every = lora.targets(model, lora.Config())
    assert [name.rpartition(".")[2] for name in every] == [
        *("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")
    ]
    chosen = lora.Config(targets=("*.wq", "head.*"))
    assert lora.targets(model, chosen) == ["blocks.attention.wq", "head.weight"]
    adapted = lora.adapt(model, chosen, key=KEY)
    np.testing.assert_array_equal(forward(adapted, TOKENS), forward(model, TOKENS))
    with pytest.raises(ValueError, match=r"targets='blocks.mpl.\*' .* those are"):
        lora.adapt(model, lora.Config(targets=("blocks.mpl.*",)), key=KEY)
    tiny = mlp.MLP(mlp.Config(4, 2, num_layers=1), key=KEY)
    with pytest.raises(ValueError, match="other matrix"):
        lora.adapt(tiny, lora.Config(), key=KEY)
    for name, value in (("rank", 0), ("alpha", 0.0), ("dropout", 1.0)):
        with pytest.raises(ValueError, match=f"{name}={value}"):
            lora.Config(**{name: value})


TOKENS = jnp.arange(16, dtype=jnp.int32).reshape(2, 8)


@pytest.fixture
def saved(tmp_path):
    model = drawn_transformer()
    zoo.save(tmp_path / "base", model)
    adapted = drawn(model)
    zoo.save_adapters(tmp_path / "adapters", adapted, base=tmp_path / "base")
    return tmp_path, adapted


def test_adapters_save_and_load_separately(saved):
    folder, adapted = saved
    size = lambda path: (folder / path).stat().st_size
    assert size("adapters/adapter_model.safetensors") < size("base/model.safetensors") / 2
    for model in (
        zoo.load(folder / "adapters"),
        zoo.load_adapters(str(folder / "adapters"), zoo.load(folder / "base")),
    ):
        assert_trees_close(model, adapted, rtol=0)
        assert jax.tree.structure(model) == jax.tree.structure(adapted)
    mesh = zoo.make_mesh("fsdp=2,tensor=2")
    sharded = zoo.load(folder / "adapters", mesh=mesh)
    found = arrays(sharded)
    for path, where in arrays_of(sharding.shardings(sharded, mesh)).items():
        assert found[path].sharding.is_equivalent_to(where, found[path].ndim)
    np.testing.assert_allclose(forward(sharded, TOKENS), forward(adapted, TOKENS), atol=1e-4)


def test_mismatched_adapters_are_refused(saved):
    folder, _ = saved
    with pytest.raises(PublishError, match=r"target_modules=.*'q_proj'.*"):
        zoo.load_adapters(folder / "adapters", make_rnn(0.0)(KEY))
    with pytest.raises(
        PublishError, match=r"1\.mlp\.up_proj\.lora_B\.weight: \(64, 4\) here, \(128, 4\)"
    ):
        zoo.load_adapters(folder / "adapters", drawn_transformer(d_ff=128))
    with pytest.raises(PublishError, match="holds no adapters"):
        zoo.load_adapters(folder / "base", drawn_transformer())
    with pytest.raises(PublishError, match="nowhere is no folder"):
        zoo.load_adapters(folder / "nowhere", drawn_transformer())
    with pytest.raises(ValueError, match="no adapters to save"):
        zoo.save_adapters(folder / "other", zoo.load(folder / "base"), base="base")
    flip_bit(folder / "adapters" / "adapter_model.safetensors", at=-1)
    for load in (zoo.load, lambda path: zoo.load_adapters(path, drawn_transformer())):
        with pytest.raises(PublishError, match="is damaged"):
            load(folder / "adapters")


# --- Frozen parts -----------------------------------------------------------------------------


def test_adapters_that_cannot_be_reloaded_are_refused(tmp_path):
    def other_scale(model):
        changed = as_subclass(model.blocks.attention.wq, lora.Adapted)
        object.__setattr__(changed, "alpha", 7.0)
        return eqx.tree_at(lambda m: m.blocks.attention.wq, model, changed)

    model = drawn(drawn_transformer())
    with pytest.raises(PublishError, match=r"attention\.wk\.alpha: 8\.0 here, 7\.0 by"):
        zoo.save_adapters(tmp_path / "a", other_scale(model), base="base")
    assert not list(tmp_path.iterdir())


def test_frozen_parts_have_no_optimizer_state():
    chosen = frozen(("embedding.*", "blocks.mlp.*"))
    options = {"optimizer": optax.adam(1e-2), "trainable": chosen}
    state, step = state_and_step(make_transformer(), losses.next_token, **options)
    before = copy(state.model)
    state, _ = step(state, token_batch())
    for name, array in arrays(state.model).items():
        still = name.startswith(("embedding.", "blocks.mlp."))
        assert np.array_equal(array, arrays_of(before)[name]) == still, name
    moments = [name for name in arrays(state.opt_state) if ".mu." in name]
    assert any("blocks.attention" in name for name in moments)
    assert not any("embedding" in name or "mlp" in name.split(".") for name in moments)


def test_freezing_nothing_or_everything_is_refused():
    model = drawn_transformer()
    with pytest.raises(ValueError, match=r"freeze='blocks.mpl.\*' .* those are"):
        frozen(("blocks.mpl.*",))(model)
    with pytest.raises(ValueError, match="trainable: freeze"):
        zoo.init_state(make_transformer(), optax.sgd(1.0), key=KEY, trainable=frozen(("*",)))


class Grouped(eqx.Module):
    weight: Float[Array, "group embed mlp"]


def test_adapters_keep_their_matrix_axes():
    stacked = Grouped(jnp.zeros((3, 2, 8, 4)))  # three layers
    members = ensemble.Ensemble(lambda key: Grouped(jnp.zeros((2, 8, 4))), 3, key=KEY)
    with sharding.use(
        zoo.Layout(rules={**sharding.RULES, "group": sharding.Axis("tensor", "stack")})
    ):
        for model, first in [(stacked, None), (members, "member")]:
            adapted = lora.adapt(model, lora.Config(rank=2), key=KEY)
            [axes] = jax.tree.leaves(logical_axes(adapted), is_leaf=lora.is_adapted)
            assert axes.weight == (first, "group", "embed", "mlp")
            assert axes.down == (first, "group", "embed", "rank")
            assert axes.up == (first, "group", "rank", "mlp")


def test_local_base_paths_are_saved_absolute(saved, monkeypatch):
    folder, adapted = saved
    monkeypatch.chdir(folder)
    for base, kept in (("base", str(folder / "base")), ("some/model", "some/model")):
        zoo.save_adapters(folder / "again", adapted, base=base)
        config = json.loads((folder / "again" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == kept


# --- Products, kinds of adapters, and adapters on adapters ---------------------------------------


def step_jaxpr(base, config, precision="bf16", loss=losses.next_token):
    """The program of a step that trains adapters, or all parameters."""
    make = lambda key, model: model if config is None else lora.adapt(model, config, key=key)
    options = {"pretrained": base, "trainable": None if config is None else lora.trainable}
    options |= {"precision": precision, "clip_norm": 1.0}
    state, step = state_and_step(make, loss, optax.sgd(1e-2), **options)
    return step.trace(state, token_batch(8, 16)).jaxpr.jaxpr


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_makes_no_sum_and_no_gradient_of_a_frozen_matrix(tied, monkeypatch):
    monkeypatch.setattr(losses, "LOGITS_BYTES", 4 * 8 * 4 * 64)  # the head in four chunks
    base = drawn_transformer(
        d_model=24,
        num_heads=4,
        d_ff=40,
        tie_embeddings=tied,
        **{"attention.head_dim": 8, "attention.num_kv_heads": 2},
    )
    frozen = {(24, 4, 8), (24, 32), (24, 2, 8), (24, 16), (4, 8, 24), (32, 24), (24, 40), (40, 24)}
    frozen |= {(64, 24), (24, 64)}

    def computed(config):
        moves = {"convert_element_type", "reshape", "transpose", "dynamic_slice", "squeeze", "copy"}
        moves |= {"broadcast_in_dim", "slice", "jit", "pjit", "custom_vjp_call"}
        return {
            (e.primitive.name, x.aval.shape)
            for e in equations(step_jaxpr(base, config))
            for x in e.outvars
            if e.primitive.name not in moves and x.aval.shape in frozen
        }

    assert computed(CONFIG) == set()
    full = {shape for name, shape in computed(None) if name == "dot_general"}
    assert {(24, 32), (24, 16), (32, 24), (24, 40), (40, 24)} <= full


def longer(model):
    """The model with other lengths than it began with."""

    def visit(x):
        scaled = lora.is_adapted(x) and x.magnitude is not None and not x.frozen
        return eqx.tree_at(lambda a: a.magnitude, x, 1.5 * x.magnitude) if scaled else x

    return jax.tree.map(visit, model, is_leaf=lora.is_adapted)


def test_the_norm_of_dora_has_no_gradient():
    config = dataclasses.replace(CONFIG, dora=True)
    rng = np.random.default_rng(0)
    layer = linear(6, 5)
    node = longer(drawn(layer, config=config)).weight
    x = jnp.asarray(rng.normal(size=(3, 6)), jnp.float32)
    g = jnp.asarray(rng.normal(size=(3, 5)), jnp.float32)
    for use in (lambda node, x: node.times(x), lambda node, x: x @ node.value()):
        _, got, _ = copy(value_and_gradients(use, g, node, x))
        w, x_, g_ = copy((node, x, g))
        total = w.weight + 2 * w.down @ w.up
        norm = np.sqrt((total**2).sum(0))
        factor = w.magnitude / norm
        np.testing.assert_allclose(got.up, 2 * (x_ @ w.down).T @ (g_ * factor), rtol=1e-4)
        np.testing.assert_allclose(got.down, 2 * x_.T @ (g_ * factor) @ w.up.T, rtol=1e-4)
        np.testing.assert_allclose(got.magnitude, (x_ @ total * g_).sum(0) / norm, rtol=1e-4)


class Linear(parameters.CastsInputs):
    weight: Float[Array, "embed mlp"] | products.Operand

    def __call__(self, x):
        return matmul(x, parameters.unshard(self).weight)


def linear(*shape):
    return Linear(jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32))


def test_a_mesh_has_the_same_dropout_and_lengths():
    config = dataclasses.replace(CONFIG, dora=True, dropout=0.5)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 2, 32)), jnp.float32)
    layer = linear(32, 64)
    model = longer(drawn(layer, config=config))

    def loss(model, batch, key):
        with parameters.dropping_out(KEY):
            return (model(batch["x"]) ** 3).sum(), jnp.float32(8), {}

    def evaluated(mesh):
        step = zoo.make_eval_step(loss, mesh=mesh and zoo.make_mesh(mesh), precision="fp32")
        return float(step(model, {"x": x})[1]["loss"])

    assert evaluated("fsdp=2,tensor=4") == pytest.approx(evaluated(None), rel=1e-4)
    assert float(loss(lora.merge(model), {"x": x}, None)[0]) != pytest.approx(evaluated(None), 0.01)


def bert_loss(model, batch, key):
    features = model(batch["tokens"], mask=batch["weights"] > 0)  # as logits
    targets = batch["targets"] % features.shape[-1]
    return *losses.cross_entropy(features, targets, batch["weights"])[:2], {}


def bert_model():
    return drawn_model(make_bert(64, d_model=32, num_layers=2, max_seq_len=32))


def mlp_members():
    return ensemble.Ensemble(make_mlp(0.0), 4, key=KEY)


AGAINST_MERGED = {
    "accumulate": (drawn_transformer, losses.next_token, "fp32", 2, token_batch),
    "fp16": (drawn_transformer, losses.next_token, "fp16", 2, token_batch),
    "bert": (bert_model, bert_loss, "fp32", 1, token_batch),
    "ensemble": (
        mlp_members,
        ensemble.member_loss(losses.classification),
        "fp32",
        1,
        labelled_batch,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dora", "axes"),
    [
        ("accumulate", True, "data=2,fsdp=2,tensor=2"),
        ("fp16", False, ""),
        ("bert", True, ""),
        ("ensemble", False, "data=2,fsdp=2,tensor=2"),
    ],
)
def test_gradients_are_those_by_the_chain_rule_of_the_merged_model(case, dora, axes):
    make, loss, precision, accumulate, make_batch = AGAINST_MERGED[case]
    config = dataclasses.replace(CONFIG, dora=dora)
    model, batch = longer(drawn(make(), config=config)), make_batch(8, 16)
    nodes = jax.tree.leaves(copy(model), is_leaf=lora.is_adapted)
    nodes = [x for x in nodes if lora.is_adapted(x)]
    wanted, whole = one_step(lambda key: lora.merge(model), loss, batch)
    options = {"precision": precision, "accumulate": accumulate, "trainable": lora.trainable}
    metrics, found = one_step(lambda key: model, loss, batch, mesh=zoo.make_mesh(axes), **options)
    rtol = 1e-4 if precision == "fp32" else 0.02
    assert metrics["loss"] == pytest.approx(wanted["loss"], rel=rtol)
    for path, node in zip(lora.config_of(model).targets, nodes, strict=True):
        stack = node.down.shape[: node.down.ndim - 1 - node.num_inputs]
        count, flat = int(np.prod(stack)), lambda x, *shape: np.asarray(x).reshape(shape)
        down = flat(node.down, count, -1, node.rank)
        up = flat(node.up, count, node.rank, -1)
        sizes = (count, down.shape[1], up.shape[2])
        g, total = flat(whole[path], *sizes), flat(node.weight, *sizes) + 2 * down @ up
        if dora:
            length = np.linalg.norm(total, axis=1)
            lengths = (g * total).sum(1) / length
            g = g * (flat(node.magnitude, count, -1) / length)[:, None]
        wanted = {"down": 2 * g @ up.swapaxes(1, 2), "up": 2 * down.swapaxes(1, 2) @ g}
        wanted |= {"magnitude": lengths} if dora else {}
        for field, value in wanted.items():
            np.testing.assert_allclose(
                found[f"{path}.{field}"].reshape(value.shape),
                value,
                rtol=0,
                atol=rtol * np.abs(value).max(),
                err_msg=f"{path}.{field}",
            )
        assert np.abs(wanted["down"]).max() > 0
        assert not found[f"{path}.weight"].any()


def test_dropout_differs_by_layer_and_is_off_without_a_key():
    config = dataclasses.replace(CONFIG, dropout=0.5)
    plain = drawn_transformer(scan_layers=True)
    model = drawn(plain, config=config)
    seeds = np.concatenate([x for path, x in arrays(model).items() if path.endswith(".seed")])
    assert len(seeds) == 14 == len(set(seeds.tolist()))
    rows = jnp.ones((4, 32))
    node = lambda layer: jax.tree.map(lambda x: x[layer], model.blocks.mlp.w_up)
    exact = [node(layer).times(rows) for layer in (0, 1)]
    with parameters.dropping_out(KEY):
        once, other = (
            node(0).times(rows) - exact[0],
            eqx.tree_at(lambda a: a.seed, node(0), node(1).seed).times(rows) - exact[0],
        )
    assert np.abs(once).max() > 1e-2
    assert np.abs(once - other).max() > 1e-2
    np.testing.assert_array_equal(node(0).times(rows), exact[0])
    # The mean over many masks is the product without any.
    many = jnp.ones((20000, 32))
    with parameters.dropping_out(KEY):
        mean = node(0).times(many).mean(0)
    np.testing.assert_allclose(mean, exact[0][0], atol=0.15)
    with pytest.raises(ValueError, match=r"dropout=0.5: head.weight"):
        lora.adapt(plain, dataclasses.replace(config, targets=("head.*",)), key=KEY)
    with pytest.raises(ValueError, match=r"dropout=0.5: layers.0.directions.0.weight_ih cannot"):
        lora.adapt(make_rnn(0.0)(KEY), config, key=KEY)


def test_frozen_adapters_have_no_dropout():
    layer = linear(32, 16)
    lower = drawn(layer, config=dataclasses.replace(CONFIG, dropout=0.5))
    upper, x = lora.adapt(lower, CONFIG, key=KEY), jnp.ones((4, 32))
    expected = lower.weight.times(x)
    with parameters.dropping_out(KEY):
        assert np.abs(lower.weight.times(x) - expected).max() > 1e-2
        np.testing.assert_array_equal(upper.weight.times(x), expected)


def test_steps_draw_their_own_masks_and_evaluations_none():
    layer = linear(32, 16)
    model = drawn(layer, config=dataclasses.replace(CONFIG, dropout=0.5))
    batch = {"x": np.ones((8, 32), np.float32)}
    loss = lambda model, batch, key: ((model(batch["x"]) ** 2).sum(), jnp.float32(8), {})
    options = {"trainable": lora.trainable}
    optimizer = optax.sgd(0.0)
    state = zoo.init_state(lambda key: model, optimizer, key=KEY, **options)
    exact = float(np.square(batch["x"] @ np.asarray(lora.merge(model).weight)).sum() / 8)
    step = zoo.make_train_step(loss, optimizer, precision="fp32", **options)
    evaluate = zoo.make_eval_step(loss, precision="fp32")
    assert float(evaluate(state.model, batch)[1]["loss"]) / 8 == pytest.approx(exact, rel=1e-4)
    found = []
    for _ in range(3):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    assert len({*found, exact}) == 4
    assert max(abs(x - exact) for x in found) > 0.01 * exact


def test_adapters_stand_on_adapters(saved, tmp_path):
    folder, lower = saved
    config = lora.Config(rank=2, targets=("*.wq", "*.w_up"), dora=True)
    upper = longer(drawn(lower, 3, config))
    scale = np.einsum(
        "lir,lr...->li...", *(getattr(upper.blocks.mlp.w_up, x) for x in ("down", "up"))
    )
    assert np.abs(scale).max() > 0
    trained = [p for p, x in arrays_of(lora.trainable(upper)).items() if x is True]
    assert sorted(trained) == sorted(
        f"blocks.{place}.{part}"
        for place in ("attention.wq", "mlp.w_up")
        for part in ("down", "up", "magnitude")
    )
    found, below = forward(upper, TOKENS), forward(lower, TOKENS)
    np.testing.assert_allclose(found, forward(lora.merge(upper), TOKENS), atol=1e-4)
    assert jax.tree.structure(lora.merge(upper)) == jax.tree.structure(drawn_transformer())
    assert np.abs(found - below).max() > 1e-2
    assert_trees_close(lora.base(upper), lower, rtol=0)
    # Saved alone, and opened with the adapters below it.
    with pytest.raises(PublishError, match=r"base=.*base' has none"):
        zoo.save_adapters(tmp_path / "upper", upper, base=folder / "base")
    zoo.save_adapters(tmp_path / "upper", upper, base=folder / "adapters")
    again = zoo.load(tmp_path / "upper")
    assert jax.tree.structure(again) == jax.tree.structure(upper)
    np.testing.assert_array_equal(forward(again, TOKENS), found)


def test_adapters_in_fp32_on_a_bf16_model_run_outside_of_a_step():
    """Also on its embedding, which is its head, and with a cache, where layers are apart."""
    base = parameters.cast(drawn_transformer(tie_embeddings=True), jnp.bfloat16)
    model = drawn(base, config=lora.Config(rank=4, targets=("embedding.*", "blocks.*")))
    assert model.blocks.mlp.w_up.down.dtype == jnp.float32
    assert model.embedding.weight.down.dtype == jnp.float32
    exact = forward(lora.merge(parameters.cast(model, jnp.float32)), TOKENS)
    np.testing.assert_allclose(forward(model, TOKENS), exact, rtol=0.1, atol=0.2)
    assert np.abs(exact - forward(parameters.cast(base, jnp.float32), TOKENS)).max() > 1
    prompt = np.asarray(TOKENS)[:, :4]
    tokens = zoo.generate(model, prompt, max_new_tokens=3, temperature=0.0)
    logits = np.asarray(forward(model, jnp.asarray(tokens)), np.float32)
    np.testing.assert_array_equal(logits[:, 3:6].argmax(-1), tokens[:, 4:])


def test_an_adapted_head_has_the_same_gradient_in_chunks(monkeypatch):
    base = drawn_transformer(tie_embeddings=True)
    config = lora.Config(rank=4, targets=("embedding.weight", "*.wq"))
    model, batch = drawn(base, config=config), jax.tree.map(jnp.asarray, token_batch(2, 8))
    adapters, rest = eqx.partition(model, lora.trainable(model))

    def gradient():
        loss = lambda x: call_loss(losses.next_token, "fp32", eqx.combine(x, rest), batch, None)[0]
        return jax.jit(jax.grad(loss))(adapters)

    whole = gradient()
    monkeypatch.setattr(losses, "LOGITS_BYTES", 4 * 2 * 2 * 64)
    chunked = gradient()
    assert np.abs(whole.embedding.weight.down).max() > 1e-3
    assert_trees_close(chunked, whole, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dora", [False, True])
def test_every_use_of_an_adapted_matrix_is_one_of_its_value(dora):
    rng = np.random.default_rng(0)
    table = linear(6, 5)
    node = longer(drawn(table, config=dataclasses.replace(CONFIG, dora=dora))).weight
    x, ids = jnp.asarray(rng.normal(size=(3, 6)), jnp.float32), jnp.asarray([[4, 9], [0, 1]])
    rows, turned = node.rows(ids), products.transposed(node)
    if not dora:  # the sum is not made
        assert lora.is_adapted(turned)
    back = matmul(rows, turned)
    twice = matmul(x.reshape(1, 3, 6), node, contract=1, dtype=jnp.float32)
    rows, back, twice, value, x = copy((rows, back, twice, node.value(), x))
    assert np.abs(value - np.asarray(node.weight)).max() > 0.1
    np.testing.assert_allclose(rows, value[[[4, 5], [0, 1]]], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(back, rows @ value.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(twice[0], x @ value, rtol=1e-4, atol=1e-4)
    low = node.cast(jnp.bfloat16)
    assert (low.weight.dtype, low.down.dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert not dora or low.magnitude.dtype == jnp.float32


def test_draws_are_of_the_matrix_alone():
    model = drawn_transformer()
    every, one = (
        lora.adapt(model, dataclasses.replace(CONFIG, targets=targets), key=KEY).blocks.attention
        for targets in ((), ("*.wq",))
    )
    np.testing.assert_array_equal(every.wq.down, one.wq.down)
    assert np.abs(every.wq.down - every.wk.down).max() > 0.1
    wide = lora.adapt(Linear(jnp.zeros((400, 3))), CONFIG, key=KEY).weight
    assert np.std(wide.down) == pytest.approx(400**-0.5, rel=0.1)
    np.testing.assert_array_equal(wide.up, 0)


class WithForeign(parameters.CastsAtUse):
    own: Linear
    foreign: eqx.nn.Linear

    def __call__(self, x):
        return jax.vmap(self.foreign)(self.own(x))


def test_foreign_layers_get_the_value():
    rng = np.random.default_rng(0)
    own = linear(8, 4)
    model = drawn(WithForeign(own, eqx.nn.Linear(4, 2, key=KEY)), config=CONFIG)
    batch = {"x": rng.normal(size=(8, 8)).astype(np.float32)}
    loss = lambda model, batch, key: (model(batch["x"]).sum(), jnp.float32(8), {})
    step = zoo.make_eval_step(loss, mesh=zoo.make_mesh("fsdp=2,tensor=2"), precision="fp32")
    merged = lora.merge(model)
    own, foreign = copy(merged.own.weight), copy(merged.foreign)
    expected = (batch["x"] @ own @ foreign.weight.T + foreign.bias).sum()
    np.testing.assert_allclose(step(model, batch)[1]["loss"], expected, rtol=1e-4)
