"""Evaluation of language models on tasks: scores, task files, metrics, results that resume."""

import json
from pathlib import Path

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.data.tokenizer import ByteTokenizer, load_tokenizer
from zoo.tasks.evaluation.scorer import LogLikelihood, Scorer, encode_pair

GOLDEN = Path(__file__).parent / "golden"
SCORES = json.loads((GOLDEN / "scores" / "scores.json").read_text())
QUICK = ("gpt2", "llama3")


def records(name: str) -> list[dict]:
    lines = (GOLDEN / "scores" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def cases() -> list:
    assert set(QUICK) <= SCORES.keys()
    return [
        pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow)
        for case in sorted(SCORES)
    ]


# --- Scores -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases())
def test_scores_equal_those_of_transformers(case, caplog):
    tokenizer = load_tokenizer(GOLDEN / "scores")
    scorer = Scorer(zoo.load(GOLDEN / "hf" / case), tokenizer, batch_tokens=512)
    assert scorer.max_length == 64
    task = records("task")
    pairs = [
        encode_pair(tokenizer, one["context"], f" {choice}")
        for one in task
        for choice in one["choices"]
    ]
    wanted = [score for choices in SCORES[case]["choices"] for score in choices]
    found = scorer.log_likelihoods(pairs)
    assert len(found) == len(wanted) > 20
    np.testing.assert_allclose([x.total for x in found], [x for x, _ in wanted], atol=1e-4)
    assert [x.greedy for x in found] == [greedy for _, greedy in wanted]
    assert [x.num_tokens for x in found] == [len(continuation) for _, continuation in pairs]
    assert len([r for r in caplog.records if "the beginning of its context" in r.message]) == 1
    texts = [tokenizer.encode(one["text"]).tolist() for one in records("text")]
    assert max(map(len, texts)) > 2 * scorer.max_length
    rolled = scorer.rolling(texts)
    np.testing.assert_allclose(
        [x.total for x in rolled], SCORES[case]["texts"], atol=1e-4, rtol=1e-6
    )
    assert [x.num_tokens for x in rolled] == [len(ids) for ids in texts]
