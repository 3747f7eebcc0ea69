"""zoo.quantization.int8_training: int8 products of blocks, beside their formula in float64."""

import contextlib
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    VOCAB,
    drawn_rnn,
    drawn_transformer,
    equations,
    one_step,
    token_batch,
    value_and_gradients,
)
from jax.sharding import PartitionSpec as P

import zoo
from zoo import ensemble, losses, sharding
from zoo.nn import parameters, precision
from zoo.nn.precision import in_precision
from zoo.nn.products import forward_mode, matmul
from zoo.quantization import int8_training
from zoo.quantization.int8_training import INT8, Rounded, rounded

# Shapes of an activation and a weight, and the number of axes that are contracted.
PRODUCTS = [((2, 5, 8), (8, 6), 1), ((2, 5, 8), (8, 3, 4), 1), ((2, 5, 3, 4), (3, 4, 8), 2)]


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def rounded_matrix(w: jax.Array, contract: int) -> Rounded:
    codes, scales = rounded(jax.lax.stop_gradient(w), tuple(range(contract)))
    return Rounded(w, codes, scales.reshape(w.shape[contract:]), contract, ())


def multiply(x: jax.Array, w: jax.Array, contract: int) -> jax.Array:
    return matmul(x, rounded_matrix(w, contract), contract=contract, dtype=jnp.float32)


