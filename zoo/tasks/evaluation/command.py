"""`python -m zoo eval`: a model on tasks, as a table and a JSON file."""

import contextlib
import hashlib
import json
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from zoo import sharding
from zoo.base import configuration, files
from zoo.base.files import local_path
from zoo.data.chats import ChatTemplate
from zoo.data.tokenizer import FILE_NAME, Tokenizer, load_tokenizer
from zoo.nn.precision import DTypeName
from zoo.planning.report import console
from zoo.publishing import models
from zoo.publishing.adapters import nearest
from zoo.publishing.finite import check_finite
from zoo.publishing.shelf import find
from zoo.runs import processes
from zoo.runs.config import check_seed
from zoo.tasks.evaluation.metrics import RESAMPLES, Estimate, estimates
from zoo.tasks.evaluation.requests import Request, make_requests
from zoo.tasks.evaluation.results import Results
from zoo.tasks.evaluation.scorer import Scorer, precision_of, row_length
from zoo.tasks.evaluation.task import Settings, Task, read_task, unescaped


@dataclass(frozen=True, kw_only=True)
class Config:
    """Evaluate a model on tasks: choices by their likelihood, generated answers, whole texts."""

    model: tyro.conf.Positional[str]
    """Name on the shelf, folder of a model, of adapters or of a run, an address, or a hub id."""
    task: Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
    """File of examples (.jsonl, .json, .csv, .parquet), of settings and the name of such a file
    (.toml), or the name of a task that comes with the zoo; once per task."""
    settings: Annotated[Settings, tyro.conf.arg(name="")] = Settings()
    limit: int | None = None
    """Number of first examples of each task to take; all if not given."""
    out: Path | None = None
    """Folder for results.json, and for the results of each batch, from which the same command
    resumes."""
    temperature: float = 0.0
    """Divides the logits of generated answers: 0 is greedy."""
    top_k: int | None = None
    """Sample from the k likeliest tokens only."""
    top_p: float | None = None
    """Sample from the fewest tokens whose probabilities add up to p."""
    seed: int = 0
    """Seed of the sampling."""
    max_length: int | None = None
    """Tokens of a row at most; the model's positions if not given, or 2048 if it has no limit."""
    batch_tokens: int = 8192
    """Tokens of a batch, on all devices together."""
    precision: DTypeName | None = None
    """Dtype that the model is cast to and computes in; that of most of its parameters if not
    given."""
    quantize: Literal["int8", "int4", "nf4"] | None = None
    """Bits of the model's matrices, which are quantised as they are read."""
    mesh: str = ""
    """Devices by axis, such as data=8 or fsdp=4,tensor=2; empty is one."""
    distributed: bool = False
    """Join the other processes of this evaluation, by JAX's variables or as members of a cluster;
    the mesh then has the devices of all of them."""

    def __post_init__(self) -> None:
        check_seed(self.seed)
        configuration.check(self)
        require = configuration.require
        require(bool(self.task), "task: name one at least, as in --task questions.jsonl")
        require(self.batch_tokens >= 1, f"batch_tokens={self.batch_tokens}: must be at least 1")
        require(self.limit is None or self.limit >= 1, f"limit={self.limit}: must be at least 1")
        require(self.temperature >= 0, f"temperature={self.temperature}: must not be negative")
        require(
            not self.distributed or bool(self.mesh),
            "distributed: name the devices of all processes by --mesh, as in --mesh "
            f"{sharding.storage_mesh(-1)}",
        )

    @property
    def sampling(self) -> dict[str, Any]:
        """The options of drawn answers; a row's random numbers depend on its place in a batch."""
        names = ("temperature", "top_k", "top_p", "seed", "batch_tokens")
        return {name: getattr(self, name) for name in names} if self.temperature else {}


