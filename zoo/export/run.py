"""Continue token ids greedily with the programs of this folder: python run.py COUNT ID [ID …]."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export
from safetensors import safe_open

FOLDER = Path(__file__).parent


def program(name: str) -> Callable[..., Any]:
    """A program of the folder; JAX compiles it for the device at its first call."""
    content = bytearray((FOLDER / f"{name}.bin").read_bytes())
    return jax.jit(export.deserialize(content).call)


def continued(ids: list[int], count: int) -> list[int]:
    """The most likely tokens after some ids, `count` of them or up to the end of the text."""
    manifest = json.loads((FOLDER / "manifest.json").read_text())
    with safe_open(FOLDER / "model.safetensors", framework="flax") as file:
        weights = [file.get_tensor(name) for name in manifest["weights"]]
    room = next((x for x in manifest["prompts"] if x >= len(ids)), None)
    if room is None or room + count - 1 > manifest["length"]:
        raise SystemExit(f"{len(ids)} ids and {count} more are too many: see manifest.json")
    tokens, mask = np.zeros((1, room), np.int32), np.zeros((1, room), bool)
    tokens[0, room - len(ids) :], mask[0, room - len(ids) :] = ids, True
    logits, cache = program(f"prefill-{room}")(weights, tokens, mask)
    new = [int(logits[0].argmax())]
    weights, decode = program("prepare")(weights), program("decode")
    while len(new) < count and new[-1] not in manifest["ends"]:
        logits, cache = decode(weights, np.array(new[-1:], np.int32), cache)
        new.append(int(logits[0].argmax()))
    return new


if __name__ == "__main__":
    print(*continued([int(x) for x in sys.argv[2:]], int(sys.argv[1])))
