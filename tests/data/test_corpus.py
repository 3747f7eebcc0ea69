"""Corpora: documents by number and by position, of arrays and prepared; damage, threads."""

import gc
import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
from prepared_parts import VOCAB, make_parts

from zoo.data.corpus import Corpus, Piece, Place
from zoo.data.prepared import format, opening
from zoo.data.prepared.format import DamagedError


@pytest.mark.parametrize("num_shards", [1, 3, 20])
@pytest.mark.parametrize("frame", [1, 2])
def test_documents_are_those_that_were_stored(tmp_path, num_shards, frame):
    for part, corpus in zip(*make_parts(tmp_path, num_shards=num_shards, frame=frame), strict=True):
        assert len(part) == len(corpus) > 1
        assert part.num_tokens == corpus.num_tokens
        assert part.vocab_size == VOCAB
        for i in range(len(part)):
            np.testing.assert_array_equal(part[i], corpus[i])
            assert part[i].dtype == np.uint16
            for start, stop in [(0, 3), (2, 5), (4, 1000), (50, 60), (3, 3)]:
                np.testing.assert_array_equal(part.ids(i, start, stop), corpus[i][start:stop])
        with pytest.raises(IndexError):
            part[len(part)]


@pytest.mark.parametrize("num_shards", [1, 3, 20])
@pytest.mark.parametrize("frame", [1, 2])
def test_positions_lie_in_their_documents(tmp_path, num_shards, frame):
    for part, corpus in zip(*make_parts(tmp_path, num_shards=num_shards, frame=frame), strict=True):
        places = [
            Place(document, offset)
            for document in range(len(corpus))
            for offset in range(max(len(corpus[document]) + frame - 1, 0))
        ]
        assert part.num_positions == len(places)
        assert [part.locate(position) for position in range(len(places))] == places
        for begin, end in itertools.combinations(range(0, len(places) + 1, 7), 2):
            found = part.pieces(begin, end)
            spread = [
                (document, offset)
                for document, start, stop in found
                for offset in range(start, stop)
            ]
            assert spread == places[begin:end]
            assert all(isinstance(piece, Piece) for piece in found)
            assert len({piece.document for piece in found}) == len(found)
        for wrong in (-1, len(places)):
            with pytest.raises(IndexError):
                part.locate(wrong)


def test_names_are_the_sources_and_their_records(tmp_path):
    (train, held_out), _ = make_parts(tmp_path)
    assert [train.name(i) for i in range(3)] == ["'a.txt'", "'b.jsonl:1'", "'a.txt:2'"]
    assert held_out.name(0) == "'b.jsonl:3'"


def touched(part):
    """Read all of a part: ids, then positions."""
    for i in range(len(part)):
        part[i]
    part.pieces(0, part.num_positions)


