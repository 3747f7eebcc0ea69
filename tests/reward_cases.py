"""Reward functions of the tests, called in processes of their own."""

import os
import sys
import time
from typing import Any


def letters(prompt: str, answer: str, row: dict[str, Any]) -> dict[str, float]:
    """The small letters of an answer, and whether it has one of the row."""
    return {"letters": sum(x.islower() for x in answer) / 8, "wanted": float(row["want"] in answer)}


def nothing(prompt: str, answer: str, row: dict[str, Any]) -> float:
    """No reward."""
    return 0.0


def odd(prompt: str, answer: str, row: dict[str, Any]) -> Any:
    """What an answer names: a kind of failure, or 1."""
    print("printed to standard output")
    match answer:
        case "raise":
            raise KeyError("x")
        case "exit":
            sys.exit(1)
        case "end":
            os._exit(3)
        case "sleep":
            time.sleep(600)
        case "nan":
            return float("nan")
        case "nothing":
            return None
        case "function":
            return lambda: 0
    return 1


def wants(prompt: str, answer: str, row: dict[str, Any]) -> float:
    """A field that no row has."""
    return row["wanted"]
