"""Classifiers of any family: training, evaluation, pictures, a published model.

Legend of suffixes: M members of an ensemble (one for a model alone), N examples, C classes.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

from zoo.data.datasets import Dataset
from zoo.data.tokenizer import Tokenizer
from zoo.publishing.models import save as save_model
from zoo.runs import evaluation, loop
from zoo.runs.callbacks.evaluations import Save
from zoo.runs.config import Config
from zoo.runs.run import Run
from zoo.sharding.placement import gathered
from zoo.training import losses, optimizers
from zoo.training.description import Training
from zoo.training.loss_values import LossFunction
from zoo.wrappers.ensemble import Ensemble, member_loss, per_member

NUM_BINS = 15
CONFUSION, CALIBRATION = "confusion.png", "calibration.png"  # of the run folder


class Predictions(NamedTuple):
    """Each member's probabilities of the classes, and the true labels."""

    probabilities_MNC: Float[np.ndarray, "members examples classes"]
    labels_N: Int[np.ndarray, "examples"]
    lengths: Int[np.ndarray, "rows"] | None = None
    """For tagged rows, how many of the examples, which are tokens, each row has."""

    @property
    def mean_NC(self) -> Float[np.ndarray, "examples classes"]:
        """The ensemble's probabilities: the mean over its members."""
        return self.probabilities_MNC.mean(0)


@runtime_checkable
class Labelled(Protocol):
    """Data with labels, such as a `tabular.Table` or a `text.Text`."""

    @property
    def train(self) -> Dataset:
        """The rows to train on."""

    @property
    def held_out(self) -> Dataset:
        """The rows to evaluate on."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the labels 0, 1, …"""

    @property
    def fingerprint(self) -> str:
        """A hash of both parts."""


@dataclass(frozen=True, kw_only=True)
class Classification(Training):
    """The training of a classifier."""

    evaluate: "Judge"
    classes: tuple[str, ...]
    """The names of the labels 0, 1, …"""


def training(
    run: Run[Config],
    optimizer: optimizers.Config,
    data: Labelled,
    make_model: Callable[..., PyTree],
    *,
    num_members: int = 1,
) -> Classification:
    """The training of a classifier, or of an ensemble of more than one.

    The model takes a batch of the dataset as `losses.classification` does.
    """
    steps = run.steps_of(data.train)
    rule = optimizers.make_optimizer(optimizer, steps)
    loss_fn: LossFunction = losses.classification
    make = make_one = optimizers.initialise(optimizer, make_model)
    alone = num_members == 1
    if not alone:
        # Each member is trained as it would be alone, and so clipped alone.
        if (norm := run.config.clip_norm) is not None:
            rule = optax.chain(optax.clip_by_global_norm(norm), rule)
        rule = per_member(rule)
        loss_fn = member_loss(losses.classification)
        make = lambda key: Ensemble(make_one, num_members, key=key)  # noqa: E731
    return Classification(
        make_model=make,
        loss_fn=loss_fn,
        optimizer=rule,
        schedule=optimizers.make_schedule(optimizer, steps),
        clips=alone,
        data=data.train,
        fingerprint=data.fingerprint,
        evaluate=Judge(run, data.held_out, data.classes),
        classes=data.classes,
    )


def train(
    run: Run[Config],
    training: Classification,
    tokenizer: Tokenizer | None = None,
    *,
    save: Save | None = None,
) -> PyTree:
    """`fit` a classifier, or an ensemble of several; save it, by `save` if given; return it."""

    def save_alone(folder: Path, model: PyTree, metrics: dict[str, Any]) -> None:
        save_model(folder, model, tokenizer=tokenizer, metrics=metrics)

    save = save or save_alone
    trained = loop.fit(run, training, save=save)
    # The last evaluation, of the average if there is one, was of all that is held out.
    run.say(training.evaluate.report)
    run.say(
        f"the confusion matrix and the calibration are drawn in {CONFUSION} and {CALIBRATION} "
        f"in {run.address}"
    )
    more = {"steps": int(trained.state.step), "classes": list(training.classes)}
    save(run.folder / "model", trained.model, {**trained.model_metrics, **more})
    run.say(f"the model is in {run.address}/model")
    return trained.model


