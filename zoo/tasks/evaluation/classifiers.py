"""`python -m zoo eval` of a model with a classification head, on texts with their labels."""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PyTree
from rich.table import Table

from zoo import sharding
from zoo.base import files
from zoo.base.files import local_path
from zoo.data.documents import read_records
from zoo.data.special_tokens import begun
from zoo.data.tokenizer import FILE_NAME, Tokenizer, load_tokenizer, reading
from zoo.nn.precision import Precision
from zoo.planning.report import console
from zoo.publishing import models
from zoo.publishing.adapters import nearest
from zoo.publishing.finite import check_finite
from zoo.publishing.folder import METRICS, read_json
from zoo.publishing.shelf import find
from zoo.sharding.placement import on_host
from zoo.tasks.classification import Predictions, calibration_error, confusion_matrix
from zoo.tasks.evaluation import command
from zoo.tasks.evaluation.forms import Example, Form
from zoo.tasks.evaluation.metrics import Estimate, bootstrap, macro_f1, share
from zoo.tasks.evaluation.results import Results
from zoo.tasks.evaluation.rows import Batch, batched, placed
from zoo.tasks.evaluation.scorer import DEFAULT_LENGTH, precision_of
from zoo.tasks.evaluation.task import Settings, Task
from zoo.training import losses
from zoo.training.step import make_eval_step

# The settings that a model with a head has a use for; its classes are those of its training.
USED = {"kind", "fields", "begin", "special_tokens"}
logger = logging.getLogger(__name__)


def classes_of(model: str | Path) -> tuple[str, ...]:
    """The names of the classes that a model was trained to tell apart; none of another model."""
    path = find(model) / METRICS
    return tuple(read_json(path).get("classes", ())) if path.is_file() else ()


def main(config: command.Config) -> None:
    """Read, check, load, classify, print, and write.

    Raises:
        ValueError: a model of something else than text; a flag for other models; a line without a
            text, or with a label that the model has not learnt.
    """
    folder, classes = find(config.model), classes_of(config.model)
    file = nearest(folder, FILE_NAME) / FILE_NAME
    if not file.is_file():
        raise ValueError(
            f"{config.model} reads rows of numbers, and a task has texts: its recipe evaluates it"
        )
    _check_flags(config)
    tokenizer = load_tokenizer(file)
    tasks = [read_labelled(name, classes, config.settings, config.limit) for name in config.task]
    command.check_names(tasks)
    skeleton = models.skeleton(folder, quantize=config.quantize)
    precision = config.precision or precision_of(skeleton)
    limit = getattr(skeleton.config, "max_seq_len", None) or DEFAULT_LENGTH
    length = min(config.max_length or limit, limit)
    rows = [encoded(task, tokenizer, length) for task in tasks]
    out = None if config.out is None else local_path(config.out, "out")
    if out is not None:
        files.make_folder(out, "out")
    same = command.model_fingerprint(config, folder, precision, length)
    kept = [
        Results(out and out / f"{task.name}.jsonl", same | {"task": command.digest(ids)})
        for task, ids in zip(tasks, rows, strict=True)
    ]
    if any(len(results.known) < len(ids) for results, ids in zip(kept, rows, strict=True)):
        mesh = sharding.make_mesh(config.mesh) if config.mesh else None
        model = models.load(folder, mesh=mesh, dtype=precision, quantize=config.quantize)
        check_finite(model, folder)
        classify = classifier(model, length, mesh, precision, config.batch_tokens)
        for task, ids, results in zip(tasks, rows, kept, strict=True):
            command.keep(results, classify(ids, results.known.keys()), task.name, len(ids))
    predictions = [
        Predictions(
            np.array([[results.known[at] for at in range(len(task.examples))]], np.float32),
            np.array([example.answer for example in task.examples], np.int32),
        )
        for task, results in zip(tasks, kept, strict=True)
    ]
    metrics = [judged(found.labels_N, found.mean_NC) for found in predictions]
    command.show(config.model, precision, tasks, metrics)
    matrices = [confusion_matrix(found, len(classes)) for found in predictions]
    for task, matrix in zip(tasks, matrices, strict=True):
        _show_confusion(task, classes, matrix)
    if out is not None:
        beside = [{"classes": classes, "confusion": matrix.tolist()} for matrix in matrices]
        content = {"model": config.model, **same}
        command.write(out / "results.json", content, tasks, metrics, beside)
        print(f"the results are in {out / 'results.json'}")