def numpy_rounded(x: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    scale = np.abs(x).max(axis, keepdims=True) / 127
    return np.round(x / scale), scale


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of int8 themselves, as everywhere but on a CPU."""
    monkeypatch.setattr(int8_training, "platform", lambda: "tpu")


@pytest.mark.parametrize(("x_shape", "w_shape", "contract"), PRODUCTS)
def test_product_and_gradients_are_those_of_the_formula(x_shape, w_shape, contract):
    x, w = normal(0, x_shape), normal(1, w_shape)
    g = normal(2, x_shape[:-contract] + w_shape[contract:])
    got = value_and_gradients(lambda x, w: multiply(x, w, contract), g, x, w)
    inner = int(np.prod(w_shape[:contract]))
    shapes = (-1, inner), (inner, -1), (-1, int(np.prod(w_shape[contract:])))
    x_, w_, g_ = (
        np.asarray(a, np.float64).reshape(s) for a, s in zip((x, w, g), shapes, strict=True)
    )
    (x_codes, x_scales), (codes, scales) = numpy_rounded(x_, 1), numpy_rounded(w_, 0)
    g_codes, g_scales = numpy_rounded(g_ * scales, 1)
    wanted = (
        x_codes @ codes * x_scales * scales,
        g_codes @ codes.T * g_scales,  # the codes again, and a gradient with a scale per row
        x_.T @ g_,  # of the values before rounding
    )
    assert np.abs(wanted[0] - x_ @ w_).max() > 1e-3  # rounding does show
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(a).reshape(b.shape), b, rtol=2e-6, atol=2e-6)


def test_a_rounded_matrix_crosses_a_trace():
    x, w = normal(0, (2, 16)), normal(1, (2, 16, 8))
    renamed = (("*matrix", "embed mlp"), ("*outputs", "mlp"))
    stacked = [dataclasses.replace(rounded_matrix(each, 1), axes=renamed) for each in w]
    both = jax.tree.map(lambda *each: jnp.stack(each), *stacked)
    _, found = jax.lax.scan(lambda carry, each: (carry, each.times(carry)), x, both)
    for each, alone in zip(found, w, strict=True):
        np.testing.assert_allclose(each, multiply(x, alone, 1), rtol=1e-6)


@pytest.mark.usefixtures("elsewhere")
def test_products_of_integers_are_those_of_a_cpu(monkeypatch: pytest.MonkeyPatch):
    x, w, g = (
        normal(i, s, jnp.bfloat16) for i, s in enumerate([(4, 64, 900), (900, 40), (4, 64, 40)])
    )
    run = lambda x, w: multiply(x, w, 1)
    dtypes = [
        {v.aval.dtype.name for v in e.invars}
        for e in equations(jax.make_jaxpr(run)(x, w))
        if e.primitive.name == "dot_general"
    ]
    assert dtypes == [{"int8"}]
    integers = value_and_gradients(run, g.astype(jnp.float32), x, w)
    monkeypatch.undo()
    for a, b in zip(
        integers, value_and_gradients(lambda *y: run(*y), g.astype(jnp.float32), x, w), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_zeros_stay_zero_and_what_is_not_finite_shows():
    x, w = np.ones((4, 8), np.float32), np.array(normal(0, (8, 3)))
    x[1], x[2, 3], x[3, 5], w[:, 1] = 0, np.nan, -np.inf, 0
    given = map(jnp.asarray, (x[:, :3], x, w))
    y, dx, _ = map(np.asarray, value_and_gradients(lambda x, w: multiply(x, w, 1), *given))
    assert not np.isfinite(y[2:, (0, 2)]).any()  # a zero column's codes are zeros
    assert np.isfinite(y[:2]).all()
    assert np.isfinite(dx[:2]).all()
    assert not y[1].any() | y[:2, 1].any() | dx[1].any()


SPECS = {  # of an activation [B, T, K] and a weight [K, N] on four devices "a" and two "b"
    "rows and outputs": (P("a"), P(None, "b")),
    "what is summed": (P("b", None, "a"), P("a")),
    "stored in parts": (P(("a", "b")), P(("a", "b"))),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_mesh_gives_what_one_device_does(name: str):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x, w, g = normal(0, (8, 4, 64)), normal(1, (64, 16)), normal(2, (8, 4, 16))
    run = lambda x, w: multiply(x, w, 1)
    wanted = value_and_gradients(run, g, x, w)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(a, jax.NamedSharding(mesh, s))
            for a, s in zip((x, w), SPECS[name], strict=True)
        ]
        y, dx, dw = value_and_gradients(lambda *y: run(*y), g, *placed)
    # Sums of integers have no order, and a largest value none either.
    np.testing.assert_array_equal(y, wanted[0])
    np.testing.assert_array_equal(dx, wanted[1])
    np.testing.assert_allclose(dw, wanted[2], rtol=1e-4, atol=1e-5)


@contextlib.contextmanager
def rounding_fp32(model: Any) -> Iterator[Any]:
    """The model as it computes in fp32, but for products of codes: without bf16's noise."""
    with in_precision(model, "fp32") as given, parameters._operands(INT8.operands):
        yield given


def gradients(model: Any, name: Any = "int8", run: Any = jax.jit) -> Any:
    """The loss and the gradients of a model in a precision, or in fp32 with codes."""
    params, static = eqx.partition(model, eqx.is_inexact_array)
    batch = jax.tree.map(jnp.asarray, token_batch())

    def mean_loss(params: Any) -> Any:
        model = eqx.combine(params, static)
        given = rounding_fp32(model) if name == "codes" else in_precision(model, name)
        with given as model:
            total, weight, _ = losses.next_token(model, batch, None)
        return total / weight

    return run(jax.value_and_grad(mean_loss))(params)


def distance(got: Any, want: Any) -> float:
    """The norm of the difference of two trees, over that of the second."""
    got, want = (jnp.concatenate([*map(jnp.ravel, jax.tree.leaves(x))]) for x in (got, want))
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def products(model: Any, name: Any) -> list[tuple[str, set[int]]]:
    """The dtype and the sizes of the operands of each product of a loss and its gradients."""
    dots = equations(gradients(model, name, run=jax.make_jaxpr))
    dots = [e for e in dots if e.primitive.name in ("dot_general", "ragged_dot_general")]
    return [
        (e.invars[0].aval.dtype.name, {n for v in e.invars[:2] for n in v.aval.shape}) for e in dots
    ]


@pytest.mark.usefixtures("elsewhere")
def test_the_matrices_of_blocks_alone_are_rounded():
    model = drawn_transformer(num_heads=8, d_ff=96, d_model=40, **{"attention.head_dim": 4})
    found = products(model, "int8")
    # Of a scanned layer: q, k, v, o, gate, up, down, and the gradient of each one's input.
    assert [dtype for dtype, _ in found].count("int8") == 2 * 7
    assert all(VOCAB not in sizes for dtype, sizes in found if dtype == "int8")
    assert any(VOCAB in sizes for dtype, sizes in found if dtype == "bfloat16")
    assert {dtype for dtype, _ in products(model, "bf16")} == {"bfloat16"}
    mixture = drawn_transformer(**{"experts.num_experts": 5, "experts.per_token": 2})
    found = products(mixture, "int8")
    assert [dtype for dtype, _ in found].count("int8") == 2 * 4
    assert all(5 not in sizes for dtype, sizes in found if dtype == "int8")


@pytest.mark.usefixtures("elsewhere")
def test_policies_keep_products_in_the_compute_dtype(capsys: pytest.CaptureFixture):
    kept = {}
    for policy in ("dots", "dots_no_batch", "full"):
        model = drawn_transformer(remat=policy, num_layers=1, scan_layers=False, d_ff=96)
        params, static = eqx.partition(model, eqx.is_inexact_array)

        def loss(params: Any, static: Any = static) -> Any:
            with in_precision(eqx.combine(params, static), "int8") as model:
                return losses.next_token(model, jax.tree.map(jnp.asarray, token_batch()), None)[0]

        jax.ad_checkpoint.print_saved_residuals(loss, params)
        kept[policy] = capsys.readouterr().out
    assert all("i32[128," not in text and "i8[" not in text for text in kept.values())
    assert all(kept[policy].count("bf16[8,16,96]") == 2 for policy in ("dots", "dots_no_batch"))
    assert "bf16[8,16,96]" not in kept["full"]


@pytest.mark.slow
def test_remat_changes_no_number():
    loss, wanted = gradients(drawn_transformer(), "codes")
    assert distance(gradients(drawn_transformer(), "fp32")[1], wanted) > 3e-3
    got = gradients(drawn_transformer(remat="full"), "codes")
    assert float(got[0]) == pytest.approx(float(loss), rel=1e-5)
    assert distance(got[1], wanted) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp=2,tensor=4", "data=2,context=2,tensor=2"])
def test_gradients_on_a_mesh_are_those_of_one_device(name: str):
    model = drawn_transformer(num_layers=1)
    loss, wanted = gradients(model, "codes")
    mesh, (params, static) = sharding.make_mesh(name), eqx.partition(model, eqx.is_inexact_array)
    with sharding.use(mesh):
        placed = jax.device_put(params, sharding.shardings(params, mesh))
        got = gradients(eqx.combine(placed, static), "codes")
    assert float(got[0]) == pytest.approx(float(loss), rel=1e-5)
    assert distance(jax.device_get(got[1]), wanted) < 1e-3


@pytest.mark.slow
def test_a_step_takes_meshes_and_microbatches():
    make, loss = lambda key: drawn_transformer(), losses.next_token
    mesh = sharding.make_mesh("fsdp=4,tensor=2")
    found, update = one_step(make, loss, token_batch(), precision="int8", mesh=mesh, accumulate=2)
    expected, wanted = one_step(make, loss, token_batch(), precision="int8")
    assert found["loss"] == pytest.approx(expected["loss"], abs=0.01)
    assert distance(update, wanted) < 0.05  # of bf16 activations


@pytest.mark.slow
def test_matrices_are_gathered_as_codes():
    mesh, optimizer = sharding.make_mesh("fsdp=8"), optax.sgd(1.0)
    make = lambda key: drawn_transformer(d_ff=88)
    state = zoo.init_state(make, optimizer, key=jax.random.key(0), mesh=mesh)
    step = zoo.make_train_step(losses.next_token, optimizer, mesh=mesh, precision="int8")
    text = step.trace(state, token_batch()).lower().compile().as_text()
    gathers = [line for line in text.splitlines() if " all-gather(" in line and "88]" in line]
    assert {line.split("[")[0].split()[-1] for line in gathers} == {"s8"}


@pytest.mark.slow
def test_an_evaluation_computes_in_int8_too():
    model, batch = drawn_transformer(), token_batch()
    found = {}
    for name in ("int8", "bf16"):
        _, sums = zoo.make_eval_step(losses.next_token, precision=name)(model, batch)
        found[name] = float(sums["loss"] / sums["tokens"])
    assert found["int8"] == pytest.approx(float(gradients(model)[0]), abs=1e-5)
    assert 1e-4 < abs(found["int8"] - found["bf16"]) < 0.02


@pytest.mark.slow
def test_adapters_on_a_rounded_matrix_are_trained():
    plain = drawn_transformer(num_layers=1)
    model = zoo.lora.adapt(plain, zoo.lora.Config(), key=jax.random.key(0))
    model = jax.tree.map(lambda x: x + 0.1 if eqx.is_inexact_array(x) else x, model)
    loss, grads = gradients(model)
    wanted_loss, wanted = gradients(model, "bf16")
    assert 1e-5 < abs(loss - wanted_loss) < 0.05
    for path in ("down", "up"):
        a, b = (getattr(x.blocks.attention.wq, path) for x in (grads, wanted))
        assert jnp.linalg.norm(a - b) < 0.1 * jnp.linalg.norm(b)


@pytest.mark.slow
def test_members_are_rounded_each_by_itself():
    first, second = (jax.tree.map(lambda x, n=n: n * x, drawn_transformer()) for n in (1, 2))
    both = ensemble.Ensemble(lambda key: first, 2, key=jax.random.key(0))
    stacked = jax.tree.map(lambda *x: jnp.stack(x), first, second)
    both = eqx.tree_at(lambda x: x.members, both, stacked)
    batch = jax.tree.map(jnp.asarray, token_batch())

    @eqx.filter_jit
    def total(model: Any, loss: Any) -> Any:
        with rounding_fp32(model) as given:
            return loss(given, batch, None)[0]

    wanted = sum(total(model, losses.next_token) for model in (first, second)) / 2
    got = total(both, ensemble.member_loss(losses.next_token))
    assert float(got) == pytest.approx(float(wanted), rel=1e-5)


def test_forward_mode_differentiates_the_plain_product():
    x, w = normal(0, (2, 3, 8)), normal(1, (8, 4))
    dx, dw = normal(2, x.shape), normal(3, w.shape)
    with forward_mode():
        run = lambda *given: jax.jvp(lambda x, w: multiply(x, w, 1), given[:2], given[2:])
        y, dy = jax.jit(run)(x, w, dx, dw)
    np.testing.assert_allclose(y, multiply(x, w, 1), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(dy, dx @ w + x @ dw, rtol=1e-5, atol=1e-5)


def device(kind: str, capability: str | None = None) -> Any:
    found = SimpleNamespace(device_kind=kind)
    if capability is not None:
        found.compute_capability = capability
    return SimpleNamespace(devices=np.array([found], object))


@pytest.mark.parametrize(
    ("kind", "capability", "others"),
    [
        ("TPU v3", None, "bf16 or fp32"),
        ("TPU v2", None, "bf16 or fp32"),
        ("Tesla V100-SXM2-16GB", "7.0", "fp16 or fp32"),
        ("TPU v5 lite", None, None),
        ("TPU v4", None, None),
        ("Tesla T4", "7.5", None),
        ("NVIDIA H100 80GB HBM3", "9.0", None),
        ("AMD Instinct MI300X", "gfx942", None),
        ("cpu", None, None),
    ],
)
def test_a_device_without_int8_is_refused(kind: str, capability: str | None, others: str | None):
    check = getattr(precision.check_precision, "__wrapped__", precision.check_precision)
    check("bf16", device(kind, capability))
    if others is None:
        check("int8", device(kind, capability))
        return
    with pytest.raises(ValueError, match=f"precision='int8': {kind} has no .* take {others} there"):
        check("int8", device(kind, capability))


@pytest.mark.parametrize("make", [zoo.make_train_step, zoo.make_eval_step])
def test_steps_refuse_such_a_device(make: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(precision.jax, "devices", lambda: device("TPU v3").devices)
    options = [optax.sgd(1.0)] if make is zoo.make_train_step else []
    with pytest.raises(ValueError, match=r"precision='int8': TPU v3 .* int8"):
        make(losses.next_token, *options, precision="int8")


def test_a_model_without_such_matrices_is_refused():
    model, batch = drawn_rnn("gru"), token_batch()
    step = zoo.make_eval_step(losses.next_token, precision="int8")
    for _ in range(2):  # and not forgotten
        with pytest.raises(ValueError, match=r"precision='int8': .* bf16"):
            step(model, batch)
