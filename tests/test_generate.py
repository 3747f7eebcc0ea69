"""zoo.generate: greedy is the argmax, and samples have the model's probabilities."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drawn_transformer

import zoo
from zoo.generate import sample

KEY = jax.random.key(0)
PROMPT = jnp.array([[1, 2, 3], [4, 5, 6]], jnp.int32)
PROBABILITIES = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])


@pytest.fixture(scope="module")
def model() -> Any:
    return drawn_transformer(num_layers=1)


def generate(model: Any, **options: Any) -> np.ndarray:
    return np.asarray(zoo.generate(model, PROMPT, max_new_tokens=4, **options))


@pytest.fixture(scope="module")
def greedy(model: Any) -> np.ndarray:
    return generate(model, temperature=0.0)


def test_greedy_takes_the_likeliest_token_each_time(model: Any, greedy: np.ndarray):
    tokens = PROMPT
    for _ in range(4):
        logits = eqx.filter_jit(model)(tokens)
        tokens = jnp.concatenate([tokens, logits[:, -1:].argmax(-1).astype(jnp.int32)], axis=1)
    np.testing.assert_array_equal(greedy, tokens)


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}], ids=str)
def test_sampling_from_one_token_is_greedy(model: Any, greedy: np.ndarray, options: dict):
    np.testing.assert_array_equal(generate(model, key=KEY, **options), greedy)


def test_samples_follow_the_key(model: Any):
    first, again, other = (generate(model, key=jax.random.key(k)) for k in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert (first[:, :3] == np.asarray(PROMPT)).all()
    assert first.shape == (2, 7)
    # Rows and positions draw apart.
    same = eqx.tree_at(lambda m: m.head.weight, model, jnp.zeros((32, 64)))
    drawn = generate(same, key=KEY)[:, 3:]
    assert len(set(drawn.flatten().tolist())) > 4


def test_no_new_token_is_the_prompt(model: Any):
    got = zoo.generate(model, PROMPT, max_new_tokens=0, key=KEY)
    np.testing.assert_array_equal(got, PROMPT)


def renormalised(kept: int, temperature: float = 1.0) -> np.ndarray:
    """The probabilities of the `kept` likeliest tokens, the rest being nought."""
    powers = PROBABILITIES ** (1 / temperature)
    powers = powers / powers.sum() * (np.arange(6) < kept)
    return powers / powers.sum()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, renormalised(6)),
        ({"temperature": 0.5}, renormalised(6, 0.5)),
        ({"temperature": 2.0}, renormalised(6, 2.0)),
        ({"top_k": 3}, renormalised(3)),
        ({"top_k": 99}, renormalised(6)),
        # 0.4 + 0.25 are less than 0.7, so a third token stays.
        ({"top_p": 0.7}, renormalised(3)),
        ({"top_p": 0.35}, renormalised(1)),
        ({"top_p": 1.0}, renormalised(6)),
        # Of the two that top_k leaves, the first has 0.4 / 0.65.
        ({"top_k": 2, "top_p": 0.6}, renormalised(1)),
        ({"top_k": 2, "temperature": 0.5}, renormalised(2, 0.5)),
    ],
    ids=str,
)
def test_samples_have_the_probabilities(options: dict, expected: np.ndarray):
    count, order = 20_000, np.array([3, 0, 5, 1, 4, 2])  # not sorted already
    logits = jnp.asarray(np.log(PROBABILITIES) + 7, jnp.float32)[order]
    options = {"temperature": 1.0, **options}
    draw = jax.jit(lambda key: sample(jnp.tile(logits[None], (count, 1)), key, **options))
    observed = np.bincount(order[np.asarray(draw(KEY))], minlength=6)
    assert (observed[expected == 0] == 0).all()
    wanted = count * expected[expected > 0]
    chi_square = (np.square(observed[expected > 0] - wanted) / wanted).sum()
    assert chi_square < 25  # of five degrees of freedom, one in seven thousand exceeds that


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "temperature=1.0 samples, and needs a key"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"top_p": 0.0}, "top_p=0.0 in"),
        ({"top_p": 1.5}, "top_p=1.5 in"),
        ({"prompt": PROMPT[:, :0]}, "prompt is empty"),
    ],
    ids=str,
)
def test_parameters_out_of_range_are_errors(model: Any, options: dict, message: str):
    options = {"prompt": PROMPT, "max_new_tokens": 2, **options}
    with pytest.raises(ValueError, match=message):
        zoo.generate(model, **options)
