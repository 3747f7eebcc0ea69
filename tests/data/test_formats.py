"""Formats of files: their documents in a stream, what cannot be read, and samples."""

import functools
import gzip
import hashlib
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from test_splits import MIB, error_of, lines, texts, write, write_parquet, zstd

from zoo.data import formats
from zoo.data.formats import SourceDocument, read_split, sample_texts
from zoo.data.splits import Piece, plan_splits

# --- Formats ----------------------------------------------------------------------------------

TEXT = "öne\r\ntwo\u2028 three"
ROWS = 'text,n\r\n"say ""hi""\r\nagain",1\r\nö,2\r\n'.encode()


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", b"\n" + lines(["x", TEXT]), [(2, "x"), (3, TEXT)]),
        ("a.ndjson", lines(["x"] * 99), [(number, "x") for number in range(1, 100)]),
        ("bom.jsonl", b"\xef\xbb\xbf" + lines(["x"]), [(1, "x")]),
        ("a.csv", ROWS, [(3, 'say "hi"\r\nagain'), (4, "ö")]),
        ("a.fasta", b">a x\nMKT\r\nV\n\n>b\nA\n", [(1, "MKTV"), (5, "A")]),
        ("a.txt", TEXT.encode(), [(0, TEXT)]),
        ("README", TEXT.encode(), [(0, TEXT)]),
        ("a.PY", b"", [(0, "")]),
    ],
)
def test_formats_are_read(tmp_path, name, content, expected, suffix):
    half = len(content) // 2  # several members and frames are one file
    if suffix == ".gz":
        content = gzip.compress(content[:half]) + gzip.compress(content[half:])
    elif suffix == ".zst":
        skippable = struct.pack("<II", 0x184D2A50, 3) + b"abc"
        content = skippable + zstd(content[:half], content[half:])
    write(tmp_path / f"{name}{suffix}", content)
    write(tmp_path / "A.txt", "x")
    splits = plan_splits(f"{tmp_path}/*", shard_bytes=MIB)
    [_, *found] = read_split(splits[0])
    assert found == [SourceDocument(1, record, text) for record, text in expected]


def labelled(path, label):
    [split] = plan_splits(str(path), shard_bytes=MIB)
    return [(record, text, found) for _, record, text, found in read_split(split, "text", label)]


def test_labels_are_read_beside_texts(tmp_path):
    content = '\ufefftext,kind,,\r\n"two\nlines, one row",x,1,\r\n"say ""hi""",y,2,\n'
    path = write(tmp_path / "a.csv", content)
    assert labelled(path, "kind") == [(3, "two\nlines, one row", "x"), (4, 'say "hi"', "y")]
    path = write(tmp_path / "b.csv", "text,kind\rhello,x\rworld,y\r")  # as old programs end lines
    assert labelled(path, "kind") == [(2, "hello", "x"), (3, "world", "y")]
    path = write(tmp_path / "a.faa", ">P1 Some name kind=in membrane OX=9606\nMK\nV\n")
    assert labelled(path, "kind") == [(1, "MKV", "in membrane")]
    assert labelled(path, "OX") == [(1, "MKV", "9606")]
    assert labelled(path, "id") == [(1, "MKV", "P1")]
    path = write(tmp_path / "a.jsonl", '{"text": "x", "stars": 5}\n{"text": "y", "stars": "1"}')
    assert labelled(path, "stars") == [(1, "x", "5"), (2, "y", "1")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text,kind\nx,y,z", r"line 2 .* columns"),
        ("a.csv", "text,sort\nx,y", r"line 2: no field 'kind'; .* \['sort', 'text'\]"),
        ("a.csv", "text,kind,text\nx,y,z", r"a\.csv has 2 columns named 'text'"),
        ("a.csv", "kind,text,kind\nx,y,z", r"a\.csv has 2 columns named 'kind'"),
        ("a.csv", 'text,kind\n"x"y,z', r"a\.csv is not CSV after line 1"),
        ("a.csv", "text,kind\nx,", "line 2: field 'kind' is '':"),
        ("a.jsonl", '{"text": "x", "kind": null}', "line 1: field 'kind' is None:"),
        ("a.txt", "x", r"a\.txt .* 'kind': .* \.jsonl"),
    ],
)
def test_what_has_no_labels_is_refused(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message):
        labelled(write(tmp_path / name, content), "kind")


def test_large_fields_of_csv_are_read(tmp_path):
    path = write(tmp_path / "a.csv", "text\n" + "x" * 300_000 + "\n")
    assert len(texts(path)[0]) == 300_000


