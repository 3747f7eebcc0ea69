"""zoo.nn.stateful: an eqx.nn.State is threaded through steps, placed, saved, and not trained."""

import functools
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import Batch, arrays, assert_trees_close, copy
from jaxtyping import Array, Float

import zoo
import zoo.runs.recorder
from zoo import ensemble, losses, sharding
from zoo.nn import stateful
from zoo.nn.stateful import LoadBias, moved
from zoo.runs.config import Config
from zoo.runs.monitor import CompileCounter

KEY = jax.random.key(0)
DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}


class Centred(eqx.Module):
    """A linear map of what is left of an input without the running mean of those before."""

    weight: Float[Array, "embed mlp"]
    mean: eqx.nn.StateIndex
    count: eqx.nn.StateIndex

    def __init__(self, key: Array):
        self.weight = 1 + jax.random.uniform(key, (8, 8))
        self.mean = eqx.nn.StateIndex(jnp.zeros((8, 8)))
        self.count = eqx.nn.StateIndex(jnp.array(0))

    def __call__(self, x_BE: Array, state: eqx.nn.State) -> tuple[Array, eqx.nn.State]:
        mean, count = state.get(self.mean), state.get(self.count)
        new = 0.5 * mean + x_BE.astype(jnp.float32).mean(0)[None]
        state = state.set(self.mean, new).set(self.count, count + 1)
        return (x_BE - mean[:1].astype(x_BE.dtype)) @ self.weight, state


def make_centred(key: Array) -> Any:
    return eqx.nn.make_with_state(Centred)(key)


def centred_loss(pair: Any, batch: Any, key: Any) -> tuple[Any, ...]:
    model, state = pair
    y, state = model(batch["x"], state)
    squares = jnp.square(y.astype(jnp.float32)).mean(1)
    bits = jnp.float32(8 * jax.tree.leaves(state)[-1].dtype.itemsize)
    weights = batch["weights"]
    return (squares * weights).sum(), weights.sum(), {"bits": bits * weights.sum()}, state


def centred_batch(rows: int = 8, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 8)).astype(np.float32)
    return {"x": x, "weights": np.ones(rows, np.float32)}


def state_and_step(
    loss: Any = centred_loss, make: Any = make_centred, optimizer: Any = None, **options: Any
) -> Any:
    optimizer = optimizer or optax.adamw(1e-2, weight_decay=0.5)
    mesh = options.get("mesh")
    state = zoo.init_state(make, optimizer, key=KEY, mesh=mesh)
    return state, zoo.make_train_step(loss, optimizer, **{"precision": "fp32", **options})


def running(means: list[np.ndarray]) -> np.ndarray:
    return functools.reduce(lambda mean, x: 0.5 * mean + x, means, np.zeros(8))


@pytest.mark.parametrize(("precision", "accumulate"), [("fp32", 1), ("fp32", 4), ("bf16", 2)])
def test_states_are_threaded_in_order_and_not_trained(precision: Any, accumulate: int):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=0.5))
    state, step = state_and_step(optimizer=optimizer, precision=precision, accumulate=accumulate)
    means = []
    for seed in range(2):
        batch = centred_batch(seed=seed)
        means += [batch["x"][m::accumulate].mean(0) for m in range(accumulate)]
        state, metrics = step(state, batch)
    model, got = state.model
    assert int(got.get(model.count)) == 2 * accumulate
    tolerance = 1e-6 if precision == "fp32" else 2**-8
    np.testing.assert_allclose(
        got.get(model.mean), running(means)[None].repeat(8, 0), atol=tolerance
    )
    assert float(metrics["bits"]) == 32
    norm = np.linalg.norm(np.asarray(model.weight))
    assert float(metrics["param_norm"]) == pytest.approx(norm, rel=1e-6)
    floats = [x for x in arrays(state.opt_state).values() if x.ndim]
    assert len(floats) == 2  # the moments of one parameter


