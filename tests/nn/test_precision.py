"""zoo.nn.precision: products keep the compute dtype both ways, the loss scale settles."""

import functools
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    FAMILIES,
    drawn_rnn,
    drawn_transformer,
    equations,
    token_batch,
    value_and_gradients,
)
from jaxtyping import Array
from model_folders import write_package

import zoo
from zoo import ensemble, losses
from zoo.nn import parameters, precision
from zoo.nn.precision import LossScale
from zoo.nn.products import matmul
from zoo.publishing import PublishError
from zoo.training import loss_values

KEY = jax.random.key(0)


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


PRODUCTS = {
    "bte,ef->btf": ((2, 5, 8), (8, 6), 1),
    "bte,enh->btnh": ((2, 5, 8), (8, 3, 4), 1),
    "btnh,nhe->bte": ((2, 5, 3, 4), (3, 4, 8), 2),
    "e,ef->f": ((8,), (8, 6), 1),
}


@pytest.mark.parametrize("formula", PRODUCTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_matmul_and_gradients_match_einsum(formula: str, dtype: str):
    x_shape, w_shape, contract = PRODUCTS[formula]
    x, w = normal(0, x_shape, dtype), normal(1, w_shape, dtype)
    plain = lambda x, w: jnp.einsum(formula, x, w, precision="highest")
    g = normal(2, jax.eval_shape(plain, x, w).shape, dtype)
    results = value_and_gradients(lambda x, w: matmul(x, w, contract=contract), g, x, w)
    expected = value_and_gradients(plain, *(y.astype(jnp.float32) for y in (g, x, w)))
    assert {y.dtype for y in results} == {jnp.dtype(dtype)}
    tolerance = {"float32": 1e-6, "bfloat16": 2**-7, "float16": 2**-10}[dtype]
    for y, want in zip(results, expected, strict=True):
        scale = np.abs(want).max()
        np.testing.assert_allclose(y.astype(jnp.float32), want, rtol=0, atol=tolerance * scale)


def test_fp32_output_keeps_bf16_gradients():
    x, w = normal(0, (2, 5, 8), jnp.bfloat16), normal(1, (8, 6), jnp.bfloat16)
    got, vjp = jax.vjp(lambda x, w: matmul(x, w, dtype=jnp.float32), x, w)
    assert got.dtype == jnp.float32
    exact = np.einsum("bte,ef->btf", *(np.asarray(y, np.float64) for y in (x, w)))
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)  # not rounded on the way
    assert {y.dtype for y in vjp(got)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("out", [None, jnp.float32])
def test_bf16_products_take_bf16_operands(out: Any):
    x, w = normal(0, (2, 5, 8), jnp.bfloat16), normal(1, (8, 6), jnp.bfloat16)
    loss = lambda x, w: matmul(x, w, dtype=out).astype(jnp.float32).sum()
    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, w)
    products = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    assert len(products) == 3
    # A mesh divides the first axis: the gradient of the weight does not mix it with the next.
    assert [v.aval.shape for v in products[2].invars] == [(2, 5, 8), (2, 5, 6)]
    assert {v.aval.dtype for e in products for v in e.invars} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize(
    ("dtype", "shape", "rows"),
    [("float32", (1, 8), 1), ("bfloat16", (1, 8), 2), ("bfloat16", (3, 3, 8), 9)],
)
def test_single_bf16_rows_are_doubled_on_cpu(dtype: str, shape: tuple[int, ...], rows: int):
    x, w = normal(0, shape, dtype), normal(1, (8, 6), dtype)
    shapes = [
        e.invars[0].aval.shape
        for e in equations(jax.make_jaxpr(matmul)(x, w))
        if e.primitive.name == "dot_general"
    ]
    assert shapes == [(rows, 8)]