def main(config: Config) -> None:
    """Read, check, load, score, print, and write."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    if config.distributed:
        processes.join_processes()
    out = None if config.out is None else local_path(config.out, "out")
    tasks = [read_task(name, config.settings, config.limit) for name in config.task]
    check_names(tasks)
    folder = find(config.model)
    skeleton = models.skeleton(folder, quantize=config.quantize)
    length = row_length(skeleton, config.max_length)
    tokenizer = load_tokenizer(nearest(folder, FILE_NAME))
    _check_vocabulary(config.model, skeleton, tokenizer)
    precision = config.precision or precision_of(skeleton)
    requests = [make_requests(task, tokenizer, length) for task in tasks]
    if out is not None:
        files.make_folder(out, "out")
    same = model_fingerprint(config, folder, precision, length)
    kept = [
        Results(out and out / f"{task.name}.jsonl", same | _fingerprint(config, task, asked))
        for task, asked in zip(tasks, requests, strict=True)
    ]
    if any(len(r.known) < len(asked) for r, asked in zip(kept, requests, strict=True)):
        mesh = sharding.make_mesh(config.mesh) if config.mesh else None
        model = models.load(folder, mesh=mesh, dtype=precision, quantize=config.quantize)
        check_finite(model, folder)
        scorer = Scorer(
            model, tokenizer, max_length=length, batch_tokens=config.batch_tokens, mesh=mesh
        )
        for task, asked, results in zip(tasks, requests, kept, strict=True):
            evaluate(config, scorer, tokenizer, task, asked, results)
    found = [
        estimates(task, asked, [results.known[at] for at in range(len(asked))])
        for task, asked, results in zip(tasks, requests, kept, strict=True)
    ]
    if jax.process_index() == 0:
        show(config.model, precision, tasks, found)
        if out is not None:
            write(out / "results.json", {"model": config.model, **same}, tasks, found)
            print(f"the results are in {out / 'results.json'}")


def evaluate(
    config: Config,
    scorer: Scorer,
    tokenizer: Tokenizer,
    task: Task,
    requests: Sequence[Request],
    results: Results,
) -> None:
    """Add the results that a task lacks, a batch at a time."""
    known = set(results.known)
    batches: Iterator[dict[int, Any]]
    if task.kind == "generate":
        settings = task.settings
        batches = scorer.stream_texts(
            [request.pair[0] for request in requests],
            stops=[*map(unescaped, settings.stops), *_ends_of_turn(task, tokenizer)],
            max_new_tokens=settings.max_new_tokens,
            known=known,
            key=jax.random.key(config.seed) if config.temperature else None,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
        )
    else:
        batches = scorer.stream([request.pair for request in requests], known)
    keep(results, batches, task.name, len(requests))


def keep(results: Results, batches: Iterable[dict[int, Any]], name: str, total: int) -> None:
    """Add the results of a task's batches as they come, with a bar on a terminal."""
    with _progress(name, total) as done:
        done(len(results.known))
        for batch in batches:
            results.add(batch)
            done(len(results.known))


def _ends_of_turn(task: Task, tokenizer: Any) -> list[str]:
    """The special token with which the chat template ends an answer, by name."""
    if not task.settings.chat:
        return []
    ids = ChatTemplate(tokenizer).ends_of_turn
    return [tokenizer.tokenizer.id_to_token(i) for i in ids]


def check_names(tasks: Sequence[Task]) -> None:
    """Refuse tasks whose results would be in one file."""
    names = [task.name for task in tasks]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"task: two of them are named {twice[0]!r}: rename a file")
    if "results" in names:
        raise ValueError("task: results is the name of the file with all of them: rename the file")


def _check_vocabulary(name: str, skeleton: Any, tokenizer: Tokenizer) -> None:
    size = skeleton.config.vocab_size
    if tokenizer.vocab_size > size:
        raise ValueError(
            f"{name}: its tokenizer has {tokenizer.vocab_size} ids, and the model a vocab_size of "
            f"{size}: they do not go together"
        )


def model_fingerprint(
    config: Config, folder: Path, precision: DTypeName, length: int
) -> dict[str, Any]:
    """The parts of a fingerprint that all tasks share: the model, and how it computes."""
    return {
        "weights": models.weights_checksum(folder),
        "precision": precision,
        "quantize": config.quantize,
        "max_length": length,
    }


