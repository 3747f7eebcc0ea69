"""zoo.training: one maths on every mesh, exact token weights, precision, no hidden compile."""

import functools
import gc
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from helpers import (
    FAMILIES,
    KEEP_GRADIENT,
    Batch,
    Family,
    arrays,
    assert_trees_close,
    copy,
    equations,
    low,
    make_transformer,
    only_norms,
    parameters,
    state_and_step,
    token_batch,
)
from jaxtyping import Array, Float

import zoo
from zoo import losses, sharding, transformer
from zoo.nn.precision import LossScale
from zoo.nn.stateful import cast
from zoo.runs.monitor import CompileCounter
from zoo.sharding.axes import keystr
from zoo.training import step as train
from zoo.training.state import (
    Blueprint,
    Pretrained,
    state_shardings,
    without_frozen,
)

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
KEY = jax.random.key(0)


# Meshes


class Trained(NamedTuple):
    """Five steps with dropout on one mesh, and what is to be compared."""

    losses: list[float]
    grad_norms: list[float]
    masks: set[int]
    initial: Any
    placed: dict[str, Any]
    first_state: Any
    state: Any


MESHES = {
    "": ("", None),
    "all": ("data=2,fsdp=2,tensor=2", None),
    "sequence": ("data=2,fsdp=2,tensor=2", sharding.SEQUENCE_PARALLEL),
}


@functools.cache
def train_five_steps(family: Family, mesh_name: str) -> Trained:
    spec, rules = MESHES[mesh_name]
    masks: set[int] = set()
    draw = jax.random.bernoulli

    def draw_and_note(key: Array, p: Any, shape: tuple[int, ...]) -> Array:
        kept = draw(key, p, shape)
        # Sums of integers are exact in any order.
        factors = jnp.arange(kept.size, dtype=jnp.uint32).reshape(shape) * np.uint32(2654435761)
        checksum = jnp.where(kept, factors, np.uint32(0)).sum(dtype=jnp.uint32)
        jax.debug.callback(lambda x: masks.add(int(x)), checksum)
        return kept

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.random, "bernoulli", draw_and_note)
        state, step = state_and_step(
            family.make_model(0.1),
            family.loss,
            optimizer=optax.adamw(1e-2),
            mesh=zoo.Layout(spec, rules),
        )
        initial, first_state = copy(state.model), state
        placed = {path: x.sharding for path, x in arrays(state).items()}
        values, grad_norms = [], []
        for seed in range(5):
            state, metrics = step(state, family.make_batch(8, 16, seed))
            values.append(float(metrics["loss"]))
            grad_norms.append(float(metrics["grad_norm"]))
        jax.effects_barrier()
    return Trained(values, grad_norms, masks, initial, placed, first_state, state)


sequences = pytest.mark.parametrize("family", FAMILIES[:2], ids=lambda f: f.name)


@sequences
def test_the_mesh_does_not_change_losses_dropout_and_initialisation(family: Family):
    """And a step keeps its state's shardings, and takes what it is given."""
    expected, on_mesh = train_five_steps(family, ""), train_five_steps(family, "all")
    np.testing.assert_allclose(on_mesh.losses, expected.losses, rtol=1e-5)
    np.testing.assert_allclose(on_mesh.grad_norms, expected.grad_norms, rtol=1e-4)
    assert len(set(on_mesh.losses)) == 5
    assert len(expected.masks) == 5 * family.num_masks  # each layer and each step has its own
    assert on_mesh.masks == expected.masks
    assert_trees_close(on_mesh.initial, expected.initial, rtol=1e-6)
    for path, x in arrays(on_mesh.state).items():
        assert x.sharding.is_equivalent_to(on_mesh.placed[path], x.ndim), path
    old = arrays(on_mesh.first_state)
    assert all(x.is_deleted() for path, x in old.items() if path != "key")


def test_a_state_is_given_to_one_step():
    for mesh in ("", "fsdp=2,tensor=2"):
        state, step = state_and_step(Line, line_loss, optax.sgd(0.1), mesh=zoo.make_mesh(mesh))
        step(state, line_batch())
        with pytest.raises(ValueError, match="given to a step before"):
            step(state, line_batch())


def test_logits_in_chunks_keep_the_losses(monkeypatch: Any):
    whole = train_five_steps(FAMILIES[0], "")
    monkeypatch.setattr(losses, "LOGITS_BYTES", 1)  # a step of time after another
    chunked = train_five_steps.__wrapped__(FAMILIES[0], "sequence")
    np.testing.assert_allclose(chunked.losses, whole.losses, rtol=1e-5)
    assert chunked.masks == whole.masks


