"""The soak test: random kills and damages, and a table of their outcomes.

    python -m benchmarks.soak --kills 300 --boundaries 300 --damages 2000

With `--folder` the same command resumes. Each failure is printed with a command that repeats it
(though the moment of a kill differs by milliseconds).
"""

import dataclasses
import json
import random
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path

from benchmarks.report import Table, provenance, save
from benchmarks.soak import boundaries
from benchmarks.soak.lives import Outcome, live
from benchmarks.soak.restores import restore_damaged, resume_damaged
from benchmarks.soak.runs import Place

CASES: dict[str, Callable[[Place, random.Random], list[Outcome]]] = {
    "lives": live,
    "boundaries": lambda place, choose: boundaries.live_at_random(
        boundaries.Kinds(place.folder / "kinds"), choose
    ),
    "restores": restore_damaged,
    "resumes": resume_damaged,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Kill and damage training runs at random, and check that the results stay the same."""

    kills: int = 300
    """Number of kills of a training run, by SIGKILL or SIGTERM; each time the run is resumed."""
    boundaries: int = 300
    """Number of kills at boundaries of a run's life, over all kinds of runs."""
    damages: int = 2000
    """Number of damages to checkpoints and, one in 40, to whole runs, which are then resumed."""
    minutes: float | None = None
    """Time limit instead of the numbers, of which only the ratio counts then."""
    seed: int = 0
    """Random seed."""
    only: str = ""
    """A single case, such as lives:17, by its name in a failure."""
    folder: Path | None = None
    """Working folder, in which the same command resumes; a temporary one if not given."""
    results: Path = Path(__file__).parents[1] / "results"
    """Folder for the results."""


def main(config: Config) -> None:
    """Run, print and save; exit with 1 if an outcome was wrong."""
    command = shlex.join(["python", "-m", "benchmarks.soak", *sys.argv[1:]])
    source = {"command": command, "date": date.today().isoformat(), **provenance()}
    with tempfile.TemporaryDirectory() as temporary:
        folder = config.folder or Path(temporary)
        tables = soak(config, folder)
    if not config.only:
        save("soak", tables, source, config.results)
    sys.exit(any(table.failures for table in tables))


def soak(config: Config, folder: Path) -> list[Table]:
    """The tables of all outcomes that the folder has on record."""
    place, record = Place(folder), folder / "outcomes.jsonl"
    counted: dict[str, list[list[Outcome]]] = {name: [] for name in CASES}
    if config.only:
        name, _, index = config.only.partition(":")
        counted[name].append(_case(config, place, name, int(index)))
        return _tables(counted)
    for line in record.read_text().splitlines() if record.exists() else ():
        name, outcomes = json.loads(line)
        counted[name].append([Outcome(**outcome) for outcome in outcomes])
    began = time.monotonic()
    while name := _next(config, counted, (time.monotonic() - began) / 60):
        outcomes = _case(config, place, name, len(counted[name]))
        counted[name].append(outcomes)
        with open(record, "a") as file:
            line = [name, [dataclasses.asdict(outcome) for outcome in outcomes]]
            file.write(json.dumps(line) + "\n")
    return _tables(counted)


def _case(config: Config, place: Place, name: str, index: int) -> list[Outcome]:
    """One case; its failures say how to repeat it."""
    outcomes = CASES[name](place, random.Random(f"{config.seed} {name} {index}"))
    again = f"python -m benchmarks.soak --seed {config.seed} --only {name}:{index}"
    outcomes = [
        dataclasses.replace(outcome, detail=f"{again}\n{outcome.detail}")
        if outcome.result == "wrong"
        else outcome
        for outcome in outcomes
    ]
    print(f"{name}:{index}", dict(Counter(outcome.result for outcome in outcomes)), flush=True)
    for detail in {outcome.detail for outcome in outcomes if outcome.result == "wrong"}:
        print(detail, flush=True)
    return outcomes


def _next(config: Config, counted: dict[str, list[list[Outcome]]], minutes: float) -> str:
    """The case that is furthest from its goal; "" if all goals are reached."""
    goals = {
        "lives": config.kills,
        "boundaries": config.boundaries,
        "restores": config.damages - config.damages // 40,
        "resumes": config.damages // 40,
    }
    done = {name: sum(map(len, cases)) for name, cases in counted.items()}
    shares = {name: done[name] / goal for name, goal in goals.items() if goal}
    if not shares or (minutes >= config.minutes if config.minutes else min(shares.values()) >= 1):
        return ""
    return min(shares, key=shares.__getitem__)


def _tables(counted: dict[str, list[list[Outcome]]]) -> list[Table]:
    named = {name: [x for case in cases for x in case] for name, cases in counted.items()}
    at_boundaries = named.pop("boundaries")
    outcomes = [outcome for several in named.values() for outcome in several]
    tables = [boundaries.make_table(at_boundaries)] if at_boundaries else []
    for table in tables:
        table.print()
    for title in dict.fromkeys(sorted(outcome.table for outcome in outcomes)):
        table = Table(title)
        mine = [outcome for outcome in outcomes if outcome.table == title]
        kinds = sorted({outcome.kind for outcome in mine})
        for kind in [*kinds, "all"]:
            results = Counter(o.result for o in mine if kind in (o.kind, "all"))
            table.rows.append(
                {
                    "kind": kind,
                    "tries": results.total(),
                    "correct": results["right"],
                    "refused with a message": results["refused"],
                    "wrong": results["wrong"],
                }
            )
        wrong = [o.detail.splitlines()[:2] for o in mine if o.result == "wrong"]
        table.failures += sorted({": ".join(lines) for lines in wrong})
        table.print()
        tables.append(table)
    return tables
