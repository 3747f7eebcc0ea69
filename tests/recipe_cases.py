"""Tiny runs of the recipes in processes of their own, for the tests of runs and of their faults."""

import functools
import hashlib
import importlib
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
import jax
import numpy as np
import pytest
import tensorstore as ts
import tyro

import zoo
from zoo import transformer
from zoo.data.tokenizer import ByteTokenizer
from zoo.runs import loop, recorder
from zoo.runs.metrics import read_metrics

STEPS = 40

# What each recipe takes to be small and quick; every run of the tests has these flags. The first
# word of a case is its recipe.
TEXT = (
    "--data.files={shared}/corpus/*.txt --data.cache={shared}/tokens --data.tokenizer=bytes "
    "--sample-tokens=8 --optimizer.name=adamw "
)
CASES = {
    "lm": TEXT + "--data.seq-len=32 --data.batch-size=8 --model.num-layers=1 --model.d-model=32 "
    "--model.num-heads=2 --model.dropout=0.1",
    "rnn": TEXT + "--data.batch-size=4 --data.buckets 32 64 128 --model.num-layers=1 "
    "--model.hidden-size=16 --model.embed-size=16 --model.dropout=0.1",
    "finetune": TEXT + "--model={shared}/base --method=lora --lora.rank=2 --data.seq-len=32 "
    "--data.batch-size=8",
    "finetune on preferences": TEXT + "--data.files={shared}/pairs.jsonl "
    "--data.format=preferences --data.buckets 32 48 --model={shared}/base --method=full "
    "--data.batch-size=8",
    "distill": TEXT + "--teacher={shared}/base --weight=0.3 --no-compare --data.seq-len=32 "
    "--data.batch-size=8 --model.num-layers=1 --model.d-model=16 --model.dropout=0.1",
    "reinforce": "--model={shared}/base --data.files={shared}/prompts.jsonl --data.batch-size=4 "
    "--data.max-prompt-tokens=16 --reward=tests.reward_cases:letters --group-size=4 "
    "--max-new-tokens=8 --eval-samples=2 --optimizer.learning-rate=0.003",
    "mlp": "--data.file={shared}/rows.csv --data.batch-size=8 --ensemble=2 "
    "--model.hidden-size=16 --optimizer.learning-rate=0.01",
    "vision": "--data.batch-size=8 --data.per-font=1 --model.d-model=32 --model.num-layers=1 "
    "--model.num-heads=2 --model.dropout=0 --optimizer.learning-rate=0.003 "
    "--optimizer.warmup-steps=2 --grid=2",
}
RECIPES = tuple(dict.fromkeys(case.split()[0] for case in CASES))
COMMON = (f"--steps={STEPS}", "--log-every=1", "--eval-every=20", "--checkpoint-every=4")


@dataclass(frozen=True)
class Recipe:
    """A recipe's tiny run: `shared` holds the corpus, and caches that make the next start quick."""

    name: str
    shared: Path

    def flags(self, run_dir: Path, *more: str) -> list[str]:
        return [
            f"--run-dir={run_dir}",
            f"--compilation-cache={self.shared}/programs",
            *COMMON,
            *(flag.format(shared=self.shared) for flag in CASES[self.name].split()),
            *more,
        ]

    def start(
        self, run_dir: Path, *more: str, devices: int = 1, record: Path | None = None, **env: str
    ) -> "Program":
        """The process; `record` takes a digest of each batch."""
        module = f"recipes.{self.name.split()[0]}"
        return Program(["-m", module, *self.flags(run_dir, *more)], devices, record, **env)

    def run(self, run_dir: Path, *more: str, code: int = 0, **options) -> str:
        """The output of a run that ends with `code`."""
        return finish(self.start(run_dir, *more, **options), code)

    def run_here(self, run_dir: Path, *more: str) -> None:
        """A run in this process, which has eight devices; a test of it takes `cache_put_back`."""
        recipe = importlib.import_module(f"recipes.{self.name}")
        recipe.main(tyro.cli(recipe.Config, args=self.flags(run_dir, *more)))


_started: list["Program"] = []
_logs = tempfile.TemporaryDirectory(prefix="zoo-logs-")


def run_program(arguments: Sequence[str], record: Path | None) -> None:
    """Run a program without the curves of runs, which would take a third of their time."""
    recorder.plot_curves = lambda *paths: None
    if record is not None:
        loop.batches = functools.partial(recorded, record, loop.batches)
    forked.run_program(arguments)


def recorded(record: Path, batches: Callable, dataset: Any, *arguments: Any, **named: Any) -> Any:
    """The batches of a dataset, a digest of each of which is appended to a file as it is taken."""
    for k, batch in batches(dataset, *arguments, **named):
        digest = hashlib.sha256()
        for name in sorted(batch):
            digest.update(name.encode() + np.asarray(batch[name]).tobytes())
        dataset_and_k = f"{dataset.batches_per_epoch} batches per epoch, batch {k}"
        with open(record, "a") as file:
            file.write(json.dumps([dataset_and_k, digest.hexdigest()]) + "\n")
        yield k, batch