def test_a_bias_of_experts_moves_against_its_load():
    """By its rate, whatever the load; one that is even, but for rounding, stays."""
    bias = LoadBias(jnp.full(4, 0.5), 0.25)
    error = LoadBias(jnp.asarray([2.0, -3.0, 1e-6, 0.0]), 0.25)
    got = moved({"bias": bias, "other": jnp.ones(2)}, {"bias": error, "other": jnp.ones(2)})
    np.testing.assert_array_equal(got["bias"].value, [0.25, 0.75, 0.5, 0.5])
    np.testing.assert_array_equal(got["other"], 1)
    frozen = eqx.tree_at(lambda bias: bias.value, error, None)
    assert moved(bias, frozen) is bias


def test_states_are_not_weakly_typed():
    """Nor are they after a restore: code that works for a new run works for a resumed one."""
    kinds = []

    def note(pair: Any, batch: Any, key: Any) -> Any:
        kinds.extend(x.weak_type for x in jax.tree.leaves(pair[1]))
        return centred_loss(pair, batch, key)

    state, step = state_and_step(note, accumulate=2)
    step(state, centred_batch())
    assert set(kinds) == {False}


def test_states_stay_as_they_were_in_a_skipped_step():
    state, step = state_and_step()
    state, _ = step(state, centred_batch())
    before = copy(state.model)
    bad = centred_batch(seed=1)
    bad["weights"][0] = np.nan
    state, metrics = step(state, jax.tree.map(jnp.asarray, bad))  # on the device: not looked at
    assert float(metrics["skipped"]) == 1
    assert_trees_close(state.model, before, rtol=0)
    state, _ = step(state, centred_batch(seed=1))
    assert int(state.model[1].get(state.model[0].count)) == 2


def test_a_fully_trainable_model_leaves_its_states_out():
    chosen = lambda model: jax.tree.map(lambda _: True, model)
    state = zoo.init_state(make_centred, optax.adam(1e-3), key=KEY, trainable=chosen)
    assert len([x for x in arrays(state.opt_state).values() if x.ndim]) == 2


MESHES = ["data=8", "fsdp=2,tensor=2"]


@functools.cache
def trained_on(mesh: str) -> tuple[list[float], Any]:
    state, step = state_and_step(mesh=zoo.make_mesh(mesh))
    values, shapes = [], [centred_batch(rows) for rows in (16, 8)]
    step.compile(state, *shapes)
    with CompileCounter() as counter:
        for seed in range(4):
            old = state
            state, metrics = step(state, centred_batch(16 - 8 * (seed % 2), seed))
            values.append(float(metrics["loss"]))
            assert all(x.is_deleted() for x in arrays(old.model).values())
    assert counter.compiles == 0
    return values, state


@pytest.mark.parametrize("mesh", MESHES)
def test_the_mesh_does_not_change_the_states(mesh: str):
    (values, state), (expected, one) = trained_on(mesh), trained_on("")
    np.testing.assert_allclose(values, expected, rtol=1e-5)
    assert_trees_close(state.model[1], copy(one.model[1]), rtol=1e-5)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(state.model[1]))
    assert state.model[0].weight.sharding.is_fully_replicated == (mesh == "data=8")
    table = sharding.placement_table(state.model, zoo.make_mesh(mesh))
    assert "1.0" in table


# Evaluation


def test_evaluation_needs_no_new_state():
    model = make_centred(KEY)
    three = lambda *arguments: centred_loss(*arguments)[:3]
    sums = [
        {name: float(x) for name, x in zoo.make_eval_step(loss)(model, centred_batch())[1].items()}
        for loss in (centred_loss, three)
    ]
    assert sums[0] == sums[1]
    assert sums[0]["bits"] == 8 * 32
    assert int(model[1].get(model[0].count)) == 0


# Errors


