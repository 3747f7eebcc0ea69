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
    drawn_transformer,
    make_rnn,
    make_transformer,
    token_batch,
    with_loud_mlp,
)
from jaxtyping import Array, Float

import zoo
from zoo import ensemble, lora, losses, mlp, sharding
from zoo.base import checksums
from zoo.nn import parameters
from zoo.publishing.errors import PublishError
from zoo.sharding.axes import keystr, logical_axes
from zoo.tasks.finetuning import frozen

CONFIG = lora.Config(rank=4, alpha=8.0)
KEY = jax.random.key(0)
ADAPTER = (".down", ".up")


def drawn(model, seed=0):
    """The model with adapters that change it: `up` is drawn as `down` is."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: (
            eqx.tree_at(
                lambda a: (a.down, a.up),
                x,
                tuple(
                    jnp.asarray(rng.normal(size=y.shape), jnp.float32) / 8 for y in (x.down, x.up)
                ),
            )
            if isinstance(x, lora.Adapted)
            else x
        ),
        lora.adapt(model, CONFIG, key=KEY),
        is_leaf=lambda x: isinstance(x, lora.Adapted),
    )


def test_adapted_mlp_matches_its_formula():
    model = drawn(mlp.MLP(mlp.Config(6, 3, hidden_size=16, activation="relu"), key=KEY))
    jax_model, model = model, copy(model)
    x = np.random.default_rng(1).normal(size=(5, 6)).astype(np.float32)
    first, last = model.first.linear, model.last.linear
    hidden = np.maximum(x @ first.weight + first.bias, 0)
    adapted = last.weight
    around = (hidden @ adapted.down) @ adapted.up * (CONFIG.alpha / CONFIG.rank)
    hidden = np.maximum(hidden @ adapted.weight + around + last.bias, 0)
    expected = hidden @ model.head.weight + model.head.bias
    np.testing.assert_allclose(jax_model(jnp.asarray(x)), expected, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("remat", ["none", "full"])
def test_merged_adapters_equal_applied_ones(family, remat):
    if remat == "full" and family.name != "transformer":
        pytest.skip("once is enough")
    plain = family.make_model(0.0)(KEY)
    if remat == "full":
        plain = make_transformer(remat="full", tie_embeddings=True)(KEY)
    model = drawn(plain)
    merged = lora.merge(model)
    assert jax.tree.structure(merged) == jax.tree.structure(plain)
    batch = jax.tree.map(jnp.asarray, family.make_batch(2, 8, 0))
    inputs = batch["inputs"] if "inputs" in batch else batch["tokens"]
    applied = eqx.filter_jit(lambda model, x: model(x))(model, inputs)
    np.testing.assert_allclose(applied, merged(inputs), atol=1e-5)
    assert np.abs(applied - plain(inputs)).max() > 1e-2  # and they do something


def test_stacked_matrices_are_merged_per_layer():
    plain = drawn_transformer()
    model = drawn(plain)
    wo, mixed = plain.blocks.attention.wo, model.blocks.attention.wo
    for layer in range(2):
        added = np.einsum("nhr,re->nhe", mixed.down[layer], mixed.up[layer])
        merged = lora.merge(model).blocks.attention.wo[layer]
        np.testing.assert_allclose(merged, wo[layer] + 2.0 * added, atol=1e-5)


def test_bf16_adapters_merge_in_fp32():
    model = parameters.cast(drawn(drawn_transformer()), jnp.bfloat16)
    wo, mixed = lora.merge(model).blocks.attention.wo, model.blocks.attention.wo
    weight, down, up = (np.asarray(x, np.float32) for x in (mixed.weight, mixed.down, mixed.up))
    expected = weight + 2.0 * np.einsum("lnhr,lre->lnhe", down, up)
    assert wo.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(wo, np.float32), expected, rtol=2**-8, atol=1e-5)


def train(family, mesh=None, steps=3, config=CONFIG, precision="fp32"):
    optimizer = optax.adamw(1e-2, mask=zoo.optimizers.matrices)
    options = {"mesh": mesh, "trainable": lora.trainable}
    base = family.make_model(0.0)(KEY)
    state = zoo.init_state(
        lambda key, model: lora.adapt(model, config, key=key),
        optimizer,
        key=jax.random.key(1),
        pretrained=base,
        **options,
    )
    step = zoo.make_train_step(family.loss, optimizer, precision=precision, **options)
    found = []
    for _ in range(steps):
        state, metrics = step(state, family.make_batch(8, 16, 0))
        found.append(float(metrics["loss"]))
    return base, state, found


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_training_changes_only_adapters(family):
    base, state, found = train(family)
    assert found[-1] < found[0]
    trained, given = arrays(state.model), arrays(base)
    for name, array in trained.items():
        if name.endswith(ADAPTER):
            assert np.abs(array).max() > 0, name
        else:
            np.testing.assert_array_equal(
                array,
                given[
                    name.removesuffix(".weight") if name.removesuffix(".weight") in given else name
                ],
                err_msg=name,
            )
    moments = [name for name in arrays(state.opt_state) if ".mu." in name]
    assert moments
    assert all(name.endswith(ADAPTER) for name in moments)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_mesh_training_matches_and_shards_adapters(family):
    mesh = zoo.make_mesh("data=2,fsdp=2,tensor=2")
    _, alone, losses_alone = train(family)
    _, state, found = train(family, mesh)
    assert found == pytest.approx(losses_alone, rel=1e-5)
    assert_trees_close(state.model, alone.model, rtol=1e-3)
    adapters = adapters_of(logical_axes(state.model))
    assert adapters
    for names in adapters:
        matrix, down, up = names
        assert (*down[:-1], *up[len(up) - (len(matrix) - len(down) + 1) :]) == matrix
    wanted = sharding.shardings(state.model, mesh)
    for path, array in arrays(state.model).items():
        assert array.sharding.is_equivalent_to(arrays_of(wanted)[path], array.ndim), path


def arrays_of(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {keystr(path): leaf for path, leaf in leaves}


def adapters_of(axes):
    nodes = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, lora.Adapted))
    return [(x.weight, x.down, x.up) for x in nodes if isinstance(x, lora.Adapted)]


def test_bf16_adapters_match_merged_weights():
    family = FAMILIES[0]
    model = drawn(family.make_model(0.0)(KEY))
    batch = family.make_batch(8, 16, 0)
    evaluate = zoo.make_eval_step(family.loss, precision="bf16")
    applied = evaluate(model, batch)[1]["loss"]
    merged = zoo.make_eval_step(family.loss, precision="bf16")(lora.merge(model), batch)[1]["loss"]
    np.testing.assert_array_equal(applied, merged)


def test_targets_are_chosen_by_path():
    model = drawn_transformer()
    every = lora.targets(model, lora.Config())
    assert [name.rpartition(".")[2] for name in every] == [
        *("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")
    ]
    chosen = lora.Config(targets=("*.wq", "head.*"))
    assert lora.targets(model, chosen) == ["blocks.attention.wq", "head.weight"]
    adapted = lora.adapt(model, chosen, key=KEY)
    np.testing.assert_array_equal(adapted(TOKENS), model(TOKENS))
    with pytest.raises(ValueError, match=r"targets='blocks.mpl.\*' matches no matrix; those are"):
        lora.adapt(model, lora.Config(targets=("blocks.mpl.*",)), key=KEY)
    with pytest.raises(ValueError, match="has adapters already: merge them"):
        lora.adapt(adapted, chosen, key=KEY)
    tiny = mlp.MLP(mlp.Config(4, 2, num_layers=1), key=KEY)
    with pytest.raises(ValueError, match="the model has no other matrix"):
        lora.adapt(tiny, lora.Config(), key=KEY)
    for wrong in ({"rank": 0}, {"alpha": 0.0}):
        with pytest.raises(ValueError, match=r"rank=.*, alpha=.*: both must be positive"):
            lora.Config(**wrong)
    assert lora.Config(rank=1, alpha=0.5).rank == 1


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
    size = lambda name: (folder / name / "model.safetensors").stat().st_size
    assert size("adapters") < size("base") / 2
    for model in (
        zoo.load(folder / "adapters"),
        zoo.load(folder / "adapters"),
        zoo.load_adapters(folder / "adapters", zoo.load(folder / "base")),
    ):
        assert arrays(model).keys() == arrays(adapted).keys()
        for name, array in arrays(adapted).items():
            np.testing.assert_array_equal(arrays(model)[name], array)
        np.testing.assert_array_equal(model(TOKENS), adapted(TOKENS))
    mesh = zoo.make_mesh("fsdp=2,tensor=2")
    sharded = zoo.load(folder / "adapters", mesh=mesh)
    for path, where in arrays_of(sharding.shardings(sharded, mesh)).items():
        assert arrays(sharded)[path].sharding.is_equivalent_to(where, arrays(sharded)[path].ndim)
    np.testing.assert_allclose(sharded(TOKENS), adapted(TOKENS), atol=1e-4)


def test_mismatched_adapters_are_refused(saved):
    folder, adapted = saved
    with pytest.raises(PublishError, match=r"does not fit the model: .* has adapters already"):
        zoo.load_adapters(folder / "adapters", adapted)
    with pytest.raises(PublishError, match=r"family 'transformer', and the model is of 'rnn'"):
        zoo.load_adapters(folder / "adapters", make_rnn(0.0)(KEY))
    with pytest.raises(PublishError, match=r"blocks.mlp.w_up.up: \(2, 4, 64\) here, \(2, 4, 128\)"):
        zoo.load_adapters(folder / "adapters", drawn_transformer(d_ff=128))
    with pytest.raises(PublishError, match="holds no adapters"):
        zoo.load_adapters(folder / "base", drawn_transformer())
    with pytest.raises(PublishError, match="nowhere is no folder"):
        zoo.load_adapters(folder / "nowhere", drawn_transformer())
    with pytest.raises(ValueError, match="no adapters to save"):
        zoo.save_adapters(folder / "other", zoo.load(folder / "base"), base="base")
    data = bytearray((folder / "adapters" / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "adapters" / "model.safetensors").write_bytes(data)
    with pytest.raises(PublishError, match="is damaged"):
        zoo.load(folder / "adapters")


# --- Frozen parts -----------------------------------------------------------------------------


def test_adapters_that_cannot_be_reloaded_are_refused(tmp_path):
    def other_scale(model):
        changed = as_subclass(model.blocks.attention.wq, lora.Adapted)
        object.__setattr__(changed, "scale", 7.0)
        return eqx.tree_at(lambda m: m.blocks.attention.wq, model, changed)

    model = drawn(drawn_transformer())
    with pytest.raises(PublishError, match=r"attention\.wk\.scale: 2\.0 here, 7\.0 by"):
        zoo.save_adapters(tmp_path / "a", other_scale(model), base="base")
    with pytest.raises(
        PublishError, match=r"blocks\.mlp: helpers\.LoudMLP here, zoo\..*\.blocks\.MLP"
    ):
        zoo.save_adapters(tmp_path / "a", with_loud_mlp(model), base="base")
    assert not list(tmp_path.iterdir())


def test_malformed_adapter_configurations_are_refused(saved):
    folder, *_ = saved
    path = folder / "adapters" / "config.json"
    good = path.read_text()
    refused = 0
    for name in ("family", "adapters_of", "rank", "alpha", "targets"):
        for value in (..., None, [], {}, "foo", -1, 10**9, 10**400, True, 0.5, [[]]):
            if (name, value) in (("alpha", 10**9), ("alpha", 0.5), ("targets", [])):
                continue  # as good as others
            values = json.loads(good) | {name: value}
            path.write_text(json.dumps({key: x for key, x in values.items() if x is not ...}))
            checksums.write(path.parent)
            with pytest.raises(PublishError):
                zoo.load(path.parent)
            refused += 1
    assert refused == 5 * 11 - 3
    path.write_text(json.dumps(json.loads(good) | {"adapters_of": str(path.parent)}))
    checksums.write(path.parent)
    with pytest.raises(PublishError, match="is this folder itself"):
        zoo.load(path.parent)


def test_frozen_parts_have_no_optimizer_state():
    chosen = frozen(("embedding.*", "blocks.mlp.*"))
    optimizer = optax.adam(1e-2)
    state = zoo.init_state(make_transformer(), optimizer, key=KEY, trainable=chosen)
    before = copy(state.model)
    step = zoo.make_train_step(losses.next_token, optimizer, trainable=chosen, precision="fp32")
    state, _ = step(state, token_batch())
    for name, array in arrays(state.model).items():
        still = name.startswith(("embedding.", "blocks.mlp."))
        assert np.array_equal(array, arrays_of(before)[name]) == still, name
    moments = [name for name in arrays(state.opt_state) if ".mu." in name]
    assert any("blocks.attention" in name for name in moments)
    assert not any("embedding" in name or "mlp" in name.split(".") for name in moments)


def test_freezing_nothing_or_everything_is_refused():
    model = drawn_transformer()
    with pytest.raises(ValueError, match=r"freeze='blocks.mpl.\*' matches no parameter; those are"):
        frozen(("blocks.mpl.*",))(model)
    with pytest.raises(ValueError, match=r"nothing of the model, .*, is trainable: freeze less"):
        zoo.init_state(make_transformer(), optax.sgd(1.0), key=KEY, trainable=frozen(("*",)))


class Grouped(eqx.Module):
    weight: Float[Array, "group embed mlp"]


def test_adapters_keep_their_matrix_axes():
    stacked = Grouped(jnp.zeros((3, 2, 8, 4)))  # three layers
    members = ensemble.Ensemble(lambda key: Grouped(jnp.zeros((2, 8, 4))), 3, key=KEY)
    with sharding.use(None, {**sharding.RULES, "group": sharding.Axis("tensor", "stack")}):
        for model, first in [(stacked, None), (members, "member")]:
            adapted = lora.adapt(model, lora.Config(rank=2), key=KEY)
            [axes] = jax.tree.leaves(logical_axes(adapted), is_leaf=lora.is_adapted)
            assert axes.weight == (first, "group", "embed", "mlp")
            assert axes.down == (first, "group", "embed", "rank")
            assert axes.up == (first, "group", "rank", "mlp")


def test_load_adapters_takes_text_and_verifies(saved):
    folder, adapted = saved[0] / "adapters", saved[1]
    base = drawn_transformer()
    loaded = zoo.load_adapters(str(folder), base)
    np.testing.assert_array_equal(loaded.blocks.mlp.w_up.up, adapted.blocks.mlp.w_up.up)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(PublishError, match="is damaged"):
        zoo.load_adapters(folder, base)


def test_local_base_paths_are_saved_absolute(saved, monkeypatch):
    folder, adapted = saved
    monkeypatch.chdir(folder)
    for base, kept in (("base", str(folder / "base")), ("some/model", "some/model")):
        zoo.save_adapters(folder / "again", adapted, base=base)
        config = json.loads((folder / "again" / "config.json").read_text())
        assert config["adapters_of"] == kept