class Program:
    """A program of Python in a process of its own, by the methods of `subprocess.Popen`.

    It is forked behind the imports, which take half of the time of a tiny run.
    """

    def __init__(
        self, arguments: Sequence[str], devices: int = 1, record: Path | None = None, **env: str
    ):
        self._log = Path(_logs.name, f"{len(_started)}")
        given = [str(argument) for argument in arguments]
        self._process = forked.start(self._log, run_program, given, record, devices=devices, **env)
        _started.append(self)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def wait(self) -> int:
        return forked.finish(self._process)

    def communicate(self) -> tuple[str, None]:
        self.wait()
        return self._log.read_text(), None


def finish(program: Program, code: int = 0) -> str:
    """The output of a process, which has to end with `code`."""
    output, _ = program.communicate()
    assert program.returncode == code, output
    return output


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Iterator[Path]:
    """One folder for the whole session, whichever test modules import this fixture."""
    folder = tmp_path_factory.getbasetemp() / "shared"
    write_corpus(folder / "corpus")
    write_rows(folder / "rows.csv")
    write_pairs(folder / "pairs.jsonl")
    write_prompts(folder / "prompts.jsonl")
    write_base(folder / "base")
    yield folder
    for program in _started:  # what a test that failed has left
        program.kill()


def wait_for(moment: Callable[[], bool], program: Program) -> None:
    """Wait for a moment in a process, or for its end."""
    deadline = time.monotonic() + forked.TIMEOUT
    while program.poll() is None and not moment():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def write_corpus(folder: Path, num_documents: int = 24) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    words = ("def", "return", "self", "for", "in", "if", "None", "import", "class", "lambda")
    choose = random.Random(0)
    for i in range(num_documents):
        text = " ".join(choose.choices(words, k=choose.choice((3, 9, 16))))
        (folder / f"{i:02}.txt").write_text(text)


def write_rows(path: Path, num_rows: int = 100) -> None:
    """Points around three centres, which can be told apart."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, num_rows)
    points = rng.normal(size=(3, 4))[labels] + 0.3 * rng.normal(size=(num_rows, 4))
    lines = [
        f"{','.join(map(str, x))},{'abc'[label]}" for x, label in zip(points, labels, strict=True)
    ]
    path.write_text("\n".join(["w,x,y,z,label", *lines]))


def write_pairs(path: Path, num_pairs: int = 60) -> None:
    """Preferences, of two lengths."""
    pairs = [
        {"prompt": f"{i} " * (1 + i % 2), "chosen": f"is {i}", "rejected": "no"}
        for i in range(num_pairs)
    ]
    write_lines(path, pairs)


def write_prompts(path: Path, num_prompts: int = 24) -> None:
    """Prompts of several lengths, each with the letter that its answer is to have."""
    rows = [{"prompt": f"{'ab' * (i % 3)}{i}: ", "want": "abc"[i % 3]} for i in range(num_prompts)]
    write_lines(path, rows)


def write_base(folder: Path) -> None:
    """A model to fine-tune, which knows nothing."""
    config = transformer.Config(
        vocab_size=320, d_model=32, num_layers=1, num_heads=2, dropout=0.1, mlp="gelu"
    )
    model = transformer.Transformer(config, key=jax.random.key(0))
    zoo.save(folder, model, tokenizer=ByteTokenizer())


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def metrics(run_dir: Path) -> list[dict]:
    """The lines of metrics.jsonl, without how fast it went."""
    lines = read_metrics(run_dir / "metrics.jsonl")
    is_speed = lambda name: name == "mfu" or name.endswith("_per_second")
    return [{k: v for k, v in line.items() if not is_speed(k)} for line in lines]


def losses(run_dir: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics(run_dir) if "loss" in line}


def saved_arrays(run_dir: Path, step: int = STEPS) -> dict[str, np.ndarray]:
    """Every array of a checkpoint by name: parameters, optimizer state, the key, the counters."""
    folder = run_dir / "checkpoints" / str(step)
    found: dict[str, np.ndarray] = {}
    for name, boxes in json.loads((folder / "meta.json").read_text())["parts"].items():
        for number, box in boxes:
            base = f"file://{folder}/arrays/{number}/"
            kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
            store = ts.open({"driver": "zarr3", "kvstore": kvstore}, read=True).result()
            at = tuple(slice(*pair) for pair in box)
            whole = found.setdefault(name, np.empty(store.shape, store.dtype.numpy_dtype))
            whole[at] = store[at].read().result()
    return found


def assert_same_result(run_dir: Path, other: Path, step: int = STEPS) -> None:
    """Two finished runs are equal to the last bit: state, and what they wrote of every step."""
    state, other_state = saved_arrays(run_dir, step), saved_arrays(other, step)
    assert state.keys() == other_state.keys()
    assert "key" in state
    assert any(name.startswith("opt_state.") for name in state)
    assert any(name.startswith("model.") for name in state)
    differing = [k for k, v in state.items() if v.tobytes() != other_state[k].tobytes()]
    assert not differing
    assert metrics(run_dir) == metrics(other) != []