class Judge:
    """The metrics `judge` gives a model on a dataset's first epoch, or part of it.

    A whole evaluation, the last of which is of the average if there is one, is drawn in the run's
    folder, as `confusion.png` and `calibration.png`, and kept there, as an `Evaluator`'s.
    """

    report: str
    """The last whole evaluation in words."""

    def __init__(self, run: Run[Config], dataset: Dataset, classes: Sequence[str]):
        self._run, self._dataset, self._classes = run, dataset, classes
        self._evaluator = evaluation.Evaluator(run, _probabilities, dataset)

    def __call__(self, model: PyTree, whole: bool) -> dict[str, float]:
        """Evaluate a model, on the whole epoch or its first batches."""
        if not whole:
            return judge(self._predict(model, whole), self._classes)
        kept = self._evaluator.once(model, lambda: self._judged(model), (CONFUSION, CALIBRATION))
        self.report = kept["report"]
        return dict(kept["metrics"])

    def _judged(self, model: PyTree) -> dict[str, Any]:
        """The metrics and the report of a whole evaluation, which is drawn."""
        predictions = self._predict(model, True)
        metrics = judge(predictions, self._classes)
        if self._run.is_main:
            plot_confusion(self._run.folder / CONFUSION, predictions, self._classes)
            plot_calibration(self._run.folder / CALIBRATION, predictions)
        what = self._dataset.unit
        return {"metrics": metrics, "report": report(predictions, metrics, what)}

    def _predict(self, model: PyTree, whole: bool) -> Predictions:
        found, labels, lengths = [], [], []
        for _, results in self._evaluator.results(model, whole):
            real = gathered(results["weights"]) > 0
            lengths.append(real.sum(-1, keepdims=real.ndim == 1))
            found.append(gathered(results["probabilities"])[:, real])
            labels.append(gathered(results["labels"])[real].astype(np.int32))  # sums are float32
        of_rows = np.concatenate(lengths) if real.ndim == 2 else None
        return Predictions(np.concatenate(found, 1), np.concatenate(labels), of_rows)


@losses.OF_LABELS
def _probabilities(model: PyTree, batch: dict[str, Array], key: None) -> Any:
    logits = losses.class_logits(model, batch, None)
    zero = jnp.zeros(())
    members = logits.reshape(-1, *batch["labels"].shape, logits.shape[-1])
    kept = {name: batch[name] for name in ("labels", "weights")}
    return zero, zero, {"probabilities": jax.nn.softmax(members.astype(jnp.float32)), **kept}


# --- Judging ----------------------------------------------------------------------------------


def judge(predictions: Predictions, classes: Sequence[str] = ()) -> dict[str, float]:
    """`eval_loss` in nats, `eval_accuracy`, `calibration_error`; an ensemble's members' too.

    The members', `member_…`, are the means over them. For tagged rows whose classes are `O`, `B-…`
    and `I-…` it has `eval_entity_f1` too.
    """
    result = _judge(predictions.mean_NC, predictions.labels_N)
    tagged = any(x.startswith("B-") for x in classes)
    if predictions.lengths is not None and tagged and all(IOB2.match(x) for x in classes):
        result["eval_entity_f1"] = entity_f1(predictions, predictions.lengths, classes)
    members = [_judge(one, predictions.labels_N) for one in predictions.probabilities_MNC]
    if len(members) > 1:
        for name in result.copy():
            mean = float(np.mean([member[name] for member in members]))
            result[f"member_{name.removeprefix('eval_')}"] = mean
    return result


def _judge(probabilities_NC: np.ndarray, labels_N: np.ndarray) -> dict[str, float]:
    right = probabilities_NC[np.arange(len(labels_N)), labels_N]
    return {
        "eval_loss": float(-np.log(np.maximum(right, np.finfo(np.float32).tiny)).mean()),
        "eval_accuracy": float((probabilities_NC.argmax(1) == labels_N).mean()),
        "calibration_error": calibration_error(probabilities_NC, labels_N),
    }


# The tags of entities: outside of them, their first word, and their others.
IOB2 = re.compile("O$|[BI]-")


def entity_f1(predictions: Predictions, lengths: np.ndarray, classes: Sequence[str]) -> float:
    """The harmonic mean of precision and recall of entities, each found whole and of its kind.

    An entity begins with `B-KIND` and goes on with `I-KIND` of its row; an `I-KIND` behind anything
    else is in no entity: strict IOB2, as seqeval counts it. 0 without an entity.
    """
    ends = np.cumsum(lengths)[:-1]
    true, found = (
        [
            (row, *entity)
            for row, numbers in enumerate(np.split(labels, ends))
            for entity in entities([classes[i] for i in numbers])
        ]
        for labels in (predictions.labels_N, predictions.mean_NC.argmax(1))
    )
    return 2 * len({*true} & {*found}) / max(len(true) + len(found), 1)


