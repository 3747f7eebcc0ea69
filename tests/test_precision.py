"""zoo.precision: products keep the compute dtype both ways, and the loss scale finds its level."""

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations, value_and_gradients
from jaxtyping import Array

from zoo import precision
from zoo.precision import LossScale, matmul


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


PRODUCTS = {
    "bte,ef->btf": ((2, 5, 8), (8, 6), 1),
    "bte,enh->btnh": ((2, 5, 8), (8, 3, 4), 1),
    "btnh,nhe->bte": ((2, 5, 3, 4), (3, 4, 8), 2),
    "be,ef->bf": ((5, 8), (8, 6), 1),
    "e,ef->f": ((8,), (8, 6), 1),
}


@pytest.mark.parametrize("formula", PRODUCTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_matmul_and_its_gradient(formula: str, dtype: str):
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


def test_fp32_results_of_bf16_products_have_bf16_gradients():
    x, w = normal(0, (2, 5, 8), jnp.bfloat16), normal(1, (8, 6), jnp.bfloat16)
    got, vjp = jax.vjp(lambda x, w: matmul(x, w, dtype=jnp.float32), x, w)
    assert got.dtype == jnp.float32
    exact = np.einsum("bte,ef->btf", *(np.asarray(y, np.float64) for y in (x, w)))
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)  # not rounded on the way
    assert {y.dtype for y in vjp(got)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("out", [None, jnp.float32])
def test_every_product_of_bf16_takes_bf16(out: Any):
    x, w = normal(0, (2, 5, 8), jnp.bfloat16), normal(1, (8, 6), jnp.bfloat16)
    loss = lambda x, w: matmul(x, w, dtype=out).astype(jnp.float32).sum()
    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, w)
    products = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    assert len(products) == 3
    assert {v.aval.dtype for e in products for v in e.invars} == {jnp.dtype("bfloat16")}


def test_cast_leaves_what_is_no_float():
    tree = {"w": jnp.ones(2), "ids": jnp.arange(2), "key": jax.random.key(0), "rate": 0.5}
    got = precision.cast(tree, jnp.bfloat16)
    assert got["w"].dtype == jnp.bfloat16
    assert got["ids"] is tree["ids"]
    assert got["key"] is tree["key"]
    assert got["rate"] == 0.5


def test_an_unknown_precision_is_an_error():
    # Past the run-time type checker, which has an error of its own.
    compute_dtype = getattr(precision.compute_dtype, "__wrapped__", precision.compute_dtype)
    with pytest.raises(ValueError, match=r"precision='fp8'.*\['bf16', 'fp16', 'fp32'\]"):
        compute_dtype("fp8")


def test_the_loss_scale_halves_at_an_overflow_and_doubles_after_a_period(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(LossScale, "PERIOD", 3)
    scale, seen = LossScale.init(), []
    for finite in [True, False, True, True, True, True, True, True]:
        scale = scale.update(jnp.asarray(finite))
        seen.append(float(scale.scale) / 2**15)
    assert seen == [1, 0.5, 0.5, 0.5, 1, 1, 1, 2]


def test_the_loss_scale_has_bounds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LossScale, "PERIOD", 1)
    update = eqx.filter_jit(LossScale.update)
    for finite, bound in ((False, 1.0), (True, 2.0**24)):
        scale = LossScale.init()
        for _ in range(20):
            scale = update(scale, jnp.asarray(finite))
        assert float(scale.scale) == bound


@pytest.mark.parametrize(
    ("backend", "flags", "expected"),
    [
        ("cpu", "flags : avx2 avx512f", "fp32"),
        ("cpu", "flags : avx2 avx512f avx512_bf16", "bf16"),
        ("cpu", None, "fp32"),
        ("gpu", "flags : avx2", "bf16"),
    ],
)
def test_bf16_is_for_hardware_that_multiplies_it(
    backend: str, flags: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(Path, "exists", lambda path: flags is not None)
    monkeypatch.setattr(Path, "read_text", lambda path: flags)
    assert precision.native_precision() == expected
