"""zoo.evaluation.scorer: log-likelihoods and texts, beside transformers, batches and meshes."""

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evaluation_cases import GOLDEN, PAIRS, SCORES, asked, records

import zoo
from zoo.data.tokenizer import ByteTokenizer, load_tokenizer
from zoo.evaluation.harness import ZooLM
from zoo.evaluation.scorer import Scorer


def everything(streamed) -> list:
    """The results of all batches in the order of what was asked."""
    found: dict = {}
    for batch in streamed:
        assert not found.keys() & batch.keys()
        found |= batch
    return [found[at] for at in range(len(found))]


@pytest.mark.parametrize("case", ["llama3", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_scores_equal_those_of_transformers(case, caplog, monkeypatch):
    kept = []
    lm = ZooLM(zoo.load(GOLDEN / "hf" / case), load_tokenizer(GOLDEN / "scores"), batch_tokens=512)
    monkeypatch.setattr(lm.cache_hook, "add_partial", lambda *entry: kept.append(entry))
    assert lm.max_length == 64
    pairs = [(one["context"], f" {x}") for one in records("task") for x in one["choices"]]
    wanted = [score for choices in SCORES[case]["choices"] for score in choices]
    found = lm.loglikelihood(asked(*pairs))
    assert len(found) == len(wanted) > 20
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in wanted], atol=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert len([r for r in caplog.records if "its beginning is cut off" in r.message]) == 1
    texts = [(one["text"],) for one in records("text")]
    assert max(len(lm.tok_encode(text)) for (text,) in texts) > 2 * lm.max_length
    rolled = lm.loglikelihood_rolling(asked(*texts))
    np.testing.assert_allclose(rolled, SCORES[case]["texts"], atol=1e-4, rtol=1e-6)
    assert len(kept) == len(pairs) + len(texts)
    by_request = {(method, *request): result for method, request, result in kept}
    assert by_request["loglikelihood", *pairs[-1]] == found[-1]
    assert by_request["loglikelihood_rolling", *texts[0]] == rolled[0]


def totals(model, pairs, **options) -> list[float]:
    found = everything(Scorer(model, ByteTokenizer(), **options).stream(pairs))
    assert len(found) == len(pairs)
    return [total for total, _ in found]


def test_scores_depend_neither_on_batches_nor_on_the_mesh(folder, monkeypatch):
    wanted = totals(zoo.load(folder), PAIRS)
    mesh = zoo.make_mesh("data=2,fsdp=2,tensor=2")
    monkeypatch.setattr("zoo.training.losses.LOGITS_BYTES", 1)  # a token's logits at a time
    found = totals(zoo.load(folder, mesh=mesh), PAIRS, batch_tokens=64)
    np.testing.assert_allclose(found, wanted, rtol=2e-5)


def whole_scores(model, pairs) -> list[float]:
    """The sums of the log-probabilities of all continuations, by one call of the model."""
    every = [[*(context or [256]), *continuation][-49:] for context, continuation in pairs]
    tokens = np.zeros((len(every), 48), np.int32)
    for row, ids in enumerate(every):
        tokens[row, : len(ids) - 1] = ids[:-1]
    logs = np.asarray(jax.nn.log_softmax(eqx.filter_jit(model)(jnp.asarray(tokens))))
    return [
        sum(logs[row, at, ids[at + 1]] for at in range(len(ids) - 1)[-len(pair[1]) :])
        for row, (ids, pair) in enumerate(zip(every, pairs, strict=True))
    ]


def test_scores_are_those_of_whole_logits(model):
    np.testing.assert_allclose(totals(model, PAIRS), whole_scores(model, PAIRS), rtol=1e-5)
    single = everything(
        Scorer(model, ByteTokenizer()).stream([([80, 81], [i]) for i in range(264)])
    )
    assert np.exp([total for total, _ in single]).sum() == pytest.approx(1, rel=1e-4)
    likeliest = int(np.argmax([total for total, _ in single]))
    assert [i for i, (_, greedy) in enumerate(single) if greedy] == [likeliest]
    pairs = [([80, 81], [first, second]) for first in (likeliest, 5) for second in range(264)]
    found = zip(pairs, everything(Scorer(model, ByteTokenizer()).stream(pairs)), strict=True)
    assert [ids[0] for (_, ids), (_, greedy) in found if greedy] == [likeliest]


@pytest.mark.slow
def test_recurrent_scores_are_those_of_whole_logits():
    model = helpers.drawn_rnn("lstm", vocab_size=264)
    assert ZooLM(model, ByteTokenizer()).max_length == 2048
    wanted = whole_scores(model, PAIRS[:-1])
    np.testing.assert_allclose(totals(model, PAIRS[:-1]), wanted, rtol=1e-5)


@pytest.mark.slow
def test_scores_in_few_bits_are_near(folder):
    wanted = totals(zoo.load(folder), PAIRS)
    pairs = asked(("ab", "c"), ("", "defg"))
    plain = ZooLM(folder).loglikelihood(pairs)
    for options in ({"dtype": "bf16"}, {"quantize": "int8"}):
        found = totals(zoo.load(folder, **options), PAIRS)
        np.testing.assert_allclose(found, wanted, rtol=0.05)
        assert found != wanted
        lm = ZooLM(folder, **options)
        assert lm.get_model_info()["dtype"] == options.get("dtype", "fp32")
        assert lm.loglikelihood(pairs) != plain


def test_what_cannot_be_asked_is_refused(folder, model):
    lm = ZooLM(model, ByteTokenizer())
    with pytest.raises(ValueError, match=r"request 1 .* 0 tokens"):
        lm.loglikelihood(asked(("a", "b"), ("a", "")))
    with pytest.raises(ValueError, match=r"continuation of 49 tokens, and .* has 1 to 48"):
        lm.loglikelihood(asked(("a", "b" * 49)))
    with pytest.raises(ValueError, match=r"id 264: .* 0 to 263"):
        next(lm.scorer.stream([([65], [264])]))
    with pytest.raises(ValueError, match="max_new_tokens=256"):
        lm.generate_until(asked(("a", {})))
    with pytest.raises(ValueError, match="no chat template"):
        lm.apply_chat_template([{"role": "user", "content": "a"}])
    with pytest.raises(ValueError, match="tokenizer: give that of the model"):
        ZooLM(model)
    with pytest.raises(ValueError, match="dtype='bf16', quantize=None:"):
        ZooLM(model, ByteTokenizer(), dtype="bf16")
    with pytest.raises(ValueError, match=r"max_length=64 .* 1, .* 48"):
        ZooLM(folder, max_length=64)
    with pytest.raises(ValueError, match=r"mlp-digits .* tokenizer"):
        ZooLM("mlp-digits")


@pytest.mark.slow
def test_texts_depend_neither_on_the_mesh_nor_greedy_ones_on_batches(folder):
    mesh = zoo.make_mesh("data=2,fsdp=2,tensor=2")
    prompts = [context for context, _ in PAIRS]

    def texts(mesh, batch_tokens=8192, **sampling):
        scorer = Scorer(zoo.load(folder, mesh=mesh), ByteTokenizer(), batch_tokens=batch_tokens)
        return everything(scorer.stream_texts(prompts, max_new_tokens=6, **sampling))

    greedy = texts(None)
    assert texts(mesh, 64) == greedy
    assert len({*greedy}) > 1
    sampling = {"temperature": 1.0, "key": jax.random.key(1)}
    assert texts(mesh, **sampling) == texts(None, **sampling) != greedy


def test_answers_come_in_the_order_of_their_requests(model):
    greedy, long = {"until": ["\n\n"], "max_gen_toks": 4}, {"max_gen_toks": 6, "until": []}
    drawn = {"do_sample": True, "temperature": 1.0, "top_k": 40, "max_gen_toks": 6}
    requests = asked(("b", drawn), ("a", greedy), ("a", long), ("c", greedy), ("b", drawn))
    found = ZooLM(model, ByteTokenizer(), seed=3).generate_until(requests)
    scorer = Scorer(model, ByteTokenizer())
    prompts = [[256, *b"a"], [256, *b"c"]]
    texts = everything(scorer.stream_texts(prompts, max_new_tokens=4, stops=["\n\n"]))
    [text] = everything(scorer.stream_texts(prompts[:1], max_new_tokens=6))
    assert [found[1], found[3], found[2]] == [*texts, text]
    assert len({texts[0], texts[1], found[0], found[4]}) == 4  # each draws for itself
    both = [requests[0], requests[4]]
    again = ZooLM(model, ByteTokenizer(), seed=3).generate_until(both)
    other = ZooLM(model, ByteTokenizer(), seed=4).generate_until(both)
    assert again == [found[0], found[4]] != other
    stop = next(x for x in text[1:] if text.index(x) > 0)
    [ended] = ZooLM(model, ByteTokenizer()).generate_until(asked(("a", {**long, "until": stop})))
    assert ended == text[: text.index(stop)]
