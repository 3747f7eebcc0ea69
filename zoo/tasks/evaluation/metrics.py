"""The metrics of a task, with standard errors and 95 % intervals.

Shares of examples have the standard error of a mean, and Wilson's interval (1927), which holds near
0 and 1 too; ratios of sums, and F1, have those of 1000 bootstrap resamples of the examples.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from zoo.tasks.evaluation.requests import Request
from zoo.tasks.evaluation.scorer import LogLikelihood
from zoo.tasks.evaluation.task import Task

RESAMPLES = 1000
NORMAL_95 = 1.959964


class Estimate(NamedTuple):
    """A metric, its standard error and 95 % interval; nan where one example does not give it."""

    value: float
    stderr: float
    low: float
    high: float
    by: Literal["wilson", "bootstrap"]


def estimates(
    task: Task, requests: Sequence[Request], results: Sequence[Any]
) -> dict[str, Estimate]:
    """The metrics of a task by name, from the results of its requests, in their order."""
    by_example: list[list[Any]] = [[] for _ in task.examples]
    for request, result in zip(requests, results, strict=True):
        by_example[request.example].append(result)
    if task.kind == "generate":
        return _of_texts(task, [text for [text] in by_example])
    if task.kind == "perplexity":
        return _of_whole_texts(task, by_example)
    return _of_choices(task, by_example)


def _of_choices(task: Task, scores: Sequence[Sequence[LogLikelihood]]) -> dict[str, Estimate]:
    """`acc`, by the likeliest choice, and `acc_norm`, by the likeliest per byte.

    Of a classification `acc` and `macro_f1`.
    """
    answers = np.array([example.answer for example in task.examples])
    likeliest = np.array([np.argmax([one.total for one in each]) for each in scores])
    found = {"acc": share(likeliest == answers)}
    if task.kind == "classification":
        return found | {"macro_f1": macro_f1(answers, likeliest)}
    if task.settings.letters:  # they are all one byte long
        return found
    per_byte = [
        np.argmax(
            [one.total / len(x.encode()) for one, x in zip(each, example.choices, strict=True)]
        )
        for each, example in zip(scores, task.examples, strict=True)
    ]
    return found | {"acc_norm": share(np.array(per_byte) == answers)}


def _of_texts(task: Task, texts: Sequence[str]) -> dict[str, Estimate]:
    """`exact_match` where there are targets, and `regex_match` where there are patterns."""
    pairs = [
        (answer_in(text, task.settings.extract), example)
        for text, example in zip(texts, task.examples, strict=True)
    ]
    found = {}
    if exact := [(answer, example) for answer, example in pairs if example.targets]:
        right = [answer in _right(example.targets, task) for answer, example in exact]
        found["exact_match"] = share(np.array(right))
    if matched := [(answer, example.pattern) for answer, example in pairs if example.pattern]:
        right = [re.search(pattern, answer) is not None for answer, pattern in matched]
        found["regex_match"] = share(np.array(right))
    return found


def _right(targets: Sequence[str], task: Task) -> set[str]:
    """Right answers, of which a task's expression takes the same part as of generated texts."""
    extract = task.settings.extract
    return {
        answer_in(target, extract if extract and re.search(extract, target) else "")
        for target in targets
    }


def answer_in(text: str, extract: str = "") -> str:
    """The answer in a generated text without the blanks around it; none if nothing matches."""
    if extract:
        found = re.search(extract, text)
        text = "" if found is None else found[1 if found.re.groups else 0] or ""
    return text.strip()


def _of_whole_texts(task: Task, windows: Sequence[Sequence[LogLikelihood]]) -> dict[str, Estimate]:
    """`bits_per_byte` of UTF-8, `perplexity` per token, and `word_perplexity` as lm-eval has it."""
    nats = np.array([-sum(one.total for one in each) for each in windows])
    texts = [example.text for example in task.examples]
    counts = {
        "bits_per_byte": [len(text.encode()) for text in texts],
        "perplexity": [sum(one.num_tokens for one in each) for each in windows],
        "word_perplexity": [len(re.split(r"\s+", text)) for text in texts],
    }

    def ratio(name: str, units: np.ndarray) -> Callable[[np.ndarray], float]:
        def value(chosen: np.ndarray) -> float:
            per_unit = nats[chosen].sum() / units[chosen].sum()
            return per_unit / math.log(2) if name == "bits_per_byte" else float(np.exp(per_unit))

        return value

    size = len(texts)
    return {name: bootstrap(ratio(name, np.array(units)), size) for name, units in counts.items()}


def share(right: np.ndarray) -> Estimate:
    """The share of right examples, with the standard error of a mean and Wilson's interval."""
    size, value = len(right), float(right.mean())
    stderr = float(right.std(ddof=1) / math.sqrt(size)) if size > 1 else math.nan
    spread = NORMAL_95**2 / size
    centre = (value + spread / 2) / (1 + spread)
    half = math.sqrt(spread * (value * (1 - value) + spread / 4)) / (1 + spread)
    return Estimate(value, stderr, max(0.0, centre - half), min(1.0, centre + half), "wilson")


def macro_f1(answers: Int[np.ndarray, "examples"], found: Int[np.ndarray, "examples"]) -> Estimate:
    """The unweighted mean of the F1 of all classes that are true or found anywhere."""
    size = int(max(answers.max(), found.max())) + 1
    cells = answers * size + found

    def value(chosen: np.ndarray) -> float:
        matrix = np.bincount(cells[chosen], minlength=size * size).reshape(size, size)
        either = matrix.sum(0) + matrix.sum(1)
        return float((2 * matrix.diagonal()[either > 0] / either[either > 0]).mean())

    return bootstrap(value, len(answers))


def bootstrap(value: Callable[[np.ndarray], float], size: int) -> Estimate:
    """A function of the indices of examples, on all of them and on resamples, always the same."""
    whole = value(np.arange(size))
    if size == 1:
        return Estimate(whole, math.nan, math.nan, math.nan, "bootstrap")
    rng = np.random.default_rng(0)
    drawn = np.array([value(rng.integers(0, size, size)) for _ in range(RESAMPLES)])
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Estimate(whole, float(drawn.std(ddof=1)), float(low), float(high), "bootstrap")
