"""zoo.decoding.attention: a ring of slots attends as if all tokens in reach were still in a row."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo import sharding
from zoo.decoding.attention import Cache, Clock, LayerCache

MORE = 6  # tokens after the prompt


def draw(rows: int, seq: int) -> list[np.ndarray]:
    """Queries, keys and values of two heads."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=(rows, seq + MORE, 2, 4)).astype(np.float32) for _ in range(3)]


def textbook(q: Any, k: Any, v: Any, first: int, last: int) -> np.ndarray:
    """Softmax attention of one row's query at `last` over its keys from `first` on."""
    k, v = k[first : last + 1], v[first : last + 1]
    weights = np.exp(np.einsum("nh,snh->ns", q[last], k) / 2)
    return np.einsum("ns,snh->nh", weights / weights.sum(1, keepdims=True), v)


@pytest.mark.parametrize(
    ("seq", "slots", "window", "new"),
    [
        *[(3, 16, None, 1), (4, 4, 4, 1), (9, 4, 4, 1), (2, 4, 4, 1), (1, 1, 1, 1)],
        # Of three tokens at once the first two are kept.
        *[(3, 16, None, 3), (9, 6, 4, 3), (2, 6, 4, 3), (5, 3, 1, 3)],
    ],
)
def test_ring_cache_matches_windowed_attention(seq: int, slots: int, window: Any, new: int):
    q, k, v = draw(3, seq)
    padding = np.minimum([0, 1, 2], seq - 1)
    mask = np.arange(seq) >= padding[:, None]

    @eqx.filter_jit
    def step(cache: Cache, q: Any, k: Any, v: Any) -> tuple[Cache, Any]:
        layer = cache.layers[0].write(k, v, cache.clock)
        kept = Cache((layer,), cache.clock).commit(min(new, 2))
        return kept, layer.attend(q, cache.clock)

    layer = LayerCache.filled(jnp.asarray(k[:, :seq]), jnp.asarray(v[:, :seq]), slots, window)
    cache = Cache((layer,), Clock.after(jnp.asarray(mask)))
    rows = [0, 1, 2]
    for number, begin in enumerate(range(seq, seq + MORE - new + 1, min(new, 2))):
        now = slice(begin, begin + new)
        cache, got = step(cache, *(jnp.asarray(x[rows, now]) for x in (q, k, v)))
        for row, outs in zip(rows, np.asarray(got), strict=True):
            for last, out in enumerate(outs, begin):
                first = max(padding[row], last - (window or 99) + 1)
                want = textbook(q[row], k[row], v[row], first, last)
                np.testing.assert_allclose(out, want, atol=1e-5)
        if number == 1:
            rows = [2, 0, 2]  # in another order, and one of them twice
            cache = cache.take(jnp.array(rows, jnp.int32))


def test_ring_caches_shard_rows_and_heads():
    _, k, v = (jnp.asarray(x) for x in draw(4, 2))
    rows = jnp.arange(4, dtype=jnp.int32)
    mesh = sharding.make_mesh("data=2,tensor=2")
    with sharding.use(mesh):
        place = lambda x: jax.device_put(x, jax.NamedSharding(mesh, jax.P()))
        layer = eqx.filter_jit(LayerCache.filled)(place(k), place(v), 5, 5)
        clock = Clock.after(place(jnp.ones((4, 8), bool)))
        written = eqx.filter_jit(LayerCache.write)(layer, place(k[:, :1]), place(v[:, :1]), clock)
        (taken,) = eqx.filter_jit(Cache.take)(Cache((layer,), clock), rows).layers
        for ring in jax.tree.leaves((layer, written, taken)):
            assert ring.shape == (4, 2, 5, 4)
            assert ring.addressable_shards[0].data.shape == (2, 1, 5, 4)


@pytest.mark.parametrize(("rows", "heads"), [(2, 2), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_no_step_copies_a_ring(rows: int, heads: int):
    """Which took three quarters of a step's time."""
    slots = 48
    x = jnp.zeros((rows, 1, heads, 8), jnp.float32)
    cache = Cache((LayerCache.filled(x, x, slots, slots),), Clock.after(jnp.ones((rows, 1), bool)))

    def step(_: Any, carry: tuple[Cache, jax.Array]) -> tuple[Cache, jax.Array]:
        cache, x = carry
        layer = cache.layers[0].write(x * 2, x * 3, cache.clock)
        return Cache((layer,), cache.clock).commit(1), layer.attend(x, cache.clock)

    loop = jax.jit(lambda *carry: jax.lax.fori_loop(0, 5, step, carry), donate_argnums=0)
    program = loop.lower(cache, x).compile().as_text()
    assert re.search(rf"f32\[[\d,]*{slots},8\]", program)
    assert re.findall(rf"f32\[[\d,]*{slots},8\]\S* copy\(.*", program) == []