@pytest.mark.parametrize(
    ("mesh", "accumulate", "logits_bytes"),
    [("", 1, 2**29), pytest.param("fsdp=2,tensor=2", 2, 1, marks=pytest.mark.slow)],
)
def test_losses_of_sources_are_those_of_their_rows(mesh, accumulate, logits_bytes, monkeypatch):
    batch, names = token_batch(8), ["code", "docs", "none"]
    source = np.array([0, 1, 1, 0, 1, 1, 1, 1], np.int32)
    placed = {"mesh": zoo.make_mesh(mesh), "accumulate": accumulate}
    make_model = make_transformer(num_layers=1)
    monkeypatch.setattr(losses, "LOGITS_BYTES", logits_bytes)
    state, step = state_and_step(make_model, losses.per_source(losses.next_token, names), **placed)
    given = jax.tree.map(jnp.asarray, batch)
    rows = jax.jit(lambda model, w: losses.next_token(model, {**given, "weights": w}, None)[:2])
    weights = [batch["weights"] * (source == i)[:, None] for i in range(2)]
    sums = np.array([rows(state.model, w) for w in weights])
    _, metrics = step(state, {**batch, "source": source})
    found = [float(metrics[f"{name}/loss"]) for name in names]
    np.testing.assert_allclose(found[:2], sums[:, 0] / sums[:, 1], rtol=1e-5)
    assert abs(found[0] - found[1]) > 1e-3
    assert np.isnan(found[2])
    np.testing.assert_allclose(metrics["loss"], sums[:, 0].sum() / sums[:, 1].sum(), rtol=1e-5)
    assert "source" not in metrics
    if logits_bytes != 1:
        return
    plain, step = state_and_step(make_model, losses.next_token, **placed)
    _, expected = step(plain, batch)
    assert expected.keys() == metrics.keys() - {f"{name}/loss" for name in names}
    for name, value in expected.items():  # the norm of the gradient too
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5)


def test_fsdp_shards_the_whole_state():
    mesh = zoo.make_mesh("fsdp=8")
    state = zoo.init_state(make_transformer(), optax.adamw(1e-2), key=KEY, mesh=mesh)
    stored = arrays((state.model, state.opt_state)).values()
    whole = sum(x.nbytes for x in stored)
    for device in jax.devices():
        shards = (s.data.nbytes for x in stored for s in x.addressable_shards if s.device == device)
        assert sum(shards) == pytest.approx(whole / 8, rel=0.05)


@sequences
def test_a_skeleton_matches_the_real_state(family: Family):
    state = train_five_steps(family, "all").state
    mesh, make_model = zoo.make_mesh(MESHES["all"][0]), family.make_model(0.1)
    abstract = Blueprint(make_model, optax.adamw(1e-2), key=KEY, mesh=mesh).skeleton
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    for want, got in zip(*map(jax.tree.leaves, (state, abstract)), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert got.sharding.is_equivalent_to(want.sharding, want.ndim)


# Invariance of the gradient


class Gradients:
    """The gradient of a family's model, which is the same model at every call."""

    def __init__(self, family: Family):
        self.family = family
        self._state = zoo.init_state(family.make_model(0.0), KEEP_GRADIENT, key=KEY)
        self.batch = family.make_batch(8, 12, 1)
        self.whole = self(self.batch)

    def __call__(self, batch: Batch, **options: Any) -> tuple[Any, dict]:
        """The gradient and the metrics."""
        options = {"precision": "fp32", "clip_norm": None, **options}
        step = zoo.make_train_step(self.family.loss, KEEP_GRADIENT, **options)
        state = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, self._state)
        if mesh := options.get("mesh"):
            state = eqx.filter_shard(state, state_shardings(state, mesh))
        state, metrics = step(state, batch)
        return state.opt_state.trace, metrics

    def assert_equal(self, gradient_and_metrics: tuple[Any, dict]) -> None:
        assert_trees_close(gradient_and_metrics, self.whole, rtol=1e-5)


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda f: f.name)
def gradients(request: pytest.FixtureRequest) -> Gradients:
    return Gradients(request.param)


