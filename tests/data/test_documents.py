import hashlib
import sysconfig

import pytest

from zoo.data import documents
from zoo.data.documents import Document, functions
from zoo.data.sources.formats import TEXT, format_of
from zoo.data.sources.splits import plan_splits, read_split


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def pairs(found):
    return [(document.name, document.text) for document in found]


def read_documents(pattern, field="text", label=None):
    """The documents of files, as they are read for a corpus."""
    found = []
    for split in plan_splits(pattern, shard_bytes=2**30):
        for source, record, text, kind in read_split(split, field, label):
            name = split.names[source]
            name = name if format_of(name) is TEXT else f"{name}:{record}"
            found.append(Document(name, text, kind))
    return found


# --- Text files


def test_text_files_are_found_by_glob(tmp_path, monkeypatch):
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "a.md"):
        write(tmp_path / "corpus" / name, f"text of {name}\r\n")
    expected = [Document(n, f"text of {n}\r\n") for n in ("a.txt", "b.txt", "deep/er/c.txt")]
    assert read_documents(f"{tmp_path}/corpus/**/*.txt") == expected
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_documents("~/corpus/**/*.txt") == expected
    monkeypatch.chdir(tmp_path)
    assert read_documents("corpus/**/*.txt") == expected
    assert read_documents("corpus/*.txt, corpus/*.md")[-1].name == "a.md"
    assert len(read_documents(["corpus/*.txt", "corpus/a.*"])) == 3  # a.txt only once
    assert read_documents("corpus/a.txt") == expected[:1]


def test_unmatched_globs_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as error:
        read_documents("corpus/*.txt")
    assert "'corpus/*.txt'" in str(error.value)
    assert str(tmp_path) in str(error.value)
    write(tmp_path / "corpus/a.txt", "a")
    with pytest.raises(FileNotFoundError, match="'corpus' is a folder: add"):
        read_documents("corpus")


def test_non_utf8_text_is_refused(tmp_path):
    write(tmp_path / "a.txt", b"good\xffbad")
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8: byte 0xff at offset 4"):
        read_documents(str(tmp_path / "a.txt"))


# --- CSV and labels


def test_columns_of_one_name_that_are_not_read(tmp_path):
    path = write(tmp_path / "a.csv", "text,,\nx,1,2\n")
    assert pairs(read_documents(str(path))) == [("a.csv:2", "x")]


def test_csv(tmp_path):
    path = write(
        tmp_path / "a.csv", '\ufefftext,kind\r\n"two\nlines, one row",x\r\n"say ""hi""",y\n'
    )
    found = read_documents(str(path), label="kind")
    assert found == [
        Document("a.csv:3", "two\nlines, one row", "x"),
        Document("a.csv:4", 'say "hi"', "y"),
    ]
    assert pairs(read_documents(str(path), field="kind")) == [
        ("a.csv:3", "x"),
        ("a.csv:4", "y"),
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("text,kind\nx", r"a\.csv, line 2 does not have as many columns as the first line"),
        ("text,kind\nx,y,z", r"line 2 does not have as many columns"),
        ("body,kind\nx,y", r"line 2 has no field 'text': its fields are \['body', 'kind'\]"),
        ("text,sort\nx,y", r"line 2 has no field 'kind'"),
        ("text,kind,text\nx,y,z", r"a\.csv has 2 columns named 'text', and one of them would be"),
        ("kind,text,kind\nx,y,z", r"a\.csv has 2 columns named 'kind'"),
        ('text,kind\n"x"y,z', r"a\.csv is not CSV after line 1"),
        ("text,kind\nx,", r"line 2: field 'kind' is '': a label is a string or an integer"),
    ],
)
def test_malformed_csv_is_refused(tmp_path, rows, message):
    path = write(tmp_path / "a.csv", rows)
    with pytest.raises(ValueError, match=message):
        read_documents(str(path), label="kind")


