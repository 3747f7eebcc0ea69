import gc

import numpy as np
import pytest

from zoo.data.corpus import Corpus


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_tokens_use_smallest_dtype(vocab_size, dtype):
    tokens = Corpus.from_arrays([np.array([0, vocab_size - 1])], vocab_size, num_bytes=2)
    assert tokens[0].dtype == dtype
    assert tokens[0][1] == vocab_size - 1


@pytest.mark.parametrize("wrong", [-1, 10, 300])
def test_tokens_outside_vocabulary_are_refused(wrong):
    arrays = [np.array([1, 2]), np.array([], int), np.array([3, 4, wrong, 5])]
    message = f"token id {wrong} at position 2 of document 'c.txt' .* vocab_size=10"
    with pytest.raises(ValueError, match=message):
        Corpus.from_arrays(arrays, 10, num_bytes=6, names=["a.txt", "b.txt", "c.txt"])
    with pytest.raises(ValueError, match="position 2 of document 2 is outside"):
        Corpus.from_arrays(arrays, 10, num_bytes=6)


@pytest.mark.parametrize("arrays", [[], [np.array([], int)]])
def test_empty_corpora_are_refused(arrays):
    with pytest.raises(ValueError, match="the corpus is empty"):
        Corpus.from_arrays(arrays, 10, num_bytes=0)


def test_columns_are_those_of_the_documents():
    arrays = [np.array([1, 2, 3]), np.array([], int), np.array([4, 5])]
    counts = [np.array([False, True, True]), np.array([], bool), np.array([True, False])]
    corpus = Corpus.from_arrays(arrays, 10, num_bytes=6, counts=counts)
    assert [corpus[i].tolist() for i in range(3)] == [ids.tolist() for ids in arrays]
    assert [corpus.counted(i).tolist() for i in range(3)] == [x.tolist() for x in counts]
    assert (corpus.num_tokens, corpus.num_counted, corpus.num_bytes) == (5, 3, 6)
    assert Corpus.from_arrays(arrays, 10, num_bytes=6).counted(0) is None


@pytest.mark.parametrize("frame", [0, 1, 2])
@pytest.mark.parametrize("framed", [False, True])
def test_positions_are_those_of_the_frame(frame, framed):
    lengths = [3, 0, 1, 7]
    arrays = [np.ones(length, int) for length in lengths]
    corpus = Corpus.from_arrays(arrays, 10, num_bytes=1, framed=framed).with_frame(frame)
    expected = [max(length + frame - 1, 0) for length in lengths]
    assert corpus.positions(0, 4).tolist() == expected
    assert corpus.positions(2, 4).tolist() == expected[2:]
    assert corpus.num_positions == sum(expected)


def test_the_folder_of_a_corpus_goes_with_it():
    corpus = Corpus.from_arrays([np.arange(5)], 10, num_bytes=5)
    path = corpus.opened(0).path(".tokens")
    assert path.exists()
    del corpus
    gc.collect()
    assert not path.exists()
