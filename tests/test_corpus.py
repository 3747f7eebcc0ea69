import json
import sys
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from zoo import corpus
from zoo.corpus import Corpus, Document
from zoo.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# --- Text files


def test_text_files_by_glob(tmp_path, monkeypatch):
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "a.md"):
        write(tmp_path / "corpus" / name, f"text of {name}\r\n")
    expected = [Document(n, f"text of {n}\r\n") for n in ("a.txt", "b.txt", "deep/er/c.txt")]
    assert corpus.read_documents(f"{tmp_path}/corpus/**/*.txt") == expected
    monkeypatch.setenv("HOME", str(tmp_path))
    assert corpus.read_documents("~/corpus/**/*.txt") == expected
    monkeypatch.chdir(tmp_path)
    assert corpus.read_documents("corpus/**/*.txt") == expected
    assert corpus.read_documents("corpus/*.txt, corpus/*.md")[-1].name == "a.md"
    assert len(corpus.read_documents(["corpus/*.txt", "corpus/a.*"])) == 3  # a.txt only once
    assert corpus.read_documents("corpus/a.txt") == expected[:1]


def test_no_file_matches(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as error:
        corpus.read_documents("corpus/*.txt")
    assert "'corpus/*.txt'" in str(error.value)
    assert str(tmp_path) in str(error.value)
    write(tmp_path / "corpus/a.txt", "a")
    with pytest.raises(FileNotFoundError, match="'corpus' is a folder: add"):
        corpus.read_documents("corpus")


def test_text_that_is_not_utf8(tmp_path):
    write(tmp_path / "a.txt", b"good\xffbad")
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8: byte 0xff at offset 4"):
        corpus.read_documents(str(tmp_path / "a.txt"))


def test_no_text_at_all(tmp_path):
    write(tmp_path / "a.txt", "")
    with pytest.raises(ValueError, match="1 documents and no text"):
        corpus.read_documents(str(tmp_path / "a.txt"))


# --- JSON lines


def test_jsonl(tmp_path):
    lines = [json.dumps({"text": "a\u2028b"}, ensure_ascii=False), "", json.dumps({"text": "é"})]
    path = write(tmp_path / "a.jsonl", "\n".join(lines) + "\n")
    assert corpus.read_documents(str(path)) == [("a.jsonl:1", "a\u2028b"), ("a.jsonl:3", "é")]
    write(path, '{"body": "x", "text": "y"}')
    assert corpus.read_documents(str(path), field="body") == [("a.jsonl:1", "x")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', r"a\.jsonl, line 2 is not JSON"),
        ('{"body": "x", "id": 1}', r"line 2 has no field 'text': its fields are \['body', 'id'\]"),
        ('{"text": 3}', r"line 2: field 'text' is a int, not a string"),
        ('["x"]', r"line 2 is a JSON list, not an object"),
        ('{"text": "\\ud800"}', r"line 2: lone surrogate at character 0"),
        (b'{"text": "\xff"}', r"line 2 is not UTF-8: byte 0xff at offset 10"),
    ],
)
def test_bad_jsonl(tmp_path, line, message):
    line = line if isinstance(line, bytes) else line.encode()
    path = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=message):
        corpus.read_documents(str(path))


# --- Parquet and ArrayRecord


def test_parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = str(tmp_path / "a.parquet")
    parquet.write_table(arrow.table({"text": ["one", "twö"], "n": [1, 2]}), path)
    assert corpus.read_documents(path) == [("a.parquet:0", "one"), ("a.parquet:1", "twö")]
    with pytest.raises(ValueError, match=r"no column 'body': its columns are \['text', 'n'\]"):
        corpus.read_documents(path, field="body")
    with pytest.raises(ValueError, match=r"row 0: column 'n' is a int, not a string"):
        corpus.read_documents(path, field="n")
    parquet.write_table(arrow.table({"text": ["one", None]}), path)
    with pytest.raises(ValueError, match=r"row 1: column 'text' is a NoneType"):
        corpus.read_documents(path)
    write(tmp_path / "a.parquet", "no such thing")
    with pytest.raises(ValueError, match="is no Parquet file"):
        corpus.read_documents(path)


