import functools
import json
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import arrays, assert_trees_close, drawn_transformer, one_step
from jaxtyping import Array
from model_folders import write_tokenizer
from prepared_parts import corpus_of, rows_in

import zoo
from zoo import lora, losses, preferences, transformer
from zoo.alignment.pairs import PairDataset
from zoo.data.chats import ChatTemplate
from zoo.data.rows import SIDES
from zoo.data.tokenizer import ByteTokenizer, load_tokenizer
from zoo.runs.config import Config
from zoo.runs.processes import RunError
from zoo.tasks import finetuning

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eot>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZES = {"vocab_size": 320, "d_model": 16, "num_layers": 1, "num_heads": 2}


def lines(tmp_path, *records):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


def chat_template(tmp_path):
    write_tokenizer(tmp_path / "tokenizer", template=TEMPLATE)
    return ChatTemplate(load_tokenizer(tmp_path / "tokenizer"))


def no_template():
    raise AssertionError("texts need no template")


def pair_corpus(tmp_path, *pairs):
    records = [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in pairs]
    rows = rows_in(lines(tmp_path, *records), "preferences", no_template)
    assert not rows[0].form.is_chat
    return corpus_of(rows, ByteTokenizer(), "pairs.jsonl")


PAIRS = [("ab", "c", "defg"), ("h", "ijkl", "m"), ("nop", "q", "rs"), ("", "tu", "vwx")]


@pytest.fixture
def dataset(tmp_path):
    corpus = pair_corpus(tmp_path, *PAIRS)
    return PairDataset(corpus, 256, buckets=(16, 24), batch_size=4, seed=0)


def model_of():
    return drawn_transformer(**SIZES, **{"attention.head_dim": 8})


def adapted():
    model = lora.adapt(model_of(), lora.Config(rank=2), key=jax.random.key(1))
    draw = lambda x: jnp.asarray(0.1 * np.random.default_rng(2).normal(size=x.shape), x.dtype)
    ups = lambda m: [
        x.up for x in jax.tree.leaves(m, is_leaf=lora.is_adapted) if lora.is_adapted(x)
    ]
    return eqx.tree_at(ups, model, [draw(x) for x in ups(model)])


def test_a_pair_is_one_row_of_two_segments(dataset):
    batch = dataset.batch(0)
    assert dataset.buckets == (16,)
    assert dataset.batches_per_epoch == 1
    rows = {}
    for i, pair in enumerate(dataset.pairs(0)):
        prompt, *sides = PAIRS[pair]
        for segment, side in enumerate(sides, start=1):
            here = batch["segment_ids"][i] == segment
            text = bytes(batch["targets"][i][here][:-1].tolist()).decode()
            assert text == prompt + side
            assert batch["targets"][i][here][-1] == 256
            assert batch["weights"][i][here].sum() == len(side) + 1  # and its end
            assert batch["positions"][i][here].tolist() == list(range(len(text) + 1))
        rows[pair] = i
    assert sorted(rows) == [0, 1, 2, 3]
    assert not batch["weights"][batch["segment_ids"] == 0].any()


def test_long_pairs_are_refused_truncated_or_left_out(tmp_path, caplog):
    corpus = pair_corpus(
        tmp_path, ("ab", "c", "defghijk"), ("abcdefg", "hi", "jk"), ("a", "b", "c")
    )
    make = lambda too_long: PairDataset(corpus, 256, (12,), 2, 0, too_long)
    with pytest.raises(ValueError, match=r"the pair 'pairs.jsonl:1' has 15 tokens in both.*2 of 3"):
        make("error")
    with pytest.raises(ValueError, match="too_long='split':"):
        make("split")
    dataset = make("truncate")
    assert "1 of 3 pairs, 'pairs.jsonl:2' the first, have no answers that differ" in caplog.text
    batches = [dataset.batch(k) for k in range(dataset.batches_per_epoch)]
    lengths = {
        int(pair): [int((batch["segment_ids"][i] == s).sum()) for s in (1, 2)]
        for k, batch in enumerate(batches)
        for i, pair in enumerate(dataset.pairs(k))
        if pair >= 0
    }
    assert lengths == {0: [4, 8], 2: [3, 3]}  # the shorter one is whole


