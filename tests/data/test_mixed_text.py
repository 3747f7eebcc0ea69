"""Mixtures of prepared folders, here and at addresses, beside text: tokenizers, limits, epochs."""

import functools
import hashlib
import itertools

import numpy as np
import pytest
from prepared_parts import make_parts, reading
from stores import proxy
from test_splits import web, write_parquet

from zoo import text
from zoo.common.files import AddressError
from zoo.data import mixed_text as mixed
from zoo.data.mixed_text import read_mixture
from zoo.data.prepared import format, hashes, opening
from zoo.data.prepared.prepare import prepare
from zoo.data.tokenizer import BPETokenizer, ByteTokenizer

__all__ = ["web"]

DEFAULT = text.Config(tokenizer="bpe")


def some(name, count=40):
    return [f"{name} {i}, of {'some ' * (i % 7)}words" for i in range(count)]


def load(tmp_path, files, steps=10, **options):
    config, tokenizer_folder = reading(tmp_path, files, options)
    return read_mixture(
        config, steps=steps, seed=0, tokenizer_folder=tokenizer_folder, default=DEFAULT
    )


@pytest.fixture
def folder(tmp_path):
    documents = [ByteTokenizer().encode(one) for one in some("prepared")]
    make_parts(tmp_path / "corpus", documents, vocab_size=257)
    return tmp_path / "corpus"


@pytest.fixture
def pattern(tmp_path):
    (tmp_path / "texts").mkdir()
    for i, document in enumerate(some("plain")):
        (tmp_path / "texts" / f"{i}.txt").write_text(document)
    return f"{tmp_path}/texts/*.txt"


def texts_of(data, name):
    """All documents of a source, by part."""
    source = data.sources[name]
    return [
        [data.tokenizer.decode(corpus[i]) for i in range(len(corpus))]
        for corpus in (source.train.corpus, source.held_out.corpus)
    ]


def all_of(data, name):
    return sorted(itertools.chain(*texts_of(data, name)))


def table(tmp_path, folder, **keys):
    lines = "".join(f"{key} = {value}\n" for key, value in keys.items())
    path = tmp_path / "mixture.toml"
    path.write_text(f'[sources.code]\nfiles = "{folder}"\n{lines}')
    return path


def test_a_prepared_folder_beside_text_gives_its_tokenizer(tmp_path, folder, pattern):
    data = load(tmp_path, f"code={folder}:0.7,help={pattern}:0.3")
    assert isinstance(data.tokenizer, ByteTokenizer)
    assert all_of(data, "code") == sorted(some("prepared"))
    assert all_of(data, "help") == sorted(some("plain"))
    assert data.sources["code"].fingerprint == format.read_manifest(folder).fingerprint
    rows = np.concatenate([data.train.batch(k)["source"] for k in range(10)])
    assert np.count_nonzero(rows[:40] == 0) == 28


def test_sources_of_toml_files_are_no_table(tmp_path):
    parsed = mixed.parse("code=src/*.py,conf=conf/*.toml")
    assert [source.name for source in parsed.sources] == ["code", "conf"]
    (table := tmp_path / "mixture.toml").write_text('[sources.code]\nfiles = "*.py"\nname = "docs"')
    with pytest.raises(ValueError, match=r"no field sources\.code\.name"):
        mixed.parse(str(table))


def test_tokenizers_have_to_agree(tmp_path, folder, pattern):
    other = tmp_path / "other"
    prepare(pattern, other, tokenizer="bpe", vocab_size=300, workers=1)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        load(tmp_path, f"code={folder}:1,help={other}:1")
    assert str(error.value) == (
        "data: the source 'help': the source 'code' has another tokenizer (bytes, 257 ids) than "
        f"{other} was prepared with (300 ids): a mixture has one tokenizer; prepare the text of "
        f"one of them again, with --tokenizer {folder}/tokenizer"
    )
    again = tmp_path / "again"
    prepare(pattern, again, tokenizer=f"{folder}/tokenizer", workers=1)
    load(tmp_path, f"code={folder}:1,help={again}:1")
    BPETokenizer.train(some("x"), 300).save(tmp_path / "named")
    files = f"code={folder}:1,help={pattern}:1"
    for message, options in {
        "'code': data.tokenizer='.*named' has another tokenizer .300 ids. than": {
            "tokenizer": f"{tmp_path}/named"
        },
        "'code': data.vocab_size=999: .*corpus was prepared with 257": {"vocab_size": 999},
    }.items():
        with pytest.raises(ValueError, match=f"data: the source {message}"):
            load(tmp_path, files, **options)
    load(tmp_path, files, held_out=0.3)  # that of the text
    with pytest.raises(ValueError, match=r"data.held_out=0.3: .*again .* 0.05"):
        load(tmp_path, f"help={again}:1", held_out=0.3)
    # The tokenizer that a run keeps stays.
    (tmp_path / "run" / "tokenizer" / "tokenizer.json").unlink()
    BPETokenizer.train(some("x"), 300).save(tmp_path / "run" / "tokenizer")
    with pytest.raises(ValueError, match=r"'code': .* .300 ids. than"):
        load(tmp_path, files)


