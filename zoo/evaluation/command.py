"""`python -m zoo eval`: a door to lm-eval, with a model of the zoo behind it."""

import contextlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro

from zoo import sharding
from zoo.common import configuration, files
from zoo.common.files import local_path
from zoo.nn.precision import DTypeName
from zoo.publishing.shelf import find
from zoo.runs import processes
from zoo.runs.config import check_seed

RESAMPLES = 1000  # for standard errors that have no formula


@dataclass(frozen=True, kw_only=True)
class Config:
    """Evaluate a model on tasks: choices by likelihood, generated answers, whole texts."""

    model: tyro.conf.Positional[str]
    """Name on the shelf, folder of a model, of adapters or of a run, an address, or a hub id."""
    task: Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
    """Name of a task, a group or a tag of lm-eval, of a task that comes with the zoo
    (python-bodies, python-signatures, python-files), or a task file (.yaml); once per task."""
    num_shots: int | None = None
    """Answered examples before each question; the task's own number if not given."""
    chat: bool = False
    """Write prompts by the chat template of the tokenizer, and shots as turns."""
    begin: bool = True
    """Put the token that the tokenizer's texts begin with before each prompt."""
    generation: str = ""
    """Options of generated answers beside the task's own, as in do_sample=true,temperature=0.8."""
    limit: int | None = None
    """Number of first examples of each task to take; all if not given."""
    out: Path | None = None
    """Folder for the results, and for the answer to each request, from which the same command
    resumes."""
    seed: int = 0
    """Seed of sampled answers."""
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
        require(bool(self.task), "task: name one at least, as in --task python-bodies")
        require(self.batch_tokens >= 1, f"batch_tokens={self.batch_tokens}: must be at least 1")
        require(self.limit is None or self.limit >= 1, f"limit={self.limit}: must be at least 1")
        require(
            self.num_shots is None or self.num_shots >= 0,
            f"num_shots={self.num_shots}: must not be negative",
        )
        require(
            not self.distributed or bool(self.mesh),
            "distributed: name the devices of all processes by --mesh, as in --mesh "
            f"{sharding.storage_mesh(-1)}",
        )


def main(config: Annotated[Config, tyro.conf.arg(name="")]) -> None:
    """Evaluate a model on tasks: choices by their likelihood, generated answers, whole texts.

    For example: python -m zoo eval lm-python --task python-bodies --out results

    Raises:
        ImportError: lm-eval is not installed.
        ValueError: an unknown task, or one that the model cannot answer.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # lm-eval would fork, which JAX may not survive
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # bars
    from zoo.evaluation.harness import ZooLM  # says what to install

    import lm_eval  # isort: skip
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import handle_non_serializable, make_table

    if config.distributed:
        processes.join_processes()
    find(config.model)
    out = None if config.out is None else local_path(config.out, "out")
    if out is not None:
        files.make_folder(out, "out")
    tasks = load_tasks(config.task)
    lm = ZooLM(
        config.model,
        mesh=sharding.make_mesh(config.mesh) if config.mesh else None,
        dtype=config.precision,
        quantize=config.quantize,
        max_length=config.max_length,
        batch_tokens=config.batch_tokens,
        begin=config.begin,
        seed=config.seed,
    )
    with request_cache(out, lm.fingerprint) as cache:
        found = lm_eval.simple_evaluate(
            model=lm,
            tasks=tasks,
            num_fewshot=config.num_shots,
            limit=config.limit,
            use_cache=cache,
            bootstrap_iters=RESAMPLES,
            apply_chat_template=config.chat,
            gen_kwargs=config.generation or None,
            task_manager=TaskManager(include_defaults=False),  # the tasks are read already
        )
    if jax.process_index() > 0:
        return
    samples = found.pop("samples")
    info = lm.get_model_info()
    print(f"{config.model}, {info['dtype']}, rows of {info['max_length']:,} tokens at most")
    print(make_table(found).strip())
    if found.get("groups"):
        print(make_table(found, "groups").strip())
    if out is None:
        return
    now = datetime.now().isoformat().replace(":", "-")

    def text(content: Any, **options: Any) -> str:
        return json.dumps(content, default=handle_non_serializable, **options) + "\n"

    for task, lines in samples.items():
        content = "".join(map(text, lines))
        name = task.replace("/", "_")
        files.replace(out / f"samples_{name}_{now}.jsonl", content)
    results = out / f"results_{now}.json"
    files.replace(results, text(found, indent=1))
    print(f"the results are in {results}")


def load_tasks(names: Sequence[str]) -> list[Any]:
    """The tasks and groups of these names, or of these files, with their examples.

    Raises:
        ValueError: lm-eval knows no task of that name, and there is no such file.
    """
    from lm_eval.tasks import TaskManager

    def only_ours(record: logging.LogRecord) -> bool:
        return "Custom kwargs can be passed" not in record.getMessage()  # of which ours take none

    logging.getLogger("lm_eval.api.task").addFilter(only_ours)

    def unknown(manager: Any) -> list[str]:
        return [x for x in names if x not in manager.all_tasks and not Path(x).is_file()]

    ours = Path(__file__).parent
    manager = TaskManager(include_path=ours, include_defaults=False)
    if unknown(manager):  # of lm-eval's, whose thousands of files take seconds to read
        manager = TaskManager(include_path=ours)
    for name in unknown(manager):
        raise ValueError(
            f"task={name!r}: neither a task of lm-eval or of the zoo (`python -m lm_eval ls tasks` "
            "lists lm-eval's), nor a task file"
        )
    loaded: list[Any] = []
    for name in names:
        found = manager.load(name)
        loaded += [*found["groups"].values()][:1] or found["tasks"].values()
    return loaded


@contextlib.contextmanager
def request_cache(out: Path | None, fingerprint: str) -> Iterator[str | None]:
    """The path of lm-eval's cache of requests, without its end; None without a folder for it.

    It is of one model, as lm-eval asks for requests by their text alone. All processes must find
    the same requests in it, so that each but the first has a copy of its own.
    """
    if out is None:
        yield None
        return
    from sqlitedict import SqliteDict

    end, known = "_rank0.db", {}
    path = out / f"requests_{fingerprint}"
    if jax.process_count() > 1 and jax.process_index() == 0:
        with SqliteDict(f"{path}{end}") as kept:
            known = dict(kept)
    known = processes.from_first(known)
    with tempfile.TemporaryDirectory() as folder:
        if jax.process_index() > 0:
            path = Path(folder, path.name)
            with SqliteDict(f"{path}{end}") as copy:
                copy.update(known)
                copy.commit()
        yield str(path)