@pytest.mark.parametrize(
    ("ends", "targets"), [(256, ([*b"ab"], [*b"xy"])), ((None, 256), ([*b"bc"], [*b"yz"]))]
)
def test_answers_cut_to_their_first_tokens_are_of_use(ends, targets, tmp_path):
    corpus = pair_corpus(tmp_path, ("", "abcd", "xyzu"))
    batch = PairDataset(corpus, ends, (4,), 1, 0, "truncate").batch(0)
    assert batch["targets"].tolist() == [[*targets[0], *targets[1]]]
    assert batch["weights"].tolist() == [[1, 1, 1, 1]]


def test_prompts_are_given_or_common_beginnings(tmp_path):
    read = lambda record: rows_in(lines(tmp_path, record), "preferences", no_template)[0].examples
    expected = [[("to be", False), (" or not", True)], [("to be", False), (" on", True)]]
    assert read({"prompt": "to be", "chosen": " or not", "rejected": " on"}) == expected
    assert read({"chosen": "to be or not", "rejected": "to be on"}) == expected


def test_chats_are_rendered_by_the_template(tmp_path):
    template = chat_template(tmp_path)
    user, good, bad = (
        {"role": role, "content": text}
        for role, text in (("user", "hi"), ("assistant", "yes"), ("assistant", "no"))
    )
    for record in (
        {"prompt": [user], "chosen": [good], "rejected": [bad]},
        {"chosen": [user, good], "rejected": [user, bad]},
        {"prompt": "hi", "chosen": [user, good], "rejected": [user, bad]},
    ):
        [row] = rows_in(lines(tmp_path, record), "preferences", lambda: template)
        assert row.form.is_chat
        for parts, answer in zip(row.examples, ("yes", "no"), strict=True):
            assert "".join(text for text, counts in parts if counts) == f"{answer}<eot>"
            assert "".join(text for text, counts in parts if not counts).endswith("<|assistant|>")


MESSAGE = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are equal"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "'rejected' is empty"),
        ({"prompt": "a", "chosen": "b"}, r"'preferences' .*'chosen', 'prompt'"),
        ({"prompt": 1, "chosen": "b", "rejected": "c"}, "field 'prompt'"),
        ({"chosen": "b", "rejected": "c"}, "no common beginning"),
        ({"chosen": [ANSWER], "rejected": [MESSAGE]}, "no common beginning"),
        ({"prompt": "x", "chosen": [MESSAGE, ANSWER], "rejected": [MESSAGE, MESSAGE]}, "'x'"),
        ({"chosen": [MESSAGE, ANSWER], "rejected": [MESSAGE, MESSAGE]}, "roles .'user'."),
        ({"prompt": [MESSAGE], "chosen": [ANSWER], "rejected": []}, "'rejected' is empty"),
        ({"prompt": [MESSAGE], "chosen": [ANSWER], "rejected": "c"}, "no list of messages"),
        ({"prompt": [MESSAGE], "chosen": [ANSWER], "rejected": [{"role": "x"}]}, "'content'"),
    ],
)
def test_bad_lines_are_refused_by_their_place(tmp_path, record, message):
    fine = {"prompt": "a", "chosen": "b", "rejected": "c"}
    if isinstance(record["chosen"], list):
        fine = {"chosen": [MESSAGE, ANSWER], "rejected": [MESSAGE, {**ANSWER, "content": "c"}]}
        if "prompt" in record:
            fine["prompt"] = "a"
    elif "prompt" not in record:
        fine = {"chosen": "a b", "rejected": "a c"}
    path = lines(tmp_path, fine, record)
    template = chat_template(tmp_path)
    with pytest.raises(ValueError, match=rf"pairs\.jsonl.*2.*{message}"):
        rows_in(path, "preferences", lambda: template)


