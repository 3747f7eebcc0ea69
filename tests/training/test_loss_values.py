"""What a step refuses, and warns of, before it uses a batch or a loss."""

import functools
import logging
import re
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import VOCAB, drawn_model, drawn_transformer, make_transformer, token_batch
from jaxtyping import Array, Float

import zoo
import zoo.runs.recorder
from zoo import ensemble, losses, mlp, preferences
from zoo.alignment.distillation import Distillation, Taught
from zoo.data import loader
from zoo.runs.config import Config
from zoo.runs.metrics import read_metrics
from zoo.runs.monitor import CompileCounter
from zoo.training.loss_values import accepted_by

KEY = jax.random.key(0)
CLASSES = 3


def points(rows: int = 24) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, rows).astype(np.int32)
    return {"inputs": rng.normal(size=(rows, 4)).astype(np.float32), "labels": labels}


def make_net(key: Any) -> mlp.MLP:
    return mlp.MLP(mlp.Config(in_size=4, out_size=CLASSES, hidden_size=8), key=key)


def dataset_with(name: str, row: int, value: Any, dtype: Any = None, **more: np.ndarray) -> Any:
    """Batches of 4 rows in their order, of which one row of one array has the value."""
    arrays = {**points(), **more}
    changed = arrays[name].astype(dtype or arrays[name].dtype)
    changed[(row, *[1] * (changed.ndim - 1))] = value
    return zoo.ArrayDataset({**arrays, name: changed}, 4, seed=0, shuffle=False)


# --- The values of batches


NAN = ("inputs", np.nan, np.float32, r"batch 2: inputs\[3, 1\] is nan, which is no finite float32")
LARGE = ("labels", 2**40 + 3, np.int64, r"labels\[3\] is 1099511627779, which int32 does not hold")
BEYOND = [
    ("labels", CLASSES, np.int64, r"labels\[3\] is 3, and the model's out_size is 3: .* 0 to 2;"),
    ("labels", -1, np.int32, r"labels\[3\] is -1, and the model's out_size is 3"),
]


def test_loader_refuses_values_by_entry_and_row():
    mesh = zoo.make_mesh("data=2,fsdp=2")
    not_finite = r"batch 2: inputs\[3, 1\] is {}, which is no finite float{}"
    for name, value, dtype, message in (
        NAN,
        ("inputs", -np.inf, np.float16, not_finite.format("-inf", 16)),
        ("inputs", 1e300, np.float64, not_finite.format(r"1e\+300", 32)),
        LARGE,
        ("labels", 2**33, np.uint64, r"labels\[3\] is 8589934592, which uint32 does not hold"),
    ):
        stream = loader.batches(dataset_with(name, 11, value, dtype), mesh, stop=6)
        assert [next(stream)[0] for _ in range(2)] == [0, 1]
        with pytest.raises(ValueError, match=message):
            next(stream)


@pytest.fixture
def run_of(tmp_path: Any, monkeypatch: Any) -> Any:
    """`run_of(**fields)` is a run of six steps, without pictures."""
    monkeypatch.setattr(zoo.runs.recorder, "plot_curves", lambda *paths: None)
    common: Any = {"steps": 6, "log_every": 1, "eval_every": 6, "precision": "fp32"}
    return lambda **fields: zoo.Run(
        Config(run_dir=tmp_path, compilation_cache=None, **common, **fields)
    )


def training(dataset: Any, evaluate: Any) -> zoo.Training:
    return zoo.Training(
        make_model=make_net,
        loss_fn=losses.classification,
        optimizer=optax.adam(1e-2),
        data=dataset,
        evaluate=evaluate,
    )


@pytest.mark.parametrize(("name", "value", "dtype", "message"), [NAN, BEYOND[0]])
def test_a_run_ends_before_the_step_that_would_use_the_value(
    name: str, value: Any, dtype: Any, message: str, run_of: Any
):
    with run_of(checkpoint_every=1) as run:
        dataset = dataset_with(name, 11, value, dtype)
        given = training(dataset, zoo.evaluator(run, losses.classification, dataset))
        with pytest.raises(ValueError, match=message):
            zoo.fit(run, given)
        state = given.blueprint(KEY, mesh=run.mesh).state()
        with pytest.raises(ValueError, match=message):  # of an evaluation as well
            given.evaluate(state.model, True)
    assert [line["step"] for line in read_metrics(run.folder / "metrics.jsonl")] == [1, 2]


