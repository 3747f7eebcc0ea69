"""Rows to fine-tune on: forms by their columns, the examples of each, and the ids of these.

An example is made of parts (text, whether it counts in the loss); a row may be several examples.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

import numpy as np

from zoo.data.chats import (
    ChatTemplate,
    Message,
    Part,
    Record,
    answer_parts,
    messages_of,
    parts_of,
    tools_of,
)
from zoo.data.formats import FORMATS, read_text, reader_of, text_of
from zoo.data.splits import Split, plan_splits
from zoo.data.tags import MOST, of_tags
from zoo.data.tokenizer import Tokenizer, end_id, reading, unframed

Counted = tuple[np.ndarray, np.ndarray]  # ids, and whether each of them counts
Format = Literal["completions", "chats", "preferences", "unpaired", "tags"]


class Form(NamedTuple):
    """A form of rows, which their columns show."""

    name: str
    columns: tuple[str, ...]
    lists: bool
    """Whether one of the columns holds a list, such as messages."""
    is_chat: bool
    """Whether a chat template writes the examples."""
    examples: Callable[[Record, Any], list[list[Part]]]
    """Makes the examples of a row, with the chat template or None."""

    @property
    def described(self) -> str:
        """The form and its columns."""
        return f"{self.name} ({', '.join(self.columns)})"


SIDES = ("chosen", "rejected")
LABELS = ["false", "true"]  # of unpaired answers
ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{}\n\n{}### Response:\n"
)
"""The prompt that Alpaca was trained with (Taori et al. 2023)."""


def of_texts(record: Record, template: None) -> list[list[Part]]:
    """A prompt and its completion, which counts."""
    return [[(text_of(record, "prompt"), False), (text_of(record, "completion"), True)]]


def of_alpaca(record: Record, template: None) -> list[list[Part]]:
    """An instruction in Alpaca's own prompt, and the output, which counts."""
    instruction, more = text_of(record, "instruction"), _input(record)
    with_input = ", paired with an input that provides further context" if more else ""
    prompt = ALPACA.format(with_input, instruction, f"### Input:\n{more}\n\n" if more else "")
    return [[(prompt, False), (text_of(record, "output"), True)]]


def of_alpaca_chat(record: Record, template: ChatTemplate) -> list[list[Part]]:
    """An instruction and its input as the user's message, and the output as the answer."""
    asked = "\n\n".join(filter(None, (text_of(record, "instruction"), _input(record))))
    messages: list[Message] = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": text_of(record, "output")},
    ]
    return parts_of(_after_system(record, messages), template, tools_of(record))


def of_messages(record: Record, template: ChatTemplate) -> list[list[Part]]:
    """A prompt of messages and its completion, an answer of the assistant, which counts."""
    prompt, answer = (messages_of(record, field) for field in ("prompt", "completion"))
    return [answer_parts(prompt, answer, template, tools_of(record), "completion")]


def of_chat(record: Record, template: ChatTemplate) -> list[list[Part]]:
    """A chat, or one of ShareGPT's, in which the assistant's messages count; see `parts_of`.

    Raises:
        ValueError: it is no chat, has no message of the assistant, or as `parts_of`.
    """
    field = "messages" if "messages" in record else "conversations"
    messages = messages_of(record, field)
    if field == "conversations":
        messages = _after_system(record, messages)
    found = parts_of(messages, template, tools_of(record))
    if not found:
        raise ValueError(f"no message of the assistant in {field!r}")
    return found


def _input(record: Record) -> str:
    return text_of(record, "input") if "input" in record else ""


def _after_system(record: Record, messages: list[Message]) -> list[Message]:
    """The messages after the one in the column `system`, unless they have one of their own."""
    system, own = record.get("system"), messages and messages[0].get("role") == "system"
    return [{"role": "system", "content": system}, *messages] if system and not own else messages