@pytest.mark.parametrize("suffix", [".array_record", ".arrayrecord"])
def test_array_record(tmp_path, suffix):
    module = pytest.importorskip("array_record.python.array_record_module")
    path = str(tmp_path / f"a{suffix}")

    def records(*contents):
        writer = module.ArrayRecordWriter(path, "group_size:1")
        for content in contents:
            writer.write(content)
        writer.close()

    records("öne".encode(), b"two")
    assert corpus.read_documents(path) == [(f"a{suffix}:0", "öne"), (f"a{suffix}:1", "two")]
    records(b"fine", b"not\xff")
    with pytest.raises(ValueError, match="record 1 is not UTF-8: byte 0xff at offset 3"):
        corpus.read_documents(path)
    write(Path(path), "no such thing" * 10)
    with pytest.raises(ValueError, match="is no ArrayRecord file"):
        corpus.read_documents(path)


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [
        ("a.parquet", "pyarrow", "parquet"),
        ("a.array_record", "array_record.python.array_record_module", "array-record"),
    ],
)
def test_a_missing_extra_is_named(tmp_path, monkeypatch, name, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"zoo\[{extra}\]"):
        corpus.read_documents(str(write(tmp_path / name, "x")))


# --- The standard library


def test_standard_library(tmp_path, monkeypatch):
    for name in ("json/decoder.py", "test/test_json.py", "unittest/test/a.py", "b.py", "ctypes.so"):
        write(tmp_path / name, f"# {name}\r\nx = 1\r")
    write(tmp_path / "site-packages/numpy/core.py", "x")
    write(tmp_path / "idlelib/idle_test/a.py", "x")
    write(tmp_path / "odd.py", b"# -*- coding: latin-1 -*-\n# \xe9\n")
    write(tmp_path / "bad.py", b"# \xff\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert corpus.standard_library() == [
        ("b.py", "# b.py\nx = 1\n"),
        ("json/decoder.py", "# json/decoder.py\nx = 1\n"),
        ("odd.py", "# -*- coding: latin-1 -*-\n# é\n"),
    ]


def test_a_python_without_library_source(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="text files of your own"):
        corpus.standard_library()


def test_this_python_has_a_standard_library():
    documents = corpus.standard_library()
    assert {"json/decoder.py", "typing.py"} <= {document.name for document in documents}
    assert sum(len(document.text) for document in documents) > 5_000_000


# --- Split


def numbered(n):
    return [Document(f"{i}.txt", "text") for i in range(n)]


def test_split_holds_out_by_name():
    train, held = corpus.held_out_split(numbered(2000), 0.1)
    assert 150 < len(held) < 250
    assert sorted(train + held) == sorted(numbered(2000))
    # The same on every machine and in every version: these names are part of the contract.
    assert [d.name for d in held[:4]] == ["1.txt", "18.txt", "20.txt", "27.txt"]
    shuffled = numbered(2000)[::-1]
    assert set(corpus.held_out_split(shuffled, 0.1)[1]) == set(held)


def test_a_new_document_moves_no_other():
    _, before = corpus.held_out_split(numbered(500))
    train, held = corpus.held_out_split([*numbered(500), Document("new", "text")])
    assert {d.name for d in held} - {"new"} == {d.name for d in before}
    assert len(train) + len(held) == 501


@pytest.mark.parametrize("fraction", [0.0001, 0.9999])
@pytest.mark.parametrize("n", [2, 3, 7])
def test_neither_part_is_empty(n, fraction):
    train, held = corpus.held_out_split(numbered(n), fraction)
    assert train
    assert held
    assert sorted(train + held) == numbered(n)
    same_names = [Document("same", str(i)) for i in range(n)]
    assert all(corpus.held_out_split(same_names, fraction))


def test_a_single_document_is_split_by_its_tail(caplog):
    text = "".join(map(str, range(100)))
    [[head], [tail]] = corpus.held_out_split([Document("a", text)], 0.1)
    assert head.text + tail.text == text
    assert len(tail.text) == 19
    assert "a is the only document: its last 10% is held out" in caplog.text
    with pytest.raises(ValueError, match="too few to hold any out"):
        corpus.held_out_split([Document("a", "x")])


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0])
def test_bad_fraction(fraction):
    with pytest.raises(ValueError, match=f"fraction={fraction} must lie between 0 and 1"):
        corpus.held_out_split(numbered(3), fraction)


def test_compressed_size_is_of_the_files_one_by_one():
    one = Document("a", "x = 1\n" * 1000)
    for method, header in (("gzip", 18), ("xz", 32)):
        size = corpus.compressed_size([one], method)
        assert header < size < 200
        assert corpus.compressed_size([one, one], method) == 2 * size


# --- Corpus


def test_corpus_of_documents():
    documents = [Document("a", "abc"), Document("b", ""), Document("c", "é")]
    tokens = corpus.tokenize(documents, BYTES)
    assert len(tokens) == 3
    assert tokens.tokens.dtype == np.uint16  # 257 ids do not fit a byte
    assert tokens.num_bytes == 5
    assert [BYTES.decode(tokens[i]) for i in range(3)] == ["abc", "", "é"]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_the_smallest_dtype_that_fits(vocab_size, dtype):
    tokens = Corpus.from_arrays([np.array([0, vocab_size - 1])], vocab_size, num_bytes=2)
    assert tokens.tokens.dtype == dtype
    assert tokens.tokens[1] == vocab_size - 1


