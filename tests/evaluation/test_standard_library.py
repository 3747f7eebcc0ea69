"""The tasks that are made from the source of Python's standard library."""

import ast
import textwrap
from collections import Counter

import datasets
import pytest

from zoo.data.documents import Document, held_out_split, standard_library
from zoo.evaluation.command import load_tasks
from zoo.evaluation.standard_library import (
    MOST,
    TASKS,
    python_bodies,
    python_files,
    python_signatures,
)

TRAINING = ["a.py", "b.py", "c.py"]
HELD_OUT = "file0.py"  # by the hash of its name


def library(*sources: str, training: str = "") -> list[Document]:
    """A library whose last file is held out."""
    documents = [Document(name, training) for name in TRAINING]
    documents.append(Document(HELD_OUT, "\n".join(map(textwrap.dedent, sources))))
    assert held_out_split(documents)[1] == documents[-1:]
    return documents


def source(name: str, parameters: str = "self, key", body: str = "") -> str:
    body = body or f"result = self.{name}.get(key, {name!r})\n    return result"
    return f"def {name}({parameters}):\n    {body}\n"


FOUR = [source(name) for name in ("first", "second", "third", "fourth")]
BODY = "    result = self.first.get(key, 'first')\n    return result"


def test_a_choice_has_the_rest_of_the_line_and_a_body():
    method = "class A:\n    @property\n    def last(self, x=()):\n" + textwrap.indent(
        '"""Docstring."""\n\n# A comment.\n\nreturn [self.last, x, 1, 2, 3, 4, 5, 6]\n', " " * 8
    )
    found = python_bodies(library(*FOUR[:3], method))
    assert len(found) == 4
    by_context = {record["context"]: record for record in found}
    first = by_context["def first(self, key"]
    assert first["choices"][first["answer"]] == f"):\n{BODY}"
    last = by_context["def last(self, x"]
    body = "    # A comment.\n\n    return [self.last, x, 1, 2, 3, 4, 5, 6]"
    assert last["choices"][last["answer"]] == f"=()):\n{body}"
    for record in found:
        assert len({*record["choices"]}) == 4
        assert all(choice.partition("\n")[0] in ("):", "=()):") for choice in record["choices"])


def test_wrong_bodies_are_of_similar_length_and_of_other_names():
    lengths = range(40, 340, 10)
    sources = [source("f" + "i" * n, "self", f"x = {'v' * n}") for n in lengths]
    sources.append(source("f" + "i" * 40, "self", f"x = {'w' * 40}"))  # another of that name
    found = python_bodies(library(*sources))
    assert len(found) == len(lengths) + 1
    seen = 0
    for record in found:
        right = record["choices"][record["answer"]]
        assert max(abs(len(choice) - len(right)) for choice in record["choices"]) <= 120
        if len(right) == len(f"):\n    x = {'v' * 40}"):  # one of the two of that name
            assert sum(len(choice) == len(right) for choice in record["choices"]) == 1
            seen += 1
    assert seen == 2
    assert len({record["answer"] for record in found}) == 4


def test_signatures_follow_the_lines_before_them():
    long = "x = 1\n" * 200
    method = "class A:\n    async def last(self, x, *, y=None):\n        return x + self.y\n"
    found = python_signatures(library(*FOUR, long, method))
    assert [record["target"] for record in found] == [", key):"] * 4 + [", x, *, y=None):"]
    context = found[-1]["context"]
    assert context.endswith("x = 1\n\nclass A:\n    async def last(self")
    assert 560 < len(context) <= 605
    assert found[1]["context"].startswith("def first(self, key):\n    result")


@pytest.mark.parametrize(
    "left_out",
    [
        "def f(self,\n      key):\n    return self.result[key], self.results[key], key",
        "def f(self, key,  # one:\n      other):\n    return self.result[key], self.results[key]",
        "def f(self, key):  # why\n    return self.result[key], self.results[key], key",
        'def f(self, key):\n    """A docstring that is all that there is of it, and long."""',
        "def f(self, key): return self.result[key], self.results[key], key",
        'class A:\n    def f(self, key):\n        return """of\nlines at the left""" + key * 20',
        "def first(self, key):\n    result = self.first.get(key, 'another')\n    return result",
    ],
)
def test_functions_of_another_form_are_left_out(left_out):
    for make, count in ((python_bodies, 4), (python_signatures, 4)):
        found = make(library(*FOUR, left_out))
        assert len(found) == count
        assert found == make(library(*FOUR))


def test_what_training_files_have_too_is_left_out():
    fifth = source("fifth", body="return self.result(key, 1, 'one'), self.results")
    assert len(python_bodies(library(*FOUR, fifth))) == 5
    indented = textwrap.indent(fifth.replace("1, 'one'", "2, 'two'"), "    ")
    training = f"class A:\n{indented}"
    for make in (python_bodies, python_signatures):
        assert len(make(library(*FOUR, fifth, training=training))) == 4


def test_a_library_with_too_little_is_refused():
    with pytest.raises(ValueError, match="3 held-out functions: 4"):
        python_bodies(library(*FOUR[:3]))
    with pytest.raises(ValueError, match="no held-out function has two parameters"):
        python_signatures(library(source("f", "self")))


def test_tasks_are_known_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    documents = library(*FOUR)
    made = {"python-bodies": python_bodies, "python-signatures": python_signatures}
    assert {*made, "python-files"} == TASKS.keys()
    for name, make in {**made, "python-files": python_files}.items():
        monkeypatch.setitem(TASKS, name, lambda make=make: make(documents))
        assert [*load_tasks([name])[0].test_docs()] == make(documents)
    assert python_files(documents) == [{"text": documents[-1].text}]


@pytest.mark.slow
def test_the_tasks_of_this_python():
    documents = standard_library()
    training, _ = held_out_split(documents)
    text = "\n".join(document.text for document in training)
    bodies, signatures = python_bodies(), python_signatures()
    assert bodies == python_bodies(documents)
    for found in (bodies, signatures):
        assert 150 < len(found) <= MOST
    assert min(Counter(record["answer"] for record in bodies).values()) > len(bodies) / 6
    for record in bodies:
        for choice in record["choices"]:
            ast.parse(record["context"] + choice)
        body = record["choices"][record["answer"]].partition("\n")[2]
        assert f"{record['context']}):\n{body}\n" not in text
    for record in signatures:
        last = record["context"].split("\n")[-1].strip()
        ast.parse(f"{last}{record['target']} pass")
    assert {len(record["choices"]) for record in bodies} == {4}
    [(_, frequent)] = Counter(record["target"] for record in signatures).most_common(1)
    assert frequent < 0.15 * len(signatures)
