import ast
import hashlib
import json
import os
import shutil

import numpy as np
import pytest
from prepared_parts import reading

from zoo import text
from zoo.data import documents as documents_of
from zoo.data.corpus import Corpus
from zoo.data.prepared import opening
from zoo.data.token_datasets import BucketedDataset, PackedDataset
from zoo.data.tokenizer import ByteTokenizer

WORDS = ("north", "east", "south", "west")


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text(
            " ".join(WORDS[(i + j) % 4] for j in range(3 + i % 5)) + f" {i}é"
        )
    return folder


def load(corpus, seed=0, label=None, **options):
    """A corpus as a run loads it, beside it: there it keeps the tokenizer."""
    options = {"tokenizer": "bytes", "cache": None} | options
    files = f"{corpus}/*.txt" if corpus.is_dir() else corpus
    config, tokenizer_folder = reading(corpus.parent, files, options)
    return text.read_text(config, seed=seed, tokenizer_folder=tokenizer_folder, label=label)


def test_split_covers_all_documents(corpus):
    loaded = load(corpus, held_out=0.2)
    sizes = [len(path.read_bytes()) for path in corpus.iterdir()]
    assert loaded.train.corpus.num_bytes + loaded.held_out.corpus.num_bytes == sum(sizes)
    held_out = {text for path in corpus.iterdir() if by_hash(text := path.read_text()) < 0.2}
    assert 1 < len(held_out) < 14
    assert {document.text for document in loaded.held_out_documents} == held_out
    assert len(loaded.held_out.corpus) == len(held_out)
    dataset = loaded.held_out
    decoded = {loaded.tokenizer.decode(dataset.corpus[i]) for i in range(len(dataset.corpus))}
    assert decoded == held_out


def test_seed_changes_only_the_order(corpus):
    one, two = load(corpus, seed=1), load(corpus, seed=2)
    assert (one.train.batch(0)["tokens"] != two.train.batch(0)["tokens"]).any()
    assert one.fingerprint == two.fingerprint


def test_fingerprint_covers_all_text(corpus):
    before = load(corpus).fingerprint
    assert load(corpus, cache=corpus.parent / "cache").fingerprint == before
    assert load(corpus, cache=corpus.parent / "cache").fingerprint == before  # out of the cache
    path = corpus / "7.txt"
    original = path.read_text()
    path.write_text(original.replace("e", "o", 1))
    assert load(corpus).fingerprint != before
    path.write_text(original)
    assert load(corpus).fingerprint == before
    # The same tokens in all, with a document's end elsewhere.
    (corpus / "7.txt").write_text(original[:-3])
    (corpus / "8.txt").write_text(original[-3:] + (corpus / "8.txt").read_text())
    assert load(corpus).fingerprint != before


class Framed(ByteTokenizer):
    """Bytes with a begin and an end of their own, or no begin."""

    vocab_size = 259
    separator_id = begin_id = bos_id = 257
    eos_ids = (258, 256)


class NoBegin(Framed):
    separator_id, begin_id, bos_id = 258, None, None


@pytest.mark.parametrize("kind", [PackedDataset, BucketedDataset])
def test_documents_begin_and_end_as_their_tokenizer_says(kind, corpus):
    ids = [np.frombuffer(path.read_bytes(), np.uint8) for path in sorted(corpus.iterdir())]
    stored = Corpus.from_arrays(ids, 259, num_bytes=sum(map(len, ids)))
    found = {}
    for tokenizer in (ByteTokenizer(), Framed(), NoBegin()):
        ends = tokenizer.begin_id, tokenizer.eos_ids[0]
        dataset = kind(stored, ends, 16 if kind is PackedDataset else (32, 64), 4, 0)
        batches = [dataset.batch(k) for k in range(dataset.batches_per_epoch)]
        kept = [(batch, batch["weights"] > 0) for batch in batches]
        tokens = np.concatenate([batch["tokens"][used] for batch, used in kept])
        targets = np.concatenate([batch["targets"][used] for batch, used in kept])
        assert (targets == tokenizer.eos_ids[0]).sum() == len(stored)
        if tokenizer.begin_id is None:
            assert len(targets) == stored.num_tokens
            assert tokens.max() < 256
        else:
            assert (tokens == tokenizer.begin_id).sum() == len(stored)
            assert len(targets) == stored.num_tokens + len(stored)
        found[type(tokenizer)] = text.Text(tokenizer, dataset, dataset)
    assert len({loaded.train.fingerprint for loaded in found.values()}) == 3
    # A begin is free; without one the first byte, which has no loss, costs as much as the others.
    assert len({loaded.bits_per_byte(1.0) for loaded in found.values()}) == 1


