"""zoo.decoding.speculative against plain decoding: greedy tokens, distributions, caches."""

import collections
import itertools
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drawn_rnn, drawn_transformer, hybrid
from jaxtyping import Array

import zoo
from zoo.decoding.decoder import decoder_of
from zoo.decoding.drawing import Sampler, Sampling, State
from zoo.decoding.sampling import Rows, _begin
from zoo.decoding.speculative import Draft, draft_and_judge, extend, read
from zoo.nn.recurrences.mixers import MIXERS

VOCAB = 7
PROMPTS = [[1, 2, 3], [4], [0, 4, 4, 1, 2, 3, 0]]
KEY = jax.random.key(0)


def model_of(name: str) -> Any:
    if name == "transformer":
        return drawn_transformer(vocab_size=VOCAB, num_layers=2, **{"attention.window": 4})
    if name == "unwindowed":
        return drawn_transformer(vocab_size=VOCAB, num_layers=2)
    if name in MIXERS:
        return drawn_transformer(vocab_size=VOCAB, **hybrid(name, num_layers=2))
    return drawn_rnn(name, vocab_size=VOCAB, num_layers=1)


def near(model: Any, scale: float) -> Any:
    """A draft that resembles a model: its arrays a little off."""
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    leaves, tree = jax.tree.flatten(arrays)
    rng = np.random.default_rng(5)
    noisy = [x + jnp.asarray(scale * rng.normal(size=x.shape), x.dtype) for x in leaves]
    return eqx.combine(jax.tree.unflatten(tree, noisy), rest)


@pytest.mark.parametrize(
    "name", ["transformer", "lstm", "mlstm", pytest.param("gated_deltanet", marks=pytest.mark.slow)]
)
def test_tokens_read_at_once_equal_those_read_one_by_one(name: str):
    decoder = decoder_of(model_of(name))
    tokens = jnp.asarray([[1, 2, 3, 4, 5, 6], [0, 0, 2, 2, 1, 3]], jnp.int32)
    mask = jnp.asarray([[True] * 6, [False] * 2 + [True] * 4])
    new = jnp.asarray([[3, 1, 4], [6, 0, 2]], jnp.int32)

    @eqx.filter_jit
    def run(decoder: Any) -> tuple[Any, ...]:
        _, cache = read(decoder, tokens, mask, 16, Draft(decoder, 4))
        decoder = decoder.for_decoding()
        logits, pending = extend(decoder, new, cache)
        ones, caches = [], [cache]
        for place in range(3):
            one, cache = decoder.decode(new[:, place], caches[-1])
            ones.append(one)
            caches.append(cache)
        kept = [pending.commit(jnp.int32(count)) for count in range(1, 4)]
        # What the model reads next, behind those kept of them.
        after = lambda cache: extend(decoder, new[:, ::-1], cache)[0]
        return logits, jnp.stack(ones, 1), [*map(after, kept)], [*map(after, caches[1:])]

    logits, ones, kept, wanted = run(decoder)
    np.testing.assert_allclose(logits, ones, atol=2e-5)
    np.testing.assert_allclose(kept, wanted, atol=2e-5)
    assert min(np.ptp(ones), np.ptp(wanted)) > 0.1


@pytest.mark.parametrize(
    "names",
    [("lstm", "transformer"), pytest.param(("transformer", "lstm"), marks=pytest.mark.slow)],
    ids=str,
)
def test_greedy_tokens_are_those_of_the_model(names: tuple[str, str]):
    model = model_of(names[0])
    options: dict = {"max_new_tokens": 17, "temperature": 0.0}  # which just fill a cache of 32
    plain, logs = zoo.generate(model, PROMPTS, logprobs=True, **options)
    # One that agrees now and then, and one that always does.
    for draft in (near(model_of(names[1]), 0.5), near(model, 0.0)):
        draft_options = {**options, "draft": draft, "draft_tokens": 3}
        tokens, found = zoo.generate(model, PROMPTS, logprobs=True, **draft_options)
        assert tokens == plain
        for row, wanted in zip(found, logs, strict=True):
            np.testing.assert_allclose(row, wanted, atol=2e-5)
        assert np.array(list(zoo.stream(model, PROMPTS, **draft_options))).T.tolist() == [
            row[len(ids) :] for row, ids in zip(plain, PROMPTS, strict=True)
        ]


def test_a_cache_has_room_for_drafts_beyond_the_last_token():
    model = model_of("unwindowed")
    lengths = [Rows(model, [[1, 2]], 17, (), *draft).length for draft in ((), (model, 3))]
    assert lengths == [32, 64]


def test_rows_end_with_their_stop_tokens():
    model = model_of("lstm")
    options: dict = {"max_new_tokens": 21, "temperature": 0.0, "stop_tokens": [2, 5]}
    plain = zoo.generate(model, PROMPTS, **options)
    assert len({len(row) - len(ids) for row, ids in zip(plain, PROMPTS, strict=True)}) > 1
    assert zoo.generate(model, PROMPTS, draft=near(model, 0.3), **options) == plain


