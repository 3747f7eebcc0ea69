"""Encoders that fill in hidden tokens; on a mesh in tests/runs/test_multiprocess.py."""

import re
from itertools import chain

import jax.numpy as jnp
import numpy as np
import pytest
import tyro
from recipe_cases import losses

import zoo
from recipes import lm
from zoo.data.masking import with_mask
from zoo.data.tokenizer import load_tokenizer
from zoo.runs.metrics import read_metrics

FLAGS = (
    "--objective=masked",
    "--mask-rate=0.2",
    "--model.no-causal",
    "--model.num-layers=1",
    "--model.d-model=32",
    "--model.num-heads=2",
    "--data.seq-len=32",
    "--data.batch-size=8",
    "--data.vocab-size=300",
    "--steps=6",
    "--log-every=1",
    "--eval-every=3",
    "--precision=fp32",
    "--optimizer.name=adamw",
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(40):
        words = " ".join(f"{'abcdefgh'[(i * j) % 8] * 3}{j % 7}" for j in range(60))
        (folder / f"{i}.txt").write_text(words)
    return f"--data={folder}/*.txt", f"--data.cache={folder}/cache"


def train(folder, corpus, *flags):
    lm.main(tyro.cli(lm.Config, args=[*FLAGS, *corpus, f"--run-dir={folder}", *flags]))
    return losses(folder)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--model.causal", "model.causal=True"),
        ("--objective=next_token", r"mask=.*objective='next_token'"),
        ("--sample-every=2", "sample_every=2"),
    ],
)
def test_what_does_not_go_together_is_refused(flags, said, corpus, tmp_path, capsys):
    with pytest.raises(SystemExit):
        train(tmp_path, corpus, flags)
    assert re.search(said, " ".join(capsys.readouterr().err.split()))


def test_bytes_and_mixtures_have_no_mask(corpus, tmp_path):
    with pytest.raises(ValueError, match=r"data.tokenizer='bytes'"):
        train(tmp_path / "bytes", corpus, "--data.tokenizer=bytes")
    with pytest.raises(ValueError, match=r"data.files='a="):
        train(tmp_path / "mixture", corpus, f"--data=a={corpus[0].partition('=')[2]}")


def test_masks_of_a_sentence_are_filled(corpus, tmp_path, capsys, no_curves):
    """By an encoder with experts, whose load is in the loss."""
    experts = ("--model.experts.num-experts=2", "--router-z=0.01")
    assert train(tmp_path / "run", corpus, *experts).keys() == {*range(1, 7)}
    found = {*chain.from_iterable(read_metrics(tmp_path / "run" / "metrics.jsonl"))}
    assert {"balance", "router_z"} <= found
    said = capsys.readouterr().out
    assert "nats per hidden token" in said
    shown = (tmp_path / "run" / "fillings.txt").read_text()
    assert "[" in shown
    assert said.rpartition("fillings.txt beside it:\n\n")[2].startswith(shown)
    folder = tmp_path / "run" / "model"
    model, tokenizer = zoo.load(folder), zoo.masked.tokenizer_of(str(folder))
    mask = tokenizer.tokens["mask_token"]
    assert with_mask(load_tokenizer(folder))[1] == tokenizer.vocab_size - 1
    found = zoo.masked.fill(model, tokenizer, f"aaa1 {mask} ccc{mask}", top=3)
    ids = tokenizer.tokenizer.encode(f"aaa1 {mask} ccc{mask}").ids
    logits = np.asarray(model(jnp.asarray([ids])))[0]
    places = [i for i, id in enumerate(ids) if tokenizer.tokenizer.id_to_token(id) == mask]
    assert len(found) == len(places) == 2
    for place, likeliest in zip(places, found, strict=True):
        shares = np.exp(logits[place] - logits[place].max())
        want = np.sort(shares / shares.sum())[::-1][:3]
        np.testing.assert_allclose([share for _, share in likeliest], want, rtol=1e-3)
    with pytest.raises(ValueError, match="text='aaa1': has no"):
        zoo.masked.fill(model, tokenizer, "aaa1")