# --- Bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "cut', "{}, line 1 is not JSON: Unterminated string"),
        (
            "a.jsonl",
            b'{"body": "x", "id": 1}',
            "{}, line 1: no text in field 'text', but None; its",
        ),
        ("a.jsonl", b'{"text": 3}', "{}, line 1: no text in field 'text', but 3; its"),
        ("a.jsonl", b'{"text": ["a"]}', "words with tags are rows of --data.format tags"),
        ("a.jsonl", b'{"text": "\\ud800"}', "{}, line 1: lone surrogate at character 0"),
        ("a.jsonl", b'{"text": "\xff"}', "{}, line 1 is not UTF-8: byte 0xff at offset 10"),
        ("a.jsonl", b"[" * 100_000, "{} is a JSON array, and needs an object per line instead"),
        ("a.jsonl", b'{"a":' * 100_000, "{}, line 1 is not JSON: maximum recursion"),
        ("a.jsonl", b"1" * 5000, "{}, line 1 is not JSON: Exceeds the limit (4300 digits)"),
        ("a.jsonl", b" \n" + lines("x") + b"[1]", "{}, line 3 is a JSON list, not an object"),
        ("a.jsonl", b'\n [\n{"text": "x"},\n', "{} is a JSON array, and needs an object per line"),
        ("a.jsonl", b'[{"text": "x"}]', "per line instead, as `jq -c '.[]'` writes them"),
        (
            "a.jsonl",
            b'{\n  "text": "x"\n}\n',
            "{} is JSON with values over several lines, and needs",
        ),
        (
            "a.jsonl.gz",
            gzip.compress(b"{\n", mtime=0),
            "an object per line instead, as `jq -c .` writes them",
        ),
        ("a.csv", b"text,n\nx", "{}, line 2 does not have as many columns as the first line"),
        ("a.csv", b"text,n\nx,1\ny\xff,2", "{}, line 3 is not UTF-8: byte 0xff at offset 1"),
        ("a.csv", b"body\nx", "{}, line 2: no text in field 'text', but None; its"),
        ("a.txt", b"good\xffbad", "{} is not UTF-8: byte 0xff at offset 4"),
        ("a.gz", b"good", "{} is no whole .gz file: Not a gzipped file (b'go'); copy or compress"),
        (
            "a.gz",
            gzip.compress(bytes(99), mtime=0)[:-9],
            "{} is no whole .gz file: Compressed file ended",
        ),
        (
            "a.zst",
            b"not at all",
            "{} is no whole .zst file: zstd decompressor error: Unknown frame",
        ),
        ("a.jsonl.zst", zstd(lines("xy"))[:-3], "{} is no whole .zst file: it ends within a frame"),
        ("a.jsonl.zst", zstd(lines("xy"), b"")[:-3], "no whole .zst file: it ends within a frame"),
        ("a.fasta", b"\nMKV\n", "{}, line 2 is no FASTA: a sequence comes after a line with >"),
        ("a.fasta", b">a\n>b\nMKV\n", "{}, line 1: the header has no sequence below it"),
        ("a.fasta", b">a\nMKV\n>b", "{}, line 3: the header has no sequence below it"),
        ("a.parquet", b"PAR1 no such thing", "{} is no Parquet file, or damaged from row 0"),
    ],
)
def test_bad_content_is_refused(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    assert message.format(path) in error_of(path)


def test_damaged_tables_are_refused(tmp_path):
    path = write_parquet(
        tmp_path / "a.parquet", [f"text {i}" for i in range(2000)], 500, n=[1] * 2000
    )
    assert f"{path} has no field 'body': its fields are ['text', 'n']" in error_of(
        path, field="body"
    )
    assert f"{path}, row 0: no text in field 'n', but 1" in error_of(path, field="n")
    whole = path.read_bytes()
    write(path, whole[:-50])
    assert f"{path} is no Parquet file, or damaged from row 0; copy it again: Parquet" in error_of(
        path
    )
    middle = whole.index(b"text 1200")
    write(path, whole[: middle - 5000] + bytes(4000) + whole[middle - 1000 :])
    assert f"{path} is no Parquet file, or damaged from row" in error_of(path)
    arrow = pytest.importorskip("pyarrow")
    buffers = arrow.array([b"fine", b"b\xff"], arrow.binary()).buffers()
    write_parquet(path, arrow.Array.from_buffers(arrow.string(), 2, buffers))
    assert f"{path}, row 1 is not UTF-8: byte 0xff at offset 1" in error_of(path)


def test_lines_of_later_pieces_are_counted_from_them(tmp_path):
    path = write(tmp_path / "a.jsonl", lines("abcdefgh") + b"{}\n")
    begin = path.stat().st_size * 2 // 4
    assert f"{path}, line 3 after byte 76: no text in field" in error_of(path, shard_bytes=40)
    array = write(path, b"[\n" + b'{"text": "x"},\n' * 20 + b"]")
    with pytest.raises(ValueError, match=r"JSON array, .* object per line"):
        list(formats.read_jsonl(Piece(str(array), "a", array.stat().st_size, begin, begin + 50)))


# --- Bounded memory ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("a.jsonl", ", line 2"),
        ("a.jsonl.gz", ", line 2"),
        ("a.jsonl.zst", ", line 2"),
        ("a.csv", ", line 3"),
        ("a.txt", ""),
        ("a.txt.zst", ""),
        ("a.parquet", ", row 1"),
    ],
)
def test_documents_beyond_the_limit_are_refused(tmp_path, monkeypatch, name, place):
    monkeypatch.setattr(formats, "MAX_DOCUMENT", 1000)
    contents, path = ["fine", "x" * 1001], tmp_path / name
    if name == "a.parquet":
        write_parquet(path, contents)
    else:
        data = {
            ".jsonl": lines(contents),
            ".csv": "text\n{}\n{}".format(*contents).encode(),
            ".txt": contents[1].encode(),
        }["." + name.split(".")[1]]
        packed = {".gz": gzip.compress, ".zst": zstd}.get(path.suffix, bytes)
        write(path, packed(data))
    assert f"{path}{place} is longer than a document may be" in error_of(path)
    if place:  # those before it are read
        [split] = plan_splits(str(path), shard_bytes=MIB)
        assert next(read_split(split)).text == "fine"


