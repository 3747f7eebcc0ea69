"""Text from a prepared folder: what it agrees on with flags, and when text is prepared."""

import math

import numpy as np
import pytest
from prepared_parts import make_parts

from zoo import text
from zoo.data.documents import Document, compressed_size
from zoo.data.prepared import agreement, choice, format
from zoo.data.prepared.plans import PreparedBucketPlan, PreparedPackedPlan
from zoo.data.token_plans import PackedPlan
from zoo.data.tokenizer import BPETokenizer, ByteTokenizer

DOCUMENTS = [f"a text of number {i}, of {'some ' * (i % 7)}words" for i in range(40)]
DEFAULT = text.Config(tokenizer="bpe")


def load(tmp_path, files, default=DEFAULT, label=None, **options):
    def tokenizer_folder(make):
        kept = tmp_path / "run" / "tokenizer"
        if not kept.exists():
            make(kept)
        return kept

    (tmp_path / "run").mkdir(exist_ok=True)
    given = {"seq_len": 16, "batch_size": 4, "tokenizer": "bpe", "cache": tmp_path / "cache"}
    config = text.Config(files=str(files), **(given | options))
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
    assert isinstance(loaded.train, PreparedPackedPlan)
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
    assert isinstance(bucketed, PreparedBucketPlan)
    assert bucketed.buckets == (32, 64)
    assert load(tmp_path, folder, rows="bucketed", cache=None).train.batches_per_epoch > 1


def test_compressors_read_a_bounded_sample(tmp_path, folder, monkeypatch):
    part = load(tmp_path, folder).held_out.corpus
    sample = agreement.Sample(part, ByteTokenizer(), 100)
    assert 100 <= sum(len(document.text) for document in sample) < 160
    assert len(sample) < len(part) == 10
    assert len(agreement.Sample(part, ByteTokenizer(), 10)[0].text) == 10  # of a long document


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


def test_a_size_that_is_not_the_prepared_vocabulary(tmp_path, folder):
    prepared = load(tmp_path, folder).prepared
    tokenizer = BPETokenizer.train(DOCUMENTS, 300)
    trained = text.Prepared(folder, prepared.manifest, tokenizer, prepared.train, prepared.held_out)
    agreement.check_named_tokenizer(trained, "bpe", tokenizer.vocab_size)
    agreement.check_named_tokenizer(trained, "bpe", None)
    with pytest.raises(
        ValueError, match=r"data.vocab_size=999: .* prepared with another .\d+ ids.; leave"
    ):
        agreement.check_named_tokenizer(trained, "bpe", 999)
    with pytest.raises(ValueError, match=r"data.tokenizer='bytes': .* leave the flag out, or"):
        agreement.check_named_tokenizer(trained, "bytes", None)


def test_what_a_prepared_folder_has_not(tmp_path, folder):
    with pytest.raises(ValueError, match="is prepared: it has whole documents without labels"):
        load(tmp_path, folder, label="topic", rows="bucketed")
    with pytest.raises(ValueError, match=r"is prepared: .* data.documents='functions'"):
        load(tmp_path, folder, documents="functions")
    (folder / format.MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"has shards and no manifest.json: .* run the same"):
        load(tmp_path, folder)


def test_small_text_is_read_into_memory_and_what_is_too_large_is_refused(tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    for i, document in enumerate(DOCUMENTS):
        (tmp_path / "texts" / f"{i}.txt").write_text(document)
    pattern, size = f"{tmp_path}/texts/*.txt", sum(map(len, DOCUMENTS))
    monkeypatch.setattr(choice, "IN_MEMORY", size)
    assert isinstance(load(tmp_path, pattern).train, PackedPlan)
    monkeypatch.setattr(choice, "BY_ITSELF", size - 1)
    with pytest.raises(ValueError, match=r"in 40 files: .* python -m zoo prepare '.*' --out") as e:
        load(tmp_path, pattern)
    assert str(e.value).startswith(f"data.files='{pattern}' has 0.0 GiB")
    assert isinstance(load(tmp_path, pattern, documents="functions").train, PackedPlan)


def test_batches_of_a_run_that_resumes(tmp_path, folder):
    first, second = load(tmp_path, folder), load(tmp_path, folder)
    for k in (7, 3, 100):
        one, other = first.train.batch(k), second.train.batch(k)
        for name, array in one.items():
            np.testing.assert_array_equal(array, other[name])
