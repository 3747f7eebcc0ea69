"""Splits of files, their documents in a stream, and what cannot be read."""

import contextlib
import functools
import gzip
import hashlib
import http.server
import json
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import gs, gs_port, s3, s3_port  # noqa: F401

from zoo.common.files import AddressError
from zoo.common.store import location
from zoo.data import formats
from zoo.data.formats import SourceDocument, read_split, sample_texts
from zoo.data.splits import Piece, plan_splits

MIB = 2**20


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def lines(texts, field="text") -> bytes:
    return b"".join(json.dumps({field: text}).encode() + b"\n" for text in texts)


def write_parquet(path: Path, texts, rows_per_group=10, **columns) -> Path:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"text": texts, **columns})
    parquet.write_table(table, path, row_group_size=rows_per_group, compression="none")
    return path


def zstd(*contents: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    return b"".join(zstandard.ZstdCompressor().compress(content) for content in contents)


def read(pattern, shard_bytes=MIB, field="text") -> list[tuple[str, int, str]]:
    """(source, record, text) of all documents, in order."""
    splits = plan_splits(str(pattern), shard_bytes=shard_bytes)
    return [
        (split.names[source], record, text)
        for split in splits
        for source, record, text, _ in read_split(split, field)
    ]


def texts(pattern, shard_bytes=MIB) -> list[str]:
    return [text for _, _, text in read(pattern, shard_bytes)]


# --- Splits -----------------------------------------------------------------------------------


def corpus(folder: Path) -> str:
    write(folder / "code/b.py", "b" * 30)
    write(folder / "code/deep/a.py", "a" * 40)
    write(folder / "code/z.py", "z" * 50)
    write(folder / "big.jsonl", lines(str(i) for i in range(30)))
    write(folder / "rows.csv", "text\n" + "row\n" * 100)
    return f"{folder}/big.jsonl, {folder}/code/**/*.py, {folder}/rows.csv, {folder}/code/b.py"


def test_small_files_share_a_split_and_large_ones_are_divided(tmp_path):
    splits = plan_splits(corpus(tmp_path), shard_bytes=100)
    assert [split.names for split in splits] == [
        *(["big.jsonl"], *([f"big.jsonl+{at}"] for at in (88, 176, 264, 352))),
        ["b.py", "deep/a.py"],  # b.py is matched twice
        ["z.py"],
        ["rows.csv"],
    ]
    assert [split.num_bytes for split in splits] == [88, 88, 88, 88, 88, 70, 50, 405]
    assert len(plan_splits(corpus(tmp_path), shard_bytes=10**6)) == 1
    # Compressed files and text stay whole.
    write(tmp_path / "a.jsonl.gz", gzip.compress(lines("ab" * 200)))
    write(tmp_path / "b.txt", "b" * 200)
    assert len(plan_splits([f"{tmp_path}/a.jsonl.gz", f"{tmp_path}/b.txt"], shard_bytes=9)) == 2


def test_splits_depend_on_names_and_sizes_alone(tmp_path):
    one, other = (
        plan_splits(corpus(tmp_path / name), shard_bytes=100) for name in ("one", "other")
    )
    assert [split.key for split in one] == [split.key for split in other]
    assert len({split.key for split in one}) == len(one) == 8
    write(tmp_path / "other/big.jsonl", lines(str(i) for i in range(31)))
    changed = plan_splits(f"{tmp_path}/other/big.jsonl", shard_bytes=100)
    assert one[0].key != changed[0].key
    # They are read in another folder of work too.
    assert all(Path(piece.path).is_absolute() for split in one for piece in split.pieces)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 40) | st.none(), max_size=30), st.integers(1, 300), st.booleans())
def test_each_line_is_in_one_piece(tmp_path_factory, lengths, shard_bytes, ended):
    content, expected = b"", []
    for number, length in enumerate(lengths):
        if length is not None:
            expected.append(f"{number}" + "x" * length)
            content += lines(expected[-1:])
        else:
            content += b" \n" if number % 2 else b"\n"
    content = content if ended else content.removesuffix(b"\n")
    if not content:
        return
    path = write(tmp_path_factory.getbasetemp() / "property.jsonl", content)
    found = read(path, shard_bytes)
    assert [text for _, _, text in found] == expected
    # A record is the number of a line, counted from the byte in the source's name.
    for source, record, text in found:
        begin = int(source.partition("+")[2] or 0)
        rest = content[begin:]
        if begin and content[begin - 1 : begin] != b"\n":
            rest = rest.partition(b"\n")[2]
        assert json.loads(rest.split(b"\n")[record - 1])["text"] == text