def test_a_run_that_skips_steps_skips_those_of_nan(run_of: Any):
    with run_of(on_nonfinite="skip") as run:
        given = training(dataset_with("inputs", 11, np.nan), lambda *_: {"eval_loss": 1.0})
        state, _ = zoo.fit(run, given)
    assert (int(state.step), int(state.skipped)) == (6, 1)


def test_a_loop_of_ones_own_has_the_same_checks():
    optimizer = optax.sgd(0.1)
    state = zoo.init_state(make_net, optimizer, key=KEY)
    step = zoo.make_train_step(losses.classification, optimizer, precision="fp32")
    evaluate = zoo.make_eval_step(losses.classification, precision="fp32")
    for name, value, dtype, message in (NAN, LARGE, *BEYOND):
        batch = dataset_with(name, 11, value, dtype).batch(2)
        for call, given in ((step, state), (evaluate, state.model)):
            message = message.replace("batch 2", "the batch")
            with CompileCounter() as counter, pytest.raises(ValueError, match=message):
                call(given, batch)
            assert counter.compiles == 0
    step(state, dataset_with("inputs", 11, np.nan).batch(1))  # which has all of its buffers


def test_ids_beyond_the_vocabulary_are_refused_and_padding_is_not():
    model, batch = drawn_transformer(), token_batch(4, 8)
    evaluate = zoo.make_eval_step(losses.next_token, precision="fp32")
    _, expected = evaluate(model, batch)
    counted = batch["weights"] > 0
    assert 0 < (~counted).sum() < counted.size
    ignored = {**batch, "targets": np.where(counted, batch["targets"], -100)}
    _, found = evaluate(model, ignored)
    assert float(found["loss"]) == float(expected["loss"])
    for name in ("tokens", "targets"):
        wrong = {**batch, name: batch[name].copy()}
        wrong[name][2, 0] = VOCAB
        message = rf"{name}\[2, 0\] is 64, and the model's vocab_size is 64: .* 0 to 63"
        with pytest.raises(ValueError, match=message):
            evaluate(model, wrong)
    prompt = {**batch, "weights": np.zeros_like(batch["weights"]), "tokens": batch["tokens"] + 99}
    with pytest.raises(ValueError, match=r"tokens\[0, 0\] is "):  # an input, whatever its weight
        evaluate(model, prompt)


class Foreign(eqx.Module):
    """A model that says nothing of its sizes."""

    weight: Float[Array, "features classes"]

    def __init__(self, key: Array):
        self.weight = jax.random.normal(key, (4, CLASSES))

    def __call__(self, x: Array, *, key: Any) -> Array:
        return x @ self.weight


def test_a_loss_says_what_its_entries_may_be():
    @losses.accepts(labels=range(1, CLASSES), inputs=None)
    def loss(model: Any, batch: Any, key: Any) -> Any:
        return losses.classification(
            model, {**batch, "inputs": jnp.nan_to_num(batch["inputs"])}, key
        )

    evaluate = zoo.make_eval_step(loss, precision="fp32")
    model, batch = Foreign(KEY), zoo.ArrayDataset(points(), 8, seed=0).batch(0)
    batch = {**batch, "labels": batch["labels"] % 2 + 1}
    batch["inputs"][3, 2] = np.nan
    _, sums = evaluate(model, batch)
    assert np.isfinite(float(sums["loss"]))
    batch["labels"][5] = 0
    with pytest.raises(ValueError, match=r"labels\[5\] is 0, .* range\(1, 3\)"):
        evaluate(model, batch)


def test_what_is_accepted_is_found_through_wrappers():
    key = KEY
    net, text = make_net(key), make_transformer()
    many = ensemble.Ensemble(make_net, 2, key=key)
    classifier = zoo.Classifier(text(key), 5, key=key)
    taught = Taught(text(key), text(key))
    mixed = losses.per_source(losses.next_token, ["a", "b"])
    member = ensemble.member_loss(losses.classification)
    expected = {"tokens": range(VOCAB), "targets": range(VOCAB)}
    for loss, model, wanted in [
        (losses.classification, net, {"labels": range(CLASSES)}),
        (member, many, {"labels": range(CLASSES)}),
        (losses.classification, classifier, {"inputs": range(VOCAB), "labels": range(5)}),
        (losses.next_token, text(key), expected),
        (losses.balanced_next_token(0.1), text(key), expected),
        (mixed, text(key), expected),
        (functools.partial(losses.next_token), (text(key), None), expected),
        (Distillation().beside_teacher, taught, expected),
        (preferences.orpo(), text(key), expected),
        (losses.classification, Foreign(key), {}),
    ]:
        found = {name: ids.values for name, ids in accepted_by(loss, model).items()}
        assert found == wanted, (loss, model)