def test_microbatches_do_not_change_the_gradient(gradients: Gradients):
    batch, mesh = gradients.batch, zoo.make_mesh("data=2,fsdp=2,tensor=2")
    assert batch["weights"][::2].sum() != batch["weights"][1::2].sum()
    gradients.assert_equal(gradients(batch, accumulate=2, mesh=mesh))


def test_rows_of_their_own_in_larger_buckets_keep_the_gradient(gradients: Gradients):
    batch, family = gradients.batch, gradients.family
    batch = separate(batch) if family.is_sequence else batch
    gradients.assert_equal(gradients(family.pad(batch)))


def separate(batch: Batch) -> Batch:
    """Each document of a packed batch in a row of its own."""
    rows, size = batch["tokens"].shape
    apart = {name: np.zeros((2 * rows, size), x.dtype) for name, x in batch.items()}
    for row in range(rows):
        for document in (1, 2):
            where = batch["segment_ids"][row] == document
            for name, x in batch.items():
                apart[name][2 * row + document - 1, : where.sum()] = x[row, where]
    apart["segment_ids"] = np.minimum(apart["segment_ids"], 1)
    return apart


# Precision


BIASED = {"bias": True, "residual.norm": "layer", "attention.qk_norm": "per_head", "mlp": "gelu"}


@pytest.mark.parametrize(
    "options",
    [{"tie_embeddings": True, "remat": "full"}, {**BIASED, "positions.kind": "learned"}],
    ids=["tied", "biased"],
)
def test_bf16_multiplies_and_fp32_reduces(options: dict):
    make_model = make_transformer(dropout=0.1, **options, **{"attention.kernel": "chunked"})
    optimizer = optax.adamw(1e-3)
    step = zoo.make_train_step(losses.next_token, optimizer, precision="bf16", accumulate=2)
    state = Blueprint(make_model, optimizer, key=KEY).skeleton
    jaxpr = eqx.filter_make_jaxpr(step._function)(token_batch(8, 16), state)[0]
    found: dict[str, list] = {}
    for equation in equations(jaxpr):
        dtypes = [x.aval.dtype for x in equation.invars if hasattr(x.aval, "dtype")]
        if all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes[:1]):
            found.setdefault(equation.primitive.name, []).append(dtypes)
    # Six products with a weight and the head's, each forward and twice backward, and
    # attention's, two forward and five backward.
    assert len(found["dot_general"]) >= 3 * (6 + 1) + 7
    assert all(set(dtypes) == {jnp.dtype("bfloat16")} for dtypes in found["dot_general"])
    # The softmax, the norms, the loss, and the sums over positions that biases and embeddings get.
    for name in ("reduce_sum", "reduce_max", "exp", "log", "rsqrt", "scatter-add"):
        assert {dtypes[0] for dtypes in found[name]} == {jnp.dtype("float32")}, name


@pytest.mark.parametrize(
    ("family", "precision", "mesh"),
    [(FAMILIES[0], "bf16", "all"), (FAMILIES[0], "fp16", ""), (FAMILIES[1], "bf16", "")],
    ids=lambda x: getattr(x, "name", x),
)
def test_training_in_half_precision_follows_fp32(family: Family, precision: Any, mesh: str):
    exact = train_five_steps(family, "")
    state, step = state_and_step(
        family.make_model(0.1),
        family.loss,
        optimizer=optax.adamw(1e-2),
        mesh=zoo.make_mesh(MESHES[mesh][0]),
        precision=precision,
    )
    values = []
    for seed in range(5):
        state, metrics = step(state, family.make_batch(8, 16, seed))
        values.append(float(metrics["loss"]))
    assert int(state.skipped) == 0
    np.testing.assert_allclose(values, exact.losses, rtol=0.01)
    assert values != exact.losses
    stored = arrays((state.model, state.opt_state)).values()
    assert {x.dtype for x in stored} <= {jnp.dtype("float32"), jnp.dtype("int32")}


@every_family
def test_fp32_products_use_highest_precision(family: Family):
    step = zoo.make_train_step(family.loss, KEEP_GRADIENT, precision="fp32")
    state = Blueprint(family.make_model(0.1), KEEP_GRADIENT, key=KEY).skeleton
    jaxpr = eqx.filter_make_jaxpr(step._function)(family.make_batch(8, 16, 0), state)[0]
    products = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    assert products
    for product in products:  # the gradient's too
        assert "HIGHEST" in str(product.params["precision"]), product