def test_texts_and_chats_do_not_mix(tmp_path):
    fine = {"prompt": "a", "chosen": "b", "rejected": "c"}
    path = lines(tmp_path, fine, {"chosen": [ANSWER], "rejected": [MESSAGE]})
    with pytest.raises(ValueError, match=r"line 2: .*first row's texts"):
        rows_in(path, "preferences", no_template)


def test_numbers_out_of_range_are_refused():
    for make, name, value in (
        (preferences.dpo, "beta", 0.0),
        (preferences.orpo, "beta", -1.0),
        (preferences.dpo, "label_smoothing", 0.5),
        (preferences.simpo, "gamma", -1.0),
        (functools.partial(preferences.apo, "zero"), "beta", 0.0),
        (preferences.ipo, "beta", -1.0),
        (preferences.kto, "undesirable_weight", -1.0),
    ):
        with pytest.raises(ValueError, match=f"{name}={value}: must"):
            make(**{name: value})
    with pytest.raises(ValueError, match="accumulate=2:"):
        zoo.make_train_step(preferences.kto(), optax.sgd(0.1), accumulate=2)


def test_configurations_that_do_not_go_together_are_refused():
    def make(format="preferences", **fields):
        data = finetuning.Data(format=format)
        return preferences.Config(run_dir="x", steps=1, data=data, **fields)

    for fields in (
        {"objective": "orpo", "beta": 0.2},
        {"label_smoothing": 0.1},
        {"format": "text"},
        {"objective": "simpo", "beta": 2.0, "gamma": 1.0},
        {"objective": "apo_zero"},
        {"format": "unpaired", "objective": "kto", "desirable_weight": 2.0},
    ):
        make(**fields)
    for fields, message in (
        ({"beta": 0.0}, "beta=0.0: must be positive"),
        (
            {"objective": "orpo", "label_smoothing": 0.1},
            "label_smoothing=0.1: objective='orpo' has none",
        ),
        ({"gamma": 1.0}, "gamma=1.0: objective='dpo' has none"),
        (
            {"format": "text", "beta": 0.2},
            r"beta=0.2: only data.format='preferences' \(now 'text'\)",
        ),
        ({"format": "unpaired"}, "data.format='unpaired': objective='dpo' needs pairs; give obj"),
        ({"objective": "kto"}, "objective='kto': only data.format='unpaired'"),
        ({"desirable_weight": 2.0}, "desirable_weight=2.0: objective='dpo' has none"),
        (
            {"format": "unpaired", "objective": "kto", "accumulate": 2},
            "accumulate=2: objective='kto' has a mean",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make(**fields)


class Given(eqx.Module):
    """Of two tokens the first has a given probability at each place, whatever the tokens are."""

    log_probs: Array

    def __call__(self, tokens, **options):
        return jnp.stack([self.log_probs, jnp.log1p(-jnp.exp(self.log_probs))], axis=-1)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("dpo", preferences.dpo),
        ("ipo", preferences.ipo),
        ("apo_zero", functools.partial(preferences.apo, "zero")),
        ("apo_down", functools.partial(preferences.apo, "down")),
        ("simpo", preferences.simpo),
        ("kto", preferences.kto),
    ],
)
def test_losses_are_those_of_trl(name, make):
    """Numbers of `golden/make_preferences_golden.py`, which are TRL's, and a row of padding."""
    golden = json.loads((Path(__file__).parents[1] / "golden" / "preferences.json").read_text())
    width = max(len(chosen) + len(rejected) for chosen, rejected in golden["tokens"]) + 2
    log_probs, gradient = np.full((4, width), -1.0, np.float32), np.zeros((4, width))
    weights, segments = np.zeros((4, width), np.float32), np.zeros((4, width), np.int32)
    for row, pair in enumerate(golden["tokens"]):
        place = 0
        for side, answer in enumerate(pair):
            segments[row, place : place + 1 + len(answer)] = side + 1  # and a prompt's token
            here = slice(place + 1, place + 1 + len(answer))
            log_probs[row, here], weights[row, here] = answer, 1
            gradient[row, here] = golden["gradients"][name][row][side]
            place += 1 + len(answer)
    zeros = np.zeros((4, width), np.int32)
    batch = {"tokens": zeros, "targets": zeros, "weights": weights, "segment_ids": segments}
    reference = np.asarray([*golden["reference"], [0, 0]], np.float32)
    batch |= {"positions": zeros, "reference": reference}
    options = {"gamma": golden["gamma"]} if name == "simpo" else {}
    if name == "kto":
        batch["labels"] = np.asarray([*golden["labels"], 0], np.int32)
        options = dict(
            zip(("desirable_weight", "undesirable_weight"), golden["weights"], strict=True)
        )
    loss = make(beta=golden["beta"], **options)

    def mean(model):
        total, weight, _ = loss(model, jax.tree.map(jnp.asarray, batch), None)
        return total / weight

    value, found = jax.value_and_grad(mean)(Given(jnp.asarray(log_probs)))
    assert float(value) == pytest.approx(golden["losses"][name], rel=1e-5)
    assert np.abs(gradient).max() > 0.01
    np.testing.assert_allclose(found.log_probs, gradient, rtol=1e-4, atol=1e-7)


