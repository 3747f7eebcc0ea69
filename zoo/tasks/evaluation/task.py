"""Tasks: examples with their answers, from JSON lines in the forms of the common harnesses."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["multiple_choice", "generate", "perplexity", "classification"]


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


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a file is made into a task: flags of `zoo eval`, or keys of a `.toml` file."""

    kind: Kind | None = None
    """Kind of the task; recognised by the fields of its first line if not given."""
    fields: tuple[str, ...] = ()
    """Other names of fields, as answer=gold."""
    prompt: str | None = None
    """Text before the answer, with fields in braces, as 'Question: {question}\\nAnswer:'."""
    letters: bool = False
    """List the choices in the prompt as A., B., …, and score the letters."""
    labels: tuple[str, ...] = ()
    """Words of the labels 0, 1, … of a classification; those of the file, sorted, if not given."""
    num_shots: int = 0
    """Answered examples before each question."""
    shots: str = ""
    """File that they come from; the task's own if not given."""
    chat: bool = False
    """Write prompts by the chat template of the tokenizer."""
    begin: bool = True
    """Put the token that texts begin with before each context."""
    max_new_tokens: int = 128
    """Tokens of a generated answer, at most."""
    stop: tuple[str, ...] = ("\n\n",)
    """Texts that end a generated answer, beside the model's own ends."""
    extract: str = ""
    """Regular expression whose first group in a generated text is the answer."""


@dataclass(frozen=True)
class Task:
    """A task: its examples, those that stand before each as shots, and how it is asked."""

    name: str
    kind: Kind
    examples: tuple[Example, ...]
    shots: tuple[Example, ...]
    settings: Settings


def read_task(name_or_path: str, settings: Settings | None = None) -> Task:
    """The task of a name in `built_in.MAKERS`, of a `.jsonl` file, or of a `.toml` file.

    A `.toml` file has the fields of `Settings` as keys, and in `data` the name of a `.jsonl` file
    beside it; what `settings` says is the default.

    Raises:
        ValueError: a line of no known form, or one that lacks a part; the message names the file
            and the line.
    """
    raise NotImplementedError