def test_labels_are_read_from_jsonl(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "x", "stars": 5}\n{"text": "y", "stars": "1"}')
    found = read_documents(str(path), label="stars")
    assert [document.label for document in found] == ["5", "1"]
    write(path, '{"text": "x", "stars": null}')
    with pytest.raises(ValueError, match="line 1: field 'stars' is None: a label is"):
        read_documents(str(path), label="stars")
    write(tmp_path / "a.txt", "x")
    with pytest.raises(ValueError, match=r"a\.txt has no field 'stars': labels are in \.jsonl"):
        read_documents(str(tmp_path / "a.txt"), label="stars")


# --- Functions

SOURCE = '''import os
\x0c
@cache
def one():
    def inner(): pass
    return inner

class A:
    x = 1
    async def two(self):
        """Text."""

if os:
    def three(): pass
'''


def test_python_functions_become_documents():
    found = functions([Document("a.py", SOURCE), Document("a.txt", "def"), Document("b.py", "def")])
    assert found == [
        Document("a.py:3", "@cache\ndef one():\n    def inner(): pass\n    return inner\n"),
        Document("a.py:10", 'async def two(self):\n    """Text."""\n'),
        Document("a.py:14", "def three(): pass\n"),
        Document("a.txt", "def"),
        Document("b.py", "def"),
    ]


# --- The standard library


def test_standard_library_excludes_tests_and_packages(tmp_path, monkeypatch):
    for name in ("json/decoder.py", "test/test_json.py", "unittest/test/a.py", "b.py", "ctypes.so"):
        write(tmp_path / name, f"# {name}\r\nx = 1\r")
    write(tmp_path / "site-packages/numpy/core.py", "x")
    write(tmp_path / "idlelib/idle_test/a.py", "x")
    write(tmp_path / "odd.py", b"# -*- coding: latin-1 -*-\n# \xe9\n")
    write(tmp_path / "bad.py", b"# \xff\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert pairs(documents.standard_library()) == [
        ("b.py", "# b.py\nx = 1\n"),
        ("json/decoder.py", "# json/decoder.py\nx = 1\n"),
        ("odd.py", "# -*- coding: latin-1 -*-\n# é\n"),
    ]


def test_missing_library_source_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="text files of your own"):
        documents.standard_library()


def test_this_python_has_a_standard_library():
    library = documents.standard_library()
    assert {"json/decoder.py", "typing.py"} <= {document.name for document in library}
    assert sum(len(document.text) for document in library) > 5_000_000


# --- Split


def numbered(n):
    return [Document(f"{i}.txt", f"text {i}") for i in range(n)]


def test_split_holds_out_by_a_hash_of_the_name():
    train, held = documents.held_out_split(numbered(2000), 0.1)
    unit = {
        document: hashlib.sha256(document.name.encode()).digest()[0] / 256
        for document in numbered(2000)
    }
    assert all(unit[document] <= 0.1 for document in held)
    assert all(unit[document] >= 25 / 256 for document in train)
    assert 150 < len(held) < 250
    assert sorted(train + held) == sorted(numbered(2000))
    # The same on every machine and in every version: these are part of the contract.
    assert [d.name for d in held[:3]] == ["1.txt", "18.txt", "20.txt"]
    shuffled = numbered(2000)[::-1]
    assert set(documents.held_out_split(shuffled, 0.1)[1]) == set(held)


def test_split_is_stable_under_additions():
    _, before = documents.held_out_split(numbered(500))
    train, held = documents.held_out_split([*numbered(500), Document("new", "new text")])
    assert {d.name for d in held} - {"new"} == {d.name for d in before}
    assert len(train) + len(held) == 501


@pytest.mark.parametrize("fraction", [0.0001, 0.9999])
@pytest.mark.parametrize("n", [2, 3, 7])
def test_split_parts_are_never_empty(n, fraction):
    train, held = documents.held_out_split(numbered(n), fraction)
    assert train
    assert held
    assert sorted(train + held) == numbered(n)


def test_documents_are_compressed_one_by_one():
    one = Document("a", "x = 1\n" * 1000)
    for method, header in (("gzip", 18), ("xz", 32)):
        size = documents.compressed_size([one], method)
        assert header < size < 200
        assert documents.compressed_size([one, one], method) == 2 * size