def test_bf16_keeps_master_weights_in_fp32():
    state, step = state_and_step(Line, line_loss, optimizer=optax.adamw(1e-4), precision="bf16")
    before = copy(state.model)
    for _ in range(3):
        state, metrics = step(state, line_batch())
    floats = jax.tree.leaves(eqx.filter((state.model, state.opt_state), eqx.is_inexact_array))
    assert {x.dtype for x in floats} == {jnp.dtype("float32")}
    assert {x.dtype for x in metrics.values()} == {jnp.dtype("float32")}
    assert float(metrics["bytes"]) == 2  # a number of the weight that the loss saw
    # Less than bf16 could tell from the weight that there was.
    change = np.abs(np.asarray(state.model.weight) - before.weight)
    assert 0 < change.max() < 2**-9 * np.abs(before.weight).min()


def test_fp16_overflow_skips_and_halves_scale(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LossScale, "PERIOD", 3)
    state, step = state_and_step(Line, line_loss, optimizer=optax.adamw(1e-3), precision="fp16")
    scales, skips = [], []
    for number in range(6):
        factor = 1e6 if number == 1 else 1.0
        before = copy((state.model, state.opt_state))
        state, metrics = step(state, line_batch(factor))
        assert bool(eqx.tree_equal(before, copy((state.model, state.opt_state)))) == (number == 1)
        scales.append(float(metrics["loss_scale"]))
        skips.append(int(metrics["skipped"]))
    assert skips == [0, 1, 1, 1, 1, 1]
    assert scales == [2.0**15, 2.0**15, 2.0**14, 2.0**14, 2.0**14, 2.0**15]
    assert int(state.step) == 6


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_non_finite_gradients_change_nothing(precision: Any):
    state, step = state_and_step(Line, line_loss, precision=precision)
    before = copy(state.model.weight)
    state, metrics = step(state, jax.tree.map(jnp.asarray, line_batch(np.nan)))
    assert np.array_equal(state.model.weight, before)
    assert int(metrics["skipped"]) == int(state.skipped) == 1
    assert np.isnan(float(metrics["loss"]))
    state, metrics = step(state, line_batch())
    assert int(metrics["skipped"]) == 1
    assert np.isfinite(float(metrics["loss"]))


def told(*updates: float) -> optax.GradientTransformation:
    """Adds `updates[k]` to one number of each parameter in step k; its state is k."""

    def update(grads: Any, step: Array, params: Any = None) -> tuple[Any, Array]:
        new = jnp.asarray(updates)[step]
        return jax.tree.map(lambda g: jnp.zeros_like(g).at[-1, -1].set(new), grads), step + 1

    return optax.GradientTransformation(lambda _: jnp.int32(0), update)


@pytest.mark.parametrize(("bad", "mesh"), [(np.nan, ""), (np.inf, "fsdp=4")])
def test_non_finite_updates_change_nothing(bad: float, mesh: str):
    optimizer = told(1.0, bad)
    state, step = state_and_step(Line, line_loss, optimizer=optimizer, mesh=zoo.make_mesh(mesh))
    state, metrics = step(state, line_batch())
    weight = np.array(state.model.weight)
    assert float(metrics["param_norm"]) == pytest.approx(np.linalg.norm(weight), rel=1e-5)
    assert int(state.opt_state) == 1
    state, metrics = step(state, line_batch())
    assert np.array_equal(state.model.weight, weight)
    assert int(state.opt_state) == 1
    assert int(metrics["skipped"]) == int(state.skipped) == 1
    assert not np.isfinite(float(metrics["param_norm"]))
    assert np.isfinite([float(metrics["loss"]), float(metrics["grad_norm"])]).all()


def test_non_finite_updates_keep_loss_scale():
    state, step = state_and_step(Line, line_loss, optimizer=told(np.nan), precision="fp16")
    state, metrics = step(state, line_batch())
    assert int(metrics["skipped"]) == 1
    assert float(state.loss_scale.scale) == float(metrics["loss_scale"])


# The step's own maths, on the smallest model


class Line(eqx.Module):
    """A linear map, with dropout on its input when there is a key."""

    weight: Float[Array, "embed mlp"]

    def __init__(self, key: Array):
        self.weight = 1.5 + 0.5 * jax.random.uniform(key, (8, 8))


