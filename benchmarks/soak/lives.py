"""Lives of a run: killed repeatedly at random moments, resumed, and compared at the end."""

import dataclasses
import random
import shutil
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

from benchmarks.soak import process, runs


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one kill, or of one damage."""

    table: str
    kind: str
    result: Literal["right", "refused", "wrong"]
    detail: str = ""
    seconds: float = 0.0


SIGNALS = {
    "SIGKILL": (signal.SIGKILL,),
    "SIGTERM": (signal.SIGTERM,),
    "SIGTERM, then SIGKILL": (signal.SIGTERM, signal.SIGKILL),
}
CHANGING = "changing meshes"
WORLDS = {"one device": 4, "fsdp=2,tensor=2": 2, CHANGING: 1}


class LifeError(Exception):
    """A process did not end as it should."""


def live(
    place: runs.Place, choose: random.Random, *, world: str = "", kills: int = 0
) -> list[Outcome]:
    """The outcome of each kill in a life; all are right, or all are wrong."""
    [drawn] = choose.choices(list(WORLDS), WORLDS.values())
    world, kills = world or drawn, kills or choose.randint(2, 14)
    run = place.folder / "life"
    shutil.rmtree(run, ignore_errors=True)
    kinds: list[str] = []
    try:
        _live(place, choose, run, world, kills, kinds)
        detail = ""
    except (LifeError, process.HangError) as error:
        detail = f"{error}; killed: {kinds}; the last process said:\n{runs.log(run)[-3000:]}"
        kinds = kinds or ["not at all"]
    result: Literal["right", "wrong"] = "wrong" if detail else "right"
    return [Outcome(f"killed on {world}", kind, result, detail) for kind in kinds]


def _live(
    place: runs.Place,
    choose: random.Random,
    run: Path,
    world: str,
    kills: int,
    kinds: list[str],
) -> None:
    """A whole life; appends each kill to `kinds`, and raises a LifeError if something was wrong."""
    changing = world == CHANGING
    mesh = "" if changing or world == "one device" else world
    straight = place.straight(mesh)
    code = None
    while code != 0:
        running = place.start(run, choose.choice(runs.OTHER_MESHES) if changing else mesh)
        if len(kinds) == kills:
            code = process.finish(running)
            if code != 0:
                raise LifeError(f"it ended with {code}")
            break
        _wait(running, run, choose)
        [name] = choose.choices(list(SIGNALS), (4, 2, 1))
        code = _kill(running, SIGNALS[name], choose)
        if code != 0:  # else it ended before the kill
            kinds.append(f"{name} {_landing(run)}")
            _check_end(run, code)
    if difference := (runs.distance if changing else runs.difference)(run, straight):
        raise LifeError(difference)


def _wait(running: BaseProcess, run: Path, choose: random.Random) -> None:
    """Wait for a random moment of a run, or for its end; half of the moments are during saves."""
    aim = choose.choices(("save", "step", "time", "end"), (6, 2, 3, 1))[0]
    if aim == "save":
        seen = runs.saving(run)  # left by the last kill
        skip = len(seen) + choose.randrange(4)

        def in_save() -> bool:
            now = runs.saving(run)
            seen.update(now)
            return len(seen) > skip and bool(now)

        process.wait_for(in_save, running)
        time.sleep(choose.choice((0, choose.uniform(0, 0.03))))
    elif aim == "step":
        step = runs.newest_step(run) + choose.randint(1, 10)
        process.wait_for(lambda: runs.has_started(run) and runs.steps_done(run) >= step, running)
        time.sleep(choose.uniform(0, 0.05))
    elif aim == "time":
        time.sleep(choose.uniform(0, 4))
    else:
        process.wait_for(lambda: runs.newest_step(run) == runs.STEPS, running)
        time.sleep(choose.uniform(0, 1))


def _kill(running: BaseProcess, signals: tuple[int, ...], choose: random.Random) -> int:
    """Send the signals, the second a moment after the first, and return the exit code."""
    if signals[0] == signal.SIGTERM:
        running.terminate()
        if len(signals) > 1:
            running.join(choose.uniform(0, 0.2))
    if signals[-1] == signal.SIGKILL:
        running.kill()
    return process.finish(running)


def _landing(run: Path) -> str:
    """The phase in which a run ended."""
    if not runs.has_started(run):
        return "during the start"
    if runs.saving(run):
        return "during a save"
    return "during the end" if runs.newest_step(run) == runs.STEPS else "between saves"


def _check_end(run: Path, code: int) -> None:
    """Check that a run was killed, or that it saved its last step when asked to stop."""
    if code in (-signal.SIGKILL, -signal.SIGTERM):
        return
    if code != 128 + signal.SIGTERM:
        raise LifeError(f"it ended with {code}")
    if f"saved step {runs.newest_step(run)} in" not in runs.log(run):
        raise LifeError(f"it ended with {code}, and the newest step is {runs.newest_step(run)}")
