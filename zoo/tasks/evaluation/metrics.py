"""The metrics of a task, with standard errors and 95 % intervals.

Means over examples have the standard error of a mean, and intervals of a normal distribution
around it; ratios of sums, and F1, have those of 1000 bootstrap resamples of the examples.
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
    """A metric, its standard error and 95 % interval; these are nan for a single example."""

    value: float
    stderr: float
    low: float
    high: float
    by: Literal["normal", "bootstrap"]


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
    found = {"acc": mean(likeliest == answers)}
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
    return found | {"acc_norm": mean(np.array(per_byte) == answers)}


def _of_texts(task: Task, texts: Sequence[str]) -> dict[str, Estimate]:
    """`exact_match` where there are targets, and `regex_match` where there are patterns."""
    pairs = [
        (answer_in(text, task.settings.extract), example)
        for text, example in zip(texts, task.examples, strict=True)
    ]
    found = {}
    if exact := [(answer, example) for answer, example in pairs if example.targets]:
        right = [answer in _right(example.targets, task) for answer, example in exact]
        found["exact_match"] = mean(np.array(right))
    if matched := [(answer, example.pattern) for answer, example in pairs if example.pattern]:
        right = [re.search(pattern, answer) is not None for answer, pattern in matched]
        found["regex_match"] = mean(np.array(right))
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


def mean(values: np.ndarray) -> Estimate:
    """The mean of zeros and ones over examples, with the standard error of the mean."""
    numbers = values.astype(np.float64)
    value = float(numbers.mean())
    stderr = float(numbers.std(ddof=1) / math.sqrt(len(numbers))) if len(numbers) > 1 else math.nan
    low, high = (float(np.clip(value + sign * NORMAL_95 * stderr, 0, 1)) for sign in (-1, 1))
    return Estimate(value, stderr, low, high, "normal")


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