def test_bf16_products_return_fp32_on_cpu(monkeypatch: pytest.MonkeyPatch):
    def returned(dtype: str) -> Any:
        # A function of its own each time, for JAX remembers the jaxpr of one.
        product = lambda x, w: matmul(x, w)
        jaxpr = jax.make_jaxpr(product)(normal(0, (5, 8), dtype), normal(1, (8, 6), dtype))
        products = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
        return [e.outvars[0].aval.dtype.name for e in products]

    assert returned("bfloat16") == ["float32"]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert returned("bfloat16") == ["bfloat16"]


class Weight(eqx.Module):
    w: Array


class CastsItself(Weight, parameters.CastsAtUse):
    pass


def test_models_may_cast_themselves():
    with precision.in_precision(Weight(jnp.ones(2)), "bf16") as model:
        assert model.w.dtype == jnp.bfloat16
    with precision.in_precision(CastsItself(jnp.ones(2)), "bf16") as model:
        assert model.w.dtype == jnp.float32
        assert parameters.cast_for_use(model).w.dtype == jnp.bfloat16
    assert parameters.cast_for_use(model).w.dtype == jnp.float32


@pytest.mark.parametrize(("name", "exact"), [("fp32", True), ("bf16", False)])
def test_fp32_products_use_highest_precision(name: Any, exact: bool):
    with precision.in_precision(Weight(jnp.ones((2, 2))), name) as model:
        jaxpr = jax.make_jaxpr(lambda w: matmul(w, w))(model.w)
    (product,) = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    highest = (jax.lax.Precision.HIGHEST,) * 2
    assert (product.params["precision"] == highest) is exact


def test_cast_changes_only_float_arrays():
    tree = {"w": jnp.ones(2), "ids": jnp.arange(2), "key": jax.random.key(0), "rate": 0.5}
    got = parameters.cast(tree, jnp.bfloat16)
    assert got["w"].dtype == jnp.bfloat16
    assert got["ids"] is tree["ids"]
    assert got["key"] is tree["key"]
    assert got["rate"] == 0.5
    assert parameters.cast([jnp.ones(1, jnp.complex64)], jnp.bfloat16)[0].dtype == jnp.complex64


def test_an_unknown_precision_is_an_error():
    # Past the run-time type checker, which has an error of its own.
    compute_dtype = getattr(precision.compute_dtype, "__wrapped__", precision.compute_dtype)
    with pytest.raises(ValueError, match=r"precision='fp8'.*\['bf16', 'fp16', 'fp32', 'int8'\]"):
        compute_dtype("fp8")


def test_loss_scale_halves_doubles_and_has_bounds(monkeypatch: pytest.MonkeyPatch):
    for good_steps, factor in ((1998, 1), (1999, 2)):
        scale = LossScale(jnp.float32(8), jnp.int32(good_steps)).update(jnp.asarray(True))
        assert float(scale.scale) == 8 * factor
    monkeypatch.setattr(LossScale, "PERIOD", 3)
    update = eqx.filter_jit(LossScale.update)
    scale, seen = LossScale.init(), []
    for finite in [True, False, *[True] * 6, *[False] * 20, *[True] * 80]:
        scale = update(scale, jnp.asarray(finite))
        seen.append(float(scale.scale) / 2**15)
    assert seen[:8] == [1, 0.5, 0.5, 0.5, 1, 1, 1, 2]
    assert (min(seen), max(seen)) == (2.0**-15, 2.0**9)


