"""Runs of every kind, killed at the boundaries of their lives, and compared at the end.

PYTHONPATH=. python tests/soak.py --kills 300    # at random; with --folder the same command resumes

A boundary lies before, within or after a moment: a call of one of `MOMENTS`. Within one are the
files that it opens, renames and removes, the batches that it evaluates, and half of a line.
"""

import dataclasses
import functools
import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import forked
import jax
import tyro
from helpers import contents
from recipe_cases import (
    metrics,
    write_base,
    write_corpus,
    write_lines,
    write_pairs,
    write_prompts,
)

from zoo.runs import recorder
from zoo.runs.command_line import cli_errors
from zoo.training.compiled import CompiledStep

STEPS = 4
COMMON = (
    f"--steps={STEPS} --log-every=1 --eval-every=2 --eval-batches=1 --checkpoint-every=2 "
    "--compilation-cache=None --optimizer.name=adamw --data.batch-size=8"
)
SAMPLES = "--sample-tokens=2"
TEXT = f"--data.files={{place}}/corpus/*.txt --data.cache={{run}}/cache --data.seq-len=32 {SAMPLES}"
PAIRS = f"--data.files={{place}}/pairs.jsonl --data.format=preferences --data.buckets 32 {SAMPLES}"
LABELS = "--data.files={place}/labelled.jsonl --data.cache={run}/cache --data.rows=bucketed"
PROMPTS = "--data.files={place}/prompts.jsonl --data.max-prompt-tokens=16 --data.held-out=0.3"
ANSWERS = "--group-size=4 --max-new-tokens=8 --eval-samples=2 --updates=2 --reward-workers=1"
BASE = "--model={place}/base"
STUDENT = "--model.num-layers=1 --model.d-model=16 --model.dropout=0.1"
NEW = "--data.tokenizer=bytes --model.d-model=32 --model.num-heads=2"
SMALL = "--model.num-layers=1 --model.dropout=0.1"
HYBRID = (
    "--model.num-layers=2 --model.mixer.pattern gated_deltanet attention "
    "--model.mixer.recurrence.num-heads=2 --model.dropout=0.1"
)
KINDS = {
    "training": f"lm {TEXT} {NEW} {SMALL} --keep-best=eval_loss --sample-every=3",
    "a hybrid on a mesh": f"lm {TEXT} {NEW} {HYBRID} --mesh=fsdp=2,context=2",
    "fine-tuning": f"finetune {TEXT} {BASE} --method=full --average=0.5",
    "adapters": f"finetune {TEXT} {BASE} --method=lora --lora.rank=2",
    "adapters on int4": f"finetune {TEXT} {BASE} --method=lora --base=int4",
    "DPO": f"finetune {PAIRS} {BASE} --method=full",
    "DPO of adapters": f"finetune {PAIRS} {BASE} --method=lora --lora.rank=2",
    "distillation": f"distill {TEXT} --teacher={{place}}/base --no-compare {STUDENT}",
    "classification": (
        f"finetune {LABELS} --data.buckets 32 --label=label --keep-best=eval_loss --method=full "
        + BASE
    ),
    "rewards": f"reinforce {PROMPTS} {ANSWERS} {BASE} --reward=tests.reward_cases:letters",
}

# The functions of a moment, by the modules that call them.
MOMENTS = {
    "opening the folder": ("zoo.runs.run:Run.__enter__",),
    "keeping a folder of the run": ("zoo.runs.run:Run.once",),
    "reading the data": (
        "zoo.tasks.language:read_text",
        "zoo.tasks.finetuning:read_text",
        "zoo.alignment.distillation:read_text",
        "zoo.alignment.reinforcement:read_prompts",
    ),
    "loading the base": ("zoo.publishing.models:load",),
    "asking for rewards": ("zoo.alignment.answers:Answers.rewards",),
    "the reference's pass": ("zoo.alignment.preferences:reference_log_probabilities",),
    "compiling the step": ("zoo.runs.loop:_compile",),
    "evaluation": ("zoo.runs.recorder:Recorder.evaluation",),
    "a line of metrics": ("zoo.runs.metrics:MetricsLog.write",),
    "handing over a checkpoint": ("zoo.runs.recorder:Recorder.save",),
    "writing a checkpoint": ("zoo.runs.checkpoint:Checkpointer._finish",),
    "keeping the best": ("zoo.runs.callbacks.evaluations:BestCheckpoint.on_evaluation",),
    "saving the adapters": ("zoo.publishing.models:save_adapters",),
    "saving the model": (
        "zoo.publishing.models:save",
        "zoo.tasks.language:save_model",
        "zoo.tasks.classification:save_model",
    ),
    "sampling": ("zoo.decoding.sampling:generate",),
}
TRACEBACK = "it ended in a traceback"
RAISED = "the exception was a"
Target = tuple[str, int] | None  # a boundary, and which one of its occurrences in a process


