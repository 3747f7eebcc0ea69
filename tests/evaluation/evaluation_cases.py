"""Models, folders and requests for the tests of evaluation."""

import json
from pathlib import Path

from lm_eval.api.instance import Instance

GOLDEN = Path(__file__).parents[1] / "golden"


SCORES = json.loads((GOLDEN / "scores" / "scores.json").read_text())


def records(name: str) -> list[dict]:
    lines = (GOLDEN / "scores" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def asked(*arguments: tuple) -> list[Instance]:
    return [Instance("loglikelihood", {}, one, 0) for one in arguments]


PAIRS = [
    (list(range(65, 65 + context)), list(range(70, 70 + continuation)))
    for context, continuation in [(0, 3), (2, 1), (20, 4), (14, 3), (15, 1), (3, 9), (40, 20)]
]


CHOICES = [{"context": x, "choices": ["ab", "c", f"{i}"], "answer": i % 3}
           for i, x in enumerate("abcdefghij")]  # fmt: skip


CLASSES = ("1", "2", "5")


LABELS = [CLASSES[i * i % 3] for i in range(24)]