def returning(change: Any) -> Any:
    def my_loss(*arguments: Any) -> Any:
        return change(*centred_loss(*arguments))

    return my_loss


def replaced(state: eqx.nn.State, change: Any) -> eqx.nn.State:
    leaves, structure = jax.tree.flatten(state)
    return jax.tree.unflatten(structure, [change(x) for x in leaves])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t, w, m, s: (t, w, m), TypeError, "three values, .* the new State as a fourth"),
        (lambda t, w, m, s: (t, w, m, t), TypeError, r"value float32\[\]: return the new State"),
        (lambda t, w, m, s: (t, w, m, [s, s]), TypeError, r"\(State, State\): return the new St"),
        (
            lambda t, w, m, s: (t, w, m, replaced(s, lambda x: x.astype(jnp.int32))),
            ValueError,
            r"Centred.mean is int32\[8, 8\], .* float32\[8, 8\]",
        ),
        (
            lambda t, w, m, s: (t, w, m, replaced(s, lambda x: x[None])),
            ValueError,
            r"Centred.mean is float32\[1, 8, 8\], .* float32\[8, 8\]",
        ),
        (
            lambda t, w, m, s: (t, w, m, eqx.nn.make_with_state(Other)()[1]),
            ValueError,
            r"Centred.mean is absent, .* float32\[8, 8\]",
        ),
    ],
)
def test_what_is_no_new_state_is_refused(change: Any, error: Any, message: str):
    state, step = state_and_step(returning(change))
    with CompileCounter() as counter, pytest.raises(error, match=f"loss_fn my_loss .*{message}"):
        step(state, centred_batch())
    assert counter.compiles == 0


class Other(eqx.Module):
    other: eqx.nn.StateIndex

    def __init__(self):
        self.other = eqx.nn.StateIndex(jnp.zeros(()))


def test_a_fourth_value_needs_a_state():
    def loss(model: Any, batch: Any, key: Any) -> Any:
        return model.weight.sum(), batch["weights"].sum(), {}, {"hidden": 0}

    state, step = state_and_step(loss, lambda key: make_centred(key)[0])
    evaluate = zoo.make_eval_step(loss, precision="fp32")
    for call in (
        lambda: step(state, centred_batch()),
        lambda: evaluate(state.model, centred_batch()),
    ):
        with pytest.raises(TypeError, match=r"dict, .* eqx.nn.make_with_state\(Net\)"):
            call()


# The layers of Equinox that have a State


