"""The published models: whole, small, and as good as their cards say."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo import tabular
from zoo.__main__ import folder_bytes
from zoo.alignment.puzzles import puzzles, right
from zoo.common import checksums
from zoo.data.tokenizer import load_tokenizer

CARDS = zoo.published()


def test_mlp_rnn_and_transformer_are_published():
    assert {card.family for card in CARDS.values()} >= {"mlp", "rnn", "transformer"}
    assert sum(folder_bytes(card.folder) for card in CARDS.values()) < 26e6


@pytest.mark.parametrize("name", CARDS)
def test_published_models_are_whole_and_documented(name):
    assert not checksums.problems(CARDS[name].folder)
    for word in ("Data:", "Command: `python -m recipes.", "Hardware", "Held out:", "Licence:"):
        assert word in CARDS[name].text
    assert zoo.load(name) is not None


def test_digits_accuracy_matches_the_card():
    pytest.importorskip("sklearn")
    held_out = tabular.read_table(tabular.Config(), seed=0).held_out.arrays
    logits = zoo.load("mlp-digits")(jnp.asarray(held_out["inputs"]))
    accuracy = np.mean(np.asarray(logits).argmax(1) == held_out["labels"])
    assert accuracy == pytest.approx(CARDS["mlp-digits"].metrics["eval_accuracy"])
    assert accuracy > 0.98


@pytest.mark.parametrize("name", sorted(CARDS.keys() - {"mlp-digits"}))
def test_language_models_know_the_ids_that_end_a_text(name):
    separator = load_tokenizer(CARDS[name].folder).separator_id
    assert zoo.load(name).config.eos_ids == (separator,)


def test_puzzles_are_solved_as_the_card_says():
    """Of 96 prompts an answer each, by the likeliest tokens: about as many as pass@1 of all."""
    model, tokenizer = zoo.load("puzzles"), load_tokenizer(CARDS["puzzles"].folder)
    rows = list(itertools.islice(puzzles(), 96))
    prompts = [[tokenizer.separator_id, *tokenizer.encode(row["prompt"]).tolist()] for row in rows]
    found = zoo.generate(model, prompts, max_new_tokens=20, temperature=0.0, stop_tokens=(256,))
    solved = []
    for row, prompt, ids in zip(rows, prompts, found, strict=True):
        answer = tokenizer.decode([x for x in ids[len(prompt) :] if x != 256])
        solved += right(row["prompt"], answer, row).values()
    assert 0.3 < np.mean(solved) < 0.8
    assert CARDS["puzzles"].metrics["pass@1"] == pytest.approx(np.mean(solved), abs=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CARDS.keys() - {"mlp-digits", "puzzles"}))
def test_language_models_prefer_forward_python(name):
    tokenizer = load_tokenizer(CARDS[name].folder)
    text = "def __init__(self):\n    return None\n"
    rows = [[tokenizer.separator_id, *tokenizer.encode(x)] for x in (text, text[::-1])]
    ids = np.zeros((2, max(map(len, rows))), np.int32)  # what is behind a row is not seen
    for row, found in zip(ids, rows, strict=True):
        row[: len(found)] = found
    logits = eqx.filter_jit(zoo.load(name, dtype="float32"))(jnp.asarray(ids[:, :-1]))
    logs = np.asarray(jax.nn.log_softmax(logits))
    losses = -np.take_along_axis(logs, ids[:, 1:, None], 2)[:, :, 0]
    forward, backward = (x[: len(row) - 1].sum() for x, row in zip(losses, rows, strict=True))
    assert forward < 0.5 * backward
