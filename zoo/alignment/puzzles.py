"""Puzzles made in place: sums, countdowns and brackets, which a small model half solves.

`python -m zoo.alignment.puzzles 200000` prints texts to learn them from, JSON lines of prompts with
answers, none of which is among the prompts of a training on rewards.
"""

import itertools
import json
import math
import random
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

NUM_PROMPTS = 4000  # of a training on rewards: the first of the puzzles
BRACKETS = {"(": ")", "[": "]", "{": "}", "<": ">"}
_EXPRESSION = re.compile(r"\d+([-+*]\d+)*")


def puzzles() -> Iterator[dict[str, str]]:
    """Puzzles without end, always the same, none twice: a `prompt`, an `answer` and the `kind`.

    Kinds: "sum", `384+57=` and 441; "countdown", `31 from 2 4 5 9=` and 5*4+9+2, one of the ways to
    make a number of four others, each used once; "brackets", `([]{<` and `>})`, what closes them.
    """
    draw, seen = random.Random(0), set[str]()
    kinds = {"sum": _sum, "countdown": _countdown, "brackets": _brackets}
    while True:
        kind = draw.choice([*kinds])
        prompt, answer = kinds[kind](draw)
        if prompt not in seen:
            seen.add(prompt)
            yield {"prompt": prompt, "answer": answer, "kind": kind}


def right(prompt: str, answer: str, row: Mapping[str, Any]) -> dict[str, float]:
    """The reward of an answer to a puzzle, by the kind of the puzzle: 1 if it solves it, else 0."""
    solves = answer == row["answer"]
    if row["kind"] == "countdown" and len(answer) < 32 and _EXPRESSION.fullmatch(answer):
        target, *numbers = map(int, re.findall(r"\d+", prompt))
        used = sorted(map(int, re.findall(r"\d+", answer)))
        solves = used == sorted(numbers) and _value(answer) == target
    return {row["kind"]: float(solves)}


def _sum(draw: random.Random) -> tuple[str, str]:
    a, b = (draw.randrange(10 ** draw.randint(1, 3)) for _ in range(2))
    return f"{a}+{b}=", f"{a + b}"


def _countdown(draw: random.Random) -> tuple[str, str]:
    while True:
        numbers = [draw.randint(1, 9) for _ in range(4)]
        answer = str(numbers[0]) + "".join(f"{draw.choice('+-*')}{n}" for n in numbers[1:])
        if 0 <= (target := _value(answer)) < 100:
            return f"{target} from {' '.join(map(str, sorted(numbers)))}=", answer


def _brackets(draw: random.Random) -> tuple[str, str]:
    prompt, is_open = "", ""
    for _ in range(draw.randint(8, 24)):
        if is_open and draw.random() < 0.4:
            prompt, is_open = prompt + BRACKETS[is_open[-1]], is_open[:-1]
        else:
            bracket = draw.choice([*BRACKETS])
            prompt, is_open = prompt + bracket, is_open + bracket
    return prompt + " ", "".join(BRACKETS[x] for x in reversed(is_open))


def _value(expression: str) -> int:
    """The value of numbers between +, - and *."""
    terms = re.findall(r"(-?)([\d*]+)", expression)
    return sum((-1) ** len(sign) * math.prod(map(int, term.split("*"))) for sign, term in terms)


if __name__ == "__main__":
    for row in itertools.islice(puzzles(), NUM_PROMPTS, NUM_PROMPTS + int(sys.argv[1])):
        print(json.dumps({"text": row["prompt"] + row["answer"]}))
