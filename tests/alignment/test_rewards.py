import time

import pytest

from zoo.alignment.rewards import rewarding

ODD = "tests.reward_cases:odd"


def test_rewards_are_in_order_whatever_fails(capfd):
    answers = ["fine", "raise", "nan", "sleep", "end", "exit", "nothing", "function", "fine"]
    with rewarding(ODD, workers=2, seconds=3.0) as rewards:
        began = time.monotonic()
        found = rewards([("prompt", answer, {}) for answer in answers])
        assert time.monotonic() - began < 60  # and not 600
        again = rewards([("prompt", "fine", {})])
    problems = {
        "raise": "KeyError: 'x'",
        "nan": "returned nan",
        "sleep": "took longer than 3 s",
        "end": "ended its process",
        "exit": "SystemExit: 1",
        "nothing": "returned None",
        "function": "returned <function",
    }
    for answer, reward in zip(answers, found, strict=True):
        assert problems.get(answer, "") in reward.problem
        assert bool(reward.problem) == (answer in problems)
        assert reward.value(-2.0) == (-2.0 if reward.problem else 1.0)
    assert again[0].value(0.0) == 1.0
    assert "printed" not in capfd.readouterr().out


def test_parts_are_added_up():
    with rewarding("tests.reward_cases:letters", workers=1) as rewards:
        [reward] = rewards([("prompt", "abCD", {"want": "b"})])
    assert reward.parts == {"letters": 0.25, "wanted": 1.0}
    assert reward.value(0.0) == 1.25


@pytest.mark.parametrize(
    ("function", "match"),
    [
        ("tests.reward_cases:none_such", "none_such"),
        ("no_such_module:f", "no_such_module"),
        ("tests.reward_cases", "MODULE:NAME"),
        ("os:getcwd:x", "getcwd:x"),
    ],
)
def test_a_function_that_is_none_is_refused(function, match):
    with pytest.raises(ValueError, match=match), rewarding(function, workers=1):
        pass