@losses.keeps_dtype("factor")
def line_loss(model: Line, batch: Any, key: Array | None) -> tuple[Array, Array, dict]:
    x = batch["x"].astype(model.weight.dtype)
    noise = jnp.float32(0) if key is None else jax.random.uniform(key)
    losses = jnp.square((x @ model.weight).astype(jnp.float32)).sum(-1) * batch["factor"]
    weights = batch["weights"]
    metrics = {
        "noise": noise * weights.sum(),
        "twice": 2 * (losses * weights).sum(),
        "bytes": model.weight.dtype.itemsize * weights.sum(),
    }
    return (losses * weights).sum(), weights.sum(), metrics


def line_batch(factor: float = 1.0, rows: int = 8) -> Batch:
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(rows, 8)).astype(np.float32) / 8,
        "weights": np.arange(rows, dtype=np.float32),
        "factor": np.full(rows, factor, np.float32),
    }


@pytest.mark.parametrize(("precision", "rtol"), [("fp32", 1e-5), ("bf16", 0.03), ("fp16", 5e-3)])
def test_gradient_is_clipped_to_global_norm(precision: Any, rtol: float):
    state, step = state_and_step(Line, line_loss, clip_norm=0.5, precision=precision)
    weight, batch = np.array(state.model.weight, np.float64), line_batch()
    x, shares = batch["x"].astype(np.float64), batch["weights"] / batch["weights"].sum()
    expected = 2 * x.T @ (shares[:, None] * (x @ weight))
    norm = np.linalg.norm(expected)
    assert norm > 0.5
    state, metrics = step(state, batch)
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=rtol)
    clipped = expected * 0.5 / norm
    np.testing.assert_allclose(state.opt_state.trace.weight, clipped, atol=rtol * clipped.max())
    assert float(metrics["loss"]) == pytest.approx(shares @ np.square(x @ weight).sum(1), rel=rtol)
    assert float(metrics["tokens"]) == batch["weights"].sum()
    assert float(metrics["twice"]) == pytest.approx(2 * float(metrics["loss"]))


def test_steps_and_microbatches_have_separate_keys():
    noise = {}
    for accumulate in (1, 2):
        state, step = state_and_step(Line, line_loss, accumulate=accumulate)
        root = jax.random.clone(state.key)
        for number in range(3):
            state, metrics = step(state, line_batch())
            noise[accumulate, number] = float(metrics["noise"])
            keys = [jax.random.fold_in(jax.random.fold_in(root, number), m) for m in (0, 1)]
            parts = [float(jax.random.uniform(key)) for key in keys[:accumulate]]
            # Microbatch m holds the rows m, m + accumulate, …
            shares = [line_batch()["weights"][m::accumulate].sum() / 28 for m in range(accumulate)]
            assert noise[accumulate, number] == pytest.approx(np.dot(parts, shares), rel=1e-5)
    assert len(set(noise.values())) == 6


def test_weightless_batches_give_no_gradient():
    state, step = state_and_step(Line, line_loss, accumulate=2)
    batch = line_batch() | {"weights": np.zeros(8, np.float32)}
    state, metrics = step(state, batch)
    assert float(metrics["loss"]) == float(metrics["grad_norm"]) == float(metrics["skipped"]) == 0


def test_evaluation_sums_without_dropout():
    mesh = zoo.make_mesh("data=4")
    state = zoo.init_state(Line, optax.sgd(0.1), key=KEY, mesh=mesh)
    step = zoo.make_eval_step(line_loss, mesh=mesh, precision="fp32")
    sums = [step(state.model, line_batch())[1] for _ in range(2)]
    losses = np.square(line_batch()["x"] @ np.asarray(state.model.weight)).sum(1)
    assert float(sums[1]["loss"]) == pytest.approx(losses @ line_batch()["weights"], rel=1e-5)
    assert float(sums[1]["tokens"]) == 28
    assert float(sums[1]["noise"]) == 0
    assert not state.model.weight.is_deleted()


def test_numbers_out_of_range_are_refused():
    for name, value in (("accumulate", 0), ("clip_norm", 0.0), ("clip_norm", np.nan)):
        with pytest.raises(ValueError, match=f"{name}={value}"):
            zoo.make_train_step(line_loss, KEEP_GRADIENT, **{name: value})


def test_batches_that_do_not_fit_are_refused_before_compiling():
    mesh = zoo.make_mesh("data=2,fsdp=2")
    state, step = state_and_step(Line, line_loss, mesh=mesh, accumulate=2)
    for call in (step, step.compile):
        for batch, message in (
            ({"factor": np.float32(1)}, r"batch\['factor'\] is .*1.0.*, and has no rows"),
            ({"factor": "one"}, r"batch\['factor'\] is 'one', and has no rows"),
            ({"factor": np.zeros(0, np.float32)}, r"batch\['factor'\] has 0 rows"),
            (line_batch(rows=12), r"12 rows.* multiple of 4 .*accumulate=2"),
        ):
            given = functools.partial(call, state, line_batch() | batch)
            assert_refused(given, ValueError, message)