def pair_of_texts(record: Record, template: None) -> list[list[Part]]:
    """Both examples of a pair of texts; without a prompt it is the words they both begin with.

    Raises:
        ValueError: a side that is empty or no text, equal sides, or no common beginning.
    """
    sides = [text_of(record, side) for side in SIDES]
    _check_sides(*sides)
    if "prompt" in record:
        prompt = text_of(record, "prompt")
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
    sides = [messages_of(record, side) for side in SIDES]
    _check_sides(*sides)
    if isinstance(record.get("prompt"), list):
        prompt = messages_of(record, "prompt")
    else:
        count = _count_same(*sides)
        prompt, sides = sides[0][:count], [side[count:] for side in sides]
        _check_prompt(record, prompt)
    tools = tools_of(record)
    examples = [
        answer_parts(prompt, side, template, tools, name)
        for name, side in zip(SIDES, sides, strict=True)
    ]
    _check_sides(*(side[0].get("content") for side in sides))
    return examples


def _check_prompt(record: Record, prompt: list[Message]) -> None:
    """Refuse conversations without a common beginning, or with another than the given prompt."""
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
        Form("texts", ("prompt", "completion"), False, False, of_texts),
        Form("messages", ("prompt", "completion"), True, True, of_messages),
        Form("Alpaca's", ("instruction", "output"), False, False, of_alpaca),
    ),
    "chats": (
        Form("messages", ("messages",), True, True, of_chat),
        Form("ShareGPT's", ("conversations",), True, True, of_chat),
        Form("Alpaca's", ("instruction", "output"), False, True, of_alpaca_chat),
    ),
    "preferences": (
        Form("texts", ("prompt", *SIDES), False, False, pair_of_texts),
        Form("messages", ("prompt", *SIDES), True, True, pair_of_messages),
        Form("texts without a prompt", SIDES, False, False, pair_of_texts),
        Form("messages without a prompt", SIDES, True, True, pair_of_messages),
    ),
    "unpaired": (
        Form("texts", ("prompt", "completion", "label"), False, False, of_texts),
        Form("messages", ("prompt", "completion", "label"), True, True, of_messages),
    ),
    "tags": (Form("words, or letters", ("text", "tags"), True, False, of_tags),),
}
"""The forms that a format takes, the first that fits a row before the others."""


class RowOptions(TypedDict):
    """How rows are read: other names of columns, the time that templates may write, the tags."""

    format: Format
    names: dict[str, str]
    now: str | None
    classes: NotRequired[list[str]]


class Row(NamedTuple):
    """The examples of a row, each in parts of which some count, and its place."""

    source: int
    """Index of its file in the split's names."""
    record: int
    form: Form
    examples: list[list[Part]]
    label: str | None = None
    """For an unpaired answer, "true" where it is desirable, or "false"."""


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
        ValueError: a row of no form, or of another than the first row's, or that its form refuses;
            or a file without fields.
    """
    form, template = None, None
    for source, piece in enumerate(split.pieces):
        read = reader_of(piece.path)
        if read is read_text:
            known = ", ".join(FORMATS)
            raise ValueError(f"{piece.path} has no fields: rows are read from {known} files")
        for number, where, record in read(piece):
            try:
                row = {column: value for column, value in record.items() if value is not None}
                for column, given in (names or {}).items():
                    if given in row:
                        row[column] = row.pop(given)
                found = _form(row, format, names or {})
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
                label = _label(row) if format == "unpaired" else None
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            yield Row(source, number, form, examples, label)


def _label(record: Record) -> str:
    if (label := str(record["label"]).lower()) not in LABELS:
        raise ValueError(f"'label' is {record['label']!r:.80}: give true or false")
    return label


def mismatched(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows, each with a second example: its own prompt, and the answer of the row before it.

    The first row has the answer of the last one.

    Raises:
        ValueError: there is one row alone.
    """
    rows = iter(rows)
    first = before = next(rows, None)
    if first is None or before is None:
        return
    for row in rows:
        yield _with_answer(row, before)
        before = row
    if before is first:
        raise ValueError("one unpaired answer alone: it needs another's in its place; give more")
    yield _with_answer(first, before)