def test_open_quotes_do_not_read_the_rest_of_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "MAX_DOCUMENT", 1_000_000)
    path = write(tmp_path / "a.csv", 'text\nfine\n"open\n' + "row\n" * 1_000_000)
    assert f"{path} is not CSV after line" in error_of(path)
    assert "field larger than field limit" in error_of(path)


GROWTH = """
import re, sys
from zoo.data.formats import read_split
from zoo.data.splits import plan_splits

def peak():
    # What `resource` tells begins with the peak of the process that started this one.
    with open("/proc/self/status") as file:
        return int(re.search(r"VmHWM:\\s+(\\d+) kB", file.read())[1]) / 1024

for warm in sys.argv[1:2]:
    for split in plan_splits(warm, shard_bytes=2**26):
        list(read_split(split))
before, count = peak(), 0
try:
    for split in plan_splits(sys.argv[2], shard_bytes=2**26):
        for document in read_split(split):
            count += len(document.text)
except ValueError as error:
    print(error, file=sys.stderr)
print(count, peak() - before)
"""


def growth(warm: Path, path: Path) -> tuple[int, float, str]:
    """Characters read, the growth of this process' memory in MiB, and an error."""
    result = subprocess.run(
        [sys.executable, "-c", GROWTH, str(warm), str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    count, grown = result.stdout.split()
    return int(count), float(grown), result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst", ".csv", ".parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path, suffix):
    def save(name: str, texts: list[str]) -> Path:
        path = tmp_path / f"{name}{suffix}"
        if suffix == ".parquet":
            return write_parquet(path, texts, rows_per_group=10**6)
        data = lines(texts) if "jsonl" in suffix else "\n".join(["text", *texts]).encode()
        packed = {".gz": functools.partial(gzip.compress, compresslevel=1), ".zst": zstd}
        return write(path, packed.get(path.suffix, bytes)(data))

    texts = [hashlib.shake_256(b"%d" % i).hexdigest(1000) for i in range(100_000)]
    count, grown, error = growth(save("small", texts[:10]), save("large", texts))
    assert (count, error) == (200_000_000, "")
    assert grown < 60


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".jsonl.zst", ".txt", ".csv"])
def test_a_gigabyte_is_not_held_to_be_refused(tmp_path, suffix):
    path = tmp_path / f"large{suffix}"
    if path.suffix == ".zst":
        write(path, zstd(bytes(2**30)))
    else:
        with path.open("wb") as file:
            file.truncate(2**30)
    small = write(tmp_path / "small.txt", "x")
    count, grown, error = growth(small, path)
    assert count == 0
    assert "is longer than a document may be (256 MiB)" in error
    assert grown < 700


# --- The sample -------------------------------------------------------------------------------


def test_samples_of_small_corpora_are_all_texts(tmp_path):
    for name, count in (("a", 300), ("b", 3), ("c", 70)):
        write(tmp_path / f"{name}.jsonl", lines(f"{name} {i} " + "é" * i for i in range(count)))
    write(tmp_path / "d.txt", "x" * 1000)
    write(tmp_path / "a.csv", "text\n" + f"{'row' * 500}\n" * 2000)  # a part of its own, the first
    pattern = f"{tmp_path}/*"
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    splits = plan_splits(pattern, shard_bytes=5000)
    assert len(splits) > 10
    assert sorted(sample_texts(splits, num_bytes=size)) == sorted(texts(pattern))
    wanted = [text for text in texts(pattern) if "7" in text]
    sample = sample_texts(splits, num_bytes=size, wanted=lambda text: "7" in text)
    assert sorted(sample) == sorted(wanted)
    assert len(wanted) > 10


def test_samples_are_bounded_even_and_the_same_whatever_the_splits(tmp_path):
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", lines(f"{name}{i:05} " + "x" * 992 for i in range(4000)))
    splits = [plan_splits(f"{tmp_path}/*", shard_bytes=size) for size in (MIB, 10**6, 10**9)]
    assert len({len(split) for split in splits}) == 3
    one, other, third = (list(sample_texts(split, num_bytes=400_000)) for split in splits)
    assert one == other == third
    assert 395 <= len(one) <= 410
    places = {(text[0], int(text[1:6]) // 1000) for text in one}
    assert places == {(name, place) for name in "ab" for place in range(4)}
    assert abs(sum(text[0] == "a" for text in one) - len(one) / 2) < 10
    few = list(sample_texts(splits[0], num_bytes=400_000, wanted=lambda text: text[5] == "3"))
    assert 380 <= len(few) <= 410
    assert {text[5] for text in few} == {"3"}
