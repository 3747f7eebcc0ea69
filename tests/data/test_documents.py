import hashlib
import sysconfig

import pytest

from zoo.data import documents
from zoo.data.documents import Document, functions_of


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def pairs(found):
    return [(document.name, document.text) for document in found]


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


def test_functions_are_found_with_their_lines():
    assert [*functions_of("a.py", SOURCE)] == [
        (3, "@cache\ndef one():\n    def inner(): pass\n    return inner\n"),
        (10, 'async def two(self):\n    """Text."""\n'),
        (14, "def three(): pass\n"),
    ]
    for name in ("a.txt", "b.py"):  # no Python
        assert [*functions_of(name, "def")] == [(0, "def")]


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


@pytest.mark.parametrize("fraction", [0.0001, 0.9999])
def test_split_parts_are_never_empty(fraction):
    for n in (2, 7):
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