def test_targets_beyond_the_logits_have_no_finite_loss():
    """Also of a model that says nothing of its classes, in a batch that is on the device."""
    batch = jax.tree.map(jnp.asarray, zoo.ArrayDataset(points(), 8, seed=0).batch(0))
    loss = lambda model, batch: losses.classification(model, batch, None)[0]
    run = eqx.filter_jit(eqx.filter_value_and_grad(loss))
    model = Foreign(KEY)
    for label in (-1, CLASSES):
        wrong = {**batch, "labels": batch["labels"].at[2].set(label)}
        assert np.isnan(float(run(model, wrong)[0]))
        weights = batch["weights"].at[2].set(0)
        (ignored, gradient), (right, other) = (
            run(model, {**x, "weights": weights}) for x in (wrong, batch)
        )
        assert float(ignored) == float(right) > 0
        np.testing.assert_array_equal(gradient.weight, other.weight)


# --- The first step


def squares(model: Any, batch: Any) -> Array:
    y = model(batch["inputs"], key=None).astype(jnp.float32)
    return jnp.square(y).sum(-1) * batch["weights"]


def sums(model: Any, batch: Any, key: Any) -> Any:
    return squares(model, batch).sum(), batch["weights"].sum(), {}


def mean_beside_a_weight(model: Any, batch: Any, key: Any) -> Any:
    return squares(model, batch).mean(), batch["weights"].sum(), {}


def sum_beside_one(model: Any, batch: Any, key: Any) -> Any:
    return squares(model, batch).sum(), jnp.float32(1), {}


def contrastive(model: Any, batch: Any, key: Any) -> Any:
    y = model(batch["inputs"], key=None) / 8
    pairs = jax.nn.logsumexp(y @ y.T, axis=1)
    return (pairs * batch["weights"]).sum(), batch["weights"].sum(), {}


def first_steps(loss: Any, mesh: str = "", count: int = 1, **options: Any) -> list[str]:
    """The LossWarnings of the first steps of a training."""
    placed, optimizer = zoo.make_mesh(mesh), optax.sgd(0.0)
    state = zoo.init_state(Foreign, optimizer, key=KEY, mesh=placed)
    step = zoo.make_train_step(loss, optimizer, mesh=placed, **{"precision": "fp32", **options})
    batch = zoo.ArrayDataset(points(), 8, seed=0).batch(0)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step.compile(state, batch)
        for _ in range(count):
            state, _ = step(state, batch)
    return [str(each.message) for each in found if each.category is zoo.LossWarning]


@pytest.mark.parametrize(
    ("loss", "mesh"), [(mean_beside_a_weight, "data=8"), (sum_beside_one, ""), (contrastive, "")]
)
def test_a_loss_that_is_no_sum_is_warned_of_once(loss: Any, mesh: str):
    [text] = first_steps(loss, mesh, count=3)
    count = 8 if mesh else 2
    numbers = rf"loss of {count} equal rows .* weight of (\S+), that of {2 * count} .* and (\S+): "
    one, two = map(float, re.search(numbers, text).groups())
    assert two / one == (1 if loss is sum_beside_one else 2)
    assert "Return the summed loss and the summed weight" in text


def test_a_sum_is_not_warned_of():
    @functools.wraps(sums)
    def wrapped(*arguments: Any) -> Any:
        return sums(*arguments)

    def needs_a_key(model: Any, batch: Any, key: Any) -> Any:
        jax.random.split(key)
        return sums(model, batch, key)

    every = ({}, {"precision": "bf16"}, {"mesh": "data=2,fsdp=2"})
    for loss, options in zip((needs_a_key, wrapped, sums), every, strict=True):
        assert first_steps(loss, **options) == []


