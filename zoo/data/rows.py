"""Rows to fine-tune on: forms by their columns, and the examples that each becomes."""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict

from zoo.data import completions
from zoo.data.chats import ChatTemplate, Message, Part
from zoo.data.sources.formats import FORMATS, format_of
from zoo.data.sources.splits import Split
from zoo.data.tokenizer import Tokenizer

Record = dict[str, Any]
Format = Literal["completions", "chats", "preferences"]


class Form(NamedTuple):
    """A form of rows, which their columns show."""

    name: str
    columns: tuple[str, ...]
    lists: bool
    """Whether one of the columns holds a list, as messages are one."""
    is_chat: bool
    """Whether a chat template writes the examples."""
    examples: Callable[[Record, Any], list[list[Part]]]
    """Makes the examples of a row, with the chat template or None."""

    @property
    def encode(self) -> Callable[[Tokenizer, list[Part]], completions.Counted]:
        """Makes the ids of an example, and whether they count."""
        return completions.encode_chat if self.is_chat else completions.encode_text

    @property
    def described(self) -> str:
        """The form and its columns."""
        return f"{self.name} ({', '.join(self.columns)})"


SIDES = ("chosen", "rejected")


def pair_of_texts(record: Record, template: None) -> list[list[Part]]:
    """Both examples of a pair of texts; without a prompt it is the words they both begin with.

    Raises:
        ValueError: a side that is empty or no text, equal sides, or no common beginning.
    """
    sides = [completions.text_of(record, side) for side in SIDES]
    _check_sides(*sides)
    if "prompt" in record:
        prompt = completions.text_of(record, "prompt")
    else:
        prompt = _common_words(*sides)
        if not prompt:
            raise ValueError(
                "no field 'prompt', and chosen and rejected have no common beginning that would "
                "be the prompt: give it in 'prompt'"
            )
        sides = [side[len(prompt) :] for side in sides]
        _check_sides(*sides)
    return [[(prompt, False), (side, True)] for side in sides]


def _common_words(one: str, other: str) -> str:
    """The words that two texts begin with, without the space after them."""
    same = one[: _count_same(one, other)]
    following = (one[len(same) :], other[len(same) :])
    if any(text and not text[0].isspace() for text in following):
        same = re.sub(r"\S+\Z", "", same)
    return same.rstrip()


def _count_same(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The length of the common beginning of two sequences."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def pair_of_messages(record: Record, template: ChatTemplate) -> list[list[Part]]:
    """Both examples of a pair of messages, each with one answer of the assistant.

    Without a list of messages as the prompt, the sides are whole conversations, whose common
    beginning is the prompt.

    Raises:
        ValueError: as `pair_of_texts`, of messages.
    """
    sides = [completions.messages_of(record, side) for side in SIDES]
    _check_sides(*sides)
    if isinstance(record.get("prompt"), list):
        prompt = completions.messages_of(record, "prompt")
    else:
        count = _count_same(*sides)
        prompt, sides = sides[0][:count], [side[count:] for side in sides]
        _check_prompt(record, prompt)
    tools = completions.tools_of(record)
    examples = [
        completions.answer_parts(prompt, side, template, tools, name)
        for name, side in zip(SIDES, sides, strict=True)
    ]
    _check_sides(*(side[0].get("content") for side in sides))
    return examples


def _check_prompt(record: Record, prompt: list[Message]) -> None:
    """Refuse conversations without a common beginning, or another than the prompt that is given."""
    if not prompt:
        raise ValueError(
            "no list of messages in 'prompt', and chosen and rejected have no common beginning"
        )
    given = record.get("prompt")
    if given is not None and given != prompt[-1].get("content"):
        raise ValueError(
            f"'prompt' is {given!r:.80}, and the common beginning of chosen and rejected ends in "
            f"{prompt[-1].get('content')!r:.80}: the prompt must be their common beginning"
        )


def _check_sides(chosen: Any, rejected: Any) -> None:
    """Refuse sides that are equal or empty."""
    for name, side in zip(SIDES, (chosen, rejected), strict=True):
        if not (side.strip() if isinstance(side, str) else side):
            raise ValueError(f"{name!r} is empty: give an answer")
    if chosen == rejected:
        raise ValueError("'chosen' and 'rejected' are equal: a pair must differ")


FORMS: dict[Format, tuple[Form, ...]] = {
    "completions": (
        Form("texts", ("prompt", "completion"), False, False, completions.of_texts),
        Form("messages", ("prompt", "completion"), True, True, completions.of_messages),
        Form("Alpaca's", ("instruction", "output"), False, False, completions.of_alpaca),
    ),
    "chats": (
        Form("messages", ("messages",), True, True, completions.of_chat),
        Form("ShareGPT's", ("conversations",), True, True, completions.of_sharegpt),
        Form("Alpaca's", ("instruction", "output"), False, True, completions.of_alpaca_chat),
    ),
    "preferences": (
        Form("texts", ("prompt", *SIDES), False, False, pair_of_texts),
        Form("messages", ("prompt", *SIDES), True, True, pair_of_messages),
        Form("texts without a prompt", SIDES, False, False, pair_of_texts),
        Form("messages without a prompt", SIDES, True, True, pair_of_messages),
    ),
}
"""The forms that a format takes, the first that fits a row before the others."""


class RowOptions(TypedDict):
    """How rows are read: the other names of columns, and the time that chat templates may write."""

    format: Format
    names: dict[str, str]
    now: str | None


class Row(NamedTuple):
    """The examples of a row, each in parts of which some count, and its place."""

    source: int
    """Index of its file in the split's names."""
    record: int
    form: Form
    examples: list[list[Part]]


def read_rows(
    split: Split,
    format: Format,
    make_template: Callable[[], ChatTemplate] | None = None,
    names: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """The rows of the files, all of the form of the first one.

    `names` are other names of columns, such as {"prompt": "question"}. A column that is null counts
    as missing.

    Raises:
        ValueError: a row of no form, or of another than the first row; or as its form says; or a
            file has no fields.
    """
    form, template = None, None
    for source, piece in enumerate(split.pieces):
        file = format_of(piece.path)
        if not file.fields:
            known = ", ".join(suffix for suffix, other in FORMATS.items() if other.fields)
            raise ValueError(f"{piece.path} has no fields: rows are read from {known} files")
        for number, where, record in file.read(piece):
            try:
                row = {column: value for column, value in record.items() if value is not None}
                for column, given in (names or {}).items():
                    if given in row:
                        row[column] = row.pop(given)
                found = _form(row, format)
                form = form or found
                if found is not form:
                    raise ValueError(
                        f"the row's form is {found.described}, and the first row's "
                        f"{form.described}: give rows of one form"
                    )
                if form.is_chat and template is None:
                    assert make_template is not None, "chats need a template"
                    template = make_template()
                examples = form.examples(row, template)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            yield Row(source, number, form, examples)


def _form(row: Record, format: Format) -> Form:
    """The form of a row."""
    if fitting := [form for form in FORMS[format] if _has_columns(row, form)]:
        lists = any(isinstance(row[column], list) for column in fitting[0].columns)
        return next((form for form in fitting if form.lists == lists), fitting[0])
    others = [o for o, forms in FORMS.items() if any(_has_columns(row, form) for form in forms)]
    hint = f"; they are rows of --data.format {others[0]}" if others else ""
    known = " or ".join(dict.fromkeys(" and ".join(form.columns) for form in FORMS[format]))
    raise ValueError(
        f"data.format={format!r} has the fields {known}, and the row has {sorted(row)}{hint}"
    )


def _has_columns(row: Record, form: Form) -> bool:
    return set(form.columns) <= row.keys()
