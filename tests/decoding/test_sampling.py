"""zoo.generate: with the cache as without it, and samples with the model's probabilities."""

import dataclasses
import functools
import importlib
import typing
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    VOCAB,
    as_subclass,
    drawn_rnn,
    drawn_transformer,
    hybrid,
    with_config,
    with_loud_mlp,
)

import zoo
from zoo import mlp, rnn, sharding
from zoo.decoding import sampling
from zoo.decoding.attention import AttentionDecoder
from zoo.decoding.decoder import decoder_of
from zoo.decoding.drawing import Sampler, Sampling, SamplingOptions, State
from zoo.nn import parameters
from zoo.nn.recurrences.mixers import MIXERS
from zoo.rnn.cells import CELLS
from zoo.runs.monitor import CompileCounter
from zoo.transformer import Transformer, blocks

KEY = jax.random.key(0)
PROMPT = jnp.array([[1, 2, 3], [4, 5, 6]], jnp.int32)
MODULE = importlib.import_module("zoo.decoding.sampling")  # `zoo.generate` is the function
PROBABILITIES = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])


DECODERS: dict[str, Callable[[], Any]] = {
    "rotary": lambda: drawn_transformer(num_layers=1),
    "grouped": lambda: drawn_transformer(
        scan_layers=False, **{"attention.num_kv_heads": 2, "attention.qk_norm": "per_head"}
    ),
    "soft caps": lambda: drawn_transformer(
        num_layers=1,
        logit_soft_cap=10.0,
        **{
            "attention.num_kv_heads": 1,
            "attention.window": 7,
            "attention.soft_cap": 5.0,
            "positions.kind": "learned",
        },
    ),
    **{
        f"hybrid {kind}": functools.partial(
            drawn_transformer,
            **hybrid(kind, num_layers=2, **{"attention.window": 5, "attention.output_gate": True}),
        )
        for kind in MIXERS
    },
    **{cell: functools.partial(drawn_rnn, cell, num_layers=1) for cell in CELLS if cell != "lstm"},
    "lstm": lambda: drawn_rnn("lstm", tie_embeddings=True, norm="rms"),
    "mlstm": functools.partial(drawn_rnn, "mlstm", num_layers=1),
}


@functools.cache
def decoder(name: str) -> Any:
    return DECODERS[name]()


@pytest.fixture(scope="module")
def model() -> Any:
    return decoder("rotary")


@eqx.filter_jit
def without_cache(model: Any, tokens: jax.Array, start: jax.Array) -> jax.Array:
    """Greedy tokens in the simplest way there is: the whole model over the whole row for each."""

    def add(position: Any, tokens: jax.Array) -> jax.Array:
        logits = jax.lax.dynamic_index_in_dim(model(tokens), position - 1, 1, keepdims=False)
        token = logits.argmax(-1).astype(jnp.int32)
        return jax.lax.dynamic_update_index_in_dim(tokens, token, position, 1)

    return jax.lax.fori_loop(start, tokens.shape[1], add, tokens)


def expected(model: Any, prompt: list[int], new: int) -> list[int]:
    tokens = jnp.asarray(np.pad([prompt], ((0, 0), (0, 40 - len(prompt)))), jnp.int32)
    return without_cache(model, tokens, jnp.int32(len(prompt)))[0, : len(prompt) + new].tolist()


def generate(model: Any, **options: Any) -> np.ndarray:
    return np.asarray(zoo.generate(model, PROMPT, **{"max_new_tokens": 4, **options}))


@pytest.fixture(scope="module")
def greedy(model: Any) -> np.ndarray:
    return generate(model, temperature=0.0)


