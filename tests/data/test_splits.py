"""Splits: the parts that files are read in, here and at addresses, and files that have none."""

import contextlib
import functools
import gzip
import hashlib
import http.server
import json
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import gs, gs_port, s3, s3_port  # noqa: F401

from zoo.common.files import AddressError
from zoo.common.store import location
from zoo.data.formats import read_split
from zoo.data.splits import plan_splits

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


def error_of(pattern, kind=ValueError, field="text", shard_bytes=MIB) -> str:
    with pytest.raises(kind) as caught:
        read(pattern, shard_bytes, field)
    return str(caught.value)


# --- Here -------------------------------------------------------------------------------------


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


def test_files_that_change_are_refused(tmp_path):
    for name in ("a.jsonl", "a.csv.gz", "a.parquet"):
        path = write(tmp_path / name, "x" * 99)
        [split] = plan_splits(str(path), shard_bytes=MIB)
        for content, size in (("x" * 100, 100), ("y" * 99, 99)):
            write(path, content)
            with pytest.raises(ValueError, match=rf"has {size} bytes and has changed since .* 99:"):
                list(read_split(split))


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