def _fingerprint(config: Config, task: Task, requests: Sequence[Request]) -> dict[str, Any]:
    """The parts of a fingerprint beside the model: ids, and how answers are generated."""
    found: dict[str, Any] = {"task": digest(ids for request in requests for ids in request.pair)}
    if task.kind == "generate":
        found["stop"] = [*task.settings.stops]
        found["max_new_tokens"] = task.settings.max_new_tokens
        found["sampling"] = config.sampling
    return found


def digest(rows: Iterable[Sequence[int]]) -> str:
    """A hash of rows of token ids."""
    found = hashlib.sha256()
    for ids in rows:
        found.update(len(ids).to_bytes(4, "little") + np.asarray(ids, np.int32).tobytes())
    return found.hexdigest()[:16]


@contextlib.contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, of which the function that it gives sets how many are done."""
    is_shown = jax.process_index() == 0 and sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=not is_shown) as progress:
        bar = progress.add_task(name, total=total)
        yield lambda done: progress.update(bar, completed=done)


def show(
    model: str, precision: str, tasks: Sequence[Task], found: Sequence[dict[str, Estimate]]
) -> None:
    """Print the table of all tasks."""
    title = f"{model}, {precision}"
    # Of 80 columns at most: what is said of a task stands below its name.
    table = Table("task", box=None, collapse_padding=True, pad_edge=False)
    table.add_column("examples", justify="right")
    table.add_column("metric", no_wrap=True)
    for name in ("value", "± s.e.", "95 % interval"):
        table.add_column(name, justify="right", no_wrap=True)
    for task, metrics in zip(tasks, found, strict=True):
        shots = task.settings.num_shots
        said = [task.name, task.kind, *([f"{shots} shots"] if shots else [])]
        count = f"{len(task.examples):,}"
        rows = [_cells(name, x) for name, x in metrics.items()]
        for i in range(max(len(said), len(rows))):
            cells = rows[i] if i < len(rows) else [""] * 4
            table.add_row(said[i] if i < len(said) else "", count if i == 0 else "", *cells)
    out = console()
    out.print(title, style="italic", highlight=False, soft_wrap=True)
    out.print(table)
    used = {x.by for metrics in found for x in metrics.values()}
    kinds = {"wilson": "Wilson's for shares of examples", "bootstrap": f"of {RESAMPLES} resamples"}
    out.print("intervals: " + "; ".join(text for by, text in kinds.items() if by in used))


def _cells(name: str, x: Estimate) -> list[str]:
    """A metric's name, value, error and interval."""
    error = "" if math.isnan(x.stderr) else f"{x.stderr:.4f}"
    interval = "" if math.isnan(x.low) else f"{x.low:.4f} to {x.high:.4f}"
    return [name, f"{x.value:.4f}", error, interval]


def write(
    path: Path,
    same: Mapping[str, Any],
    tasks: Sequence[Task],
    found: Sequence[dict[str, Estimate]],
    beside: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the metrics as JSON, and what is `beside` them for each task.

    Other tasks that are there, of the same model, stay.
    """

    def plain(x: Estimate) -> dict[str, Any]:
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in x._asdict().items()
        }

    content: dict[str, Any] = {**same, "tasks": _tasks_in(path, same)}
    for task, metrics in zip(tasks, found, strict=True):
        content["tasks"][task.name] = {
            "kind": task.kind,
            "examples": len(task.examples),
            "metrics": {name: plain(x) for name, x in metrics.items()},
            "settings": asdict(task.settings),
        }
    for task, more in zip(tasks, beside, strict=False):
        content["tasks"][task.name] |= more
    text = json.dumps(content, indent=1) + "\n"
    files.replace(path, lambda temporary: temporary.write_text(text))


def _tasks_in(path: Path, same: Mapping[str, Any]) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
        return content["tasks"] if all(content[name] == x for name, x in same.items()) else {}
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return {}  # the results of batches are what it is made of