def test_vocabulary_size_is_rounded_up(corpus):
    loaded = load(corpus)
    assert loaded.vocab_size() == 320  # 257 and more
    assert loaded.vocab_size(at_least=64) == 320
    assert loaded.vocab_size(at_least=512) == 512


def test_tokenizer_survives_corpus_changes(corpus):
    first = load(corpus, tokenizer="bpe", vocab_size=280)
    for path in corpus.iterdir():
        path.write_text("something else entirely " * 4)
    second = load(corpus, tokenizer="bpe", vocab_size=280)
    assert second.tokenizer.encode("north").tolist() == first.tokenizer.encode("north").tolist()
    shutil.rmtree(corpus.parent / "run")
    third = load(corpus, tokenizer="bpe", vocab_size=280)
    assert third.tokenizer.encode("north").tolist() != first.tokenizer.encode("north").tolist()


def test_a_second_run_finds_the_text(corpus, tmp_path, monkeypatch):
    """However small it is, it is tokenized once, and its tokenizer trained once."""
    options = {"tokenizer": "bpe", "vocab_size": 280}
    folder = corpus.parent / "run" / "tokenizer"
    alone, plain = load(corpus, **options), (folder / "tokenizer.json").read_bytes()
    calls, prepare = [], opening.prepare

    def counted(*args, **named):
        calls.append(args)
        return prepare(*args, **named)

    monkeypatch.setattr(opening, "prepare", counted)
    for _ in range(2):
        shutil.rmtree(folder)
        cached = load(corpus, cache=tmp_path / "cache", **options)
        assert cached.fingerprint == alone.fingerprint
        assert (folder / "tokenizer.json").read_bytes() == plain
    assert len(calls) == 1
    shutil.rmtree(folder)
    load(corpus, cache=tmp_path / "cache", tokenizer="bpe", vocab_size=281)
    shutil.rmtree(folder)
    path = corpus / "3.txt"  # of the same size, at another time
    path.write_text(path.read_text().replace("north", "forth"))
    os.utime(path, (1, 1))
    assert load(corpus, cache=tmp_path / "cache", **options).fingerprint != alone.fingerprint
    assert len(calls) == 3


def test_the_only_document_is_cut(tmp_path, caplog):
    """Whatever its form, and however many copies there are of it."""
    whole = "".join(f"line {i} of a long text: é\n" for i in range(200))
    (tmp_path / "a.txt").write_text(whole)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": whole}) + "\n" + '{"text": ""}')
    for files in ("a.txt", "b.jsonl", "?.*"):
        cache = tmp_path / "cache"
        loaded = load(tmp_path / files, tokenizer="bpe", vocab_size=280, held_out=0.1, cache=cache)
        train, held_out = loaded.train.corpus, loaded.held_out.corpus
        assert (len(train), len(held_out)) == (1, 1)
        cut = len(whole) - round(0.1 * len(whole))
        assert loaded.tokenizer.decode(train[0]) == whole[:cut]
        assert loaded.tokenizer.decode(held_out[0]) == whole[cut:]
        assert held_out.num_bytes == len(whole[cut:].encode())
        assert "its last 10% is held out" in caplog.text
        caplog.clear()
    (tmp_path / "c.txt").write_text("x")
    with pytest.raises(ValueError, match="1 characters: too few"):
        load(tmp_path / "c.txt").train  # noqa: B018