@pytest.mark.parametrize("wrong", [-1, 10, 300])
def test_a_token_outside_the_vocabulary(wrong):
    arrays = [np.array([1, 2]), np.array([], int), np.array([3, 4, wrong, 5])]
    message = f"token id {wrong} at position 2 of document 'c.txt' .* vocab_size=10"
    with pytest.raises(ValueError, match=message):
        Corpus.from_arrays(arrays, 10, num_bytes=6, names=["a.txt", "b.txt", "c.txt"])
    with pytest.raises(ValueError, match="position 2 of document 2 is outside"):
        Corpus.from_arrays(arrays, 10, num_bytes=6)


def test_a_tokenizer_that_breaks_its_word():
    class Wrong(ByteTokenizer):
        vocab_size = 100

    with pytest.raises(ValueError, match=r"token id 122 at position 1 of document 'name'"):
        corpus.tokenize([Document("name", "Az")], Wrong())


@pytest.mark.parametrize("arrays", [[], [np.array([], int)]])
def test_an_empty_corpus(arrays):
    with pytest.raises(ValueError, match="the corpus is empty"):
        Corpus.from_arrays(arrays, 10, num_bytes=0)


@pytest.mark.parametrize("offsets", [[0, 2], [1, 3], [0, 2, 1, 3]])
def test_offsets_that_do_not_fit(offsets):
    with pytest.raises(ValueError, match="offsets must rise from 0 to 3"):
        Corpus(np.array([1, 2, 3]), np.array(offsets), num_bytes=3, vocab_size=10)


# --- Cache


class Counted(ByteTokenizer):
    calls = 0

    def encode_batch(self, texts):
        Counted.calls += 1
        return super().encode_batch(texts)


DOCUMENTS = [Document("a", "some text"), Document("b", "more")]


def entry_of(folder):
    [entry] = [path for path in folder.iterdir() if not path.name.startswith(".")]
    return entry


def test_the_cache_is_used_and_memory_mapped(tmp_path):
    first = corpus.tokenize(DOCUMENTS, Counted(), tmp_path)
    calls = Counted.calls
    second = corpus.tokenize(DOCUMENTS, Counted(), tmp_path)
    assert Counted.calls == calls
    plain = corpus.tokenize(DOCUMENTS, BYTES)
    for cached in (first, second):
        assert isinstance(cached.tokens, np.memmap)
        assert cached.tokens.dtype == plain.tokens.dtype
        np.testing.assert_array_equal(cached.tokens, plain.tokens)
        np.testing.assert_array_equal(cached.offsets, plain.offsets)
        assert (cached.num_bytes, cached.vocab_size) == (plain.num_bytes, plain.vocab_size)
        assert list(cached.names) == ["a", "b"]
    assert entry_of(tmp_path).is_dir()  # and nothing else is left behind


def test_what_changes_the_tokens_changes_the_entry(tmp_path):
    class Other(ByteTokenizer):
        def save(self, folder):
            (folder / "tokenizer.json").write_text("other")

    moved = [Document("a", "some textb"), Document("", "more")]
    renamed = [Document("x", "some text"), Document("b", "more")]
    for documents, tokenizer in [
        (DOCUMENTS, BYTES),
        (moved, BYTES),
        (renamed, BYTES),
        (DOCUMENTS, Other()),
    ]:
        corpus.tokenize(documents, tokenizer, tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def _flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "flipped": _flip,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("name", ["tokens.npy", "offsets.npy", "corpus.json", "checksums.json"])
def test_a_damaged_entry_is_made_anew(tmp_path, caplog, name, damage):
    corpus.tokenize(DOCUMENTS, BYTES, tmp_path)
    damage(entry_of(tmp_path) / name)
    again = corpus.tokenize(DOCUMENTS, BYTES, tmp_path)
    assert [BYTES.decode(again[i]) for i in range(2)] == ["some text", "more"]
    assert "is made anew" in caplog.text
    caplog.clear()
    corpus.tokenize(DOCUMENTS, BYTES, tmp_path)
    assert not caplog.text


def test_many_may_share_the_cache(tmp_path):
    for round_ in range(10):
        folder = tmp_path / str(round_)
        start = threading.Barrier(8)

        def work(folder=folder, start=start):
            start.wait()
            return BYTES.decode(corpus.tokenize(DOCUMENTS, BYTES, folder).tokens)

        with ThreadPoolExecutor(8) as pool:
            texts = [future.result() for future in [pool.submit(work) for _ in range(8)]]
        assert texts == ["some textmore"] * 8
        assert entry_of(folder).is_dir()