def test_text_that_would_take_too_long_is_to_be_prepared_with_the_same_tokenizer(
    tmp_path, folder, pattern, monkeypatch
):
    monkeypatch.setattr(opening, "BY_ITSELF", 100)
    with pytest.raises(ValueError, match=r"'help': .* tokenize") as error:
        load(tmp_path, f"code={folder}:1,help={pattern}:1")
    assert f"--tokenizer {folder}/tokenizer" in str(error.value)


def test_a_tokenizer_is_trained_on_what_is_not_held_out(tmp_path, pattern, monkeypatch):
    """Of every source by its weight."""
    (tmp_path / "more").mkdir()
    for i, document in enumerate(some("more")):
        (tmp_path / "more" / f"{i}.txt").write_text(document)
    seen = []

    def train(texts, vocab_size):
        seen.extend(texts)
        return ByteTokenizer()

    monkeypatch.setitem(mixed.TRAINED, "bpe", train)
    files = f"a={pattern}:0.75,b={tmp_path}/more/*.txt:0.25"
    data = load(tmp_path, files, held_out=0.3)
    trained = [texts_of(data, name)[0] for name in "ab"]
    assert sorted(seen) == sorted(itertools.chain(*trained))
    assert 20 < len(seen) < 70
    seen.clear()
    (tmp_path / "run" / "tokenizer" / "tokenizer.json").unlink()
    (tmp_path / "run" / "tokenizer").rmdir()
    monkeypatch.setattr(mixed, "SAMPLE_BYTES", 1000)
    load(tmp_path, files, held_out=0.3)
    sizes = [sum(len(text) for text in seen if text.startswith(word)) for word in ("plain", "more")]
    assert 740 < sizes[0] < 800
    assert 240 < sizes[1] < 300


def test_no_source_trains_on_what_a_prepared_one_holds_out(tmp_path, pattern, caplog, monkeypatch):
    """Where they hold out other shares; a slice of hashes after the other."""
    monkeypatch.setattr(hashes, "SLICE", 10)
    more = tmp_path / "more"
    prepare(pattern, more, held_out=0.5, shard_megabytes=2e-4, workers=1)
    data = load(tmp_path, f"text={pattern}:1,more={more}:1", held_out=0.1)
    assert len(data.sources["more"].prepared.manifest.shards) > 3
    [train, held_out], [_, held] = texts_of(data, "text"), texts_of(data, "more")
    both = {text for text in some("plain") if hash_of(text) >= 0.5}
    assert 10 < len(both) < 30
    assert sorted(train) == sorted(both)
    assert len(held) == 40 - len(both)
    assert len(held_out) >= 1
    left_out = 40 - len(held_out) - len(train)
    assert f"data: {left_out} documents to train on of the source 'text' are left" in caplog.text
    for files, held_out in (
        (f"text={pattern}:1,more={more}:1", 0.9),  # the text holds out more
        (f"less={tmp_path}/less:1,more={more}:1", 0.05),
    ):
        if "less" in files:
            prepare(pattern, tmp_path / "less", held_out=0.05, workers=1)
        with pytest.raises(ValueError, match=r"(more|less)' trains on \d+ documents or more that"):
            load(tmp_path, files, held_out=held_out)
    # A few, of which one had to change parts.
    few = tmp_path / "few"
    few.mkdir()
    for i, one in enumerate(sorted(some("plain"), key=hash_of)[-2:]):
        (few / f"{i}.txt").write_text(one)
    prepare(f"{few}/*.txt", tmp_path / "two", held_out=0.5, workers=1)
    with pytest.raises(ValueError, match="'more' trains on 1"):
        load(tmp_path, f"two={tmp_path}/two:1,more={more}:1")
    with pytest.raises(ValueError, match=r"documents='functions': the sources \['more'\] are prep"):
        load(tmp_path, f"text={pattern}:1,more={more}:1", documents="functions")


def hash_of(text):
    return hashlib.sha256(text.encode()).digest()[0] / 256