def entities(tags: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """The kind, the first token and the end of each entity of a row."""
    begin = None
    for i, tag in enumerate([*tags, "O"]):
        if begin is not None and tag != f"I-{tags[begin][2:]}":
            yield tags[begin][2:], begin, i
            begin = None
        if tag.startswith("B-"):
            begin = i


def report(predictions: Predictions, result: Mapping[str, float], what: str = "examples") -> str:
    """The result in words; `what` was classified."""
    text = (
        f"held out: accuracy {result['eval_accuracy']:.2%} of {len(predictions.labels_N):,} "
        f"{what}, calibration error {result['calibration_error']:.2%}"
    )
    if "eval_entity_f1" in result:
        text += f", F1 of entities {result['eval_entity_f1']:.2%}"
    if "member_accuracy" in result:
        text += (
            f"; one of the {len(predictions.probabilities_MNC)} members alone, on average: "
            f"accuracy {result['member_accuracy']:.2%}, calibration error "
            f"{result['member_calibration_error']:.2%}"
        )
    return text


class Bins(NamedTuple):
    """Examples by their confidence, the probability of the likeliest class: one number per bin."""

    size: Int[np.ndarray, "bins"]
    confidence: Float[np.ndarray, "bins"]
    accuracy: Float[np.ndarray, "bins"]


def calibration_bins(
    probabilities_NC: Float[np.ndarray, "examples classes"],
    labels_N: Int[np.ndarray, "examples"],
    num_bins: int = NUM_BINS,
) -> Bins:
    """Mean confidence and accuracy in bins of equal width; nan where a bin has no example."""
    confidence = probabilities_NC.max(1).astype(np.float64)
    right = (probabilities_NC.argmax(1) == labels_N).astype(np.float64)
    bins = np.minimum((confidence * num_bins).astype(int), num_bins - 1)
    count = np.bincount(bins, minlength=num_bins)
    with np.errstate(invalid="ignore"):
        means = [
            np.bincount(bins, weights=x, minlength=num_bins) / count for x in (confidence, right)
        ]
    return Bins(count, *means)


def calibration_error(
    probabilities_NC: Float[np.ndarray, "examples classes"],
    labels_N: Int[np.ndarray, "examples"],
    num_bins: int = NUM_BINS,
) -> float:
    """The expected calibration error (Guo et al. 2017): how far confidence is from accuracy."""
    count, confidence, accuracy = calibration_bins(probabilities_NC, labels_N, num_bins)
    return float(np.nansum(count * np.abs(confidence - accuracy)) / count.sum())


def confusion_matrix(
    predictions: Predictions, num_classes: int
) -> Int[np.ndarray, "classes classes"]:
    """How many examples of each true class (row) were predicted as each class (column)."""
    matrix = np.zeros((num_classes, num_classes), np.int64)
    np.add.at(matrix, (predictions.labels_N, predictions.mean_NC.argmax(1)), 1)
    return matrix


# --- Pictures ---------------------------------------------------------------------------------


def plot_confusion(path: Path, predictions: Predictions, classes: Sequence[str]) -> None:
    """Draw the confusion matrix as a PNG, with a number in each cell if there is room."""
    from matplotlib.figure import Figure  # here: a run need not wait for it before its first step

    matrix = confusion_matrix(predictions, len(classes))
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    side = float(np.clip(0.5 * len(classes) + 1.5, 4, 14))
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if len(classes) <= 25:
        for (row, column), number in np.ndenumerate(matrix):
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(number or ""), ha="center", va="center", color=color)
    ticks: Any = {"ticks": range(len(classes)), "labels": classes}
    axes.set_xticks(**ticks, rotation=0 if max(map(len, classes)) < 4 else 90)
    axes.set_yticks(**ticks)
    title = f"{matrix.trace()} of {matrix.sum()} predicted correctly"
    axes.set(xlabel="predicted", ylabel="true", title=title)
    figure.savefig(path, format="png", dpi=130)


def plot_calibration(path: Path, predictions: Predictions) -> None:
    """Draw accuracy against confidence as a PNG, and how many examples have each confidence."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 7), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    top.plot([0, 1], [0, 1], color="0.7", linewidth=1, label="perfectly calibrated")
    members = predictions.probabilities_MNC
    curves = {"first member" if len(members) > 1 else "model": members[0]}
    if len(members) > 1:
        curves = {f"ensemble of {len(members)}": predictions.mean_NC, **curves}
    width = 1 / NUM_BINS
    for index, (name, probabilities_NC) in enumerate(curves.items()):
        bins = calibration_bins(probabilities_NC, predictions.labels_N)
        error = calibration_error(probabilities_NC, predictions.labels_N)
        label, color = f"{name} (error {error:.2%})", f"C{index}"
        # No line joins them: a bin of one example is hardly evidence, and its dot is small.
        area = 12 * np.sqrt(bins.size)
        top.scatter(bins.confidence, bins.accuracy, area, color=color, alpha=0.7, label=label)
        share = width / len(curves)
        left = np.arange(NUM_BINS) * width + (index + 0.5) * share
        bottom.bar(left, bins.size, width=share, color=color)
    top.set(ylabel="accuracy", xlim=(0, 1.02), ylim=(-0.02, 1.05))
    top.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize=8)
    bottom.set(xlabel="confidence: the probability of the likeliest class", ylabel="examples")
    bottom.set_yscale("symlog")
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", dpi=130)
