"""Rows to fine-tune on: forms by their columns, and the examples that each becomes."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from zoo.common import plugins
from zoo.data import completions
from zoo.data.chats import ChatTemplate, Part
from zoo.data.documents import Document, read_records
from zoo.data.token_plans import TokenPlan

Record = dict[str, Any]


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
    make_plan: Callable[..., TokenPlan] | None = None
    """Makes the plan of their corpus, in place of a `BucketPlan`."""

    @property
    def described(self) -> str:
        """The form and its columns."""
        return f"{self.name} ({', '.join(self.columns)})"


FORMS: dict[str, tuple[Form, ...]] = {
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
}


def all_forms() -> dict[str, tuple[Form, ...]]:
    """The forms of each format, of `zoo.row_forms` too; the first that fits a row is its own."""
    group = "zoo.row_forms"
    return {**FORMS, **{name: plugins.find(group, name) for name in plugins.names(group)}}


class Rows(NamedTuple):
    """Documents of JSON, a list of examples in parts each (see `zoo.data.completions`)."""

    documents: list[Document]
    form: Form


def read_rows(
    pattern: str,
    format: str,
    make_template: Callable[[], ChatTemplate] | None = None,
    names: Mapping[str, str] | None = None,
) -> Rows:
    """The rows of the matching files, which `documents.read_records` reads, and their form.

    `names` are other names of columns, such as {"prompt": "question"}. A column that is null counts
    as missing.

    Raises:
        ValueError: a row of no form, or of another than the first row; or as its form says.
    """
    formats = all_forms()
    form, template, documents = None, None, []
    for name, where, record in read_records(pattern):
        try:
            row = {column: value for column, value in record.items() if value is not None}
            for column, given in (names or {}).items():
                if given in row:
                    row[column] = row.pop(given)
            found = _form(row, format, formats)
            form = form or found
            if found is not form:
                raise ValueError(
                    f"the row's form is {found.described}, and the first row's {form.described}: "
                    "give rows of one form"
                )
            if form.is_chat and template is None:
                assert make_template is not None, "chats need a template"
                template = make_template()
            documents.append(Document(name, json.dumps(form.examples(row, template))))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    if form is None:
        raise ValueError(f"{pattern!r} has no rows")
    return Rows(documents, form)


def _form(row: Record, format: str, formats: Mapping[str, tuple[Form, ...]]) -> Form:
    """The form of a row."""
    if fitting := [form for form in formats[format] if set(form.columns) <= row.keys()]:
        lists = any(isinstance(row[column], list) for column in fitting[0].columns)
        return next((form for form in fitting if form.lists == lists), fitting[0])
    others = [
        name
        for name, forms in formats.items()
        if any(set(form.columns) <= row.keys() for form in forms)
    ]
    hint = f"; they are rows of --data.format {others[0]}" if others else ""
    known = " or ".join(dict.fromkeys(" and ".join(form.columns) for form in formats[format]))
    raise ValueError(
        f"data.format={format!r} has the fields {known}, and the row has {sorted(row)}{hint}"
    )
