"""Models of the tests of evaluation."""

import datasets
import helpers
import pytest

import zoo
from zoo.data.tokenizer import ByteTokenizer


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.fixture(scope="module")
def model():
    return helpers.drawn_transformer(vocab_size=264, max_seq_len=48, num_layers=1)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> str:
    """A small model that reads bytes."""
    folder = tmp_path_factory.mktemp("models") / "bytes"
    zoo.save(folder, model, tokenizer=ByteTokenizer())
    return str(folder)
