"""Tasks: examples with their answers, from JSON lines in the forms of the common harnesses."""

import dataclasses
import logging
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zoo.base import configuration
from zoo.base.addresses import is_remote
from zoo.base.files import local_path
from zoo.data.documents import read_records
from zoo.data.tokenizer import Reading
from zoo.tasks.evaluation.built_in import TASKS
from zoo.tasks.evaluation.forms import Example as Example
from zoo.tasks.evaluation.forms import Form, Record, kind_of, labels_of, renamed
from zoo.tasks.evaluation.forms import Kind as Kind

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a file is made into a task: flags of `zoo eval`, or keys of a `.toml` file."""

    kind: Kind | None = None
    """Kind of the task; recognised by the fields of its first line if not given."""
    fields: tuple[str, ...] = ()
    """Names of fields that are not the usual ones, as context=passage answer=gold_index."""
    prompt: str | None = None
    r"""Text before the answer, with fields in braces, as 'Question: {question}\nAnswer:'."""
    delimiter: str = " "
    """Text between a prompt and its answer, but in a chat."""
    letters: bool = False
    """List the choices in the prompt as A., B., …, and score the letters."""
    labels: tuple[str, ...] = ()
    """Words of a classification's labels, those of 0, 1, … where labels are numbers; by default
    those that the file has, sorted."""
    num_shots: int = 0
    """Answered examples before each question."""
    shots: str = ""
    """File that they come from; the task's own if not given, without the example at hand."""
    chat: bool = False
    """Write prompts by the chat template of the tokenizer."""
    begin: bool = True
    """Put the token that the tokenizer's texts begin with before each prompt."""
    special_tokens: Reading | None = None
    """Reading of special tokens' names in the texts, such as <|im_end|>: parse, as those tokens; or
    text, as plain characters. If not given, parse, and text for a classifier, as in training."""
    max_new_tokens: int = 128
    """Tokens of a generated answer, at most."""
    stop: tuple[str, ...] | None = None
    """Texts, or special tokens by name, that end a generated answer, beside the model's own ends;
    an empty line if not given, and in a chat none."""
    extract: str = ""
    """Regular expression whose first match in a generated text, or its group, is the answer."""

    def __post_init__(self) -> None:
        configuration.check(self)
        require = configuration.require
        require(self.num_shots >= 0, f"num_shots={self.num_shots}: must not be negative")
        require(self.max_new_tokens >= 1, f"max_new_tokens={self.max_new_tokens}: at least 1")
        require(
            not self.shots or self.num_shots > 0, f"shots={self.shots!r}: say how many, --num-shots"
        )
        renamed(self.fields)
        try:
            re.compile(self.extract)
        except re.error as error:
            message = f"extract={self.extract!r} is no regular expression: {error}"
            raise ValueError(message) from error

    @property
    def stops(self) -> tuple[str, ...]:
        """The ends of a generated answer, beside the model's own."""
        return (() if self.chat else ("\n\n",)) if self.stop is None else self.stop


@dataclass(frozen=True)
class Task:
    """A task: its examples, those that stand before each as shots, and how it is asked."""

    name: str
    kind: Kind
    examples: tuple[Example, ...]
    shots: tuple[Example, ...]
    settings: Settings

    @property
    def shares_shots(self) -> bool:
        """Whether the shots are the task's own examples."""
        return not self.settings.shots


def read_task(
    name_or_path: str, settings: Settings | None = None, limit: int | None = None
) -> Task:
    """The task of a name in `built_in.TASKS`, of a file of records, or of a `.toml` file.

    A `.toml` file has fields of `Settings` as keys, and in `data` the file of records (see
    `read_records`), from its own folder. A field of `settings` that is not the default comes before
    it. `limit` is the number of first examples that are taken.

    Raises:
        ValueError: a line of no known form, or one that lacks a part; the message names the file
            and the line.
    """
    name, own, records = _found(name_or_path)
    settings = _merged(settings or Settings(), own, name_or_path)
    kind = settings.kind or kind_of(*records[0], settings.fields)
    labels: Sequence[str] = settings.labels
    if kind == "classification" and not labels:
        labels = labels_of(records, settings.fields)
    prompt = None if settings.prompt is None else unescaped(settings.prompt)
    form = Form(kind, settings.fields, prompt, settings.letters, labels)

    def examples_of(records: Sequence[Record]) -> tuple[Example, ...]:
        return tuple(form.example(where, record) for where, record in records)

    examples = shots = examples_of(records)
    _say_unread(name, form, records)
    if settings.shots:
        shots = examples_of(_lines(settings.shots))
    task = Task(name, kind, examples[:limit], shots, settings)
    _check_shots(task, name_or_path)
    return task


def unescaped(text: str) -> str:
    """The text of a flag, in which \\n and \\t are written out, as a shell passes them on."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def _found(name_or_path: str) -> tuple[str, Mapping[str, Any], Sequence[Record]]:
    """A task's name, its own settings, and its records."""
    if name_or_path in TASKS:
        made = enumerate(TASKS[name_or_path].records(), start=1)
        records = [(f"{name_or_path}, example {number}", record) for number, record in made]
        return name_or_path, TASKS[name_or_path].settings, records
    name = re.sub(
        r"\.(toml|(jsonl|ndjson|json|csv|parquet)(\.\w+)?)$",
        "",
        re.split(r"[/\\\\]", name_or_path)[-1],
    )
    if not name_or_path.endswith(".toml"):
        return name, {}, _lines(name_or_path)
    path = local_path(name_or_path, "task")
    try:
        own = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no TOML: {error}") from error
    data = own.pop("data", None)
    if not isinstance(data, str):
        raise ValueError(f"{path} names no file of examples: add data = 'examples.jsonl'")
    for field, file in (("data", data), ("shots", own.get("shots"))):
        if isinstance(file, str) and not is_remote(file):
            own[field] = str(path.parent / file)
    return name, own, _lines(own.pop("data", data))


def _lines(pattern: str) -> list[Record]:
    try:
        records = [(where, record) for _, where, record in read_records(pattern)]
    except FileNotFoundError as error:
        known = f"; {pattern!r} is no built-in task either: {', '.join(TASKS)}" if TASKS else ""
        raise FileNotFoundError(f"{error}{known}") from error
    if not records:
        raise ValueError(f"{pattern} has no lines: a task has an example per line")
    return records


def _merged(settings: Settings, own: Mapping[str, Any], name: str) -> Settings:
    """The task's own settings, and in their place those that are given."""
    given = {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)
        if getattr(settings, field.name) != field.default
    }
    try:
        return dataclasses.replace(configuration.from_json(Settings, own), **given)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _say_unread(name: str, form: Form, records: Sequence[Record]) -> None:
    if unread := sorted({field for _, record in records for field in record} - form.read):
        logger.warning("%s: not read are the fields %s", name, ", ".join(unread))


def _check_shots(task: Task, name: str) -> None:
    count, found = task.settings.num_shots, len(task.shots)
    if count == 0:
        return
    if task.kind == "perplexity":
        raise ValueError(f"num_shots={count}: {name} is scored as text, which has no questions")
    if count > found - task.shares_shots:
        beside = f", {found - 1} beside each" if task.shares_shots else ""
        raise ValueError(
            f"num_shots={count}: {task.settings.shots or name} has {found} examples{beside}: lower "
            "it, or name another file by --shots"
        )
    for shot in task.shots:
        if not shot.solution:
            raise ValueError(f"{shot.where}: a shot needs a target, and this has a pattern alone")