def read_labelled(
    path: str, classes: Sequence[str], settings: Settings, limit: int | None = None
) -> Task:
    """The texts of a file of records, and their labels as classes of a model.

    A label is the name of its class, as in training, and never an index.

    Raises:
        ValueError: a line without one of them, or of another class.
    """
    form = Form("classification", settings.fields)
    examples = []
    for _, where, record in read_records(path):
        text, label = (form.field(where, record, role) for role in ("text", "label"))
        if not isinstance(text, str):
            raise ValueError(f"{where}: the text is {text!r:.80}, and has to be a text")
        if str(label) not in classes:
            raise ValueError(
                f"{where}: the label {label!r} is none of the model's classes: {', '.join(classes)}"
            )
        examples.append(Example(where, text, tuple(classes), classes.index(str(label))))
    if not examples:
        raise ValueError(f"{path} has no lines: a task has an example per line")
    name = Path(path).name.partition(".")[0]
    return Task(name, "classification", tuple(examples[:limit]), (), settings)


def encoded(task: Task, tokenizer: Tokenizer, length: int) -> list[list[int]]:
    """The ids of each text after the begin of text, the first `length` of them."""
    reader = reading(tokenizer, task.settings.special_tokens or "text")
    texts = reader.encode_batch([example.context for example in task.examples])
    rows = [ids.tolist() for ids in texts]
    if task.settings.begin:
        rows = [begun(tokenizer, ids) for ids in rows]
    for row, example in zip(rows, task.examples, strict=True):
        if not row:
            raise ValueError(f"{example.where}: the text has no token")
    if cut := sum(len(row) > length for row in rows):
        logger.warning("%s: %d texts are cut to their first %d tokens", task.name, cut, length)
    return [row[:length] for row in rows]


def classifier(
    model: PyTree, length: int, mesh: Mesh | None, precision: Precision, tokens: int
) -> Callable[[Sequence[Sequence[int]], Collection[int]], Iterator[dict[int, list[float]]]]:
    """A function of rows of ids that gives the probabilities of the classes, by the row's index.

    They come a batch at a time, each of one of a few shapes. A batch of `known` indices alone is
    left out; the others are as they would be without.
    """

    def probabilities(model: PyTree, batch: dict[str, Array], key: None) -> Any:
        logits = losses.class_logits(model, batch, None)
        zero = jnp.zeros(())
        return zero, zero, {"probabilities": jax.nn.softmax(logits.astype(jnp.float32))}

    step = make_eval_step(probabilities, mesh=mesh, precision=precision)
    parts = 1 if mesh is None else sharding.num_batch_parts(mesh)

    def classify(
        rows: Sequence[Sequence[int]], known: Collection[int]
    ) -> Iterator[dict[int, list[float]]]:
        for batch in batched([len(row) for row in rows], length, tokens, parts=parts):
            if set(batch.places) <= set(known):
                continue
            arrays = placed(_arrays(batch, rows), mesh)
            step.compile(model, arrays)
            found = on_host(step(model, arrays)[1]["probabilities"]).tolist()
            yield {place: found[at] for at, place in enumerate(batch.places)}

    return classify


def _arrays(batch: Batch, rows: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    shape = (batch.rows, batch.bucket)
    inputs, mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
    for at, place in enumerate(batch.places):
        inputs[at, : len(rows[place])] = rows[place]
        mask[at, : len(rows[place])] = True
    return {"inputs": inputs, "mask": mask}


def judged(
    labels: Int[np.ndarray, "examples"], probabilities: Float[np.ndarray, "examples classes"]
) -> dict[str, Estimate]:
    """`acc`, `macro_f1`, and `calibration_error` as in the recipes' metrics."""
    likeliest = probabilities.argmax(1)

    def calibration(chosen: np.ndarray) -> float:
        return calibration_error(probabilities[chosen], labels[chosen])

    return {
        "acc": share(likeliest == labels),
        "macro_f1": macro_f1(labels, likeliest),
        "calibration_error": bootstrap(calibration, len(labels)),
    }


def _check_flags(config: command.Config) -> None:
    default, settings = Settings(), vars(config.settings)
    for name, value in settings.items():
        if name not in USED and value != getattr(default, name):
            raise ValueError(
                f"{name}={value!r}: {config.model} has a classification head and is asked nothing; "
                "leave it out"
            )
    if config.distributed or config.temperature:
        raise ValueError(
            f"{config.model} has a classification head: leave out --distributed and --temperature"
        )


def _show_confusion(task: Task, classes: Sequence[str], matrix: np.ndarray) -> None:
    table = Table("true \\ predicted", title=f"{task.name}: confusion", box=None)
    for name in classes:
        table.add_column(name, justify="right")
    for name, row in zip(classes, matrix, strict=True):
        table.add_row(name, *map(str, row))
    console().print(table)
