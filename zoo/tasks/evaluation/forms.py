"""The forms of a task's records: which field holds what, and an example made of one."""

import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["multiple_choice", "generate", "perplexity", "classification"]
Record = tuple[str, dict[str, Any]]  # file and line, and what is there

# The usual names of what a record holds, those of lm-eval's tasks, ARC, HellaSwag, MMLU, GSM8K, …
ROLES: dict[str, tuple[str, ...]] = {
    "context": ("context", "ctx", "question", "query", "prompt", "input"),
    "choices": ("choices", "endings", "options"),
    "answer": ("answer", "label", "gold", "answerKey", "target", "answer_index"),
    "target": ("target", "targets", "answer", "answers", "completion", "ideal"),
    "pattern": ("pattern", "regex"),
    "text": ("text", "sentence", "content"),
    "label": ("label",),
}
NEEDED: dict[Kind, tuple[str, ...]] = {
    "multiple_choice": ("context", "choices", "answer"),
    "classification": ("text", "label"),
    "generate": ("context", "target"),
    "perplexity": ("text",),
}


@dataclass(frozen=True)
class Example:
    """One example of a task; which fields it has depends on the task's kind.

    `multiple_choice` and `classification`: `context`, `choices` and `answer`, the index of the
    right one. `generate`: `context`, and `targets`, texts any of which is right, or a `pattern`,
    the regular expression of right answers. `perplexity`: `text`.
    """

    where: str
    """File and line, for messages."""
    context: str = ""
    choices: tuple[str, ...] = ()
    answer: int = 0
    targets: tuple[str, ...] = ()
    pattern: str = ""
    text: str = ""

    @property
    def solution(self) -> str:
        """The right answer as a text; empty where there is a pattern alone."""
        return self.choices[self.answer] if self.choices else "".join(self.targets[:1])


def renamed(fields: Sequence[str]) -> dict[str, str]:
    """The field of each role, of texts `role=field`.

    Raises:
        ValueError: a text of another form, or no role.
    """
    pairs = [entry.partition("=") for entry in fields]
    for role, _, name in pairs:
        if role not in ROLES or not name:
            raise ValueError(
                f"fields={role + ('=' if name else '') + name!r}: write role=field, where a role "
                f"is one of {', '.join(ROLES)}"
            )
    return {role: name for role, _, name in pairs}


def kind_of(where: str, record: Mapping[str, Any], fields: Sequence[str] = ()) -> Kind:
    """The kind of a task, by the fields of one of its records.

    Raises:
        ValueError: a record of no known form.
    """
    given = renamed(fields)

    def has(role: str) -> bool:
        return role in given or any(name in record for name in ROLES[role])

    if has("choices"):
        return "multiple_choice"
    if has("label") and (has("text") or has("context")):
        return "classification"
    if has("context") and (has("target") or has("pattern")):
        return "generate"
    if has("text"):
        return "perplexity"
    forms = "; ".join(f"{' + '.join(roles)} ({kind})" for kind, roles in NEEDED.items())
    raise ValueError(
        f"{where} is of no known form: its fields are {sorted(record)}, and the forms are {forms}. "
        "Name the fields by --fields, as in --fields context=passage target=reply"
    )


def labels_of(records: Iterable[Record], fields: Sequence[str] = ()) -> tuple[str, ...]:
    """The words that the labels of some records are, sorted.

    Raises:
        ValueError: a label that is no word, or a single one.
    """
    form, found = Form("classification", fields), set()
    for where, record in records:
        label = form.field(where, record, "label")
        if not isinstance(label, str) or not label.strip():
            raise ValueError(
                f"{where}: the label is {label!r}, and no word: give the words of the labels 0, 1, "
                "… by --labels, as in --labels negative positive"
            )
        found.add(label)
    if len(found) == 1:
        raise ValueError(f"all labels are {found.pop()!r}: name the others too, by --labels")
    return tuple(sorted(found))


