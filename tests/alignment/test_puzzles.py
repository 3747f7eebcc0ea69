import itertools
import json
import subprocess
import sys

import pytest

from zoo.alignment import puzzles


def first(count):
    return list(itertools.islice(puzzles.puzzles(), count))


def test_puzzles_are_always_the_same_and_have_their_answers():
    rows = first(3000)
    assert rows == first(3000)
    assert len({row["prompt"] for row in rows}) == 3000
    assert all(puzzles.right(x["prompt"], x["answer"], x) == {x["kind"]: 1.0} for x in rows)
    kinds = [row["kind"] for row in rows]
    assert min(kinds.count(kind) for kind in ("sum", "countdown", "brackets")) > 500
    assert max(len(row["prompt"]) for row in rows) <= 31
    assert max(len(row["answer"]) for row in rows) < 24


@pytest.mark.parametrize(
    ("kind", "prompt", "answer", "given", "reward"),
    [
        ("sum", "384+57=", "441", "441", 1),
        ("sum", "384+57=", "441", "0441", 0),
        ("brackets", "([]{< ", ">})", ">})", 1),
        ("brackets", "([]{< ", ">})", ">}", 0),
        ("countdown", "31 from 2 4 5 9=", "5*4+9+2", "2+9+4*5", 1),  # another way
        ("countdown", "31 from 2 4 5 9=", "5*4+9+2", "5*4+9-2", 0),  # 27
        ("countdown", "31 from 2 4 5 9=", "5*4+9+2", "5*5+4+2", 0),  # 5 twice, no 9
        ("countdown", "31 from 2 4 5 9=", "5*4+9+2", "31", 0),
        ("countdown", "7 from 1 2 3 9=", "9-3+2-1", "9-3+2-1", 1),
        ("countdown", "7 from 1 2 3 9=", "9-3+2-1", "9--3+2-1", 0),
        ("countdown", "7 from 1 2 3 9=", "9-3+2-1", "9-(3+2-1)", 0),
        ("countdown", "7 from 1 2 3 9=", "9-3+2-1", "", 0),
    ],
)
def test_answers_have_the_reward_of_what_they_solve(kind, prompt, answer, given, reward):
    row = {"kind": kind, "prompt": prompt, "answer": answer}
    assert puzzles.right(prompt, given, row) == {kind: float(reward)}


def test_texts_to_learn_from_have_none_of_the_prompts():
    command = [sys.executable, "-m", "zoo.alignment.puzzles", "50"]
    texts = [json.loads(line)["text"] for line in subprocess.check_output(command).splitlines()]
    assert len(texts) == 50
    prompts = {row["prompt"] for row in first(puzzles.NUM_PROMPTS)}
    assert not any(text.startswith(prompt) for text in texts for prompt in prompts)
    assert first(puzzles.NUM_PROMPTS + 1)[-1]["prompt"] in texts[0]
