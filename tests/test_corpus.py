import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from zoo.data import corpus
from zoo.data.corpus import Corpus
from zoo.data.documents import Document
from zoo.data.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# --- Corpus


def test_documents_are_tokenized_losslessly():
    documents = [Document("a", "abc"), Document("b", ""), Document("c", "é")]
    tokens = corpus.tokenize(documents, BYTES)
    assert len(tokens) == 3
    assert tokens.tokens.dtype == np.uint16  # 257 ids do not fit a byte
    assert tokens.num_bytes == 5
    assert [BYTES.decode(tokens[i]) for i in range(3)] == ["abc", "", "é"]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_tokens_use_smallest_dtype(vocab_size, dtype):
    tokens = Corpus.from_arrays([np.array([0, vocab_size - 1])], vocab_size, num_bytes=2)
    assert tokens.tokens.dtype == dtype
    assert tokens.tokens[1] == vocab_size - 1


@pytest.mark.parametrize("wrong", [-1, 10, 300])
def test_tokens_outside_vocabulary_are_refused(wrong):
    arrays = [np.array([1, 2]), np.array([], int), np.array([3, 4, wrong, 5])]
    message = f"token id {wrong} at position 2 of document 'c.txt' .* vocab_size=10"
    with pytest.raises(ValueError, match=message):
        Corpus.from_arrays(arrays, 10, num_bytes=6, names=["a.txt", "b.txt", "c.txt"])
    with pytest.raises(ValueError, match="position 2 of document 2 is outside"):
        Corpus.from_arrays(arrays, 10, num_bytes=6)


def test_ids_beyond_tokenizer_vocabulary_are_refused():
    class Wrong(ByteTokenizer):
        vocab_size = 100

    with pytest.raises(ValueError, match=r"token id 122 at position 1 of document 'name'"):
        corpus.tokenize([Document("name", "Az")], Wrong())


@pytest.mark.parametrize("arrays", [[], [np.array([], int)]])
def test_empty_corpora_are_refused(arrays):
    with pytest.raises(ValueError, match="the corpus is empty"):
        Corpus.from_arrays(arrays, 10, num_bytes=0)


@pytest.mark.parametrize("offsets", [[0, 2], [1, 3], [0, 2, 1, 3]])
def test_inconsistent_offsets_are_refused(offsets):
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


def test_cache_is_reused_and_memory_mapped(tmp_path):
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


def test_cache_key_covers_documents_and_tokenizer(tmp_path):
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
def test_damaged_cache_entries_are_rebuilt(tmp_path, caplog, name, damage):
    corpus.tokenize(DOCUMENTS, BYTES, tmp_path)
    damage(entry_of(tmp_path) / name)
    again = corpus.tokenize(DOCUMENTS, BYTES, tmp_path)
    assert [BYTES.decode(again[i]) for i in range(2)] == ["some text", "more"]
    assert "is replaced" in caplog.text
    caplog.clear()
    corpus.tokenize(DOCUMENTS, BYTES, tmp_path)
    assert not caplog.text


def test_cache_is_safe_across_threads(tmp_path):
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