class Form:
    """The way from a record to an example of a kind, by its fields' names and a prompt.

    `read` gathers the names of the fields that examples were made of.
    """

    def __init__(
        self,
        kind: Kind,
        fields: Sequence[str] = (),
        prompt: str | None = None,
        letters: bool = False,
        labels: Sequence[str] = (),
    ):
        self.kind, self._prompt, self._letters = kind, prompt, letters
        self._labels = tuple(labels)
        self._fields = renamed(fields)
        self.read: set[str] = set()

    def example(self, where: str, record: Mapping[str, Any]) -> Example:
        """The example in a record.

        Raises:
            ValueError: a part that is missing, empty or out of range; it begins with `where`.
        """
        if self.kind == "perplexity":
            text = _text(where, "text", self.field(where, record, "text"))
            if not text:
                raise ValueError(f"{where}: the text is empty, and has no bits per byte")
            return Example(where, text=text)
        if self.kind == "generate":
            return self._generated(where, record)
        names: tuple[str, ...] = ()
        if self.kind == "classification":
            choices, answer = self._labels, self.field(where, record, "label")
        else:
            choices, names = _choices(where, self.field(where, record, "choices"))
            answer = self.field(where, record, "answer")
        if self._letters and len(choices) > len(string.ascii_uppercase):
            raise ValueError(f"{where} has {len(choices)} choices, more than there are letters")
        right = _index(where, answer, choices, names)
        context = self._context(where, record, choices)
        shown = tuple(string.ascii_uppercase[: len(choices)]) if self._letters else choices
        return Example(where, context, shown, right)

    def _generated(self, where: str, record: Mapping[str, Any]) -> Example:
        targets: tuple[str, ...] = ()
        text = ""
        if not self._has(record, "pattern") or self._has(record, "target"):
            targets = _targets(where, self.field(where, record, "target"))
        if self._has(record, "pattern"):
            text = _text(where, "pattern", self.field(where, record, "pattern"))
            try:
                re.compile(text)
            except re.error as error:
                raise ValueError(f"{where}: {text!r} is no regular expression: {error}") from error
        context = self._context(where, record, ())
        return Example(where, context, targets=targets, pattern=text)

    def field(self, where: str, record: Mapping[str, Any], role: str) -> Any:
        """The field of a record in a role; none, or two of them, are a ValueError."""
        name = self._name(record, role)
        usual = [self._fields[role]] if role in self._fields else ROLES[role]
        others = [other for other in usual if other in record and other != name]
        if name is None or name not in record:
            raise ValueError(
                f"{where} has no field {' or '.join(map(repr, usual))}, for the {role}: its fields "
                f"are {sorted(record)}; name it by --fields {role}=…"
            )
        if others:
            raise ValueError(
                f"{where} has both {name!r} and {others[0]!r}: say which one is the {role}, by "
                f"--fields {role}={name}"
            )
        self.read.add(name)
        return record[name]

    def _has(self, record: Mapping[str, Any], role: str) -> bool:
        return self._name(record, role) is not None

    def _name(self, record: Mapping[str, Any], role: str) -> str | None:
        if role in self._fields:
            return self._fields[role]
        return next((name for name in ROLES[role] if name in record), None)

    def _context(self, where: str, record: Mapping[str, Any], choices: Sequence[str]) -> str:
        """The prompt of a record, up to the answer."""
        listed = "\n".join(f"{a}. {x}" for a, x in zip(string.ascii_uppercase, choices))  # noqa: B905
        prompt = self._prompt
        if prompt is None:
            role = "text" if self.kind == "classification" else "context"
            if role == "text" and self._name(record, "text") not in record:
                role = "context"  # of what is classified
            text = _text(where, role, self.field(where, record, role))
            is_question = self._name(record, role) == "question"
            start = f"Question: {text}" if is_question else text
            if self._letters:
                return f"{start}\n{listed}\nAnswer:"
            return f"{start}\nAnswer:" if is_question else start

        def fill(match: re.Match[str]) -> str:
            name = match[1]
            if name not in record:
                raise ValueError(
                    f"{where} has no field {name!r}, which the prompt names: its fields are "
                    f"{sorted(record)}"
                )
            self.read.add(name)
            value = record[name]
            if self.kind == "multiple_choice" and name == self._name(record, "choices"):
                return listed
            return _text(where, name, value)

        return re.sub(r"\{(\w+)\}", fill, prompt)


def _text(where: str, name: str, value: Any) -> str:
    """A text, or a number as one."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{where}: {name} is {value!r:.80}, and has to be a text")
    return str(value)


def _choices(where: str, value: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Choices, and their own names where they have some, as ARC's do."""
    names: Any = ()
    if isinstance(value, dict) and isinstance(value.get("text"), list):
        value, names = value["text"], value.get("label", ())
    if not isinstance(value, list) or len(value) < 2:
        raise ValueError(f"{where}: choices are {value!r:.80}, and have to be a list of two texts")
    choices = tuple(_text(where, f"choice {i}", x) for i, x in enumerate(value))
    for i, choice in enumerate(choices):
        if not choice.strip():
            raise ValueError(
                f"{where}: choice {i} is empty ({choice!r}): there is nothing to score"
            )
    return choices, tuple(map(str, names))


def _index(where: str, answer: Any, choices: Sequence[str], names: Sequence[str]) -> int:
    """Which choice an answer is: by its name, its text, its index, or its letter."""
    last = len(choices) - 1
    if isinstance(answer, str):
        text = answer.strip()
        if text in names:
            return list(names).index(text)
        if [*choices].count(answer) == 1:
            return list(choices).index(answer)
        if re.fullmatch(r"\d+", text):
            answer = int(text)
        elif len(text) == 1 and text in string.ascii_letters:
            answer = string.ascii_uppercase.index(text.upper())
            if answer > last:
                letters = string.ascii_uppercase[: last + 1]
                raise ValueError(f"{where}: the answer {text!r} is none of {', '.join(letters)}")
    if isinstance(answer, bool) or not isinstance(answer, int):
        raise ValueError(
            f"{where}: the answer {answer!r:.80} is no index, no letter and none of the choices "
            f"{', '.join(map(repr, choices))}"
        )
    if not 0 <= answer <= last:
        raise ValueError(
            f"{where}: the answer {answer} is out of range: the {last + 1} choices are 0 to {last}"
        )
    return answer


def _targets(where: str, value: Any) -> tuple[str, ...]:
    """The right texts of a generated answer: one, or any of a list."""
    if isinstance(value, dict) and isinstance(value.get("text"), list):  # SQuAD's
        value = value["text"]
    found = tuple(
        _text(where, "target", x) for x in (value if isinstance(value, list) else [value])
    )
    if not found or not all(x.strip() for x in found):
        raise ValueError(f"{where}: the target is {value!r:.80}: give a text that is right")
    return found