def test_a_missing_reference_is_refused(dataset):
    batch, model = jax.tree.map(jnp.asarray, dataset.batch(0)), model_of()
    with pytest.raises(ValueError, match="no 'reference':"):
        eqx.filter_eval_shape(preferences.dpo(), model, batch, None)
    with pytest.raises(ValueError, match="the model has none: adapt it"):
        eqx.filter_eval_shape(preferences.dpo(reference="base"), model, batch, None)
    with pytest.raises(ValueError, match="labels"):
        eqx.filter_eval_shape(preferences.kto(reference="base"), adapted(), batch, None)


@pytest.mark.slow
def test_loss_over_a_base_is_that_of_its_log_probabilities(dataset, monkeypatch):
    """In chunks as at once, whose loss is compared by hand below."""
    model, options = adapted(), {"beta": 0.5, "label_smoothing": 0.2}
    batch = {name: jnp.asarray(x) for name, x in dataset.batch(0).items()}
    given = {"reference": preferences.log_probabilities(model_of(), batch)}
    params, rest = eqx.partition(model, lora.trainable(model))

    def value_of(loss, batch):
        total = lambda params: loss(eqx.combine(params, rest), batch, None)[0]
        with jax.default_matmul_precision("highest"):
            return jax.jit(jax.value_and_grad(total))(params)

    wanted = value_of(preferences.dpo(**options), batch | given)
    monkeypatch.setattr(losses, "LOGITS_BYTES", 4 * 4 * 320 * 4)
    assert losses.num_chunks(jax.ShapeDtypeStruct((4, 16, 320), jnp.float32)) > 1
    found = value_of(preferences.dpo(**options, reference="base"), batch)
    assert len(arrays(wanted)) > 4
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(wanted[1])) > 1e-2
    assert_trees_close(found, wanted, rtol=3e-6, atol=3e-6)


class Head(eqx.Module):
    weight: Array

    def __call__(self, x):
        return x @ self.weight


class Bigram(eqx.Module):
    """Logits that are a product."""

    table: Array
    weight: Array

    def hidden(self, tokens, **options):
        return self.table[tokens]

    def readout(self):
        return Head(self.weight)


# Two pairs, the first with a token of padding, and a row without any; prompts have no weight.
HAND = {
    "tokens": [[0, 1, 0, 2, 3, 0], [4, 4, 1, 4, 3, 3], [0] * 6],
    "targets": [[1, 2, 2, 3, 4, 0], [4, 1, 0, 3, 2, 4], [0] * 6],
    "weights": [[0, 1, 0, 1, 1, 0], [1, 1, 1, 0, 1, 0.5], [0] * 6],
    "segment_ids": [[1, 1, 2, 2, 2, 0], [1, 1, 1, 2, 2, 2], [0] * 6],
    "positions": [[0, 1, 0, 1, 2, 0], [0, 1, 2, 0, 1, 2], [0] * 6],
    "reference": [[-1.5, -2.0], [-19.0, -4.0], [0, 0]],
}
FLOATS = ("weights", "reference")


