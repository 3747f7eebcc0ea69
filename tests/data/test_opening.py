"""Text from a prepared folder: what it agrees on with flags, and when text is prepared."""

import json
import math

import pytest
from prepared_parts import make_parts, reading

from zoo import text
from zoo.data.corpus import Corpus
from zoo.data.documents import Document, compressed_size
from zoo.data.prepared import format, opening
from zoo.data.prepared.prepare import prepare
from zoo.data.token_datasets import BucketedDataset, PackedDataset
from zoo.data.tokenizer import BPETokenizer, ByteTokenizer

DOCUMENTS = [f"a text of number {i}, of {'some ' * (i % 7)}words" for i in range(40)]
DEFAULT = text.Config(tokenizer="bpe")


def load(tmp_path, files, default=DEFAULT, label=None, **options):
    config, tokenizer_folder = reading(tmp_path, files, options)
    return text.read_text(
        config, seed=0, tokenizer_folder=tokenizer_folder, default=default, label=label
    )


@pytest.fixture
def folder(tmp_path):
    ids = [ByteTokenizer().encode(document) for document in DOCUMENTS]
    make_parts(tmp_path / "corpus", ids, vocab_size=257)
    return tmp_path / "corpus"


def test_a_folder_brings_its_tokenizer_and_fingerprint(tmp_path, folder):
    loaded = load(tmp_path, folder)
    assert isinstance(loaded.train, PackedDataset)
    assert isinstance(loaded.train.corpus, Corpus)
    assert isinstance(loaded.tokenizer, ByteTokenizer)
    assert loaded.fingerprint == format.read_manifest(folder).fingerprint
    assert (tmp_path / "run" / "tokenizer" / "tokenizer.json").is_file()
    held_out = [document for i, document in enumerate(DOCUMENTS) if i % 4 == 3]
    assert [document.text for document in loaded.held_out_documents] == held_out
    num_bytes = sum(map(len, held_out))
    bits = 2.0 / math.log(2) * (num_bytes + len(held_out)) / num_bytes
    assert loaded.bits_per_byte(2.0) == pytest.approx(bits)
    documents = [Document("", document) for document in held_out]
    assert loaded.compressors["gzip -9"] == 8 * compressed_size(documents, "gzip") / num_bytes
    bucketed = load(tmp_path, folder, rows="bucketed", buckets=(32, 64)).train
    assert isinstance(bucketed, BucketedDataset)
    assert bucketed.buckets == (32, 64)
    assert load(tmp_path, folder, rows="bucketed", cache=None).train.batches_per_epoch > 1


def test_compressors_read_a_bounded_sample(tmp_path, folder, monkeypatch):
    part = load(tmp_path, folder).held_out.corpus
    sample = opening.first_documents(part, ByteTokenizer(), 100)
    assert 100 <= sum(len(document.text) for document in sample) < 160
    assert len(sample) < len(part) == 10
    assert (
        len(opening.first_documents(part, ByteTokenizer(), 10)[0].text) == 10
    )  # of a long document


def test_flags_that_name_another_tokenizer(tmp_path, folder):
    other = BPETokenizer.train(DOCUMENTS, 300)
    other.save(tmp_path / "other")
    ByteTokenizer().save(tmp_path / "same")
    load(tmp_path, folder, tokenizer="bytes")
    load(tmp_path, folder, tokenizer=str(tmp_path / "same"))
    wrong = {
        f"data.tokenizer='{tmp_path / 'other'}' has another tokenizer .{other.vocab_size} ids. than"
        f" {folder} was prepared with .bytes, 257 ids.": {"tokenizer": str(tmp_path / "other")},
        f"data.tokenizer='bpe': {folder} was prepared with another .bytes, 257 ids.; leave the": {
            "default": None
        },
    }
    for message, options in wrong.items():
        with pytest.raises(ValueError, match=message):
            load(tmp_path, folder, **options)
    other.save(tmp_path / "run" / "tokenizer")
    with pytest.raises(ValueError, match=r"run/tokenizer has another tokenizer .\d+ ids. than"):
        load(tmp_path, folder)


def test_fields_that_differ_from_those_it_was_prepared_with(tmp_path):
    lines = "".join(json.dumps({"body": document}) + "\n" for document in DOCUMENTS)
    (tmp_path / "lines.jsonl").write_text(lines)
    options = {"tokenizer": "bpe", "vocab_size": 300, "field": "body", "held_out": 0.2}
    prepare(str(tmp_path / "lines.jsonl"), tmp_path / "corpus", workers=1, **options)
    for named in ({}, {"vocab_size": 300}, {"field": "body", "held_out": 0.2}):
        assert load(tmp_path, tmp_path / "corpus", **named).tokenizer.vocab_size == 300
    wrong = {
        "tokenizer='bytes': .* another .300 ids.": {"tokenizer": "bytes"},
        "vocab_size=999: .* with 300; leave the flag out": {"vocab_size": 999},
        "field='title': .* with 'body'": {"field": "title"},
        "held_out=0.1: .* with 0.2": {"held_out": 0.1},
    }
    for message, named in wrong.items():
        with pytest.raises(ValueError, match=f"data.{message}"):
            load(tmp_path, tmp_path / "corpus", **named)


def test_what_a_prepared_folder_has_not(tmp_path, folder):
    with pytest.raises(ValueError, match="label='topic':"):
        load(tmp_path, folder, label="topic", rows="bucketed")
    with pytest.raises(ValueError, match=r"is prepared: .* data.documents='functions'"):
        load(tmp_path, folder, documents="functions")
    (folder / format.MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"no manifest.json: .* run"):
        load(tmp_path, folder)


@pytest.fixture
def pattern(tmp_path):
    (tmp_path / "texts").mkdir()
    for i, document in enumerate(DOCUMENTS):
        (tmp_path / "texts" / f"{i}.txt").write_text(document)
    return f"{tmp_path}/texts/*.txt"


def test_too_much_text_is_to_be_prepared(tmp_path, pattern, monkeypatch):
    monkeypatch.setattr(opening, "BY_ITSELF", sum(map(len, DOCUMENTS)) - 1)
    with pytest.raises(ValueError, match="in 40 files: above 0 GiB") as error:
        load(tmp_path, pattern)
    assert str(error.value).startswith(f"data.files='{pattern}' has 0.0 GiB")
    command = f"python -m zoo prepare '{pattern}' --tokenizer bpe --vocab-size 2048 --out FOLDER"
    assert command in str(error.value)