def _with_answer(row: Row, other: Row) -> Row:
    [own], [others] = row.examples, other.examples
    begin_of = lambda parts: [bool(counts) for _, counts in parts].index(True)  # noqa: E731
    return row._replace(examples=[own, own[: begin_of(own)] + others[begin_of(others) :]])


def tags_in(files: str, names: Mapping[str, str]) -> list[str]:
    """The tags in the rows of all files, sorted; see `read_rows`.

    Raises:
        ValueError: as `read_rows`; or fewer than two tags, or more than a byte has numbers for.
    """
    splits = plan_splits(files, shard_bytes=2**62)
    rows = (row for split in splits for row in read_rows(split, "tags", None, names))
    tags = (tag for row in rows for parts in row.examples for _, tag in parts)
    found = sorted({str(tag) for tag in tags if tag})
    if not 2 <= len(found) <= MOST:
        raise ValueError(f"the tags are {found}: there must be 2 to {MOST}")
    return found


def _form(row: Record, format: Format, names: Mapping[str, str]) -> Form:
    """The form of a row, whose columns may have other `names` in the file."""
    if fitting := [form for form in FORMS[format] if _has_columns(row, form)]:
        lists = any(isinstance(row[column], list) for column in fitting[0].columns)
        return next((form for form in fitting if form.lists == lists), fitting[0])
    others = [o for o, forms in FORMS.items() if any(_has_columns(row, form) for form in forms)]
    hint = f"; they are rows of --data.format {others[0]}" if others else ""
    named = lambda columns: [names.get(x, x) for x in columns]  # noqa: E731
    known = " or ".join(dict.fromkeys(" and ".join(named(x.columns)) for x in FORMS[format]))
    raise ValueError(
        f"data.format={format!r} has the fields {known}, and the row has {sorted(named(row))}{hint}"
    )


def _has_columns(row: Record, form: Form) -> bool:
    return set(form.columns) <= row.keys()


def encode_parts(tokenizer: Tokenizer, parts: list[Part], *, is_chat: bool) -> Counted:
    """The ids of an example, and whether they count.

    A text loses the begin and the end at its ends, as rows have their own. A conversation keeps
    those of its template, and gets the tokenizer's end where it ends with no special token.
    """
    if not is_chat:
        ids, counted = _encode_whole(tokenizer, parts)
        inner = unframed(tokenizer, ids)
        return ids[inner], counted[inner]
    ids, counted = _encode_whole(reading(tokenizer, "parse"), parts)
    if int(ids[-1]) not in getattr(tokenizer, "special_ids", ()):
        ids, counted = np.append(ids, np.int32(end_id(tokenizer))), np.append(counted, True)
    return ids, counted


def _encode_whole(tokenizer: Tokenizer, parts: list[Part], inside: bool = False) -> Counted:
    """The ids of an example, tokenized as a whole, and whether they count.

    A model is given a prompt's own ids: where the whole has others, the answer is tokenized apart.
    """
    whole = "".join(text for text, _ in parts)
    ids, spans = tokenizer.encode_spans(whole, inside=inside)
    starts, stops = spans.T
    counted, begin = np.zeros(len(ids), bool), 0
    for i, (text, counts) in enumerate(parts):
        if counts and begin:
            prompt, _ = tokenizer.encode_spans(whole[:begin], inside=inside)
            reaches_over = ((starts < begin) & (stops > begin)).any()
            if reaches_over or not np.array_equal(ids[: len(prompt)], prompt):
                before = _encode_whole(tokenizer, parts[:i], inside)
                after = _encode_whole(tokenizer, parts[i:], True)
                return np.concatenate([before[0], after[0]]), np.concatenate([before[1], after[1]])
        counted |= (starts >= begin) & (starts < begin + len(text)) & counts
        begin += len(text)
    return ids, counted