@dataclass(frozen=True)
class Outcome:
    """The outcome of one kill: the fault at the end of that life, "" if there is none."""

    kind: str
    boundary: str
    detail: str


class Kinds:
    """A folder with what the runs of all kinds read, and an undisturbed run of each kind."""

    def __init__(self, folder: Path):
        self.folder = folder.absolute()
        if (self.folder / "base").exists():
            return
        write_corpus(self.folder / "corpus")
        write_pairs(self.folder / "pairs.jsonl", 24)
        write_prompts(self.folder / "prompts.jsonl")
        words = ("def", "return", "import", "class")
        rows = [{"text": f"{words[i % 4]} {i}", "label": "ab"[i % 2]} for i in range(48)]
        write_lines(self.folder / "labelled.jsonl", rows)
        write_base(self.folder / "base")

    def start(self, kind: str, run: Path, target: Target) -> BaseProcess:
        """Start a process of a run in `run/run`, which dies at the target."""
        run.mkdir(parents=True, exist_ok=True)
        recipe, _, flags = KINDS[kind].partition(" ")
        words = f"--run-dir={{run}}/run {COMMON} {flags}".split()
        given = [word.format(place=self.folder, run=run) for word in words]
        arguments = (recipe, given, self.folder / "programs", target, run / "boundaries.json")
        return forked.start(run / "log", run_recipe, *arguments)

    def straight(self, kind: str) -> tuple[Path, list[str]]:
        """An undisturbed run, and the boundaries of its life in their order."""
        run = self.folder / f"straight {kind}"
        if not (run / "ended").exists():
            shutil.rmtree(run, ignore_errors=True)
            if (code := forked.finish(self.start(kind, run, None))) != 0:
                raise RuntimeError(f"{kind}: an undisturbed run ended with {code}:\n{log(run)}")
            (run / "ended").touch()
        return run, json.loads((run / "boundaries.json").read_text())


def live(kinds: Kinds, kind: str, choose_next: Callable[[list[str], str], Target]) -> list[Outcome]:
    """A life that is killed where `choose_next` says, until it ends by itself; an outcome per kill.

    `choose_next` is given all boundaries, and that of the last kill.
    """
    straight, boundaries = kinds.straight(kind)
    run, killed = kinds.folder / f"life of {kind}", []
    shutil.rmtree(run, ignore_errors=True)
    detail, code = "", -signal.SIGKILL
    try:
        while code == -signal.SIGKILL and not detail:
            target = choose_next(boundaries, killed[-1] if killed else "")
            code = forked.finish(kinds.start(kind, run, target))
            if "Traceback" in log(run):
                detail = TRACEBACK
            elif code == -signal.SIGKILL:
                killed.append(target[0] if target else "")
        detail = detail or (f"it ended with {code}" if code else difference(run, straight))
    except forked.HangError as error:
        detail = str(error)
    if detail:
        detail += f"; killed: {killed}; the last process said:\n{log(run)[-3000:]}"
    return [Outcome(kind, boundary, detail) for boundary in killed or ["not at all"]]


def live_at_random(kinds: Kinds, choose: random.Random) -> list[Outcome]:
    """A life of a random kind, killed at random boundaries, in the order in which they are passed.

    A quarter of the targets are later occurrences, which a resumed run may not have: it ends then.
    """

    def choose_next(boundaries: list[str], last: str) -> Target:
        names = list(dict.fromkeys(boundaries))
        ahead = names[names.index(last) + 1 if last else 0 :][:8]
        if not ahead:
            return None
        name = choose.choice(ahead)
        later = choose.random() < 0.25
        return name, choose.randint(1, boundaries.count(name)) if later else 1

    return live(kinds, choose.choice(sorted(KINDS)), choose_next)


def difference(run: Path, straight: Path) -> str:
    """The difference of a finished run from an undisturbed one; "" if they are equal to the bit.

    Compares the numbers of metrics.jsonl, the published model, the adapters and the best model, and
    what the end printed; and looks for remains of interrupted writes.
    """
    found, wanted = metrics(run / "run"), metrics(straight / "run")
    if found != wanted or not wanted:
        return f"metrics.jsonl has {found} instead of {wanted}"
    for name in ("model", "adapters", "best"):
        found_files, wanted_files = (contents(each / "run" / name) for each in (run, straight))
        if unlike := {file for file, _ in found_files.items() ^ wanted_files.items()}:
            return f"{name}/ differs in {sorted(unlike)}"
    if contents(run / "run", "samples.jsonl") != contents(straight / "run", "samples.jsonl"):
        return "samples.jsonl differs"
    if (found_end := printed_end(run)) != (wanted_end := printed_end(straight)):
        return f"the end printed {found_end!r} instead of {wanted_end!r}"
    names = {path.name for path in (run / "run").rglob("*")}
    left = [x for x in names if x.endswith(".tmp") or x.startswith((".model.", ".best."))]
    return f"left behind: {left}" if left else ""


def log(run: Path) -> str:
    """The output of the last process of a run."""
    path = run / "log"
    return path.read_text(errors="replace") if path.exists() else ""


