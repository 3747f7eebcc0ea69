"""Tasks made from the source of Python's standard library, from the files that are held out.

The files are what `recipes.lm` and `recipes.rnn` hold out by default, so that the models of
the shelf have not been trained on them. Functions that training files have too, or that differ from
another one in numbers and strings alone, are left out.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from zoo.data.documents import Document, functions_of, held_out_split, standard_library, unit_hash

MOST = 400  # examples
CHOICES = 4
NEAREST = 12  # functions of nearly the same length that wrong bodies are drawn from
BODY_BYTES = range(40, 481)  # with its signature it fits into the 256 tokens of a training row
BEFORE_BYTES = 600  # of the file, before a signature to complete


def dataset(name: str, **_: Any) -> Any:
    """The examples of the task of that name as lm-eval reads them; a `datasets.DatasetDict`."""
    import datasets

    return datasets.DatasetDict(test=datasets.Dataset.from_list(TASKS[name]()))


class Function(NamedTuple):
    """A function of one line of signature, as it stands in its file."""

    place: str
    """Its file and line."""
    name: str
    before: str
    """Lines of its file and the first of its own, up to its parameters."""
    signature: str
    """The rest of the first line, `(self, key, default=None):` for example."""
    body: str
    """The lines after it, dedented as if the function were at top level, without a docstring."""


def python_bodies(documents: Sequence[Document] | None = None) -> list[dict[str, Any]]:
    """Multiple choice: the body of a function, among the bodies of three others of similar length.

    The prompt is the signature up to its last word, where tokenizers cut too, and each choice the
    rest of that line and a body.

    Raises:
        ValueError: fewer than four held-out functions.
    """
    found = [f for f in _held_out(documents) if len(f.body.encode()) in BODY_BYTES]
    if len(found) < CHOICES:
        raise ValueError(f"{len(found)} held-out functions: {CHOICES} bodies make a choice")
    return [_choice(function, found) for function in _chosen(found)]


def python_signatures(documents: Sequence[Document] | None = None) -> list[dict[str, Any]]:
    """Completion: a function's signature from its first parameter on.

    The prompt is the lines of its file before it, and its name and first parameter.

    Raises:
        ValueError: no held-out function has a second one.
    """
    found = [(f, re.fullmatch(r"(\(\w+)(,.*:)", f.signature)) for f in _held_out(documents)]
    parts = {f: (f.before + match[1], match[2]) for f, match in found if match}
    if not parts:
        raise ValueError("no held-out function has two parameters: there is nothing to complete")
    return [{"context": parts[f][0], "target": parts[f][1]} for f in _chosen([*parts])]


def python_files(documents: Sequence[Document] | None = None) -> list[dict[str, Any]]:
    """Text: each held-out file as it stands."""
    _, held_out = _split(documents)
    return [{"text": document.text} for document in held_out if document.text.strip()]


TASKS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "python-bodies": python_bodies,
    "python-signatures": python_signatures,
    "python-files": python_files,
}


def _split(documents: Sequence[Document] | None) -> tuple[list[Document], list[Document]]:
    documents = standard_library() if documents is None else documents
    python = [document for document in documents if document.name.endswith(".py")]
    return held_out_split(python)


def _held_out(documents: Sequence[Document] | None) -> list[Function]:
    training, held_out = _split(documents)
    seen = {_without_constants(document.text) for document in _functions(training)}
    lines_of = {document.name: document.text.split("\n") for document in held_out}
    found: list[Function] = []
    for document in _functions(held_out):
        if (text := _without_constants(document.text)) not in seen:
            seen.add(text)
            found += _read(document, lines_of)
    return found


def _functions(documents: Sequence[Document]) -> Iterator[Document]:
    for name, text in documents:
        for line, function in functions_of(name, text):
            yield Document(f"{name}:{line}", function)


def _without_constants(text: str) -> str:
    return re.sub(r"'[^'\n]*'|\"[^\"\n]*\"|\d+", "", text.strip())


def _read(document: Document, lines_of: Mapping[str, list[str]]) -> Iterator[Function]:
    """The function that is a document, if its signature is one line and it does something."""
    file, _, first = document.name.rpartition(":")
    try:
        [node] = ast.parse(document.text).body
    except (SyntaxError, ValueError):  # of a string over lines, which hindered dedenting
        return
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    lines = document.text.split("\n")  # as the parser counts them
    head = re.fullmatch(r"((?:async )?def \w+)(.*:)", lines[node.lineno - 1])
    if head is None or not _is_whole(head[0]):
        return
    has_docstring = ast.get_docstring(node, clean=False) is not None
    if len(node.body) == has_docstring:
        return
    start = (node.body[0].end_lineno or 0) if has_docstring else node.lineno
    body = "\n".join(lines[start : node.end_lineno]).strip("\n").rstrip()
    at = int(first) + node.lineno - 2  # the line of its signature in the file
    before = _last_lines([*lines_of[file][:at], lines_of[file][at].removesuffix(head[2])])
    yield Function(document.name, node.name, before, head[2], body)


def _last_lines(lines: Sequence[str]) -> str:
    """The last line, and as many before it as make up `BEFORE_BYTES` at most."""
    text = lines[-1]
    for line in lines[-2::-1]:
        if len(line.encode()) + 1 + len(text.encode()) > BEFORE_BYTES:
            break
        text = f"{line}\n{text}"
    return text


def _is_whole(line: str) -> bool:
    try:
        ast.parse(f"{line} pass")
    except SyntaxError:
        return False
    return True


def _chosen(found: Sequence[Function]) -> list[Function]:
    """At most `MOST` of them, by a hash of their places, in the order of the library."""
    kept = sorted(found, key=lambda function: unit_hash(function.place))[:MOST]
    return [function for function in found if function in kept]


def _choice(function: Function, found: Sequence[Function]) -> dict[str, Any]:
    length = len(function.body.encode())
    bodies = {f.body: f for f in found if f.name != function.name}
    bodies.pop(function.body, None)
    near = sorted(bodies, key=lambda body: (abs(len(body.encode()) - length), body))[:NEAREST]
    wrong = sorted(near, key=lambda body: unit_hash(f"{function.place} or {bodies[body].place}"))
    choices = wrong[: CHOICES - 1]
    answer = int(unit_hash(f"{function.place} is right") * CHOICES)
    choices.insert(answer, function.body)
    line = function.before.split("\n")[-1].lstrip() + function.signature
    cut = max(match.end() for match in re.finditer(r"\w", line))
    return {
        "context": line[:cut],
        "choices": [f"{line[cut:]}\n{body}" for body in choices],
        "answer": answer,
    }
