"""The run to kill and damage: a tiny language model; and comparisons of two such runs."""

import contextlib
import json
import random
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

from benchmarks.soak import process
from zoo.runs.metrics import read_metrics

STEPS = 30
SPEEDS = {"tokens_per_second", "examples_per_second", "mfu"}
MESHES = ("", "fsdp=2,tensor=2")
# Other meshes add in another order: losses are equal to one part in a thousand.
OTHER_MESHES = ("", "fsdp=2,tensor=2", "data=2,tensor=2", "fsdp=4", "tensor=2")
TOLERANCE = 1e-3

FLAGS = (
    f"--steps={STEPS}",
    "--log-every=1",
    "--eval-every=10",
    "--checkpoint-every=2",
    "--sample-tokens=4",
    "--optimizer.name=adamw",
    "--data.tokenizer=bpe",
    "--data.vocab-size=300",
    "--data.seq-len=32",
    "--data.batch-size=8",
    "--model.num-layers=1",
    "--model.d-model=32",
    "--model.num-heads=2",
    "--model.dropout=0.1",
)


class Place:
    """A folder with a corpus, compiled programs, undisturbed runs, and room for others.

    Each run has its own `cache` of tokens, so that it gets damaged too.
    """

    def __init__(self, folder: Path):
        self.folder = folder.absolute()
        self._write_corpus(self.folder / "corpus")

    def flags(self, run: Path, mesh: str) -> list[str]:
        """The command line of a run in `run/run`."""
        return [
            f"--run-dir={run / 'run'}",
            f"--mesh={mesh}",
            f"--data.files={self.folder / 'corpus'}/*.txt",
            f"--data.cache={run / 'cache'}",
            "--compilation-cache=None",
            *FLAGS,
        ]

    def start(self, run: Path, mesh: str):
        """Start a process of a run, with its output in `run/log`."""
        run.mkdir(parents=True, exist_ok=True)
        flags = self.flags(run, mesh)
        return process.start_recipe(run / "log", flags, self.folder / "programs")

    def straight(self, mesh: str) -> Path:
        """An undisturbed run, with which the others are compared."""
        run = self.folder / f"straight {mesh}".strip()
        if not (run / "ended").exists():
            code = process.finish(self.start(run, mesh))
            if code != 0:
                raise RuntimeError(f"an undisturbed run ended with {code}:\n{log(run)}")
            (run / "ended").touch()
        return run

    def half_way(self) -> Path:
        """A run on one device that was killed in the middle."""
        run = self.folder / "half way"
        if not (run / "ended").exists():
            process_ = self.start(run, "")
            process.wait_for(lambda: newest_step(run) >= STEPS // 2, process_)
            process_.kill()
            process.finish(process_)
            (run / "ended").touch()
        return run

    def _write_corpus(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        words = ("def", "return", "self", "for", "in", "if", "None", "import", "class", "lambda")
        choose = random.Random(0)
        for i in range(24):
            text = " ".join(choose.choices(words, k=choose.choice((30, 60, 90))))
            (folder / f"{i:02}.txt").write_text(text)


def checkpoints(run: Path) -> Path:
    """The folder of a run's checkpoints."""
    return run / "run" / "checkpoints"


def saving(run: Path) -> set[str]:
    """The steps that are being written or removed."""
    return {path.name for path in checkpoints(run).glob("*.tmp")}


def newest_step(run: Path) -> int:
    """The newest saved step; 0 if there is none."""
    return max((int(p.name) for p in checkpoints(run).glob("*") if p.name.isdigit()), default=0)


def steps_done(run: Path) -> int:
    """The number of steps in metrics.jsonl."""
    path = run / "run" / "metrics.jsonl"
    return path.read_bytes().count(b'"loss"') if path.exists() else 0


def has_started(run: Path) -> bool:
    """Whether the last process of a run has compiled its step and entered the training loop."""
    text = log(run)
    return "\ncompiled " in text or "has finished" in text


def log(run: Path) -> str:
    """The output of the last process of a run."""
    path = run / "log"
    return path.read_text(errors="replace") if path.exists() else ""


def difference(run: Path, straight: Path, *, metrics: bool = True) -> str:
    """The difference of a finished run from an undisturbed one; "" if they are bit-identical.

    Compares all arrays of the final state, the published model, and, with `metrics`, the lines of
    metrics.jsonl without their speeds; and looks for remains of interrupted writes.
    """
    state, other = _state(run), _state(straight)
    if not state or state.keys() != other.keys():
        return f"the states have other arrays: {sorted(state.keys() ^ other.keys())}"
    if differing := [name for name, x in state.items() if x.tobytes() != other[name].tobytes()]:
        return f"{len(differing)} of {len(state)} arrays differ: {differing[:5]}"
    if metrics and (found := _metrics(run)) != (wanted := _metrics(straight)):
        pairs = zip(found, wanted, strict=False)
        first = next(((a, b) for a, b in pairs if a != b), (len(found), len(wanted)))
        return f"metrics.jsonl is {first[0]} instead of {first[1]}"
    if (found := files(run / "run" / "model")) != (wanted := files(straight / "run" / "model")):
        unlike = {name for name, _ in found.items() ^ wanted.items()}
        return f"the models differ in {sorted(unlike)}"
    left = [path.name for path in (run / "run").rglob("*") if path.name.endswith(".tmp")]
    return f"left behind: {left}" if left else ""


def distance(run: Path, straight: Path) -> str:
    """The difference of a run whose mesh changed; "" if it has each step once, and close losses."""
    steps, losses = _losses(run)
    wanted_steps, wanted = _losses(straight)
    if steps != wanted_steps or not steps:
        return f"metrics.jsonl has the steps {steps} instead of {wanted_steps}"
    error = float(np.max(np.abs(losses / wanted - 1)))
    return f"the losses are off by {error:.1e}" if not error < TOLERANCE else ""


def _losses(run: Path) -> tuple[list[int], np.ndarray]:
    lines = [line for line in _metrics(run) if "loss" in line]
    return [line["step"] for line in lines], np.array([line["loss"] for line in lines])


def _metrics(run: Path) -> list[dict]:
    lines = read_metrics(run / "run" / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k not in SPEEDS} for line in lines]


def _state(run: Path) -> dict[str, np.ndarray]:
    """Every array of the last checkpoint by name: parameters, optimizer state, key, counters."""
    folder = checkpoints(run) / str(STEPS)
    names = json.loads((folder / "meta.json").read_text())["arrays"]
    as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    with contextlib.closing(ocp.PyTreeCheckpointer()) as checkpointer:
        return checkpointer.restore(folder / "arrays", restore_args=as_numpy)


def files(folder: Path) -> dict[str, bytes]:
    """The content of each file of a folder, by name; none if there is no folder."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
