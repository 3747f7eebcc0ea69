import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from prepared_parts import corpus_of, rows_in
from recipe_cases import write_base

import zoo
from recipes import finetune
from zoo import preferences, rnn, transformer
from zoo.alignment.reward_model import _scores
from zoo.data.tokenizer import ByteTokenizer
from zoo.runs.metrics import read_metrics

GOLDEN = Path(__file__).parents[1] / "golden" / "preferences.json"
KEY = jax.random.key(0)
PAIRS = [("ab", "c", "defg"), ("h", "ijkl", "m"), ("nop", "q", "rs"), ("", "tu", "vwx")]


def write_pairs(path, pairs):
    names = ("prompt", "chosen", "rejected")
    path.write_text("\n".join(json.dumps(dict(zip(names, x, strict=True))) for x in pairs))
    return path


@pytest.fixture
def batch(tmp_path):
    """Four pairs, and two rows of padding."""
    rows = rows_in(str(write_pairs(tmp_path / "pairs.jsonl", PAIRS)), "preferences", None)
    corpus = corpus_of(rows, ByteTokenizer(), "pairs.jsonl")
    found = zoo.PairDataset(corpus, 256, buckets=(16,), batch_size=6, seed=0)
    return found.pairs(0), {name: jnp.asarray(x) for name, x in found.batch(0).items()}


def models():
    config = transformer.Config(320, d_model=16, num_layers=2, num_heads=2)
    for body in (
        transformer.Transformer(config, key=KEY),
        rnn.RNN(rnn.Config(320, hidden_size=16, num_layers=1), key=KEY),
    ):
        yield zoo.Classifier(body, 1, pooling="last", key=jax.random.key(1))


@pytest.mark.slow
def test_scores_are_of_each_whole_answer_alone(batch):
    """By the classifier itself, of each example in a row of its own, with its end."""
    numbers, batch = batch
    for model in models():
        scores, seen = _scores(model, batch, None), 0
        for i, number in enumerate(numbers):
            for side in (0, 1) if number >= 0 else ():
                text = PAIRS[number][0] + PAIRS[number][1 + side]
                ids = jnp.asarray([[256, *text.encode(), 256]], jnp.int32)
                np.testing.assert_allclose(scores[i, side], model(ids)[0, 0], rtol=1e-5, atol=1e-6)
                assert abs(float(scores[i, side] - model(ids[:, :-1])[0, 0])) > 1e-4
                seen += 1
        assert seen == 8


def test_the_loss_is_that_of_trl(batch, monkeypatch):
    """Of given scores, whose loss is TRL's; padding counts nothing."""
    golden, (numbers, batch) = json.loads(GOLDEN.read_text()), batch
    given = np.zeros((6, 2), np.float32)
    given[numbers >= 0] = golden["scores"]
    monkeypatch.setattr("zoo.alignment.reward_model._scores", lambda *_: jnp.asarray(given))
    total, weight, metrics = preferences.bradley_terry(next(models()), batch, None)
    assert float(weight) == 4
    np.testing.assert_allclose(total / weight, golden["losses"]["reward"], rtol=1e-6)
    margins = given[numbers >= 0] @ [1, -1]
    np.testing.assert_allclose(metrics["margin"], margins.sum(), rtol=1e-6)
    assert float(metrics["accuracy"]) == (margins > 0).sum()
    assert 0 < (margins > 0).sum() < 4


def test_other_models_and_batches_are_refused(batch):
    model = next(models())
    two = zoo.Classifier(model.body, 2, key=KEY)
    for other in (two, transformer.Transformer(model.config, key=KEY)):
        with pytest.raises(ValueError, match=r"a reward model is a zoo.Classifier\(model, 1"):
            preferences.bradley_terry(other, batch[1], None)
    with pytest.raises(ValueError, match="no 'segment_ids'"):
        preferences.bradley_terry(
            model, {name: x for name, x in batch[1].items() if name != "segment_ids"}, None
        )
    with pytest.raises(ValueError, match=r"beta=0\.2: objective='reward' has none"):
        dataclasses.replace(finetune.Config(), objective="reward", beta=0.2)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_reward_model_is_trained_saved_and_scores(method, tmp_path, capsys):
    """Answers of letters over answers of digits, whatever the prompt."""
    write_base(tmp_path / "base")
    path = write_pairs(tmp_path / "pairs.jsonl", [(f"{i} ", "abc", "123") for i in range(60)])
    data = dataclasses.replace(
        finetune.Config.data, files=str(path), format="preferences", buckets=(32,), batch_size=8
    )
    optimizer = zoo.finetuning.Optimizer(learning_rate=0.01)
    config = finetune.Config(
        run_dir=tmp_path / "run", model=str(tmp_path / "base"), method=method, data=data,
        objective="reward", optimizer=optimizer, steps=24, precision="fp32", compilation_cache=None,
    )  # fmt: skip
    finetune.main(config)
    evaluated = [x for x in read_metrics(tmp_path / "run" / "metrics.jsonl") if "eval_loss" in x]
    assert evaluated[-1]["eval_loss"] < 0.5 * evaluated[0]["eval_loss"]
    assert evaluated[-1]["eval_accuracy"] == 1
    assert "the reward model is in" in capsys.readouterr().out
    model = zoo.load(tmp_path / "run" / "model")
    assert isinstance(model, zoo.Classifier)
    assert not zoo.lora.has_adapters(model)
    score = preferences.Scorer(str(tmp_path / "run" / "model"))
    ids = jnp.asarray([[256, *b"7 abc", 256]], jnp.int32)
    assert score("7 ", "abc", {}) == pytest.approx(float(model(ids)[0, 0]), rel=1e-5)
    assert score("7 ", "abc", {}) > 1 + score("7 ", "123", {})