class Net(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: Any
    linear: eqx.nn.Linear

    def __init__(self, key: Array, make_norm: Any):
        first, second = jax.random.split(key)
        self.conv = eqx.nn.Conv2d(2, 4, 3, key=first)
        self.norm = make_norm(4)
        self.linear = eqx.nn.Linear(4, 4, key=second)

    def __call__(self, x: Array, state: eqx.nn.State) -> tuple[Array, eqx.nn.State]:
        x, state = self.norm(self.conv(x), state)
        return self.linear(jax.nn.relu(x).mean((1, 2))), state


def spectral(size: int) -> Any:
    conv = eqx.nn.Conv2d(size, size, 1, key=KEY)
    return eqx.nn.SpectralNorm(conv, "weight", key=KEY)


NORMS = {
    "batch": lambda size: eqx.nn.BatchNorm(size, "batch", mode="batch", momentum=0.9),
    "ema": lambda size: eqx.nn.BatchNorm(size, "batch", mode="ema", momentum=0.9),
    "spectral": spectral,
}


def make_net(norm: str) -> Any:
    return lambda key: eqx.nn.make_with_state(Net)(key, NORMS[norm])


def image_loss(pair: Any, batch: Any, key: Any) -> tuple[Any, ...]:
    model, state = pair
    if key is None:
        model = eqx.nn.inference_mode(model)
    apply = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    with jax.numpy_dtype_promotion("standard"):  # an evaluation in Equinox needs it
        logits, state = apply(batch["images"], state)
    total, weight = losses.cross_entropy(logits, batch["labels"], batch["weights"])
    return total, weight, {"bits": 8 * logits.dtype.itemsize * weight}, state


def image_batch(seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    return {
        "images": (3 + rng.normal(size=(8, 2, 6, 6))).astype(np.float32),
        "labels": rng.integers(0, 4, 8).astype(np.int32),
        "weights": np.ones(8, np.float32),
    }


@functools.cache
def trained_net(norm: str, precision: Any, mesh: str = "") -> Any:
    """The losses of three steps and of an evaluation, and the State."""
    placed = zoo.make_mesh(mesh) if mesh else None
    state, step = state_and_step(
        image_loss, make_net(norm), optax.sgd(0.1), precision=precision, mesh=placed
    )
    values = []
    for seed in range(3):
        state, metrics = step(state, image_batch(seed))
        values.append(float(metrics["loss"]))
    assert float(metrics["bits"]) == 8 * jnp.dtype(DTYPES[precision]).itemsize
    _, sums = zoo.make_eval_step(image_loss, precision=precision, mesh=placed)(
        state.model, image_batch()
    )
    return [*values, float(sums["loss"]) / 8], copy(state.model[1])


@pytest.mark.parametrize(("norm", "precision"), [("batch", "bf16"), ("ema", "fp16")])
def test_norms_of_equinox_train_in_low_precision(norm: str, precision: Any):
    (values, state), (expected, exact) = (trained_net(norm, p) for p in (precision, "fp32"))
    np.testing.assert_allclose(values, expected, rtol=2e-2)
    assert_trees_close(state, exact, rtol=2e-2)
    initial = make_net(norm)(KEY)[1]
    moved = [
        np.abs(x - y).max()
        for x, y in zip(*map(jax.tree.leaves, (state, initial)), strict=True)
        if x.ndim
    ]
    assert min(moved) > 0
    assert {x.dtype for x in jax.tree.leaves(state) if x.ndim} == {np.dtype("float32")}


def test_a_spectral_norm_is_of_fp32_alone():
    values, state = trained_net("spectral", "fp32")
    assert values[0] > values[1]
    assert not eqx.tree_equal(state, copy(make_net("spectral")(KEY)[1]))
    with pytest.raises(ValueError, match=r"SpectralNorm in bfloat16.*precision='fp32'"):
        trained_net("spectral", "bf16")


def test_the_mesh_does_not_change_batch_norm():
    """Statistics are of the whole batch, not of a device's rows."""
    (values, state), (expected, one) = (trained_net("batch", "fp32", m) for m in (MESHES[0], ""))
    np.testing.assert_allclose(values, expected, rtol=1e-5)
    assert_trees_close(state, one, rtol=1e-5)


def test_running_statistics_of_an_incomplete_batch_are_of_different_rows():
    """Of an epoch of two batches, the second of one row; by a formula for each batch's rows."""
    make = lambda key: eqx.nn.make_with_state(OneNorm)(key)
    rows = np.random.default_rng(0).normal(2.0, 0.9, size=(9, 3)).astype(np.float32)
    dataset = zoo.ArrayDataset({"x": rows}, batch_size=8, seed=0, shuffle=False)
    state, step = state_and_step(norm_loss, make, optax.sgd(0.0))
    for k in range(2):
        state, metrics = step(state, dataset.batch(k))
    assert float(metrics["tokens"]) == 1
    mean, variance = state.model[1].get(state.model[0].norm.batch_state_index)
    taken = [rows[:8], rows[[8, 0, 1, 2, 3, 4, 5, 6]]]
    # In this mode both begin at zero.
    np.testing.assert_allclose(mean, 0.09 * taken[0].mean(0) + 0.1 * taken[1].mean(0), rtol=1e-5)
    wanted = 0.9 * (0.9 * 1 + 0.1 * taken[0].var(0)) + 0.1 * taken[1].var(0)
    np.testing.assert_allclose(variance, wanted, rtol=1e-5)
    assert taken[1].var(0).min() > 0.2


class OneNorm(eqx.Module):
    norm: eqx.nn.BatchNorm
    weight: Float[Array, "embed mlp"]

    def __init__(self, key: Array):
        self.norm = eqx.nn.BatchNorm(3, "batch", momentum=0.9, mode="batch")
        self.weight = jnp.ones((3, 1))


def norm_loss(pair: Any, batch: Any, key: Any) -> tuple[Any, ...]:
    model, state = pair
    apply = jax.vmap(model.norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    y, state = apply(batch["x"], state)
    total = (jnp.square(y @ model.weight)[:, 0] * batch["weights"]).sum()
    return total, batch["weights"].sum(), {}, state


def test_small_updates_of_statistics_are_not_lost():
    net, state = make_net("batch")(KEY)
    net = stateful.cast_around(net, jnp.bfloat16)
    assert isinstance(net.norm, eqx.nn.BatchNorm)
    assert net.norm.weight.dtype == jnp.float32
    assert net.conv.weight.dtype == jnp.bfloat16
    x = jnp.full((2, 4, 6), 1 + 2**-7, jnp.bfloat16)
    apply = jax.vmap(net.norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    y, state = apply(x, state)
    assert y.dtype == jnp.bfloat16
    mean, variance = state.get(net.norm.batch_state_index)
    np.testing.assert_allclose(mean, 0.1 * (1 + 2**-7), rtol=1e-6)
    np.testing.assert_allclose(variance, 0.9, rtol=1e-6)


def test_ensembles_have_a_state_for_each_member():
    make = lambda key: ensemble.Ensemble(make_centred, 2, key=key)
    loss = ensemble.member_loss(centred_loss)
    state, step = state_and_step(
        loss, make, ensemble.per_member(optax.sgd(0.0)), mesh=zoo.make_mesh("fsdp=2")
    )
    state, _ = step(state, centred_batch())
    state, _ = step(state, centred_batch(seed=1))
    leaves = {x.ndim: x for x in jax.tree.leaves(state.model.members[1])}
    np.testing.assert_array_equal(leaves[1], [2, 2])
    means = running([centred_batch(seed=seed)["x"].mean(0) for seed in (0, 1)])
    np.testing.assert_allclose(leaves[3], np.broadcast_to(means, (2, 8, 8)), atol=1e-6)


# A run


def run(folder: Path, steps: int) -> Any:
    config = Config(
        run_dir=folder,
        steps=steps,
        precision="bf16",
        accumulate=2,
        checkpoint_every=2,
        eval_every=2,
        compilation_cache=None,
        log_every=1,
    )
    dataset = zoo.ArrayDataset({"x": centred_batch()["x"]}, 4, 0)
    with zoo.Run(config) as run:
        training = zoo.Training(
            make_model=make_centred,
            loss_fn=centred_loss,
            optimizer=optax.adam(1e-2),
            data=dataset,
            evaluate=zoo.evaluator(run, centred_loss, dataset),
        )
        return zoo.fit(run, training)


def test_a_resumed_run_has_the_same_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(zoo.runs.recorder, "plot_curves", lambda *paths: None)
    run(tmp_path / "stopped", 2)
    resumed, result = run(tmp_path / "stopped", 4)
    whole, expected = run(tmp_path / "whole", 4)
    assert result == expected
    counts = [x for x in jax.tree.leaves(whole.model[1]) if x.ndim == 0]
    assert [int(x) for x in counts] == [8]
    got, want = arrays(resumed), arrays(whole)
    assert got.keys() == want.keys()
    for path, x in want.items():
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, got[path] = jax.random.key_data(x), jax.random.key_data(got[path])
        np.testing.assert_array_equal(got[path], x, err_msg=path)