def by_hand(kind, table, weight):
    """Loss and metrics of HAND, one pair after another, in float64."""
    total, metrics = 0.0, dict.fromkeys(("accuracy", "margin", *SIDES), 0.0)
    for pair in range(2):
        row = {name: np.asarray(x[pair]) for name, x in HAND.items()}
        logits = table[row["tokens"]] @ weight
        chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        of_tokens = np.log(chances[np.arange(6), row["targets"]]) * row["weights"]
        chosen, rejected = (of_tokens[row["segment_ids"] == side].sum() for side in (1, 2))
        if kind == "dpo":
            margin = 0.5 * ((chosen - row["reference"][0]) - (rejected - row["reference"][1]))
            right = 1 / (1 + np.exp(-margin))
            total += -0.8 * np.log(right) - 0.2 * np.log(1 - right)
        else:
            counts = [row["weights"][row["segment_ids"] == side].sum() for side in (1, 2)]
            p, other = np.exp(chosen / counts[0]), np.exp(rejected / counts[1])
            odds = (p / (1 - p)) / (other / (1 - other))
            margin = np.log(odds)
            total += -np.log(p) - 0.3 * np.log(odds / (1 + odds))
        for name, x in zip(metrics, (margin > 0, margin, chosen, rejected), strict=True):
            metrics[name] += x
    return total, metrics


@pytest.mark.parametrize(("kind", "limit"), [("dpo", 2**29), ("orpo", 1)])  # in chunks
def test_loss_gradient_and_metrics_are_those_by_hand(kind, limit, monkeypatch):
    monkeypatch.setattr(losses, "LOGITS_BYTES", limit)
    rng = np.random.default_rng(123)  # of margins on both sides of 0, and likely tokens and not
    arrays = [rng.normal(size=(5, 3)), 3 * rng.normal(size=(3, 5))]
    options = {"beta": 0.5, "label_smoothing": 0.2} if kind == "dpo" else {"beta": 0.3}
    loss = getattr(preferences, kind)(**options)
    model = Bigram(*(jnp.asarray(x, jnp.float32) for x in arrays))
    batch = {
        name: jnp.asarray(x, jnp.float32 if name in FLOATS else jnp.int32)
        for name, x in HAND.items()
    }
    run = jax.jit(jax.value_and_grad(lambda model: loss(model, batch, None)[0]))
    total, gradient = run(model)
    expected, metrics = by_hand(kind, *arrays)
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    for i, found in enumerate((gradient.table, gradient.weight)):
        for place in np.ndindex(found.shape):
            ends = []
            for step in (1e-5, -1e-5):
                moved = [x.copy() for x in arrays]
                moved[i][place] += step
                ends.append(by_hand(kind, *moved)[0])
            assert float(found[place]) == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-4)
    with jax.debug_nans(True):  # and none in what is not chosen
        _, weight, found = loss(model, batch, None)
    assert float(weight) == 2
    assert metrics["accuracy"] == 1
    names = ("accuracy", "margin", "chosen_log_prob", "rejected_log_prob")
    assert {*found} == {*names}
    np.testing.assert_allclose([found[name] for name in names], [*metrics.values()], rtol=1e-5)
    log_probs = np.asarray(preferences.log_probabilities(model, batch))
    assert log_probs.shape == (3, 2)
    np.testing.assert_allclose(log_probs.sum(0), [metrics[side] for side in SIDES], rtol=1e-5)
    assert not log_probs[2].any()