def printed_end(run: Path) -> str:
    """What the last process printed after its last evaluation."""
    text = log(run).replace(str(run), "RUN")
    return re.split(r"(?m)^(?:step \d+: |.* has finished \d+ steps).*\n", text)[-1]


# --- Within a process of a run ------------------------------------------------------------------


def run_recipe(
    recipe: str, flags: Sequence[str], programs: Path, target: Target, record: Path
) -> None:
    """Run a recipe to the target, and die there; or to its end, and record its boundaries."""
    recorder.plot_curves = lambda *paths: None  # a third of the time of such a run
    jax.config.update("jax_compilation_cache_dir", str(programs))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    module = importlib.import_module(f"recipes.{recipe}")
    sys.argv = [f"recipes.{recipe}", *flags]
    life = Life(target)
    life.watch(programs)
    with cli_errors():
        try:
            module.main(tyro.cli(module.Config, args=flags))
        except Exception as error:
            print(RAISED, type(error).__name__, flush=True)
            raise
    life.pass_("the end")
    if target is None:
        record.write_text(json.dumps(life.passed))


class Life:
    """The boundaries that a process passes, the target among them, at which it dies."""

    def __init__(self, target: Target):
        self.passed: list[str] = []
        self._target, self._left = target or ("", 0)
        self._inside = threading.local()
        self._lock = threading.Lock()

    def pass_(self, boundary: str) -> None:
        """Pass a boundary, or die there."""
        with self._lock:
            self.passed.append(boundary)
            self._left -= boundary == self._target
            if boundary == self._target and self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, programs: Path) -> None:
        """Watch the moments, and what happens within them."""
        for name, places in MOMENTS.items():
            wrapped: dict[Any, Any] = {}  # a function that several modules call is one
            for place in places:
                module, _, path = place.partition(":")
                *owners, attribute = path.split(".")
                owner = functools.reduce(getattr, owners, importlib.import_module(module))
                function = getattr(owner, attribute)
                wrapped.setdefault(function, self._watched(name, function))
                setattr(owner, attribute, wrapped[function])
        CompiledStep.__call__ = self._batch(CompiledStep.__call__)  # type: ignore[method-assign]

        def audit(event: str, arguments: tuple) -> None:
            changes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir") or (
                event == "open"
                and isinstance(arguments[1], str)
                and set(arguments[1]) & set("wax+")
            )
            if changes and str(programs) not in str(arguments[0]):
                self._within()

        sys.addaudithook(audit)

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(*arguments: Any, **named: Any) -> Any:
            moment = name if name != "evaluation" else _which_evaluation(*arguments)
            stack = self._inside.__dict__.setdefault("stack", [])
            self.pass_(f"before {moment}")
            stack.append(moment)
            if name == "a line of metrics":
                self._half_a_line(*arguments)
            result = function(*arguments, **named)
            stack.pop()
            self.pass_(f"after {moment}")
            return result

        return watched

    def _half_a_line(self, log: Any, *_: Any) -> None:
        if self._target == "within a line of metrics" and self._left == 1:
            log._file.write('{"step": 1, "lo')
            log._file.flush()
        self._within()

    def _batch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._within()
            return function(*arguments)

        return call

    def _within(self) -> None:
        if stack := getattr(self._inside, "stack", None):
            self.pass_(f"within {stack[-1]}")


def _which_evaluation(recorder: Any, step: int, state: Any, whole: bool) -> str:
    if step == 0:
        return "the evaluation at step 0"
    return "the last evaluation" if whole else "an evaluation during training"


# --- At random ----------------------------------------------------------------------------------


def soak(
    kills: int = 300,
    minutes: float | None = None,
    seed: int = 0,
    only: int | None = None,
    folder: Path | None = None,
) -> None:
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
            sys.exit(any(outcome.detail for outcome in _life(kinds, seed, only)))
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
    wrong = [outcome for outcome in outcomes if outcome.detail]
    for boundary, count in sorted(Counter(outcome.boundary for outcome in outcomes).items()):
        print(f"{count:5} kills {boundary}, wrong {sum(x.boundary == boundary for x in wrong)}")
    print(f"{len(outcomes):5} kills of {lives} lives, wrong {len(wrong)}")
    sys.exit(bool(wrong))


def _life(kinds: Kinds, seed: int, index: int) -> list[Outcome]:
    """One life; its failure says how to repeat it."""
    outcomes = live_at_random(kinds, random.Random(f"{seed} {index}"))
    if detail := outcomes[0].detail:
        detail = f"PYTHONPATH=. python tests/soak.py --seed {seed} --only {index}\n{detail}"
        outcomes = [dataclasses.replace(outcome, detail=detail) for outcome in outcomes]
    print(f"life {index}: {outcomes[0].kind}, {len(outcomes)} kills. {detail}", flush=True)
    return outcomes


if __name__ == "__main__":
    tyro.cli(soak)