# What is no loss, no optimizer and no model


def first_steps(loss: Any) -> dict[str, Any]:
    """The first call of a train step and of an evaluation step with a loss."""
    state = zoo.init_state(Line, KEEP_GRADIENT, key=KEY)
    train_step = zoo.make_train_step(loss, KEEP_GRADIENT, precision="fp32", accumulate=2)
    eval_step = zoo.make_eval_step(loss, precision="fp32")
    return {
        "train": lambda: train_step(state, line_batch()),
        "eval": lambda: eval_step(state.model, line_batch()),
    }


def assert_refused(call: Any, error: type[Exception], message: str) -> None:
    with CompileCounter() as counter, pytest.raises(error, match=message):
        call()
    assert counter.compiles == 0


def changed(change: Any) -> Any:
    """`line_loss` with another result."""

    @losses.keeps_dtype("factor")
    def my_loss(model: Any, batch: Any, key: Any) -> Any:
        return change(*line_loss(model, batch, key))

    return my_loss


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t, w, m: t, TypeError, r"returned float32\[\], and not \(total, weight, metrics\)"),
        (lambda t, w, m: (t, w), TypeError, r"returned \(float32\[\], float32\[\]\), and"),
        (lambda t, w, m: (t, w, None), TypeError, r"float32\[\], NoneType\), and not"),
        (lambda t, w, m: None, TypeError, "returned NoneType, and not"),
        (lambda t, w, m: (t[None], w, m), ValueError, r"a total float32\[1\]: sum it"),
        (lambda t, w, m: (t, w[None], m), ValueError, r"a weight float32\[1\]: sum it"),
    ],
)
def test_malformed_loss_results_are_refused(change: Any, error: Any, message: str):
    for step in first_steps(changed(change)).values():
        assert_refused(step, error, f"loss_fn my_loss .*{message}")


def test_reserved_metric_names_are_refused():
    loss = lambda name: changed(lambda t, w, m: (t, w, {name: w, "mine": w}))
    names = [(name, "train") for name in ("loss", "mfu", "tokens_per_second")]
    for name, step in [*names, ("loss", "eval")]:
        message = f"loss_fn my_loss has a metric '{name}', .* rename it"
        assert_refused(first_steps(loss(name))[step], ValueError, message)
    first_steps(loss("mfu"))["eval"]()
    state, step = state_and_step(Line, changed(lambda t, w, m: (t, w, {})), precision="fp16")
    assert train.STEP_NAMES >= step(state, line_batch())[1].keys() >= train.EVAL_NAMES


def test_a_loss_may_return_plain_numbers():
    loss = changed(lambda t, w, m: [t, 28.0, {"rows": 8}])
    for step in ("train", "eval"):
        _, metrics = first_steps(loss)[step]()
        assert {x.dtype for x in metrics.values()} == {jnp.dtype("float32")}
        assert float(metrics["tokens"]) in (28.0, 56.0)  # two microbatches, or the whole


@pytest.mark.usefixtures("unchecked_types")
def test_non_optimizers_are_refused():
    for make in (
        lambda: zoo.make_train_step(line_loss, optax.adam),
        lambda: zoo.init_state(Line, optax.adam, key=KEY),
    ):
        with pytest.raises(TypeError, match=r"optimizer=<function adam.*optax\.adam"):
            make()


@pytest.mark.usefixtures("unchecked_types")
def test_init_state_refuses_models():
    for model in (Line(KEY), "lm-python"):
        with pytest.raises(
            TypeError, match=f"make_model is a {type(model).__name__}: .*pretrained"
        ):
            zoo.init_state(model, KEEP_GRADIENT, key=KEY)
    with pytest.raises(ValueError, match="NoneType, is trainable"):
        zoo.init_state(lambda key: None, KEEP_GRADIENT, key=KEY)


def test_eval_step_refuses_a_state():
    state = zoo.init_state(Line, KEEP_GRADIENT, key=KEY)
    step = zoo.make_eval_step(line_loss, precision="fp32")
    assert_refused(lambda: step(state, line_batch()), TypeError, r"step\(state.model, …\)")


# Compiles


