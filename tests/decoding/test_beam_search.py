"""zoo.decoding.beam_search against all continuations there are."""

import dataclasses
import importlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drawn_rnn, drawn_transformer, hybrid, with_config

import zoo
from zoo import sharding

VOCAB, NEW = 5, 3
PROMPTS = [[1, 2, 3], [4], [0, 4, 4, 1, 2, 3, 0]]
MODELS: dict[str, Callable[[], Any]] = {
    "transformer": lambda: drawn_transformer(
        vocab_size=VOCAB, num_layers=1, **{"attention.window": 4}
    ),
    "hybrid": lambda: drawn_transformer(vocab_size=VOCAB, **hybrid(num_layers=2)),
    "lstm": lambda: drawn_rnn("lstm", vocab_size=VOCAB, num_layers=1),
}


def brute_force(model: Any, prompt: list[int], stop: int | None) -> list[tuple[float, list[int]]]:
    """Every continuation, up to its first stop token, with its log-probability; best first."""
    whole = np.array([[*prompt, *new] for new in itertools.product(range(VOCAB), repeat=NEW)])
    logs = jax.nn.log_softmax(eqx.filter_jit(model)(jnp.asarray(whole, jnp.int32)), axis=-1)
    found = {}
    for row, row_logs in zip(whole, np.asarray(logs), strict=True):
        score, end = 0.0, len(prompt)
        while end < len(row):
            score += float(row_logs[end - 1, row[end]])
            end += 1
            if row[end - 1] == stop:
                break
        found[tuple(row[:end].tolist())] = score
    return sorted(((score, [*row]) for row, score in found.items()), reverse=True)


@pytest.mark.parametrize(("name", "stop"), [("transformer", None), ("hybrid", 2), ("lstm", 2)])
def test_wide_beam_search_matches_exhaustive_search(name: str, stop: int | None):
    """With as many beams as there are beginnings nothing is ever dropped too early."""
    model = MODELS[name]()
    num_beams, stops = VOCAB ** (NEW - 1), [] if stop is None else [stop]
    options: dict = {"max_new_tokens": NEW, "num_beams": num_beams, "stop_tokens": stops}
    tokens, scores = zoo.beam_search(model, PROMPTS, **options)
    for prompt, beams, beam_scores in zip(PROMPTS, tokens, scores, strict=True):
        best = brute_force(model, prompt, stop)[:num_beams]
        np.testing.assert_allclose(beam_scores, [score for score, _ in best], rtol=1e-4)
        assert beams == [row for _, row in best]


def test_one_beam_is_greedy():
    model = MODELS["hybrid"]()
    tokens, _ = zoo.beam_search(model, PROMPTS, max_new_tokens=12, num_beams=1)
    greedy = zoo.generate(model, PROMPTS, max_new_tokens=12, temperature=0.0)
    assert [beams[0] for beams in tokens] == greedy


def test_beams_end_at_the_model_s_own_ids():
    plain, prompt = MODELS["transformer"](), [[1, 2, 3]]
    options: dict = {"max_new_tokens": 5, "num_beams": 4}
    stop = zoo.beam_search(plain, prompt, **options)[0][0][0][4]
    config = dataclasses.replace(plain.config, eos_ids=(stop,))
    own = with_config(plain, config)
    given, _ = zoo.beam_search(plain, prompt, **options, stop_tokens=[stop])
    assert zoo.beam_search(own, prompt, **options)[0] == given
    assert any(beam[-1] == stop and len(beam) < 8 for beam in given[0])
    # An array has rows of one length, in which what follows a stop token repeats it.
    array, _ = zoo.beam_search(own, jnp.array(prompt, jnp.int32), **options)
    for beam, listed in zip(np.asarray(array)[0].tolist(), given[0], strict=True):
        assert beam == [*listed, *[stop] * (8 - len(listed))]


def test_array_prompts_give_arrays_on_any_mesh(monkeypatch: pytest.MonkeyPatch):
    from zoo.decoding import beam_search as module

    search, found = module._search, []
    monkeypatch.setattr(module, "_search", lambda *a: found.append(search(*a)) or found[-1])
    model = MODELS["transformer"]()
    prompt = jnp.array([[1, 2, 3]], jnp.int32)
    options: dict = {"max_new_tokens": 6, "num_beams": 3, "stop_tokens": [2]}
    tokens, scores = zoo.beam_search(model, prompt, **options)
    assert tokens.shape == (1, 3, 9)
    assert (tokens[:, :, :3] == prompt[:, None]).all()
    mesh = zoo.make_mesh("data=2,tensor=2")
    rules = {**sharding.RULES, "vocab": None}
    with sharding.use(zoo.Layout(mesh, rules)):
        placed = jax.device_put(model, sharding.shardings(model, mesh))
        again, same_scores = zoo.beam_search(placed, prompt, **options)
    np.testing.assert_array_equal(again, tokens)
    np.testing.assert_allclose(same_scores, scores, rtol=1e-5)
    # Every process of a mesh over several reads them.
    assert found[1].tokens.sharding.is_fully_replicated
    assert found[1].scores.sharding.is_fully_replicated


def test_surplus_beams_score_minus_infinity():
    model = MODELS["lstm"]()
    tokens, scores = zoo.beam_search(model, PROMPTS[:1], max_new_tokens=1, num_beams=VOCAB + 2)
    assert sorted(beam[-1] for beam in tokens[0][:VOCAB]) == [*range(VOCAB)]
    np.testing.assert_allclose(np.exp(scores[0]).sum(), 1, rtol=1e-5)
    assert np.isneginf(scores[0, VOCAB:]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"num_beams": 0}, "num_beams=0"), ({"length_penalty": float("nan")}, "length_penalty=nan")],
)
def test_invalid_options_of_a_search_are_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        zoo.beam_search(MODELS["lstm"](), PROMPTS, **options)


def test_zero_new_tokens_skip_the_search(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(importlib.import_module("zoo.decoding.beam_search"), "_search")
    prompt = jnp.array([[1, 2, 3], [4, 0, 1]], jnp.int32)
    tokens, scores = zoo.beam_search(MODELS["lstm"](), prompt, max_new_tokens=0, num_beams=2)
    np.testing.assert_array_equal(tokens, np.repeat(prompt[:, None], 2, axis=1))
    np.testing.assert_array_equal(scores, np.zeros((2, 2)))


GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama3"])
def test_beams_end_as_those_of_transformers(name: str):
    """The golden file is made by `golden/make_beams_golden.py`."""
    found = json.loads((GOLDEN / "beams.json").read_text())
    cases = [case for case in found if case.pop("model") == name]
    assert len({str(case["tokens"]) for case in cases}) >= 8
    model = zoo.load(GOLDEN / "hf" / name)
    for case in cases:
        prompt, tokens, wanted = (case.pop(name) for name in ("prompt", "tokens", "scores"))
        [beams], scores = zoo.beam_search(model, [prompt], max_new_tokens=9, **case)
        np.testing.assert_allclose(scores[0], wanted, atol=2e-5, err_msg=str(case))
        assert beams == [[*prompt, *new] for new in tokens], case