def test_losses_of_the_zoo_need_no_second_program():
    """They are sums; a loss of one's own is computed once more, for a few rows."""
    counts = []
    for loss in (losses.classification, sums):
        optimizer = optax.sgd(0.0)
        state = zoo.init_state(Foreign, optimizer, key=KEY)
        step = zoo.make_train_step(loss, optimizer, precision="fp32")
        with CompileCounter() as counter:
            step.compile(state, zoo.ArrayDataset(points(), 8, seed=0).batch(0))
        counts.append(counter.compiles)
        with CompileCounter() as counter:
            step(state, zoo.ArrayDataset(points(), 8, seed=0).batch(0))
        assert counter.compiles == 0
    assert counts == [1, 2]


def pairs_batch() -> dict[str, np.ndarray]:
    return {**token_batch(4, 16), "reference": np.full((4, 2), -3.0, np.float32)}


OF_THE_ZOO: dict[str, Any] = {
    "next token": (losses.next_token, drawn_transformer, token_batch),
    "experts": (
        losses.balanced_next_token(0.5, 0.5),
        lambda: drawn_transformer(d_ff=12, **{"experts.num_experts": 4, "experts.per_token": 2}),
        token_batch,
    ),
    "classification": (
        losses.classification,
        lambda: drawn_model(make_net),
        lambda: zoo.ArrayDataset(points(), 8, seed=0).batch(0),
    ),
    "orpo": (preferences.orpo(), drawn_transformer, pairs_batch),
    "dpo": (preferences.dpo(), drawn_transformer, pairs_batch),
    "teacher": (
        Distillation(2.0).beside_teacher,
        lambda: Taught(drawn_transformer(), drawn_transformer(num_layers=1)),
        token_batch,
    ),
}


@pytest.mark.parametrize("name", OF_THE_ZOO)
def test_losses_of_the_zoo_are_sums(name: str):
    """Why their first step is not checked: by their real batches, twice."""
    loss, make, make_batch = OF_THE_ZOO[name]
    model, batch = make(), jax.tree.map(jnp.asarray, make_batch())
    twice = jax.tree.map(lambda x: jnp.asarray(np.concatenate([x, x])), batch)
    run = eqx.filter_jit(lambda model, batch: loss(model, batch, None)[:2])
    (total, weight), (totals, weights) = run(model, batch), run(model, twice)
    assert float(weight) > 0
    assert abs(float(total)) > 0
    assert float(totals) == pytest.approx(2 * float(total), rel=1e-5)
    assert float(weights) == pytest.approx(2 * float(weight), rel=1e-6)


@pytest.mark.parametrize(
    ("clip_norm", "factor", "said"),
    [("default", 100.0, True), ("default", 1e-4, False), (None, 100.0, False)],
)
def test_clipping_is_said_once(clip_norm: Any, factor: float, said: bool, caplog: Any):
    def scaled(model: Any, batch: Any, key: Any) -> Any:
        total, weight, metrics = sums(model, batch, key)
        return factor * total, weight, metrics

    norms = []
    optimizer = optax.chain(optax.trace(0.0), optax.scale(0.0))  # it keeps the last gradient
    state = zoo.init_state(Foreign, optimizer, key=KEY)
    given = {} if clip_norm == "default" else {"clip_norm": clip_norm}
    step = zoo.make_train_step(scaled, optimizer, precision="fp32", **given)
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            state, metrics = step(state, zoo.ArrayDataset(points(), 8, seed=0).batch(0))
            norms.append(float(metrics["grad_norm"]))
    found = [record.message for record in caplog.records if "gradient norm" in record.message]
    assert (
        found
        == [f"gradient norm {norms[0]:.4g}, clipped to 1; clip_norm=None turns that off"] * said
    )
    kept = np.concatenate([x.ravel() for x in jax.tree.leaves(state.opt_state[0].trace)])
    assert np.linalg.norm(kept) == pytest.approx(1.0 if said else norms[-1], rel=1e-5)


def test_a_run_clips_nothing_if_told_so(tmp_path: Any):
    with pytest.raises(ValueError, match=r"clip_norm=0\.0:"):
        Config(run_dir=tmp_path, steps=1, clip_norm=0.0)
    assert Config(run_dir=tmp_path, steps=1, clip_norm=None).clip_norm is None
    assert Config(run_dir=tmp_path, steps=1).clip_norm == 1.0
