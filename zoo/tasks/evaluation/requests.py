"""The requests of a task: what is scored or continued for each example, as token ids."""

import datetime
import random
from collections.abc import Sequence
from typing import NamedTuple

from zoo.data.chats import ChatTemplate, Message
from zoo.data.completions import encode_parts
from zoo.data.special_tokens import begun
from zoo.data.tokenizer import Tokenizer, reading
from zoo.tasks.evaluation.encoding import encode_pair, prefix_id, windows
from zoo.tasks.evaluation.forms import Example
from zoo.tasks.evaluation.rows import Pair
from zoo.tasks.evaluation.task import Task

BETWEEN = "\n\n"  # shots and the question
NOW = datetime.datetime(2025, 1, 1)  # for templates that write the day: the same text every day


class Request(NamedTuple):
    """A pair to score, or a prompt without a continuation, and the example that it is of."""

    pair: Pair
    example: int


def make_requests(task: Task, tokenizer: Tokenizer, length: int) -> list[Request]:
    """The requests of all examples, for rows of `length` tokens.

    Raises:
        ValueError: a tokenizer without a chat template, where there is to be a chat; an answer
            without a token, or with more than a row has; a text without one.
    """
    given = task.settings.special_tokens or "parse"
    template = ChatTemplate(tokenizer, NOW, given) if task.settings.chat else None
    tokenizer = reading(tokenizer, given)
    asked = _Asked(task, tokenizer, template)
    requests = []
    for index, example in enumerate(task.examples):
        if task.kind == "perplexity":
            ids = tokenizer.encode(example.text).tolist()
            pairs = windows(ids, prefix_id(tokenizer), length)
        elif task.kind == "generate":
            pairs = [(asked.prompt(index), ())]
        else:
            pairs = asked.choices(index)
            _check_choices(example, pairs, length)
        if not pairs:
            raise ValueError(f"{example.where}: the text has no token")
        requests += [Request(pair, index) for pair in pairs]
    return requests


class _Asked:
    """A task's examples as a model is asked them: after their shots, plain or as a chat."""

    def __init__(self, task: Task, tokenizer: Tokenizer, template: ChatTemplate | None):
        self._task, self._tokenizer, self._template = task, tokenizer, template
        self._settings = task.settings

    def prompt(self, index: int) -> list[int]:
        """The ids of an example's prompt."""
        if self._template is not None:
            return self._template.encode(self._messages(index)).tolist()
        ids = self._tokenizer.encode(self._text(index)).tolist()
        return begun(self._tokenizer, ids) if self._settings.begin else ids

    def choices(self, index: int) -> list[Pair]:
        """The ids of an example's prompt and of each of its choices."""
        choices = self._task.examples[index].choices
        if self._template is not None:  # whose ids a model is given before it answers
            before = self._template.render(self._messages(index), add_generation_prompt=True)
            return [self._answer(self._template, before, choice) for choice in choices]
        text, begin, delimiter = self._text(index), self._settings.begin, self._settings.delimiter
        return [
            encode_pair(self._tokenizer, text, delimiter + choice, begin=begin)
            for choice in choices
        ]

    @staticmethod
    def _answer(template: ChatTemplate, before: str, choice: str) -> Pair:
        """The ids of a chat and of an answer, as in training."""
        parts = [(before, False), (template.quoted(choice), True)]
        ids, counted = encode_parts(template.tokenizer, parts)
        return ids[~counted].tolist(), ids[counted].tolist()

    def _shots(self, index: int) -> list[Example]:
        """The shots of an example: drawn by its number, the same in every run."""
        count, pool = self._settings.num_shots, range(len(self._task.shots))
        if not self._task.shares_shots:
            drawn = random.Random(f"shots/{index}").sample(pool, count)
        else:
            spare = min(count + 1, len(pool))  # one of them may be the example itself
            drawn = [i for i in random.Random(f"shots/{index}").sample(pool, spare) if i != index]
        return [self._task.shots[i] for i in drawn[:count]]

    def _text(self, index: int) -> str:
        delimiter = self._settings.delimiter
        shots = [f"{shot.context}{delimiter}{shot.solution}" for shot in self._shots(index)]
        return BETWEEN.join([*shots, self._task.examples[index].context])

    def _messages(self, index: int) -> list[Message]:
        messages: list[Message] = []
        for shot in self._shots(index):
            messages.append({"role": "user", "content": shot.context})
            messages.append({"role": "assistant", "content": shot.solution})
        return [*messages, {"role": "user", "content": self._task.examples[index].context}]


def _check_choices(example: Example, pairs: Sequence[Pair], length: int) -> None:
    for number, (_, continuation) in enumerate(pairs):
        if not continuation:
            raise ValueError(f"{example.where}: choice {number} has no token of its own")
        if len(continuation) > length:
            raise ValueError(
                f"{example.where}: choice {number} has {len(continuation)} tokens, and a row of "
                f"this model {length}: shorten it, or take it out"
            )