@pytest.mark.parametrize(
    ("backend", "flags", "expected"),
    [
        ("cpu", "flags : avx2 avx512f", "fp32"),
        ("cpu", "flags : avx2 avx512f avx512_bf16", "bf16"),
        ("cpu", None, "fp32"),
        ("gpu", "flags : avx2", "bf16"),
    ],
)
def test_bf16_needs_hardware_support(
    backend: str, flags: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(Path, "exists", lambda path: flags is not None)
    monkeypatch.setattr(Path, "read_text", lambda path: flags)
    assert precision.native_precision() == expected


# Models that are not the zoo's


def conv_net(key: Array) -> Any:
    first, second = jax.random.split(key)
    layers = [eqx.nn.Conv2d(1, 4, 3, key=first), eqx.nn.Lambda(lambda x: jax.nn.relu(x[:, 0, 0]))]
    return eqx.nn.Sequential([*layers, eqx.nn.Linear(4, 3, key=second)])


IMAGES = {
    "images": np.linspace(-1, 1, 4 * 25, dtype=np.float32).reshape(4, 1, 5, 5),
    "depth": np.full(4, 1 + 2**-20, np.float32),
    "labels": np.arange(4, dtype=np.int32) % 3,
    "weights": np.full(4, 1 + 2**-20, np.float32),
}


@losses.keeps_dtype("depth")
def image_loss(model: Any, batch: Any, key: Any) -> tuple[Array, Array, dict]:
    logits = jax.vmap(model)(batch["images"])
    total, weight = losses.cross_entropy(logits, batch["labels"], batch["weights"])
    bits = {name: batch[name].dtype.itemsize * 8 * weight for name in ("images", "depth")}
    return total, weight, {**bits, "logits": logits.dtype.itemsize * 8 * weight}


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_convolutions_train_in_every_precision(name: Any):
    optimizer = optax.sgd(0.1)
    state = zoo.init_state(conv_net, optimizer, key=KEY)
    _, sums = zoo.make_eval_step(image_loss, precision=name)(state.model, IMAGES)
    state, metrics = zoo.make_train_step(image_loss, optimizer, precision=name)(state, IMAGES)
    bits = 32 if name == "fp32" else 16
    for seen, weight in ((sums, 4 * (1 + 2**-20)), (metrics, 1.0)):
        assert float(seen["tokens"]) == 4 * (1 + 2**-20)
        got = [float(seen[x]) / weight for x in ("images", "depth", "logits")]
        np.testing.assert_allclose(got, [bits, 32, bits], rtol=1e-6)
    assert float(metrics["loss"]) == pytest.approx(float(sums["loss"]) / 4, rel=1e-2)
    assert float(metrics["grad_norm"]) > 0
    assert {x.dtype.name for x in jax.tree.leaves(eqx.filter(state.model, eqx.is_array))} == {
        "float32"
    }


def dtypes_in_bf16(batch: Any, kept: Any = (), model: Any = None) -> list[str]:
    cast = precision.cast_inputs(model, jax.tree.map(jnp.asarray, batch), "bf16", kept)
    return [x.dtype.name for x in jax.tree.leaves(cast)]


def test_what_outputs_are_compared_with_stays_in_fp32():
    x = np.ones(2, np.float32)
    kept = ["label", "labels", "target", "targets", "weight", "weights"]
    assert dtypes_in_bf16(dict.fromkeys(kept, x)) == ["float32"] * 6
    assert dtypes_in_bf16({"teacher": {"targets": x, "image": x}}) == ["bfloat16", "float32"]
    assert dtypes_in_bf16({"ids": np.arange(2), "mask": x > 0}) == ["int32", "bool"]
    assert dtypes_in_bf16((x, x), kept=[1]) == ["bfloat16", "float32"]
    assert dtypes_in_bf16(Weight(x), kept=["w"]) == ["float32"]
    assert dtypes_in_bf16({"a": x, "b": {"c": x}}, kept=["b"]) == ["bfloat16", "float32"]


def test_an_entry_that_a_batch_lacks_is_an_error():
    with pytest.raises(ValueError, match=r"keeps_dtype\('depht'\): .* \['depth'\]"):
        dtypes_in_bf16({"depth": np.ones(2, np.float32)}, kept=["depht"])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_the_families_cast_their_own_inputs(family: Any):
    model = eqx.filter_eval_shape(family.make_model(0.0), KEY)
    for given in (model, ensemble.Ensemble(lambda key: model, 1, key=KEY)):
        assert dtypes_in_bf16({"x": np.ones(2, np.float32)}, model=given) == ["float32"]
    if family.is_sequence:
        make = lambda key: zoo.Classifier(family.make_model(0.0)(key), 2, key=key)
        classifier = eqx.filter_eval_shape(make, KEY)
        assert dtypes_in_bf16({"x": np.ones(2, np.float32)}, model=classifier) == ["float32"]
    foreign = ensemble.Ensemble(conv_net, 1, key=KEY)
    assert dtypes_in_bf16({"x": np.ones(2, np.float32)}, model=foreign) == ["bfloat16"]


def test_what_a_loss_keeps_is_found_inside_of_wrappers():
    partial = functools.partial(image_loss, key=None)
    wrapped = functools.wraps(partial)(lambda *arguments: partial(*arguments))
    for loss in (image_loss, partial, wrapped, ensemble.member_loss(image_loss)):
        assert loss_values.kept_by(loss) == {"depth"}
    assert loss_values.kept_by(losses.classification) == set()


@pytest.mark.parametrize("name", ["matmul", "rnn", "embedding"])
def test_no_gradient_of_a_frozen_matrix_is_computed(name: str):
    x, w = jnp.ones((2, 3, 5)), jnp.ones((5, 7))
    if name == "matmul":
        model, run = w, lambda w, x: matmul(x, w)
    elif name == "embedding":
        model, run = drawn_transformer().embedding, lambda model, x: model(jnp.arange(3)) * x.sum()
    else:
        model, x = drawn_rnn("lstm", vocab_size=None, in_size=5, out_size=3), jnp.ones((2, 9, 5))
        run = lambda model, x: model(x)
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    shapes = {leaf.shape for leaf in leaves if leaf.ndim > 1}

    def of_weights(frozen: bool) -> set[Any]:
        arrays, static = eqx.partition(model, eqx.is_array)
        loss = lambda arrays, x: run(eqx.combine(arrays, static), x).sum()
        jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=1 if frozen else (0, 1)))(arrays, x)
        made = {"dot_general", "scatter-add"}
        products = [e for e in equations(jaxpr.jaxpr) if e.primitive.name in made]
        return shapes & {x.aval.shape for e in products for x in e.outvars}

    assert of_weights(frozen=True) == set()
    assert of_weights(frozen=False)


