"""Decoding of many layers, in a loop over stacked caches, against that of layers apart."""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drawn_transformer

import zoo
from zoo.decoding import attention
from zoo.decoding.cache import StackedCache
from zoo.decoding.decoder import decoder_of

PROMPTS = [[1, 2, 3], [4], [0, 4, 4, 1, 2, 3, 0]]
KEY = jax.random.key(0)
MODELS: dict[str, dict[str, Any]] = {
    "global": {"num_layers": 3},
    "turns": {
        "num_layers": 5,
        "attention.window": 4,
        "attention.window_pattern": ("local", "global"),
    },
    "experts": {"num_layers": 2, "experts.num_experts": 4},
}
CALLS = {
    "greedy": lambda model: zoo.generate(model, PROMPTS, max_new_tokens=9, temperature=0.0),
    "sampled": lambda model: zoo.generate(model, PROMPTS, max_new_tokens=9, key=KEY),
    "beams": lambda model: zoo.beam_search(model, PROMPTS, max_new_tokens=6, num_beams=3)[0],
    "drafted": lambda model: zoo.generate(
        model, PROMPTS, max_new_tokens=9, temperature=0.0, draft=drawn_transformer(num_layers=1)
    ),
}


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Has two layers be many, from when it is called."""

    def begin() -> None:
        monkeypatch.setattr(attention, "MOST_APART", 1)
        jax.clear_caches()  # of programs of layers apart

    yield begin
    jax.clear_caches()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("turns", "greedy"),
        *(
            pytest.param(name, call, marks=pytest.mark.slow)
            for name in MODELS
            for call in CALLS
            if (name, call) != ("turns", "greedy")
        ),
    ],
)
def test_a_loop_over_layers_gives_the_same_tokens(name: str, call: str, loop: Any):
    model = drawn_transformer(**MODELS[name])
    apart = CALLS[call](model)
    loop()
    looped = CALLS[call](model)
    found, wanted = jax.tree.leaves(looped), jax.tree.leaves(apart)
    assert [np.asarray(x).tolist() for x in found] == [np.asarray(x).tolist() for x in wanted]
    assert sum(np.size(x) for x in found) > 15


@pytest.mark.parametrize("mesh", ["fsdp=2,tensor=2"])
def test_a_loop_over_layers_on_a_mesh(mesh: str, loop: Any):
    loop()
    model, prompt = drawn_transformer(**MODELS["turns"]), jnp.ones((2, 5), jnp.int32)
    one = zoo.generate(model, prompt, max_new_tokens=6, temperature=0.0)
    placed = jax.device_put(model, zoo.sharding.shardings(model, zoo.make_mesh(mesh)))
    many = zoo.generate(placed, prompt, max_new_tokens=6, temperature=0.0)
    np.testing.assert_array_equal(one, many)


def test_a_program_of_many_layers_does_not_grow_with_them():
    mask = jnp.ones((1, 4), bool)

    def size(num_layers: int) -> int:
        decoder = decoder_of(drawn_transformer(num_layers=num_layers))

        def step(decoder: Any) -> Any:
            _, cache = decoder.prefill(jnp.ones((1, 4), jnp.int32), mask, 8)
            assert isinstance(cache.layers[0], StackedCache) == (num_layers > 96)
            return decoder.for_decoding().decode(jnp.ones(1, jnp.int32), cache)[0]

        return len(str(eqx.filter_make_jaxpr(step)(decoder)[0]))

    # But for the digits of their number.
    assert size(252) < 1.01 * size(126) < size(12)