@pytest.mark.parametrize("name", DECODERS)
def test_cached_greedy_matches_uncached_greedy(name: str):
    """For prompts of different lengths in a batch as for each alone, beyond any window."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, VOCAB, size).tolist() for size in (1, 14, 6)]
    got = zoo.generate(decoder(name), prompts, max_new_tokens=20, temperature=0.0)
    assert got == [expected(decoder(name), prompt, 20) for prompt in prompts]
    assert len({*got[1][14:]}) > 1  # no token that repeats itself


@pytest.mark.parametrize("name", ["rotary", "lstm"])
def test_bf16_picks_near_maximal_logits(name: str):
    model = parameters.cast(decoder(name), jnp.bfloat16)
    prompt = np.random.default_rng(4).integers(0, VOCAB, (2, 9)).astype(np.int32)
    tokens = zoo.generate(model, prompt, max_new_tokens=12, temperature=0.0)
    logits = np.asarray(eqx.filter_jit(model)(tokens))[:, 8:-1]
    chosen = np.take_along_axis(logits, np.asarray(tokens)[:, 9:, None], -1)[:, :, 0]
    assert (logits.max(-1) - chosen < 0.05 * logits.std()).all()
    _, cache = eqx.filter_eval_shape(decoder_of(model).prefill, tokens, tokens > -1, 32)
    if name != "lstm":
        assert {x.dtype for x in jax.tree.leaves(cache.layers)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    ("name", "axes"), [("lstm", "fsdp=2"), ("hybrid mlstm", "data=4,tensor=2")]
)
def test_mesh_generates_the_same_tokens(name: str, axes: str, monkeypatch: pytest.MonkeyPatch):
    model, prompts = decoder(name), [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    options: dict = {"max_new_tokens": 6, "stop_tokens": [3], "key": KEY}
    expected = zoo.generate(model, prompts, **options)
    advance, found = MODULE._advance, []
    monkeypatch.setattr(MODULE, "_advance", lambda *a: found.append(advance(*a)) or found[-1])
    mesh = zoo.make_mesh(axes)
    placed = jax.device_put(model, sharding.shardings(model, mesh))
    assert zoo.generate(placed, prompts, **options) == expected
    (state,) = found
    assert state.tokens.sharding.is_fully_replicated  # every process reads them
    assert state.done.sharding.is_fully_replicated
    if name != "lstm":
        keys = next(layer.keys for layer in state.cache.layers if hasattr(layer, "keys"))
        assert keys.addressable_shards[0].data.size == keys.size // mesh.size


def test_compiles_once_per_bucket():
    model = drawn_transformer(num_layers=1, d_ff=48)
    with CompileCounter() as counter:
        run = functools.partial(zoo.generate, model, temperature=0.0)
        run([[1] * 3, [2]], max_new_tokens=5)
        once = counter.compiles
        run([[1] * 16, [2]], max_new_tokens=16)
        run([[1], [2] * 9], max_new_tokens=11)
        for _ in zoo.stream(model, [[1] * 8, [2] * 8], max_new_tokens=7, temperature=0.0):
            pass
        assert counter.compiles == once
        run([[1] * 17, [2]], max_new_tokens=5)
        assert counter.compiles > once


def test_sampling_from_one_token_is_greedy(model: Any, greedy: np.ndarray):
    np.testing.assert_array_equal(generate(model, key=KEY, top_k=1), greedy)


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


def test_a_row_ends_with_its_stop_token(model: Any):
    options: dict = {"max_new_tokens": 12, "temperature": 0.0, "logprobs": True}
    whole, whole_logs = map(np.asarray, zoo.generate(model, PROMPT, **options))
    new = whole[:, 3:].tolist()
    stop = next(token for token in new[0] if token != new[0][0] and token not in new[1])
    end = new[0].index(stop) + 1
    options["stop_tokens"] = [stop]
    got, logs = map(np.asarray, zoo.generate(model, PROMPT, **options))
    np.testing.assert_array_equal(got[1], whole[1])
    assert got[0].tolist() == [*whole[0, : 3 + end], *[stop] * (12 - end)]
    np.testing.assert_allclose(logs[1], whole_logs[1], atol=1e-5)
    np.testing.assert_allclose(logs[0], [*whole_logs[0, :end], *[0] * (12 - end)], atol=1e-5)
    lists, list_logs = zoo.generate(model, np.asarray(PROMPT).tolist(), **options)
    assert lists == [whole[0, : 3 + end].tolist(), whole[1].tolist()]
    assert [len(row) for row in list_logs] == [end, 12]
    alone, alone_logs = zoo.generate(model, PROMPT[:1], **options)
    np.testing.assert_array_equal(alone, got[:1])
    np.testing.assert_allclose(alone_logs, logs[:1], atol=1e-5)


def test_a_model_stops_at_its_own_ids():
    plain = drawn_rnn("gru")
    options: dict = {"max_new_tokens": 12, "temperature": 0.0}
    whole = zoo.generate(plain, [[1, 2, 3]], **options)[0]
    stop = next(token for token in whole[3:] if token != whole[3])
    config = dataclasses.replace(plain.config, eos_ids=(VOCAB - 1, stop))
    own = with_config(plain, config)
    short = whole[: 4 + whole[3:].index(stop)]
    assert zoo.generate(own, [[1, 2, 3]], **options) == [short] != [whole]
    assert len(list(zoo.stream(own, [[1, 2, 3]], **options))) == len(short) - 3
    assert zoo.generate(own, [[1, 2, 3]], **options, stop_tokens=()) == [whole]
    other = zoo.generate(own, [[1, 2, 3]], **options, stop_tokens=[whole[3]])
    assert other == [whole[:4]]  # in place of the model's own
    array = zoo.generate(own, jnp.array([[1, 2, 3]], jnp.int32), **options)[0].tolist()
    assert array == [*short, *[stop] * (15 - len(short))]


def test_stream_yields_the_generated_tokens(model: Any):
    options: dict = {"max_new_tokens": 9, "top_p": 0.9, "temperature": 1.3, "key": KEY}
    streamed = np.stack(list(zoo.stream(model, PROMPT, **options)), axis=1)
    np.testing.assert_array_equal(streamed, generate(model, **options)[:, 3:])


def test_rows_are_sampled_independently(model: Any):
    options: dict = {"max_new_tokens": 8, "temperature": 2.0, "key": KEY}
    others = [[4] * 9, [7, 8]]
    first, second = (zoo.generate(model, [[1, 2, 3], other], **options) for other in others)
    assert first[0] == second[0]
    assert first[1][9:] != second[1][2:]


def renormalised(kept: int, power: Any = 1.0) -> np.ndarray:
    """Powers of the probabilities of the `kept` likeliest tokens, the rest being nought."""
    powers = PROBABILITIES**power * (np.arange(6) < kept)
    return powers / powers.sum()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 0.5}, renormalised(6, 2.0)),
        ({"top_k": 3}, renormalised(3)),
        ({"top_k": 99, "top_p": 1.0}, renormalised(6)),
        # 0.4 + 0.25 are less than 0.7, so a third token stays.
        ({"top_p": 0.7}, renormalised(3)),
        # Of the two that top_k leaves, the first has 0.4 / 0.65.
        ({"top_k": 2, "top_p": 0.6}, renormalised(1)),
        ({"top_k": 2, "temperature": 0.5}, renormalised(2, 2.0)),
        # 0.4 * 0.3 is less than the third probability, and more than the fourth.
        ({"min_p": 0.3}, renormalised(3)),
        ({"top_k": 2, "min_p": 0.3}, renormalised(2)),
        ({"logit_bias": {4: np.log(5.0), 0: -1e4}}, PROBABILITIES * [0, 1, 1, 1, 5, 1]),
        # Of the prompt's tokens and of new ones; all logits are negative, and so multiplied.
        ({"repetition_penalty": 2.0}, renormalised(6, np.array([2, 2, 2, 1, 1, 1]))),
    ],
    ids=str,
)
def test_sample_frequencies_match_probabilities(options: dict, expected: np.ndarray):
    count, order = 20_000, np.array([3, 0, 5, 1, 4, 2])  # not sorted already
    bias = {int(np.argsort(order)[i]): x for i, x in options.get("logit_bias", {}).items()}
    sampler = Sampler.of(Sampling(**{"temperature": 1.0, **options, "logit_bias": bias}), 6, KEY)
    logits = jnp.asarray(np.log(PROBABILITIES), jnp.float32)[order]

    @jax.jit
    def draw() -> Any:
        prompt = jnp.tile(jnp.asarray([[1, 0]], jnp.int32), (count, 1))
        seen = sampler.begin(prompt, prompt == 1, 6)  # the second is padding
        state = State(prompt, jnp.int32(1), jnp.zeros(count, bool), (), seen)
        for token in (3, 5, 5):
            token = jnp.full((count, 1), token, jnp.int32)
            state = state.append(token, jnp.zeros((count, 1, 6)), 1, jnp.zeros(0, jnp.int32))
        return sampler.draw(jnp.tile(logits[None], (count, 1)), jnp.int32(0), state.seen)

    observed = np.bincount(order[np.asarray(draw())], minlength=6)
    assert (observed[expected == 0] == 0).all()
    wanted = (count * expected / expected.sum())[expected > 0]
    chi_square = (np.square(observed[expected > 0] - wanted) / wanted).sum()
    assert chi_square < 25  # of five degrees of freedom, one in seven thousand exceeds that


def test_options_that_change_nothing_cost_nothing():
    nothing = Sampling(top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, logit_bias={})
    found, plain = (jax.tree.structure(Sampler.of(x, 6, KEY)) for x in (nothing, Sampling()))
    assert found == plain


def test_a_penalty_lowers_every_logit_of_an_earlier_token():
    sampler = Sampler.of(Sampling(temperature=0.0, repetition_penalty=2.0), 5, None)
    seen = jnp.asarray([[True, True, True, True, False]])
    found = sampler.adjusted(jnp.asarray([[-2.0, -0.5, 0.5, 2.0, 2.0]]), seen)
    assert found.tolist() == [[-4.0, -1.0, 0.25, 1.0, 2.0]]


def test_penalties_count_the_tokens_of_the_text():
    """Against a loop over the whole forward pass."""
    model, prompts = DECODERS["rotary"](), [[1, 2, 3], [5]]
    options: dict = {"max_new_tokens": 8, "temperature": 0.0, "stop_tokens": ()}
    found, logs = zoo.generate(model, prompts, repetition_penalty=1.3, logprobs=True, **options)
    assert found != zoo.generate(model, prompts, **options)
    forward = eqx.filter_jit(model)
    signs = set()
    for prompt, row, row_logs in zip(prompts, found, logs, strict=True):
        whole = jnp.asarray([row + [0] * (12 - len(row))], jnp.int32)
        for end, raw in enumerate(np.asarray(forward(whole))[0], 1):
            if not len(prompt) <= end < len(row):
                continue
            logits, earlier = raw.copy(), sorted({*row[:end]})
            logits[earlier] = np.where(raw[earlier] > 0, raw[earlier] / 1.3, raw[earlier] * 1.3)
            signs |= {*np.sign(raw[earlier]).tolist()}
            assert row[end] == logits.argmax()
            log = raw[row[end]] - np.log(np.exp(raw - raw.max()).sum()) - raw.max()
            np.testing.assert_allclose(row_logs[end - len(prompt)], log, atol=2e-5)
    assert signs == {1.0, -1.0}


@pytest.mark.usefixtures("unchecked_types")
def test_invalid_generation_arguments_are_refused(model: Any):
    for options, message in (
        ({}, "temperature=0.8 samples, and needs a key"),
        ({"key": 0}, r"key=0: must be a key of JAX; give jax\.random\.key\(0\)"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan: must be a finite"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"top_k": -1}, "top_k=-1: must be at least 1"),
        ({"top_p": 0.0}, "top_p=0.0: must be above 0"),
        ({"prompt": [[1], []]}, "prompt is empty"),
        ({"prompt": []}, "give int32"),
        ({"prompt": [np.ones(2, np.float32)]}, "prompt holds float32"),
        ({"prompt": [[1], [[2]]]}, "one prompt is a batch of one"),
        ({"prompt": [[1, VOCAB]]}, f"prompt has the id {VOCAB}: .* vocab_size={VOCAB}"),
        ({"prompt": [[1, 2**32 + 1]]}, f"prompt .*{2**32 + 1}"),
        ({"prompt": [[-1]]}, "prompt has the id -1"),
        ({"stop_tokens": [VOCAB]}, "stop_tokens has the id"),
        ({"min_p": 1.5}, "min_p=1.5: must be"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: must be positive"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias has the id"),
        ({"logit_bias": {1: float("inf")}}, r"logit_bias\[1\]=inf: must be a finite"),
    ):
        with pytest.raises(ValueError, match=message):
            zoo.generate(model, **{"prompt": PROMPT, "max_new_tokens": 2, **options})


def test_options_replace_those_of_a_sampling(model: Any):
    generate = functools.partial(zoo.generate, model, PROMPT, max_new_tokens=6, key=KEY)
    plain, other = (generate(temperature=x, stop_tokens=()).tolist() for x in (0.8, 5.0))
    assert plain != other
    sampling = zoo.Sampling(temperature=5.0, stop_tokens=[])
    assert generate(sampling=sampling).tolist() == other
    assert generate(sampling=sampling, temperature=0.8).tolist() == plain
    assert generate(stop_tokens=()).tolist() == plain  # the default temperature
    steps = zoo.stream(model, PROMPT, max_new_tokens=6, key=KEY, sampling=sampling)
    assert np.stack(list(steps), 1).tolist() == np.array(other)[:, PROMPT.shape[1] :].tolist()
    with pytest.raises(TypeError, match="temperatur"):
        generate(temperatur=0.8)  # type: ignore[call-arg]


def test_the_options_are_the_fields_of_sampling():
    assert typing.get_type_hints(SamplingOptions) == typing.get_type_hints(Sampling)
    assert Sampling(stop_tokens=range(2)).stop_tokens == (0, 1)


def test_texts_beyond_what_rotary_models_know_are_warned_of_once(caplog: Any):
    sampling._warn_of_length.cache_clear()
    model = drawn_transformer(num_layers=1, max_seq_len=8)
    options: dict = {"temperature": 0.0, "max_new_tokens": 5}
    zoo.generate(model, PROMPT, **options)
    assert not caplog.records
    for _ in range(2):
        zoo.generate(model, PROMPT, **{**options, "max_new_tokens": 6})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "max_seq_len=8" in caplog.text


def test_models_without_next_token_are_refused():
    learned = {"max_seq_len": 4, "positions.kind": "learned"}
    for model, message in (
        (drawn_transformer(num_layers=1, causal=False), "causal=False: this is an encoder"),
        (
            drawn_transformer(num_layers=1, **learned),
            "a sequence of 5 is longer than max_seq_len=4",
        ),
        (drawn_rnn("gru", bidirectional=True), "bidirectional=True"),
        (drawn_rnn("gru", pooling="last", out_size=VOCAB), "pooling='last'"),
        (drawn_rnn("gru", out_size=3), "out_size=3"),
        (mlp.MLP(mlp.Config(in_size=2, out_size=2), key=KEY), "MLP is not a decoder"),
    ):
        with pytest.raises(ValueError, match=message):
            zoo.generate(model, PROMPT, max_new_tokens=2, temperature=0.0)


class Twice(Transformer):
    """A forward pass of its own, which decoding would not go through."""

    def hidden(self, tokens: Any, **options: Any) -> Any:
        return 2 * super().hidden(tokens, **options)


class TwiceDecoded(Twice):
    """And decoding to go with it."""

    def check_decoder(self, length: int) -> None:
        AttentionDecoder(self).check_decoder(length)

    def prefill(self, *arguments: Any) -> Any:
        logits, cache = AttentionDecoder(self).prefill(*arguments)
        return 2 * logits, cache

    def for_decoding(self) -> Any:
        return AttentionDecoder(self).for_decoding().model

    def decode(self, *arguments: Any) -> Any:
        logits, cache = AttentionDecoder(self).decode(*arguments)
        return 2 * logits, cache


class Again(TwiceDecoded):
    """Another forward pass behind the decoding of the class before."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return 2 * super().__call__(*arguments, **options)


