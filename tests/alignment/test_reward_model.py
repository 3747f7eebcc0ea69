import dataclasses
import json
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drawn_rnn, drawn_transformer, one_step
from prepared_parts import corpus_of, rows_in
from recipe_cases import write_base

import zoo
from recipes import finetune
from zoo import preferences, transformer
from zoo.alignment.reward_model import _scores
from zoo.data.tokenizer import ByteTokenizer
from zoo.runs.metrics import MetricsLog, read_metrics

GOLDEN = Path(__file__).parents[1] / "golden" / "preferences.json"
KEY = jax.random.key(0)
PAIRS = [("ab", "c", "defg"), ("h", "ijkl", "m"), ("nop", "q", "rs"), ("", "tu", "vwx")]


class KilledError(BaseException):
    pass


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
    sizes = {"vocab_size": 320, "d_model": 16, "num_heads": 2, "num_layers": 1}
    for body in (
        drawn_transformer(**sizes, **{"attention.head_dim": 8}),
        drawn_rnn("lstm", vocab_size=320, hidden_size=16, num_layers=1),
    ):
        yield zoo.Classifier(body, 1, pooling="last", key=jax.random.key(1))


@pytest.mark.slow
def test_scores_are_of_each_whole_answer_alone(batch):
    """By the classifier itself, of each example in a row of its own, with its end."""
    numbers, batch = batch
    for model in models():
        scores, seen = eqx.filter_jit(_scores)(model, batch, None), 0
        score = eqx.filter_jit(lambda model, ids, end: model(ids, mask=jnp.arange(16)[None] < end))
        for i, number in enumerate(numbers):
            for side in (0, 1) if number >= 0 else ():
                text = PAIRS[number][0] + PAIRS[number][1 + side]
                ids = [256, *text.encode(), 256]
                row = jnp.asarray([ids + [0] * (16 - len(ids))], jnp.int32)
                whole, cut = (score(model, row, len(ids) - less)[0, 0] for less in (0, 1))
                np.testing.assert_allclose(scores[i, side], whole, rtol=1e-5, atol=1e-6)
                assert abs(float(scores[i, side] - cut)) > 1e-4
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
        with pytest.raises(ValueError, match=r"zoo.Classifier\(model, 1"):
            preferences.bradley_terry(other, batch[1], None)
    with pytest.raises(ValueError, match="no 'segment_ids'"):
        preferences.bradley_terry(
            model, {name: x for name, x in batch[1].items() if name != "segment_ids"}, None
        )
    with pytest.raises(ValueError, match=r"beta=0\.2: objective='reward' has none"):
        dataclasses.replace(finetune.Config(), objective="reward", beta=0.2)


def test_a_table_of_positions_bounds_the_padding_of_an_answer(tmp_path):
    sizes = {"vocab_size": 320, "d_model": 16, "num_heads": 2, "num_layers": 1, "max_seq_len": 10}
    body = drawn_transformer(**sizes, **{"positions.kind": "learned"})
    model = zoo.Classifier(body, 1, pooling="last", key=KEY)
    zoo.save(tmp_path, model, tokenizer=ByteTokenizer())
    score = preferences.Scorer(str(tmp_path))
    ids = jnp.asarray([[256, *b"7 abc", 256]], jnp.int32)
    assert score("7 ", "abc", {}) == pytest.approx(float(model(ids)[0, 0]), rel=1e-5)


@pytest.mark.slow
def test_a_mesh_learns_the_same(batch):
    make, loss = lambda key: next(models()), preferences.bradley_terry
    wanted, gradients = one_step(make, loss, batch[1])
    found, others = one_step(make, loss, batch[1], mesh=zoo.make_mesh("data=2,tensor=2"))
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    largest = max(np.abs(x).max() for x in gradients.values())
    assert largest > 1e-2
    for path, x in gradients.items():
        np.testing.assert_allclose(x, others[path], atol=1e-5 * largest, err_msg=path)


def config_of(folder, run_dir, **fields):
    """A run on answers of letters over answers of digits, whatever the prompt."""
    write_base(folder / "base")
    path = write_pairs(folder / "pairs.jsonl", [(f"{i} ", "abc", "123") for i in range(60)])
    data = dataclasses.replace(
        finetune.Config.data, files=str(path), format="preferences", buckets=(32,), batch_size=8
    )
    optimizer = zoo.finetuning.Optimizer(learning_rate=0.01)
    return finetune.Config(
        run_dir=run_dir, model=str(folder / "base"), data=data, objective="reward",
        optimizer=optimizer, precision="fp32", compilation_cache=None, **fields,
    )  # fmt: skip


@pytest.mark.slow
def test_a_killed_run_ends_the_same(tmp_path, monkeypatch):
    fields = {"method": "full", "steps": 8, "checkpoint_every": 3, "log_every": 1}
    finetune.main(config_of(tmp_path, tmp_path / "whole", **fields))
    plain = MetricsLog.write

    def write(log, step, **metrics):
        if step == 5 and "loss" in metrics:
            raise KilledError
        plain(log, step, **metrics)

    with monkeypatch.context() as context:
        context.setattr(MetricsLog, "write", write)
        with pytest.raises(KilledError):
            finetune.main(config_of(tmp_path, tmp_path / "run", **fields))
    assert not (tmp_path / "run" / "model").exists()
    finetune.main(config_of(tmp_path, tmp_path / "run", **fields))
    losses = [
        [(x["step"], x["loss"]) for x in read_metrics(run / "metrics.jsonl") if "loss" in x]
        for run in (tmp_path / "whole", tmp_path / "run")
    ]
    assert losses[0] == losses[1]
    assert [step for step, _ in losses[0]] == [*range(1, 9)]
    found = [
        (tmp_path / run / "model" / "model.safetensors").read_bytes() for run in ("whole", "run")
    ]
    assert found[0] == found[1]


def test_a_reward_model_is_trained_saved_and_scores(tmp_path, capsys):
    config = config_of(tmp_path, tmp_path / "run", method="lora", steps=24)
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