def test_the_built_in_text_is_held_out_by_its_names(tmp_path):
    """So that published numbers stay; copies and empty files are kept."""
    names = [f"{i}.py" for i in range(60)]
    documents = [
        documents_of.Document(name, f"def f(): return {i % 3}") for i, name in enumerate(names)
    ] + [documents_of.Document("empty.py", "")]
    held = {name for name in [*names, "empty.py"] if by_hash(name) < 0.2}
    for kind in ("files", "functions"):
        config = text.Config(held_out=0.2, documents=kind, cache=tmp_path / "cache")
        found = opening.open_text(config, config, "bytes", built_in=lambda: documents)
        train, held_out = found.train, found.held_out
        names = {held_out.name(i).strip("'").partition(":")[0] for i in range(len(held_out))}
        assert names == held - ({"empty.py"} if kind == "functions" else set())
        assert len(train) + len(held_out) == 60 + (kind == "files")


def by_hash(key):
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big") / 2**48


def test_bpe_never_sees_held_out_text(corpus):
    loaded = load(corpus, tokenizer="bpe", vocab_size=300, held_out=0.2)
    name = ast.literal_eval(loaded.held_out_documents[0].name)
    texts = ("qqqq " * n for n in range(50, 100))  # of which a hash holds out the one
    held_out = next(t for t in texts if hashlib.sha256(t.encode()).digest()[0] < 0.2 * 255)
    (corpus / name).write_text(held_out)
    shutil.rmtree(corpus.parent / "run")
    again = load(corpus, tokenizer="bpe", vocab_size=300, held_out=0.2)
    assert again.tokenizer.encode("qqqq").size == 4


def labelled(tmp_path, kinds, lines=None, **options):
    tmp_path.mkdir(exist_ok=True)
    rows = [f'{{"text": "{kind} {i}", "kind": "{kind}"}}' for i, kind in enumerate(kinds)]
    (tmp_path / "rows.jsonl").write_text(lines or "\n".join(rows))
    options = {"rows": "bucketed", "buckets": (16,)} | options
    return load(tmp_path / "rows.jsonl", label="kind", **options)


def test_labels_become_sorted_classes(tmp_path):
    loaded = labelled(tmp_path, ["north", "east"] * 30)
    assert loaded.classes == ("east", "north")
    batch = loaded.train.batch(0)
    for tokens, label in zip(batch["inputs"], batch["labels"], strict=True):
        assert loaded.tokenizer.decode(tokens[tokens > 0]).find(loaded.classes[label]) >= 0
    path = tmp_path / "rows.jsonl"
    lines = path.read_text().replace('"kind": "north"', '"kind": "east"', 1)
    changed = labelled(tmp_path, ["north", "east"] * 30, lines=lines)
    assert changed.fingerprint != loaded.fingerprint


def test_unusable_labels_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"label='kind' .* \['x'\]"):
        labelled(tmp_path / "one", ["x"] * 20)
    with pytest.raises(ValueError, match="are among the held-out rows alone"):
        labelled(tmp_path / "many", [f"kind{i}" for i in range(40)], held_out=0.3)
    with pytest.raises(ValueError, match=r"needs data\.rows='bucketed' \(now 'packed'\)"):
        labelled(tmp_path / "packed", ["x", "y"] * 20, rows="packed")


def test_functions_are_split_by_their_file(tmp_path):
    for i in range(20):
        functions = "".join(f"def f{i}_{j}(): pass\n" for j in range(3))
        (tmp_path / f"{i}.py").write_text(functions)
    read = lambda: load(tmp_path / "*.py", documents="functions", held_out=0.2)
    loaded = read()
    names = [document.name.strip("'").partition(":")[0] for document in loaded.held_out_documents]
    assert {names.count(name) for name in names} == {3}
    assert len(loaded.train.corpus) == 60 - len(names)
    # One that all files have is held out alone.
    for path in tmp_path.glob("*.py"):
        path.write_text(path.read_text() + "def same(): pass\n")
    again = read()
    held_out = {document.text for document in again.held_out_documents}
    assert "def same(): pass\n" in held_out
    corpus = again.train.corpus
    assert len(corpus) > 20
    assert not held_out & {again.tokenizer.decode(corpus[i]) for i in range(len(corpus))}
    for i, path in enumerate(tmp_path.glob("*.py")):
        path.write_text(f"x = {i}")
    with pytest.raises(ValueError, match="0 different documents with a token"):
        read()