@pytest.mark.parametrize("shard_bytes", [MIB // 2, 2 * MIB])
def test_lines_may_be_longer_than_pieces(tmp_path, shard_bytes):
    expected = ["a", "b" * 3 * MIB, "c"]
    path = write(tmp_path / "a.jsonl", lines(expected))
    splits = plan_splits(str(path), shard_bytes=shard_bytes)
    first, *others, last = [[d.text for d in read_split(split)] for split in splits]
    assert (first, last) == (expected[:2], expected[2:])
    assert not any(others)


@pytest.mark.parametrize("shard_bytes", [1, 1000, 10**6])
def test_each_row_is_in_one_piece(tmp_path, shard_bytes):
    expected = [f"{number} " + "x" * (number * 7 % 50) for number in range(97)]
    path = write_parquet(tmp_path / "a.parquet", expected)
    shard_bytes = max(shard_bytes, path.stat().st_size // 300)
    assert shard_bytes > 5000 or len(plan_splits(str(path), shard_bytes=shard_bytes)) > 1
    found = read(path, shard_bytes)
    assert [text for _, _, text in found] == expected
    assert [record for _, record, _ in found] == list(range(97))
    assert read(write_parquet(path, [])) == []


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


def test_files_are_found_by_glob(tmp_path, monkeypatch):
    names = ["a.txt", "b.txt", "deep/er/c.txt"]
    for name in (*names, "a.md"):
        write(tmp_path / "corpus" / name, f"text of {name}\r\n")
    expected = [(name, 0, f"text of {name}\r\n") for name in names]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, "~", "."):
        assert read(f"{folder}/corpus/**/*.txt") == expected
    assert read("corpus/*.txt, corpus/*.md")[-1][0] == "a.md"
    assert len(read("corpus/*.txt,corpus/a.*")) == 3  # a.txt only once
    with pytest.raises(FileNotFoundError, match=rf"'none/\*.txt'.*{tmp_path}"):
        read("none/*.txt")


def test_large_fields_of_csv_are_read(tmp_path):
    path = write(tmp_path / "a.csv", "text\n" + "x" * 300_000 + "\n")
    assert len(texts(path)[0]) == 300_000


# --- Bad input --------------------------------------------------------------------------------


def error_of(pattern, kind=ValueError, field="text", shard_bytes=MIB) -> str:
    with pytest.raises(kind) as caught:
        read(pattern, shard_bytes, field)
    return str(caught.value)


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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.tar.gz", "unpack the archive"),
        ("a.zip", "unpack the archive"),
        ("a.jsonl.bz2", "compress it as .gz or .zst instead"),
        ("a.arrow", "write it as Parquet"),
        ("a.parquet.gz", ".parquet files compress their content by themselves: decompress it"),
    ],
)
def test_formats_without_documents_are_refused_before_any_is_read(tmp_path, name, message):
    path = write(tmp_path / name, "x")
    with pytest.raises(ValueError, match="cannot be read") as caught:
        plan_splits(f"{tmp_path}/a.*", shard_bytes=MIB)
    assert str(caught.value).startswith(f"{path} cannot be read: ")
    assert message in str(caught.value)


def test_sources_of_nothing_are_refused(tmp_path):
    write(tmp_path / "empty/a.txt", "")
    write(tmp_path / "empty/b.jsonl", "")
    write(tmp_path / "full.txt", "x")
    empty, full, none = f"{tmp_path}/empty/*", f"{tmp_path}/full.txt", f"{tmp_path}/none/*.txt"
    assert f"{empty!r}: all matching files (2) are empty" in error_of(f"{full},{empty}")
    assert f"no file matches {none!r}" in error_of(f"{full},{none}", FileNotFoundError)
    assert "is a folder: add '/**/*.txt'" in error_of(f"{tmp_path}/empty", FileNotFoundError)
    assert "no file matches ''" in error_of(f"{full},", FileNotFoundError)
    assert "shard_bytes=0: must be positive" in error_of(full, shard_bytes=0)
    assert "data='ftp://a/b.txt': unknown scheme ftp://" in error_of("ftp://a/b.txt")
    write(tmp_path / "empty.gz", "")
    assert "empty.gz is no whole .gz file: it is empty" in error_of(f"{tmp_path}/*.*")


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


def test_files_that_change_are_refused(tmp_path):
    for name in ("a.jsonl", "a.csv.gz", "a.parquet"):
        path = write(tmp_path / name, "x" * 99)
        [split] = plan_splits(str(path), shard_bytes=MIB)
        for content, size in (("x" * 100, 100), ("y" * 99, 99)):
            write(path, content)
            with pytest.raises(ValueError, match=rf"has {size} bytes and has changed since .* 99:"):
                list(read_split(split))


def test_lines_of_later_pieces_are_counted_from_them(tmp_path):
    path = write(tmp_path / "a.jsonl", lines("abcdefgh") + b"{}\n")
    begin = path.stat().st_size * 2 // 4
    assert f"{path}, line 3 after byte 76: no text in field" in error_of(path, shard_bytes=40)
    array = write(path, b"[\n" + b'{"text": "x"},\n' * 20 + b"]")
    with pytest.raises(ValueError, match=r"JSON array, .* object per line"):
        list(formats.read_jsonl(Piece(str(array), "a", array.stat().st_size, begin, begin + 50)))


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [("a.parquet", "pyarrow", "parquet"), ("a.txt.zst", "zstandard", "compressed")],
)
def test_missing_extras_are_named_before_any_document_is_read(
    tmp_path, monkeypatch, name, module, extra
):
    monkeypatch.setitem(sys.modules, module, None)
    path = write(tmp_path / name, "x")
    with pytest.raises(ImportError) as caught:
        plan_splits(str(path), shard_bytes=MIB)
    assert str(caught.value) == f"{path} needs an extra: pip install 'zoo[{extra}]'"


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


