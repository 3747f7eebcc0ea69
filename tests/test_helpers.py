"""The tests' own comparisons, which have to be able to fail."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close

FULL = np.arange(6, dtype=np.float32).reshape(2, 3)


def tree(x: Any) -> Any:
    return {"a": [x, "text", 1.0], "b": {"c": jnp.ones(2)}, "d": None}


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