class Half(Transformer):
    """A decoder that lacks two methods."""

    def prefill(self, *arguments: Any) -> Any:
        return AttentionDecoder(self).prefill(*arguments)

    def decode(self, *arguments: Any) -> Any:
        return AttentionDecoder(self).decode(*arguments)


class Loud(rnn.RNN):
    def run(self, *arguments: Any, **options: Any) -> Any:
        outputs, state = super().run(*arguments, **options)
        return 3 * outputs, state


@pytest.mark.parametrize(
    ("name", "cls", "message"),
    [
        ("rotary", Again, "Again overrides __call__"),
        ("rotary", Twice, "Twice overrides hidden"),
        ("rotary", Half, r"Half .* check_decoder; .* check_decoder, prefill, for_"),
        ("lstm", Loud, r"Loud overrides run, .*: RecurrentDecoder"),
    ],
)
def test_overridden_forward_passes_are_refused(name: str, cls: type, message: str):
    model = as_subclass(decoder(name), cls)
    greedy = [functools.partial(x, temperature=0.0) for x in (zoo.generate, zoo.stream)]
    for run in (*greedy, zoo.beam_search):
        with pytest.raises(ValueError, match=message):
            run(model, PROMPT, max_new_tokens=2)


class Near(blocks.Attention):
    def __call__(self, x: Any, segments: Any, rotary: Any, window: Any, attend: Any) -> Any:
        return super().__call__(x, segments, rotary, 2, attend)