def test_limits_of_a_prepared_source(tmp_path, folder):
    whole = load(tmp_path, f"code={folder}")
    documents, held_out = texts_of(whole, "code")
    sizes = np.cumsum([len(document) for document in documents])

    def limited(**keys):
        data = load(tmp_path, table(tmp_path, folder, **keys))
        part = data.sources["code"].train.corpus
        found, same = texts_of(data, "code")
        assert found == documents[: len(found)]
        assert same == held_out
        assert part.num_tokens == sum(map(len, found))
        assert part.num_positions == part.num_tokens + len(found)
        assert part.num_bytes == part.num_tokens  # of bytes
        dataset = data.sources["code"].train
        batches = [dataset.batch(k) for k in range(dataset.batches_per_epoch)]
        assert sum(batch["weights"].sum() for batch in batches) == part.num_positions
        return len(found), data.fingerprint

    prints = {whole.fingerprint}
    for count in (1, 10, 29):  # of 30, in shards of ten
        found = limited(limit_documents=count)
        assert found[0] == count
        prints.add(found[1])
        assert limited(limit_tokens=sizes[count - 1]) == found
        assert limited(limit_tokens=sizes[count] - 1) == found
    assert len(prints) == 4
    assert limited(limit_documents=20, limit_tokens=sizes[4])[0] == 5
    assert limited(limit_documents=4, limit_tokens=sizes[9])[0] == 4
    assert limited(limit_tokens=1)[0] == 1
    for more in ({"limit_documents": 30}, {"limit_documents": 99}, {"limit_tokens": 10**6}):
        assert limited(**more) == (30, whole.fingerprint)


def test_limits_and_epochs_of_bucketed_rows(tmp_path, folder, pattern):
    bucketed = functools.partial(load, tmp_path, rows="bucketed", buckets=(32, 64))
    whole = bucketed(f"code={folder}")
    few = bucketed(table(tmp_path, folder, limit_documents=8))
    assert (whole.train.datasets["code"].num_rows, few.train.datasets["code"].num_rows) == (32, 8)
    assert few.train.epochs(10) == {"code": 5}
    bucketed(table(tmp_path, folder, limit_documents=8, max_epochs=5))
    with pytest.raises(ValueError, match=r"'code' .* 5.00 times in --steps 10, .*=4.9"):
        bucketed(table(tmp_path, folder, limit_documents=8, max_epochs=4.9))
    large = bucketed(table(tmp_path, pattern, limit_documents=8), tokenizer="bytes")
    assert len(large.sources["code"].train.corpus) == 8


# --- A web server -----------------------------------------------------------------------------


@pytest.fixture
def parquet(web):
    """The address of a web server with two shards, their folder, and their texts."""
    address, folder, _ = web
    expected = some("web", 60)
    for number in range(2):
        part = expected[30 * number :][:30]
        write_parquet(folder / f"train-{number}.parquet", part, rows_per_group=10)
    return address, folder, expected


def test_shards_of_a_web_server_are_a_source(tmp_path, parquet, folder, monkeypatch):
    monkeypatch.setattr(opening, "prepare", functools.partial(prepare, workers=1))
    address, local, expected = parquet
    listed = f"{address}/train-0.parquet,{address}/train-1.parquet"
    data = load(tmp_path, f"web={listed}:0.6,code={folder}:0.4")
    assert all_of(data, "web") == sorted(expected)
    assert data.sources["web"].prepared is not None
    found = load(tmp_path, f"web={address}/train-*.parquet:0.6,code={folder}:0.4")
    here = load(tmp_path, f"web={local}/train-*.parquet:0.6,code={folder}:0.4", held_out=0.05)
    assert found.sources["web"].fingerprint == data.sources["web"].fingerprint
    assert all_of(here, "web") == sorted(expected)
    with pytest.raises((ValueError, FileNotFoundError), match=r"no file matches .*train-9.parquet"):
        load(tmp_path, f"web={address}/train-9.parquet:0.6,code={folder}:0.4")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (500, "the store failed, more often than its library tries again"),
        ("drop", "the store cannot be reached"),
        ("half", "the store cannot be reached"),
        (403, "the store refuses permission"),
    ],
)
def test_a_web_server_that_falters(tmp_path, parquet, fault, message):
    """The same command, once the server is well, gives the same as files here."""
    address, local, _ = parquet
    make = functools.partial(prepare, folder=tmp_path / "out", workers=1, shard_megabytes=0.001)

    def falters(number, method, path):
        return fault if method == "GET" and path.endswith("train-1.parquet") else None

    with proxy(int(address.rpartition(":")[2]), falters) as port:
        files = [f"http://127.0.0.1:{port}/train-{number}.parquet" for number in range(2)]
        with pytest.raises(AddressError, match=rf"train-1\.parquet: {message}"):
            make(files)
    assert not (tmp_path / "out" / format.MANIFEST).exists()
    again = make([f"{address}/train-{number}.parquet" for number in range(2)])
    files = [f"{local}/train-{number}.parquet" for number in range(2)]
    assert again == make(files, folder=tmp_path / "local")