@pytest.mark.parametrize("suffix", [".tokens", ".train", ".held_out", ".sums"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_damage_is_named(tmp_path, suffix, damage):
    both, _ = make_parts(tmp_path, [20_000] * 25, num_shards=2)
    path = tmp_path / "shards" / f"00000001{suffix}"
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    {
        "flipped": lambda: path.write_bytes(content),
        "truncated": lambda: path.write_bytes(content[:-1]),
        "missing": path.unlink,
    }[damage]()
    part = both[suffix == ".held_out"]
    assert len(part[0]) == 20_000  # of the other shard
    with pytest.raises((DamagedError, FileNotFoundError)) as error:
        touched(part)
    size = len(content)
    block = (size - 1) // format.BLOCK
    wanted = {
        "flipped": f": block {block} (bytes {block * format.BLOCK:,} to {size - 1:,}) is not what",
        "truncated": f" has {size - 1:,} bytes instead of {size:,}",
        "missing": " is missing",
    }[damage]
    if (damage, suffix) == ("flipped", ".sums"):
        wanted = " is not what was written"
    message = str(error.value)
    assert f"{path}{wanted}" in message
    assert f"put 00000001.* back from a copy, or remove {tmp_path} and run `python -m" in message


def test_what_is_not_read_is_not_verified_and_each_block_is_once(tmp_path, monkeypatch):
    """Reading a document reads its shard's sums, and the blocks that it is in."""
    hashed = []
    of_block = format.xxhash.xxh3_64_intdigest

    def noted(content):
        hashed.append(len(content))
        return of_block(content)

    (part, _), (corpus, _) = make_parts(tmp_path, [200_000] * 12, num_shards=3)
    expected = corpus[4][1000:2000].copy()
    monkeypatch.setattr(format.xxhash, "xxh3_64_intdigest", noted)
    np.testing.assert_array_equal(part.ids(4, 1000, 2000), expected)
    records = hashed.pop(0)  # a block of them
    assert records < 1000
    assert hashed == [format.BLOCK]
    part.ids(4, 1500, 2500)
    assert hashed == [format.BLOCK]
    part.pieces(part.num_positions // 2, part.num_positions // 2 + 100)  # records alone
    assert sum(hashed) < 2 * format.BLOCK


def test_a_bounded_number_of_shards_is_open_and_verified_blocks_stay_so(tmp_path, monkeypatch):
    monkeypatch.setattr("zoo.data.corpus.OPEN_SHARDS", 2)
    opened, hashed = [], []
    mapped, of_block = np.memmap, format.xxhash.xxh3_64_intdigest
    (part, _), (corpus, _) = make_parts(tmp_path, [30] * 40, num_shards=10)
    expected = [corpus[i].copy() for i in range(len(part))]
    monkeypatch.setattr(np, "memmap", lambda path, *a: opened.append(path) or mapped(path, *a))
    monkeypatch.setattr(
        format.xxhash, "xxh3_64_intdigest", lambda block: hashed.append(1) or of_block(block)
    )
    for _ in range(3):
        for i in range(len(part)):
            np.testing.assert_array_equal(part[i], expected[i])
    assert len(hashed) == 2 * 10  # the ids and the records of each shard
    assert len(opened) == 3 * 3 * 10  # and the sums; again in each round
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert 0 < maps.read_text().count(f"{tmp_path}/") <= 3 * 2


def test_threads_read_the_same(tmp_path):
    (part, _), (corpus, _) = make_parts(tmp_path, [50, 3, 700, 0, 9] * 40, num_shards=5)
    wrong = []

    def read(seed):
        try:
            for i in np.random.default_rng(seed).integers(0, len(part), 300).tolist():
                np.testing.assert_array_equal(part[i], corpus[i])
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_start_reads_the_manifest_and_the_tokenizer_alone(tmp_path, monkeypatch):
    """Files opened do not grow with the corpus; sizes are compared all the same."""
    import builtins
    import io

    read = []
    opened = builtins.open

    def noted(path, *arguments, **named):
        read.append(str(path))
        return opened(path, *arguments, **named)

    for place in (builtins, io):
        monkeypatch.setattr(place, "open", noted)
    for number in (2, 30):
        folder = tmp_path / f"{number}"
        make_parts(folder, [300] * 60, num_shards=number, vocab_size=257)
        read.clear()
        prepared = opening.open_prepared(folder)
        assert {str(Path(path).relative_to(folder)) for path in read} == {
            format.MANIFEST,
            "tokenizer/tokenizer.json",
        }
        assert len(read) <= 5
        assert len(prepared.train) == 45
        assert prepared.train.num_tokens == 45 * 300
        assert prepared.tokenizer.vocab_size == prepared.train.vocab_size == 257
        assert prepared.train[44].shape == (300,)
        assert any("shards" in path for path in read)


@pytest.mark.parametrize("suffix", [".tokens", ".train", ".held_out"])
def test_a_start_finds_files_of_another_size(tmp_path, suffix):
    make_parts(tmp_path, vocab_size=257)
    path = tmp_path / "shards" / f"00000002{suffix}"
    content = path.read_bytes()
    path.write_bytes(content + b"x")
    with pytest.raises(DamagedError, match=f"00000002{suffix} has .* bytes instead of "):
        opening.open_prepared(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"00000002{suffix} is missing: put 0000"):
        opening.open_prepared(tmp_path)
    path.write_bytes(content)
    opening.open_prepared(tmp_path)


def test_a_folder_at_an_address_is_copied_shard_by_shard(tmp_path):
    pytest.importorskip("upath")
    from zoo.common.store import location

    make_parts(tmp_path / "here", [30] * 12, num_shards=4, vocab_size=257)
    there = location("memory://corpora/read", "data.files")
    for path in (tmp_path / "here").rglob("*"):
        if path.is_file():
            target = there / path.relative_to(tmp_path / "here").as_posix()
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    here = opening.open_prepared(tmp_path / "here")
    prepared = opening.open_prepared(there, tmp_path / "cache")
    copied = lambda: {path.name for path in tmp_path.glob("cache/**/*.tokens")}
    assert prepared.fingerprint == here.fingerprint
    assert copied() == set()
    np.testing.assert_array_equal(prepared.train[0], here.train[0])
    assert copied() == {"00000000.tokens"}
    for i in range(len(here.train)):
        np.testing.assert_array_equal(prepared.train[i], here.train[i])
    assert len(copied()) == 4
    np.testing.assert_array_equal(opening.open_prepared(there).train[3], here.train[3])
    [damaged] = tmp_path.glob("cache/**/00000002.tokens")
    damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
    with pytest.raises(DamagedError, match=f"block 0 .* remove {damaged.parent}, which is copied"):
        touched(opening.open_prepared(there, tmp_path / "cache").train)


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
    gc.collect(1)  # of what is new: all that the tests have made takes seconds
    assert not path.exists()
