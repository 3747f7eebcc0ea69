"""zoo.training.loss_checks: a step says where it computes in another dtype than asked."""

import inspect
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import FAMILIES, Family, make_transformer, token_batch
from jax.experimental import pallas as pl
from jaxtyping import Array

import zoo
from zoo import ensemble, losses
from zoo.training import loss_checks
from zoo.training.loss_checks import Checks

KEY = jax.random.key(0)


def said(call: Any) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found, jax.numpy_dtype_promotion("standard"):
        warnings.simplefilter("always")
        call()
    return [x for x in found if issubclass(x.category, zoo.PrecisionWarning)]


def said_of(function: Any, name: Any = "bf16") -> list[str]:
    """The warnings about a loss that computes `function(w, x)` of a bf16 weight and activation."""

    def loss(model: Any, batch: Any, key: Any) -> Any:
        y = function(model["w"], batch["x"], batch["weights"])
        return y.astype(jnp.float32).sum(), batch["weights"].sum(), {}

    given = {"model": {"w": jnp.ones((4, 4))}, "key": KEY}
    given["batch"] = {"x": jnp.ones((2, 4)), "weights": jnp.ones((2, 4))}
    watch = Checks(loss, name).dtypes
    found = said(lambda: watch(**given))
    assert not said(lambda: watch(**given))  # once
    return [str(x.message) for x in found]


def in_scan(w: Array, x: Array, f: Array) -> Array:
    return jax.lax.scan(lambda carry, row: (carry, row @ w), 0, f)[1]


def in_branch(w: Array, x: Array, f: Array) -> Array:
    return jax.lax.cond(f.sum() > 0, lambda w, f: f @ w, lambda w, f: f, w, f)


MIXED = {
    "product": lambda w, x, f: f @ w,
    "turned": lambda w, x, f: f @ w.T[None][0][:, :3],
    "computed": lambda w, x, f: (x * f) @ w,
    "einsum": lambda w, x, f: jnp.einsum("bi,ij->bj", f, w),
    "vmap": lambda w, x, f: jax.vmap(lambda row: w @ row)(f),
    "jit": lambda w, x, f: jax.jit(lambda w, f: f @ w.astype(jnp.float32))(w, f),
    "outside of jit": lambda w, x, f: jax.jit(jnp.matmul)(f, w.astype(jnp.float32)),
    "scan": in_scan,
    "branch": in_branch,
    "checkpoint": lambda w, x, f: jax.checkpoint(lambda w, f: f @ w)(w, f),
}


def test_a_product_of_two_dtypes_is_named():
    for name, product in MIXED.items():
        (text,) = said_of(product)
        assert "model['w'] bfloat16[" in text, name
        assert "float32[" in text, name
        assert "is computed in float32" in text, name
        assert not said_of(product, "fp32"), name
    (text,) = said_of(lambda w, x, f: jnp.sin(f) @ jnp.sin(w))  # of two computed values
    assert text.startswith("a product of float32[2, 4] and bfloat16[4, 4] is computed in float32")


ALIKE = {
    "bf16": lambda w, x, f: x @ w,
    "fp32 result": lambda w, x, f: jnp.matmul(x, w, preferred_element_type=jnp.float32),
    "both cast": lambda w, x, f: x.astype(jnp.float32) @ w.astype(jnp.float32),
    "one cast": lambda w, x, f: f.astype(jnp.bfloat16) @ w,
    "fp32": lambda w, x, f: f @ jnp.ones((4, 4)),
    "bf16 by way of fp8": lambda w, x, f: x.astype(jnp.float8_e5m2).astype(x.dtype) @ w,
    "no product": lambda w, x, f: f * w[:2],
    "in a kernel": lambda w, x, f: pl.pallas_call(
        lambda f, w, out: out.__setitem__(..., f[...] @ w[...].astype(jnp.float32)),
        jax.ShapeDtypeStruct((2, 4), jnp.float32),
        interpret=True,
    )(f, w),
    "integers": lambda w, x, f: f.astype(jnp.int32) @ jnp.ones((4, 4), jnp.int32),
}