def test_each_bucket_compiles_once_and_no_other_does():
    """What changes after the announcement is an error, before any compile or donation."""
    make_model, mesh = make_transformer(num_layers=1, dropout=0.1), zoo.make_mesh("fsdp=2")
    state, step = state_and_step(make_model, losses.next_token, optax.adamw(1e-3), mesh=mesh)
    batches = [token_batch(4 * k, 8 * k) for k in (1, 2)]
    shapes = [jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), b) for b in batches]
    with CompileCounter() as announced:
        step.compile(state, *shapes)
        step.compile(state, *shapes)
    with CompileCounter() as running:
        for number in range(6):
            state, metrics = step(state, batches[number % 2])
        jax.block_until_ready(metrics)
    assert [announced.compiles, running.compiles] == [2, 0]

    def refused(state: Any, batch: Any) -> str:
        with CompileCounter() as counter, pytest.raises(zoo.RecompilationError) as error:
            step(state, batch)
        assert counter.compiles == 0
        assert not any(x.is_deleted() for x in arrays(state).values())
        return str(error.value)

    longer = {**batches[0], "weights": np.ones((8, 8), np.float32)}
    text = refused(state, longer)
    assert "batch['weights']: was float32[4, 8]" in text
    assert "is float32[8, 8]" in text
    assert text.count("batch[") == 1
    assert "step.compile" in text
    assert "2 bucket(s)" in text
    text = refused(state, batches[0] | {"more": np.zeros(4, np.float32)})
    assert "batch['more']: was absent, is float32[4]" in text
    assert text.count("batch[") == 1

    path = next(p for p, x in arrays(state).items() if "fsdp" in str(x.sharding))
    gather = lambda x: jax.device_put(x, sharding.replicated(mesh))
    gathered = jtu.tree_map_with_path(lambda p, x: gather(x) if keystr(p) == path else x, state)
    text = refused(gathered, batches[0])
    assert f"state.{path}: was" in text
    assert "fsdp" in text.partition("was")[2].partition(", is")[0]
    assert "fsdp" not in text.partition(", is")[2].partition("\n")[0]


# What a step takes by default, and how it leaves an update out


