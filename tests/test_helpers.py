"""The tests' own comparisons, which have to be able to fail."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    arrays,
    assert_trees_close,
    copy,
    covering,
    equations,
    value_and_gradients,
)

FULL = np.arange(6, dtype=np.float32).reshape(2, 3)


def tree(x: Any) -> Any:
    return {"a": [x, "text", 1.0], "b": {"c": jnp.ones(2)}, "d": None}


def test_arrays_lists_jax_and_numpy_leaves():
    found = arrays({"a": [jnp.ones(2), FULL, np.float32(3), 1.0, "text", None]})
    assert list(found) == ["a.0", "a.1", "a.2"]
    assert found["a.1"] is FULL


@pytest.mark.parametrize(
    "empty", [{}, [None, "text", 1.0], {"a": jax.ShapeDtypeStruct((2,), "f4")}]
)
def test_trees_without_arrays_are_refused(empty: Any):
    with pytest.raises(AssertionError, match="no array in"):
        arrays(empty)


@pytest.mark.parametrize(("strength", "least", "most"), [(1, 4, 4), (2, 12, 14), (3, 24, 32)])
def test_few_cases_cover_all_combinations(strength: int, least: int, most: int):
    axes = ["abcd", [False, True], [None, 1, 2], [0, 1]]
    cases = covering(*axes, strength=strength)
    assert least <= len(cases) <= most < 4 * 2 * 3 * 2
    assert cases == covering(*axes, strength=strength)
    for chosen in itertools.combinations(range(4), strength):
        seen = {tuple(case[axis] for axis in chosen) for case in cases}
        assert seen == {*itertools.product(*(axes[axis] for axis in chosen))}


def test_duplicate_paths_are_refused():
    with pytest.raises(AssertionError, match="one path twice"):
        arrays({"a.b": FULL, "a": {"b": FULL}})


@pytest.mark.parametrize("make", [jnp.asarray, np.asarray], ids=["jax", "numpy"])
def test_equal_trees_are_close(make: Any):
    assert_trees_close(tree(make(FULL)), tree(jnp.asarray(FULL)), rtol=0)
    assert_trees_close(tree(make(FULL) * (1 + 9e-6)), tree(make(FULL)), rtol=1e-5)
    # A small number is compared with the largest beside it.
    assert_trees_close(tree(make(FULL) + 4e-5), tree(make(FULL)), rtol=1e-5)


@pytest.mark.parametrize("make", [jnp.asarray, np.asarray], ids=["jax", "numpy"])
@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (tree(FULL + 6e-5), tree(FULL), "a.0"),
        (tree(FULL * np.nan), tree(FULL), "a.0"),
        (tree(FULL * np.nan), tree(FULL * np.nan), "a.0 is expected to be"),
        (tree(FULL[:1]), tree(FULL), "a.0"),
        (tree(FULL[0, 1]), tree(np.ones_like(FULL)), "a.0"),
        (tree(FULL[:0]), tree(FULL[:0]), "a.0 is empty"),
        (tree(FULL), tree(None), "one has .'a.0'."),
        ({}, {}, "no array in"),
        ([1.0], [2.0], "no array in"),
    ],
    ids=["far", "nan", "nans", "shape", "broadcast", "empty", "missing", "no leaf", "no array"],
)
def test_unequal_trees_fail_comparison(make: Any, actual: Any, expected: Any, message: str):
    convert = lambda tree: jax.tree.map(lambda x: make(x) if isinstance(x, np.ndarray) else x, tree)
    with pytest.raises(AssertionError, match=message):
        assert_trees_close(convert(actual), convert(expected), rtol=1e-5)


def test_numpy_copies_are_compared():
    """They are of numpy, which a comparison once left out."""
    model = tree(jnp.asarray(FULL))
    assert isinstance(model["a"][0], jax.Array)
    assert isinstance(copy(model)["a"][0], np.ndarray)
    assert_trees_close(copy(model), model, rtol=0)
    with pytest.raises(AssertionError, match=r"a\.0"):
        assert_trees_close(copy(tree(jnp.asarray(FULL) + 1)), copy(model), rtol=1e-5)


def test_value_and_gradients_match_calculus():
    x, y = jnp.asarray([1.0, 2.0]), jnp.asarray([3.0, 4.0])
    value, dx, dy = value_and_gradients(lambda x, y: x * x * y, jnp.asarray([1.0, 10.0]), x, y)
    assert_trees_close(
        [value, dx, dy], [x * x * y, np.array([6.0, 160.0]), np.array([1.0, 40.0])], rtol=1e-6
    )


def test_equations_are_found_in_nested_jaxprs():
    @jax.jit
    def function(x: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, _: (jnp.sin(x), None), x, length=2)
        return jax.lax.cond(x > 0, jnp.cos, jnp.tanh, x)

    names = {equation.primitive.name for equation in equations(jax.make_jaxpr(function)(1.0))}
    assert {"scan", "sin", "cond", "cos", "tanh"} <= names