def test_a_product_of_one_dtype_is_no_matter():
    for name, product in ALIKE.items():
        assert said_of(product) == [], name


class Noisy(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x: Array) -> Array:
        noise = jnp.ones(4)
        return self.linear(x + noise)  # here


def noisy_loss(model: Any, batch: Any, key: Any) -> Any:
    y = jax.vmap(model)(batch["x"])
    return y.astype(jnp.float32).sum(), batch["weights"].sum(), {}


def test_a_step_names_the_line_once():
    optimizer, make = optax.sgd(0.1), lambda key: Noisy(eqx.nn.Linear(4, 2, key=key))
    batches = [{"x": np.ones((n, 4), "f"), "weights": np.ones(n, "f")} for n in (2, 4)]
    lines, start = inspect.getsourcelines(Noisy)
    here = start + next(i for i, line in enumerate(lines) if line.endswith("# here\n"))
    for _ in range(2):  # each step says it
        state = zoo.init_state(make, optimizer, key=KEY)
        step = zoo.make_train_step(noisy_loss, optimizer, accumulate=2)
        evaluate = zoo.make_eval_step(noisy_loss, precision="fp16")
        model, calls = state.model, [lambda: step.compile(state, *batches)]  # noqa: B023
        calls.append(lambda: [evaluate.compile(model, *batches)])  # noqa: B023
        for call, dtype in zip(calls, ("bfloat16", "float16"), strict=True):
            (warning,) = said(call)
            assert f"model.linear.weight {dtype}[2, 4] and float32[" in str(warning.message)
            assert (warning.filename, warning.lineno) == (__file__, here)


@pytest.mark.parametrize("name", ["total", "weight"])
def test_sums_in_low_precision_are_named(name: str):
    def loss(model: Any, batch: Any, key: Any) -> Any:
        sums = [x.sum() for x in (batch["x"], batch["weights"])]
        return *(sums if name == "total" else sums[::-1]), {}

    batch = {"x": jnp.ones(4), "weights": jnp.ones(4)}
    (warning,) = said(lambda: Checks(loss, "bf16").dtypes(model=None, batch=batch, key=None))
    assert f"the loss's {name} is a sum in bfloat16: sum in float32" in str(warning.message)
    assert warning.filename == __file__


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The products that were looked at."""
    seen, look = [], loss_checks._mixed
    monkeypatch.setattr(loss_checks, "_mixed", lambda *x: seen.append(x) or look(*x))
    return seen


EXPERTS = Family(
    "experts",
    lambda dropout: make_transformer(dropout=dropout, **{"experts.num_experts": 4}),
    token_batch,
    lambda batch: batch,
    losses.balanced_next_token(0.01),
    is_sequence=True,
    num_masks=0,
)


@pytest.mark.parametrize("family", [*FAMILIES, EXPERTS], ids=lambda family: family.name)
def test_the_families_have_no_mixed_product(family: Family, products: list[Any]):
    def look(make: Any, loss: Any, batch: Any) -> None:
        trace = lambda key: Checks(loss, "bf16").dtypes(model=make(key), batch=batch, key=key)
        assert not said(lambda: jax.eval_shape(trace, KEY))
        assert products
        products.clear()

    make, batch = family.make_model(0.1), family.make_batch(4, 16, 0)
    batch = jax.tree.map(jnp.asarray, batch)
    look(make, family.loss, batch)
    look(lambda key: ensemble.Ensemble(make, 2, key=key), ensemble.member_loss(family.loss), batch)
    if family.is_sequence:
        labels = {"labels": jnp.zeros(4, jnp.int32), "weights": jnp.ones(4)}
        batch = {"inputs": batch["tokens"], **labels}
        look(lambda key: zoo.Classifier(make(key), 2, key=key), losses.classification, batch)