def test_master_weights_are_always_fp32():
    low = lambda key: cast(Line(key), jnp.bfloat16)
    state = Blueprint(low, optax.adam(1e-3), key=KEY).skeleton
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert len(floats) == 4  # the weight, its two moments, and the loss scale
    assert {x.dtype for x in floats} == {jnp.dtype("float32")}


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_skipping_branches_only_on_cpu(platform: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(train, "platform", lambda: platform)
    state, step = state_and_step(Line, line_loss, optimizer=told(1.0, np.nan))
    jaxpr = eqx.filter_make_jaxpr(step._function)(line_batch(), state)[0]
    names = {equation.primitive.name for equation in equations(jaxpr)}
    assert ("cond" in names) == (platform == "cpu")
    weight = np.array(state.model.weight)
    weight[-1, -1] += 1
    for _ in range(2):
        state, _ = step(state, line_batch())
        np.testing.assert_allclose(state.model.weight, weight, rtol=1e-6)
        assert int(state.opt_state) == 1


# What is frozen


def frozen_state_and_step(pretrained: Any, mesh: Any = None, **options: Any) -> Any:
    options = {"trainable": only_norms, "mesh": mesh, "pretrained": pretrained, **options}
    make = lambda key, model: model
    return state_and_step(make, losses.next_token, optax.adam(0.1), clip_norm=1.0, **options)


def test_frozen_parameters_are_on_the_device_once_in_their_own_dtype():
    mesh = zoo.make_mesh("fsdp=2,tensor=4")
    skeleton = eqx.filter_eval_shape(low)
    gc.collect()  # of what other tests have left
    others = live_bytes()
    owned = [jax.device_put(low(), sharding.shardings(skeleton, mesh))]
    given = {name: np.array(array) for name, array in parameters(owned[0]).items()}
    buffers = {
        name: [x.data.unsafe_buffer_pointer() for x in array.addressable_shards]
        for name, array in parameters(owned[0]).items()
    }
    state, step = frozen_state_and_step(Pretrained(skeleton, owned.pop), mesh)
    of_state = sum(x.nbytes for x in jax.tree.leaves(state) if eqx.is_array(x))
    gc.collect()
    assert live_bytes() - others == of_state
    state, _ = step(state, token_batch(8, 16, 0))
    state, _ = step(state, token_batch(8, 16, 1))
    for name, array in parameters(state.model).items():
        if name.endswith("scale"):
            assert array.dtype == jnp.float32
            assert np.abs(np.asarray(array) - given[name].astype(np.float32)).max() > 0
        else:
            assert array.dtype == jnp.bfloat16
            np.testing.assert_array_equal(array, given[name])
            found = [x.data.unsafe_buffer_pointer() for x in array.addressable_shards]
            assert found == buffers[name], name  # taken over, and never copied


def live_bytes() -> int:
    return sum(x.nbytes for x in jax.live_arrays())


def test_a_pretrained_model_stays_its_owners():
    base = low()
    before = {name: np.array(array) for name, array in parameters(base).items()}
    state, step = frozen_state_and_step(base)
    step(state, token_batch(8, 16, 0))
    for name, array in parameters(base).items():
        assert not array.is_deleted()
        np.testing.assert_array_equal(array, before[name])


def test_a_pretrained_model_on_other_devices_is_named():
    loaded = jax.device_put(low(), jax.devices()[0])
    frozen_state_and_step(loaded)  # without a mesh it may lie there
    message = r"pretrained\.\S+ is on 1 device\(s\), and the mesh .*'fsdp': 2.* on 2: .*run\.mesh"
    with pytest.raises(ValueError, match=message):
        frozen_state_and_step(loaded, zoo.make_mesh("fsdp=2"))


def test_frozen_parameters_are_computed_with_in_the_precision():
    found = []
    for base in (low(), cast(low(), jnp.float32)):
        state, step = frozen_state_and_step(base)
        for seed in range(3):
            state, metrics = step(state, token_batch(8, 16, seed))
        found.append((float(metrics["loss"]), arrays(only_trained(state.model))))
    (loss, model), (loss_in_fp32, model_in_fp32) = found
    assert loss == loss_in_fp32
    assert_trees_close(model, model_in_fp32, 1e-6)


def only_trained(model: Any) -> Any:
    return eqx.filter(model, only_norms(model))


def test_loaded_arrays_have_to_be_those_of_the_skeleton():
    skeleton = eqx.filter_eval_shape(low)
    with pytest.raises(ValueError, match=r"skeleton: .* is float32\[.*, .* bfloat16"):
        frozen_state_and_step(Pretrained(skeleton, lambda: cast(low(), jnp.float32)))


def test_frozen_parts_complete_a_state():
    skeleton = eqx.filter_eval_shape(low)
    options = {"key": KEY, "trainable": only_norms, "pretrained": Pretrained(skeleton, low)}
    make = (lambda key, model: model, optax.adam(0.1))
    state = zoo.init_state(*make, **options)
    frozen = Blueprint(*make, **options).frozen()
    rest = without_frozen(state, only_norms)
    assert jax.tree.leaves(frozen)
    assert not parameters(frozen.model).keys() & parameters(rest.model).keys()
    joined = eqx.combine(rest, frozen)
    assert jax.tree.structure(joined) == jax.tree.structure(state)
    assert_trees_close(arrays(joined.model), arrays(state.model), 0)
    # Nothing is loaded where nothing is frozen.
    options |= {"trainable": None, "pretrained": Pretrained(skeleton, lambda: 1 / 0)}
    assert not jax.tree.leaves(Blueprint(*make, **options).frozen())


WHOLE = ["fsdp=4,tensor=2", "fsdp=2,expert=4", "data=2,context=2,tensor=2"]


@pytest.mark.usefixtures("no_cache")  # a program that is there already is not spoken of again
@pytest.mark.parametrize(
    "mesh",
    ["data=2,fsdp=2,tensor=2", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in WHOLE)],
)
def test_no_activation_is_gathered_whole_for_want_of_a_plan(mesh, capfd):
    """XLA says so of what it can only copy to all devices to place it anew."""
    config = transformer.Config(256, d_model=64, num_layers=1, num_heads=2)
    optimizer = optax.sgd(0.1)
    mesh = zoo.make_mesh(mesh)
    state = zoo.init_state(
        lambda key: transformer.Transformer(config, key=key), optimizer, key=KEY, mesh=mesh
    )
    step = zoo.make_train_step(losses.next_token, optimizer, mesh=mesh, precision="bf16")
    tokens = jnp.zeros((8, 64), jnp.int32)
    step(state, {"tokens": tokens, "targets": tokens, "weights": jnp.ones((8, 64))})
    assert "rematerialization" not in capfd.readouterr().err