class Mute(blocks.Attention):
    def __call__(self, x: Any, *_: Any) -> Any:
        return x


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (
            Near,
            r"Near .* causal=True, window=2 .*, .* causal=True, window=N",
        ),
        (Mute, "Mute calls `attend` 0 times"),
    ],
)
def test_attention_incompatible_with_cache_is_refused(model: Any, cls: type, message: str):
    changed = as_subclass(model.blocks.attention, cls)
    model = eqx.tree_at(lambda model: model.blocks.attention, model, changed)
    with pytest.raises(ValueError, match=message):
        zoo.generate(model, PROMPT, max_new_tokens=2, temperature=0.0)


@pytest.mark.parametrize(
    "change",
    [with_loud_mlp, lambda model: as_subclass(model, TwiceDecoded)],
    ids=["mlp", "decoding of its own"],
)
def test_replaced_parts_are_used_in_decoding(model: Any, change: Callable[[Any], Any]):
    """The logits with the cache are those of the forward pass, and not those of the plain model."""
    changed, tokens = change(model), jnp.arange(5, 21, dtype=jnp.int32)[None]

    @eqx.filter_jit
    def decoded(model: Any) -> jax.Array:
        decoder = decoder_of(model)
        logits, cache = decoder.prefill(tokens[:, :14], tokens[:, :14] > -1, 16)
        last, _ = decoder.for_decoding().decode(tokens[:, 14], cache)
        return jnp.stack([logits, last], axis=1)

    want, plain = (eqx.filter_jit(x)(tokens)[:, 13:15] for x in (changed, model))
    np.testing.assert_allclose(decoded(changed), want, rtol=1e-4, atol=1e-4)
    assert np.abs(want - plain).max() > 0.1
    got = zoo.generate(changed, [tokens[0].tolist()], max_new_tokens=3, temperature=0.0)
    assert got == [expected(changed, tokens[0].tolist(), 3)]


