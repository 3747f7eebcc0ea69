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
