"""zoo.nn.grouped_products: the TPU's kernel, interpreted, beside `jax.lax.ragged_dot`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.nn import grouped_products, products
from zoo.nn.grouped_products import grouped_product, megablox
from zoo.planning import flops

GROUPS = {
    "empty ones, and rows behind": (300, (0, 100, 7, 0, 150, 0)),
    "all rows in one": (300, (0, 0, 300, 0, 0, 0)),
    "all rows": (256, (10, 20, 30, 40, 50, 106)),
    "no row": (256, (0, 0, 0, 0, 0, 0)),
}


def inputs(rows: int, dtype: Any = jnp.float32) -> list[jax.Array]:
    """Rows, matrices of six groups, and the gradient of the result; no size divides a tile."""
    rng, shapes = np.random.default_rng(0), [(rows, 40), (6, 40, 72), (rows, 72)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def value_and_gradients(
    product: Callable[..., jax.Array], sizes: jax.Array, x: jax.Array, w: jax.Array, g: jax.Array
) -> list[jax.Array]:
    """The product and its gradients, with zeros in rows behind all groups."""
    y, backward = jax.vjp(lambda x, w: product(x, w, sizes), x, w)
    dx, dw = backward(g)
    counted = (jnp.arange(len(x)) < sizes.sum())[:, None]
    return [jnp.where(counted, y, 0), jnp.where(counted, dx, 0), dw]


def interpreted(*args: jax.Array) -> jax.Array:
    return megablox(*args, interpret=True)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("empty ones, and rows behind", jnp.float32),
        pytest.param("all rows in one", jnp.float32, marks=pytest.mark.slow),
        pytest.param("all rows", jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param("no row", jnp.float32, marks=pytest.mark.slow),
    ],
)
def test_the_kernel_matches_ragged_dot(name: str, dtype: Any):
    rows, sizes = GROUPS[name]
    args = (jnp.asarray(sizes, jnp.int32), *inputs(rows, dtype))
    got = jax.jit(lambda: value_and_gradients(interpreted, *args))()
    wanted = value_and_gradients(jax.lax.ragged_dot, *args)
    for x, want in zip(got, wanted, strict=True):
        assert x.dtype == dtype
        x, want = (np.asarray(y, np.float32) for y in (x, want))
        atol = (1e-5 if dtype == jnp.float32 else 2e-2) * np.abs(want).max()
        np.testing.assert_allclose(x, want, atol=atol)
    assert (np.abs(np.asarray(wanted[0], np.float32)).max() > 1) == (sum(sizes) > 0)


@pytest.mark.slow
def test_members_of_an_ensemble_take_turns():
    x, w, _ = inputs(256)
    sizes = jnp.asarray([GROUPS["all rows"][1], GROUPS["all rows in one"][1]], jnp.int32)
    sizes = jnp.minimum(sizes, 256)
    gradients = jax.jit(jax.grad(lambda x, w, sizes: interpreted(x, w, sizes).sum(), (0, 1)))
    got = jax.jit(jax.vmap(gradients, (None, None, 0)))(x, w, sizes)
    wanted = [gradients(x, w, each) for each in sizes]
    for index, each in enumerate(wanted):
        for one, want in zip(got, each, strict=True):
            np.testing.assert_array_equal(one[index], want)
    assert np.abs(wanted[0][1] - wanted[1][1]).max() > 1


def test_a_tpu_takes_the_kernel_where_it_applies(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(grouped_products, "megablox", lambda x, *_: jnp.full_like(x, 7))
    x, w = jnp.ones((256, 8)), jnp.ones((6, 8, 8))
    sizes = jnp.asarray(GROUPS["all rows"][1], jnp.int32)

    def is_kernel(dtype: Any) -> bool:
        return bool((grouped_product(x.astype(dtype), w.astype(dtype), sizes) == 7).all())

    assert is_kernel(jnp.float32)
    assert is_kernel(jnp.bfloat16)
    assert not is_kernel(jnp.float16)
    with products.forward_mode():
        assert not is_kernel(jnp.float32)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert not is_kernel(jnp.float32)


def test_products_by_the_kernel_are_counted():
    """Of whole tiles of rows, once each."""
    x, w, g = inputs(512)
    sizes = jnp.asarray(GROUPS["all rows"][1], jnp.int32)
    kernel = jax.make_jaxpr(lambda *args: value_and_gradients(interpreted, sizes, *args))
    assert flops.count(kernel(x, w, g).jaxpr) == 3 * 2 * 512 * 40 * 72


# The layers of Qwen3-30B-A3B and Mixtral 8x7B, with 4 rows of 4,096 tokens on a chip.
LAYERS = [(2048, 768, 128, 8), (768, 2048, 128, 8), (4096, 14_336, 8, 2), (14_336, 4096, 8, 2)]


@pytest.mark.parametrize(("inner", "outer", "groups", "choices"), LAYERS)
def test_tiles_take_little_more_than_the_products(inner, outer, groups, choices):
    """Neither shared tiles nor what is read again take more than a seventh of the products' time.

    By the chip's peaks of v5e, with 8 MiB for two blocks of each operand.
    """
    rows, memory = 4 * 4096 * choices, 12 * 2**20
    for sums in (False, True):
        m, k, n = grouped_products.tile(rows, groups, inner, outer, 2, memory, sums=sums)
        steps = rows // m + groups - 1
        assert rows % m == 0
        assert steps * m / rows < 8 / 7
        parts, whole = -(-outer // n), k == inner
        moved = rows * (inner * parts + outer)
        if sums:
            moved += rows * outer * (-(-inner // k) - 1) + groups * inner * outer
        else:
            moved += (groups if whole else steps) * inner * outer
        seconds = 2 * rows * inner * outer / 197e12
        assert moved * 2 / 819e9 < 8 / 7 * seconds
        held = 2 * 2 * (m * k + k * n + m * n) + 4 * max(m, k if sums else 0) * n
        assert held < memory


@pytest.mark.parametrize(
    ("rows", "whole"), [(1, 128), (128, 128), (129, 256), (300, 512), (513, 1024)]
)
def test_rows_fill_tiles(rows, whole):
    assert grouped_products.padded(rows) == whole


def test_a_plan_names_kernels_that_have_no_name():
    sizes = jnp.array([100, 0, 50, 50, 50, 50], jnp.int32)
    x, w, g = inputs(300)
    step = jax.make_jaxpr(lambda *xs: value_and_gradients(interpreted, sizes, *xs))(x, w, g)
    products = flops.of_kernels(step.jaxpr)
    assert sum(product for product, _ in products.values()) >= 3 * 2 * 300 * 40 * 72