def test_custom_decoders_can_generate(model: Any, greedy: np.ndarray):
    class Flipped(AttentionDecoder):
        """Prefers the tokens that the model likes least."""

        def prefill(self, *arguments: Any) -> Any:
            logits, cache = super().prefill(*arguments)
            return -logits, cache

    whole = np.asarray(eqx.filter_jit(model)(PROMPT))[:, -1]
    np.testing.assert_array_equal(generate(AttentionDecoder(model), temperature=0.0), greedy)
    flipped = generate(Flipped(model), temperature=0.0, max_new_tokens=1)
    np.testing.assert_array_equal(flipped[:, 3], whole.argmin(-1))


def test_padding_rows_do_not_delay_stopping():
    model, prompt = decoder("lstm"), [[1, 2, 3]]
    options: dict = {"max_new_tokens": 12, "temperature": 2.0, "key": KEY}
    new = zoo.generate(model, prompt, **options)[0][3:]
    stop = new[4]
    mesh = zoo.make_mesh("data=8")
    placed = jax.device_put(model, sharding.shardings(model, mesh))
    tokens = [int(x[0]) for x in zoo.stream(placed, prompt, stop_tokens=[stop], **options)]
    assert tokens == new[: new.index(stop) + 1]


@pytest.mark.usefixtures("unchecked_types")
def test_zero_new_tokens_skip_the_prefill(model: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(MODULE, "_begin")
    options: dict = {"max_new_tokens": 0, "temperature": 0.0}
    got = zoo.generate(model, np.asarray(PROMPT, np.uint64), **options)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, PROMPT)
    assert list(zoo.stream(model, PROMPT, **options)) == []
