"""Runs that are killed at random boundaries of their lives, and a table of the outcomes.

    python -m benchmarks.soak --kills 300

With `--folder` the same command resumes. Each failure is printed with a command that repeats it.
"""

import dataclasses
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.harness import Table, main
from benchmarks.soak.boundaries import KINDS, TRACEBACK, Kinds, Outcome, live_at_random


def soak(
    kills: int = 300,
    minutes: float | None = None,
    seed: int = 0,
    only: int | None = None,
    folder: Path | None = None,
) -> list[Table]:
    """Kill runs at random boundaries, and check that the results stay the same.

    Args:
        kills: number of kills, over all kinds of runs.
        minutes: time limit instead of the number.
        seed: random seed.
        only: a single life, by its number in a failure.
        folder: working folder, in which the same command resumes; a temporary one if not given.
    """
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as temporary:
        kinds, lives, began = Kinds(folder or Path(temporary)), 0, time.monotonic()
        if only is not None:
            sys.exit(any(x.detail for x in _life(kinds, seed, only)))
        record = kinds.folder / "outcomes.jsonl"
        for line in record.read_text().splitlines() if record.exists() else ():
            outcomes += [Outcome(**outcome) for outcome in json.loads(line)]
            lives += 1
        while len(outcomes) < kills if minutes is None else time.monotonic() - began < 60 * minutes:
            found = _life(kinds, seed, lives)
            outcomes += found
            lives += 1
            with open(record, "a") as file:
                file.write(json.dumps([dataclasses.asdict(outcome) for outcome in found]) + "\n")
    table = Table("killed at the boundaries of their lives")
    for name in [*sorted({outcome.boundary for outcome in outcomes}), "all"]:
        mine = [outcome for outcome in outcomes if name in (outcome.boundary, "all")]
        wrong = [outcome for outcome in mine if outcome.detail]
        raised = sum(TRACEBACK in outcome.detail for outcome in wrong)
        counts = Counter(outcome.kind for outcome in mine)
        ends = {"all": len(mine), "unequal": len(wrong) - raised, "traceback": raised}
        table.rows.append({"boundary": name, **{kind: counts[kind] for kind in KINDS}, **ends})
    table.failures += sorted({": ".join(x.detail.splitlines()[:2]) for x in outcomes if x.detail})
    return [table]


def _life(kinds: Kinds, seed: int, index: int) -> list[Outcome]:
    """One life; its failure says how to repeat it."""
    outcomes = live_at_random(kinds, random.Random(f"{seed} {index}"))
    if detail := outcomes[0].detail:
        detail = f"python -m benchmarks.soak --seed {seed} --only {index}\n{detail}"
        outcomes = [dataclasses.replace(outcome, detail=detail) for outcome in outcomes]
    print(f"life {index}: {outcomes[0].kind}, {len(outcomes)} kills. {detail}", flush=True)
    return outcomes


if __name__ == "__main__":
    main(soak)