def probabilities_of(
    logits: Any,
    temperature: float,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    logit_bias: Mapping[int, float] = MappingProxyType({}),
) -> np.ndarray:
    """The distribution of sampling, token by token, in float64."""
    logits = np.array(logits, np.float64)
    for token, bias in logit_bias.items():
        logits[..., token] += bias
    found = np.empty_like(logits)
    for place in np.ndindex(logits.shape[:-1]):
        p = np.exp(logits[place] / temperature)
        order = np.argsort(-p)[:top_k]
        share = p[order] / p[order].sum()
        order = order[: 1 + np.flatnonzero(np.cumsum(share) >= top_p - 1e-12)[0]]
        order = [token for token in order if p[token] >= min_p * p.max()]
        found[place] = 0
        found[place][order] = p[order] / p[order].sum()
    return found


def assert_distributed(counts: collections.Counter, expected: dict[Any, float]) -> None:
    """By chi-squared, where what is rare is one outcome."""
    rows = sum(counts.values())
    assert sum(expected.values()) == pytest.approx(1, abs=1e-4)
    assert not [t for t in counts if expected[t] == 0]
    large = [t for t, p in expected.items() if p * rows >= 5]
    assert len(large) > 6
    observed = np.array([counts[t] for t in large])
    wanted = rows * np.array([expected[t] for t in large])
    if rows - wanted.sum() >= 5:  # the rare ones
        observed = np.append(observed, rows - observed.sum())
        wanted = np.append(wanted, rows - wanted.sum())
    chi_square = (np.square(observed - wanted) / wanted).sum()
    # Of n degrees of freedom: the mean n, and five standard deviations of sqrt(2 n).
    assert chi_square < len(large) + 5 * np.sqrt(2 * len(large))


class Trigram(eqx.Module):
    """A decoder whose next token depends on the two before it, of which the cache is the first."""

    logits: Array

    @property
    def config(self) -> Any:
        return SimpleNamespace(vocab_size=self.logits.shape[-1])

    def check_decoder(self, length: int) -> None:
        pass

    def prefill(self, tokens: Array, mask: Array, length: int) -> tuple[Array, Array]:
        return self.decode(tokens[:, -1], tokens[:, -2])

    def for_decoding(self) -> "Trigram":
        return self

    def decode(self, tokens: Array, cache: Array) -> tuple[Array, Array]:
        return self.logits[cache, tokens], tokens


def trigram(seed: int, vocab: int = VOCAB) -> Trigram:
    return Trigram(1.5 * jax.random.normal(jax.random.key(seed), (vocab,) * 3))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8},
        {"temperature": 1.5, "top_k": 3},
        {"temperature": 1.5, "min_p": 0.1, "top_p": 0.95, "logit_bias": {3: 1.0, 1: -0.5}},
    ],
    ids=str,
)
def test_kept_and_redrawn_tokens_have_the_distribution_of_the_model(options: dict):
    """Of three tokens behind 0 and 1, in two rows of 20,000 runs."""
    model, draft, runs = trigram(0, 4), Draft(trigram(1, 4), 2), 20000

    def run(key: Array) -> Array:
        sampler = Sampler.of(Sampling(**options), 4, key)
        before, empty = jnp.zeros(2, jnp.int32), jnp.zeros((2, 10), jnp.int32)
        state = State(
            empty.at[:, 0].set(1),
            jnp.int32(1),
            before > 0,
            before,
            draft_cache=before,
            steps=jnp.int32(0),
        )
        for _ in range(3):  # a token each, at least
            state = draft_and_judge(model, draft, sampler, jnp.zeros(0, jnp.int32), state)
        return state.tokens[:, 1:4]

    found = jax.jit(jax.vmap(run))(jax.random.split(KEY, runs))
    counts = collections.Counter(map(tuple, found.reshape(-1, 3).tolist()))
    p, expected = probabilities_of(model.logits, **options), {}
    for a, b, c in itertools.product(range(4), repeat=3):
        expected[a, b, c] = p[0, 1, a] * p[1, a, b] * p[a, b, c]
    assert_distributed(counts, expected)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("drafted", "steps"), [(1, 10), (3, 5)])
def test_all_tokens_of_a_draft_that_is_the_model_are_kept(
    temperature: float, drafted: int, steps: int
):
    rows = Rows(trigram(0), PROMPTS, 21, (), trigram(0), drafted)
    sampler = Sampler.of(Sampling(temperature=temperature), VOCAB, KEY)
    state, proceed = _begin(rows, sampler)
    state = proceed(state, 21)  # the first token is the prompt's, and a step adds one to its draft
    assert (int(state.count), int(state.steps)) == (21, steps)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_tokens": 0}, r"draft_tokens=0 .* 1"),
        ({"repetition_penalty": 1.2}, r"draft .* repetition_penalty"),
        ({"draft": 9}, r"vocab_size=9 .* 7"),
    ],
    ids=str,
)
def test_drafts_that_do_not_fit_are_refused(options: dict, message: str):
    model = model_of("lstm")
    draft = drawn_rnn("lstm", vocab_size=options.pop("draft", VOCAB), num_layers=1)
    with pytest.raises(ValueError, match=message):
        zoo.generate(model, PROMPTS, **{"draft": draft, "temperature": 0.0, **options})
