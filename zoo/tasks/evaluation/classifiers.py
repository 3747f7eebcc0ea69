"""`python -m zoo eval` of a model with a classification head, on texts with their labels."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree
from rich.table import Table

from zoo import sharding
from zoo.base import files
from zoo.base.files import local_path
from zoo.data.documents import read_json_lines
from zoo.data.tokenizer import FILE_NAME, Tokenizer, load_tokenizer
from zoo.planning.report import console
from zoo.publishing import models
from zoo.publishing.adapters import nearest
from zoo.publishing.folder import METRICS, read_json
from zoo.publishing.shelf import find
from zoo.sharding.placement import on_host
from zoo.tasks.classification import Predictions, calibration_error, confusion_matrix
from zoo.tasks.evaluation import command
from zoo.tasks.evaluation.encoding import begin_ids
from zoo.tasks.evaluation.forms import Example, Form
from zoo.tasks.evaluation.metrics import Estimate, bootstrap, macro_f1, share
from zoo.tasks.evaluation.rows import batched
from zoo.tasks.evaluation.scorer import DEFAULT_LENGTH, precision_of
from zoo.tasks.evaluation.task import Settings, Task
from zoo.training import losses
from zoo.training.step import make_eval_step

# The settings that a model with a head has a use for; its classes are those of its training.
USED = {"kind", "fields", "begin"}
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
    skeleton = models.skeleton(folder, quantize=config.quantize)
    precision = config.precision or precision_of(skeleton)
    mesh = sharding.make_mesh(config.mesh) if config.mesh else None
    limit = getattr(skeleton.config, "max_seq_len", None) or DEFAULT_LENGTH
    length = min(config.max_length or limit, limit)
    model = models.load(folder, mesh=mesh, dtype=precision, quantize=config.quantize)
    found = []
    for task in tasks:
        rows = encoded(task, tokenizer, length)
        labels = np.array([example.answer for example in task.examples], np.int32)
        probabilities = predict(
            model, rows, length, mesh=mesh, precision=precision, tokens=config.batch_tokens
        )
        found.append((labels, probabilities))
    metrics = [judged(labels, probabilities) for labels, probabilities in found]
    command.show(config.model, precision, tasks, metrics)
    matrices = [
        confusion_matrix(Predictions(probabilities[None], labels), len(classes))
        for labels, probabilities in found
    ]
    for task, matrix in zip(tasks, matrices, strict=True):
        _show_confusion(task, classes, matrix)
    if config.out is not None:
        out = local_path(config.out, "out")
        files.make_folder(out, "out")
        same = {
            "model": config.model,
            "weights": models.weights_checksum(folder),
            "precision": precision,
            "quantize": config.quantize,
            "max_length": length,
        }
        beside = [{"classes": classes, "confusion": matrix.tolist()} for matrix in matrices]
        command.write(out / "results.json", same, tasks, metrics, beside)
        print(f"the results are in {out / 'results.json'}")


def read_labelled(
    path: str, classes: Sequence[str], settings: Settings, limit: int | None = None
) -> Task:
    """The texts of a `.jsonl` file, and their labels as classes of a model.

    A label is the name of its class, as in training, and never an index.

    Raises:
        ValueError: a line without one of them, or of another class.
    """
    form = Form("classification", settings.fields)
    examples = []
    for _, where, record in read_json_lines(path):
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
    name = Path(path).name.partition(".jsonl")[0]
    return Task(name, "classification", tuple(examples[:limit]), (), settings)


def encoded(task: Task, tokenizer: Tokenizer, length: int) -> list[list[int]]:
    """The ids of each text after the begin of text, the first `length` of them."""
    begin = begin_ids(tokenizer, task.settings.begin)
    texts = tokenizer.encode_batch([example.context for example in task.examples])
    rows = [[*begin, *ids.tolist()] for ids in texts]
    for row, example in zip(rows, task.examples, strict=True):
        if not row:
            raise ValueError(f"{example.where}: the text has no token")
    if cut := sum(len(row) > length for row in rows):
        logger.warning("%s: %d texts are cut to their first %d tokens", task.name, cut, length)
    return [row[:length] for row in rows]


def predict(
    model: PyTree,
    rows: Sequence[Sequence[int]],
    length: int,
    *,
    mesh: Any = None,
    precision: Any = "fp32",
    tokens: int = 8192,
) -> Float[np.ndarray, "examples classes"]:
    """The probabilities of the classes for each row of ids, in batches of a few shapes."""

    def probabilities(model: PyTree, batch: dict[str, Array], key: None) -> Any:
        logits = losses.class_logits(model, batch, None)
        zero = jnp.zeros(())
        return zero, zero, {"probabilities": jax.nn.softmax(logits.astype(jnp.float32))}

    step = make_eval_step(probabilities, mesh=mesh, precision=precision)
    parts = 1 if mesh is None else sharding.num_batch_parts(mesh)
    found: dict[int, np.ndarray] = {}
    for batch in batched([len(row) for row in rows], length, tokens, parts=parts):
        shape = (batch.rows, batch.bucket)
        inputs, mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
        for at, place in enumerate(batch.places):
            inputs[at, : len(rows[place])] = rows[place]
            mask[at, : len(rows[place])] = True
        arrays: dict[str, Any] = {"inputs": inputs, "mask": mask}
        if mesh is not None:
            placed = sharding.batch_sharding(mesh, 2)
            arrays = {
                name: jax.make_array_from_callback(x.shape, placed, x.__getitem__)
                for name, x in arrays.items()
            }
        step.compile(model, arrays)
        one = on_host(step(model, arrays)[1]["probabilities"])
        found |= {place: one[at] for at, place in enumerate(batch.places)}
    return np.stack([found[at] for at in range(len(rows))])


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