def test_references_are_by_pair_and_finite(tmp_path):
    """The last pair has no answer within the row, and is left out."""
    corpus = pair_corpus(tmp_path, *PAIRS, ("abcdefghijklmno", "xy", "z"))
    dataset = PairDataset(corpus, 256, (16, 24), 3, 0, "truncate")
    assert np.concatenate([dataset.pairs(0), dataset.pairs(1)]).tolist() != [0, 1, 2, 3, -1, -1]
    rng = np.random.default_rng(0)
    table, weight = rng.normal(size=(257, 3)), rng.normal(size=(3, 257))
    wanted = np.full((5, 2), np.nan)
    for place in np.ndindex(4, 2):
        prompt, answer = PAIRS[place[0]][0], PAIRS[place[0]][1 + place[1]]
        ids = np.array([256, *(prompt + answer).encode(), 256])
        chances = np.exp(table[ids[:-1]] @ weight)
        chances /= chances.sum(1, keepdims=True)
        wanted[place] = np.log(chances[np.arange(len(ids) - 1), ids[1:]])[len(prompt) :].sum()
    of = lambda run, *arrays: preferences.reference_log_probabilities(
        run, Bigram(*(jnp.asarray(x, jnp.float32) for x in arrays)), dataset
    )
    config = Config(run_dir=tmp_path / "run", steps=1, precision="fp32", compilation_cache=None)
    with zoo.Run(config) as run:
        np.testing.assert_allclose(of(run, table, weight), wanted, rtol=1e-5)
        table[ord("q")] = np.nan  # in the chosen answer of the third pair alone
        with pytest.raises(RunError, match=r"pair 'pairs.jsonl:3' .* fp32"):
            of(run, table, weight)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_steps_do_not_depend_on_mesh_microbatches_and_padding(kind, tmp_path):
    corpus = pair_corpus(tmp_path, *PAIRS, ("x", "yz", "w"))
    labels = np.asarray([1, 0, 0, 1, 1])
    make = lambda buckets, rows: PairDataset(corpus, 256, buckets, rows, 0).with_labels(labels)
    loss = getattr(preferences, kind)(reference="base")
    batch = make((16,), 8).batch(0)
    assert (batch["segment_ids"] == 2).any(1).sum() == 5
    run = lambda batch, **options: one_step(
        lambda key: adapted(), loss, batch, trainable=lora.trainable, **options
    )
    expected, gradients = run(batch)
    assert expected["tokens"] == 5
    assert expected["grad_norm"] > 1e-3
    for other, options in (
        (batch, {"mesh": zoo.make_mesh("data=2,fsdp=2,tensor=2"), "accumulate": 2}),
        (make((32,), 5).batch(0), {}),
    ):
        if kind == "kto":  # of whole batches alone
            options.pop("accumulate", None)
        found, theirs = run(other, **options)
        for name in expected.keys() - {"skipped"}:
            assert found[name] == pytest.approx(expected[name], rel=2e-5, abs=1e-6), name
        for path, gradient in gradients.items():
            np.testing.assert_allclose(theirs[path], gradient, atol=4e-6, err_msg=path)


@pytest.mark.slow
def test_adapters_need_one_base(dataset):
    """Neither the state nor the step has a second copy of it."""
    config = transformer.Config(320, d_model=256, num_layers=1, num_heads=4)
    make_base = lambda key: transformer.Transformer(config, key=key)
    make_policy = lambda key: lora.adapt(make_base(key), lora.Config(rank=2), key=key)

    def needed(loss):
        optimizer, trainable = optax.sgd(0.1), {"trainable": lora.trainable}
        state = zoo.init_state(make_policy, optimizer, key=jax.random.key(0), **trainable)
        step = zoo.make_train_step(loss, optimizer, precision="fp32", **trainable)
        stats = step.lower(state, dataset.batch(0)).compiled.memory_analysis()
        return stats.argument_size_in_bytes, stats.temp_size_in_bytes

    skeleton = eqx.filter_eval_shape(make_base, jax.random.key(0))
    base = sum(4 * x.size for x in jax.tree.leaves(skeleton))
    arguments, temporaries = needed(preferences.dpo(reference="base"))
    _, plain = needed(losses.next_token)
    assert base < arguments < 1.2 * base
    assert temporaries < 1.01 * plain
