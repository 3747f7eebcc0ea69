"""zoo.nn.remat: policies change what is kept, never the numbers."""

import re
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import assert_trees_close, drawn_transformer, equations, small_config, token_batch

from zoo import losses
from zoo.nn import remat


class Outcome(NamedTuple):
    loss: Any
    grads: Any
    temporaries: int


def run(**options: Any) -> Outcome:
    """The loss and gradient of one model with dropout, and the bytes that the program needs."""
    options = {"num_layers": 3, "d_model": 64, "dropout": 0.2, **options}
    model = drawn_transformer(**options)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def mean_loss(params: Any, batch: Any) -> Any:
        total, weight, _ = losses.next_token(eqx.combine(params, static), batch, jax.random.key(1))
        return total / weight

    batch = jax.tree.map(jnp.asarray, token_batch(8, 32))
    program = jax.jit(jax.value_and_grad(mean_loss)).lower(params, batch).compile()
    loss, grads = program(params, batch)
    return Outcome(loss, grads, program.memory_analysis().temp_size_in_bytes)


@pytest.fixture(scope="module")
def kept() -> Outcome:
    return run()


@pytest.fixture(scope="module")
def full() -> Outcome:
    return run(remat="full")


def assert_same(got: Outcome, want: Outcome) -> None:
    assert float(got.loss) == pytest.approx(float(want.loss), rel=1e-6)
    assert_trees_close(got.grads, want.grads, rtol=1e-5)


def test_full_remat_saves_memory_with_equal_gradients(kept: Outcome, full: Outcome):
    assert_same(full, kept)
    assert full.temporaries < 0.6 * kept.temporaries


@pytest.mark.parametrize("policy", ["dots", "dots_no_batch"])
def test_partial_policies_keep_the_gradient(policy: str, kept: Outcome, full: Outcome):
    got = run(remat=policy)
    assert_same(got, kept)
    assert full.temporaries < got.temporaries < kept.temporaries


def test_named_arrays_are_kept_alone(kept: Outcome, full: Outcome):
    few, most = (run(remat=f"save:{names}") for names in ("query", ",".join(remat.NAMES)))
    assert_same(few, kept)
    assert_same(most, kept)
    assert full.temporaries < few.temporaries < most.temporaries < kept.temporaries


def test_unrolled_layers_give_the_same_gradient(kept: Outcome):
    assert_same(run(scan_layers=False), kept)


@pytest.mark.parametrize("scan", [True, False])
def test_layers_run_in_order_with_their_index(scan: bool):
    layers = {"by": jnp.array([2.0, 3.0, 5.0]), "name": "not an array"}
    seen = []

    def step(layer: Any, carry: Any, index: Any) -> Any:
        seen.append(layer["name"])
        return carry * 10 + layer["by"] * (index + 1).astype(jnp.float32)

    got = remat.scan_layers(step, layers, jnp.float32(0), scan=scan)
    assert float(got) == 2 * 100 + 6 * 10 + 15
    assert set(seen) == {"not an array"}


@pytest.mark.parametrize(("scan", "num_layers"), [(True, 1), (True, 4), (True, 5), (False, 5)])
def test_step_functions_alternate_over_layers(scan: bool, num_layers: int):
    by = jnp.outer(jnp.arange(2.0, 2.0 + num_layers), jnp.array([1.0, 0.5]))

    def add(layer: Any, carry: Any, index: Any) -> Any:
        return carry * 10 + layer["by"] * (index + 1).astype(jnp.float32)

    def multiply(layer: Any, carry: Any, index: Any) -> Any:
        return carry * layer["by"] + index.astype(jnp.float32)

    def run(by: Any) -> Any:
        return remat.scan_layers([add, multiply], {"by": by}, jnp.ones(2), scan=scan).sum()

    def plain(by: Any) -> Any:
        x = jnp.ones(2)
        for i in range(num_layers):
            x = x * by[i] + i if i % 2 else x * 10 + by[i] * (i + 1)
        return x.sum()

    got, want = (jax.jit(jax.value_and_grad(each))(by) for each in (run, plain))
    assert_trees_close(got, want, rtol=1e-6)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("some", {}),
        ("save:", {}),
        ("save:query,keys", {}),
        ("keep:query", {}),
        ("save:query+offload:query", {}),
        ("save:mlp_hidden", {"experts.num_experts": 4, "mlp": "swiglu"}),  # of an expert's rows
    ],
)
def test_an_unknown_policy_is_an_error(policy: str, options: Any):
    message = rf"remat='{re.escape(policy)}'.*'dots_no_batch'.*block_input, query"
    with pytest.raises(ValueError, match=message):
        small_config(remat=policy, **options)


def test_each_name_is_in_a_layer():
    model = drawn_transformer(num_layers=1, remat="none")
    found = equations(jax.make_jaxpr(lambda x: model(x))(jnp.zeros((1, 8), jnp.int32)))
    names = {e.params["name"] for e in found if e.primitive.name == "name"}
    assert set(remat.NAMES) <= names


def test_a_cpu_has_no_other_memory():
    model = drawn_transformer(num_layers=1, remat="offload:block_input")
    with pytest.raises(ValueError, match=r"remat='offload:block_input'.*save:"):
        jax.eval_shape(model, jnp.zeros((1, 8), jnp.int32))


@pytest.mark.parametrize(
    ("turns", "scan", "expected"),
    [
        (1, True, [False]),
        (1, False, [True] * 5),
        (2, True, [False, False, True]),  # the last layer comes after the loop
    ],
)
def test_recomputation_outside_loops_prevents_cse(turns: int, scan: bool, expected: list[bool]):
    def run(by: Any) -> Any:
        add = lambda layer, carry, index: carry + layer["by"]
        functions = [add] * turns
        return remat.scan_layers(functions, {"by": by}, jnp.float32(1), policy="full", scan=scan)

    assert kept_apart(run, jnp.ones(5)) == expected
    assert kept_apart(remat.checkpoint(jnp.sin, "full"), 1.0) == [True]


def kept_apart(function: Any, x: Any) -> list[bool]:
    """For each recomputed part, whether XLA is kept from merging it with the forward pass."""
    found = [e.params for e in equations(jax.make_jaxpr(function)(x))]
    return [params["prevent_cse"] for params in found if "prevent_cse" in params]


def test_policy_override_is_scoped():
    function = lambda x: x
    with remat.overridden("full"):
        assert remat.checkpoint(function, "none") is not function
    assert remat.checkpoint(function, "none") is function
    with remat.overridden("none"):
        assert remat.checkpoint(function, "full") is function
        with remat.overridden(None):
            assert remat.checkpoint(function, "full") is not function