# --- Addresses --------------------------------------------------------------------------------


@contextlib.contextmanager
def served(handler, folder: Path):
    handler = functools.partial(handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


@pytest.fixture
def web(tmp_path):
    """A server of a folder that knows ranges: its address, the folder, and the bytes it sent."""
    sent: list[int] = []
    folder = tmp_path / "served"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            path = Path(self.translate_path(self.path))
            if not path.is_file() or "Range" not in self.headers:
                return super().do_GET()
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            content = path.read_bytes()
            part = content[int(first) : int(last) + 1]
            sent.append(len(part))
            self.send_response(206)
            self.send_header("Content-Length", str(len(part)))
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
            self.end_headers()
            self.wfile.write(part)
            return None

        def end_headers(self) -> None:
            self.send_header("Accept-Ranges", "bytes")
            super().end_headers()

    with served(Handler, folder) as address:
        yield address, folder, sent


def test_parquet_of_an_address_is_read_by_range(web):
    address, folder, sent = web
    expected = [f"{i} " + "x" * 1000 for i in range(1000)]
    other = [hashlib.shake_256(b"%d" % i).hexdigest(2000) for i in range(1000)]
    for number in range(2):
        path = folder / f"train-{number:05}.parquet"
        part = slice(500 * number, 500 * number + 500)
        write_parquet(path, expected[part], rows_per_group=100, other=other[part])
    splits = plan_splits(f"{address}/train-*.parquet", shard_bytes=MIB)
    assert len(splits) == 6
    assert splits[-1].names == [f"train-00001.parquet+{path.stat().st_size * 2 // 3}"]
    found = []
    for split in splits:
        del sent[:]
        documents = list(read_split(split))
        assert documents
        assert sum(sent) < 1100 * len(documents) + 140_000  # the column, and the ends of files
        found += [document.text for document in documents]
    assert found == expected


def test_lines_of_an_address_are_read_by_range(web):
    address, folder, sent = web
    expected = [f"{i} " + "x" * 1000 for i in range(20_000)]
    write(folder / "a.jsonl", lines(expected))
    write(folder / "b.txt.gz", gzip.compress(b"text"))
    splits = plan_splits(f"{address}/a.jsonl,{address}/b.txt.gz", shard_bytes=8 * MIB)
    assert [split.names for split in splits][::3] == [["a.jsonl"], ["b.txt.gz"]]
    assert [d.text for split in splits for d in read_split(split)] == [*expected, "text"]
    del sent[:]
    assert len(list(read_split(splits[1]))) > 5000
    assert sum(sent) < 16 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_sources_lie_on_object_stores(tmp_path, request, scheme):
    store = request.getfixturevalue(scheme)
    expected = [f"{i} " + "x" * 1000 for i in range(2000)]
    write(tmp_path / "a.jsonl", lines(expected))
    write(tmp_path / "b.txt.zst", zstd(b"text"))
    write(tmp_path / "deep/c.txt", "more")
    write_parquet(tmp_path / "d.parquet", expected, rows_per_group=100)
    for name in ("a.jsonl", "b.txt.zst", "deep/c.txt", "d.parquet"):
        location(f"{store.address}/{name}", "data").write_bytes((tmp_path / name).read_bytes())
    pattern = f"{store.address}/**"
    found, local = read(pattern, MIB // 2), read(f"{tmp_path}/**", MIB // 2)
    assert found == local
    assert len(found) == 4002
    with store.proxied(lambda number, method, path: 403), pytest.raises(AddressError) as caught:
        read(pattern)
    assert "refuses permission" in str(caught.value)


def test_contents_of_addresses_are_not_mistaken_for_faults_of_the_store(web):
    address, folder, _ = web
    write(folder / "quota/AccessDenied.jsonl", "x")
    message = f"{address}/quota/AccessDenied.jsonl, line 1 is not JSON"
    assert error_of(f"{address}/quota/AccessDenied.jsonl").startswith(message)


def test_servers_without_ranges_are_named(tmp_path, capfd):
    write(tmp_path / "a.jsonl", lines(["x" * 20 * MIB]))
    with served(http.server.SimpleHTTPRequestHandler, tmp_path) as address:
        message = f"{address}/a.jsonl: its server does not send parts of files; copy it here"
        assert error_of(f"{address}/a.jsonl") == message


def test_shards_of_the_hub_are_addresses(monkeypatch):
    """There is no network here: its file system is asked for the files of the pattern."""
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    def glob(self, path, **kwargs):
        asked.append(path)
        raise FileNotFoundError(path)

    monkeypatch.setattr(hub.HfFileSystem, "glob", glob)
    error_of("hf://datasets/someone/corpus/data/*.parquet", (ValueError, FileNotFoundError))
    assert asked == ["datasets/someone/corpus/data/*.parquet"]


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