THEIRS = """
import jax, jax.numpy as jnp
from zoo.nn.precision import Scheme
from zoo.quantization import loading
class Doubled(Scheme):
    dtype = jnp.float32
    def operands(self, layer): return jax.tree.map(lambda x: 2 * x, layer)
    def check_device(self, device): pass
    def check_loss(self, jaxpr):
        if not jaxpr.eqns: raise ValueError("nothing")
DOUBLED = Doubled()
def quantized_skeleton(skeleton, kind): return loading.quantized_skeleton(skeleton, "int8")
"""


def test_a_package_brings_a_precision_and_a_quantization(tmp_path, monkeypatch):
    entries = "[zoo.precisions]\ndoubled = their_matrices:DOUBLED\n"
    entries += "[zoo.quantizations]\ntheirs = their_matrices\n"
    write_package(tmp_path, "their_matrices", THEIRS, entries)
    with pytest.raises(ValueError, match=r"precision='doubled': .* \[.*'int8'\]"):
        precision.compute_dtype("doubled")
    model, batch = drawn_transformer(), token_batch()
    zoo.save(tmp_path / "model", model)
    with pytest.raises(PublishError, match=r"quantize='theirs': .* int8, int4, nf4, or"):
        zoo.load(tmp_path / "model", quantize="theirs")
    monkeypatch.syspath_prepend(tmp_path)
    doubled = eqx.tree_at(lambda m: m.blocks, model, jax.tree.map(lambda x: 2 * x, model.blocks))
    found = [
        float(zoo.make_eval_step(losses.next_token, precision=name)(given, batch)[1]["loss"])
        for name, given in (("doubled", model), ("fp32", doubled), ("fp32", model))
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0] != pytest.approx(found[2], rel=1e-3)
    theirs = zoo.load(tmp_path / "model", quantize="theirs")
    ours = zoo.load(tmp_path / "model", quantize="int8")
    assert eqx.tree_equal(theirs, ours)
