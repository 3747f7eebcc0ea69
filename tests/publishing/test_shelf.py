"""The published models: whole, small, and as good as their cards say."""

import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo import tabular
from zoo.__main__ import folder_bytes
from zoo.common import checksums
from zoo.data.tokenizer import load_tokenizer

CARDS = zoo.published()


def test_mlp_rnn_and_transformer_are_published():
    assert {card.family for card in CARDS.values()} >= {"mlp", "rnn", "transformer"}
    assert sum(folder_bytes(card.folder) for card in CARDS.values()) < 24e6


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


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CARDS.keys() - {"mlp-digits"}))
def test_language_models_prefer_forward_python(name):
    tokenizer = load_tokenizer(CARDS[name].folder)
    text = "def __init__(self):\n    return None\n"

    def loss(text: str) -> float:
        ids = jnp.asarray([[tokenizer.separator_id, *tokenizer.encode(text)]], jnp.int32)
        logits = zoo.load(name, dtype="float32")(ids[:, :-1])
        chosen = jnp.take_along_axis(logits, ids[:, 1:, None], 2)[..., 0]
        log_sum = jnp.log(jnp.exp(logits).sum(-1))
        return float((log_sum - chosen).sum())

    assert loss(text) < 0.5 * loss(text[::-1])
