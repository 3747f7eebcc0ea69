"""Classifiers of any family, from plans to a published model and its pictures: training, judging.

Legend of suffixes: M members of an ensemble (one, of a model alone), N examples, C classes.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jaxtyping import Array, Float, Int, PyTree

from zoo.data.plans import Plan
from zoo.data.tokenizer import Tokenizer
from zoo.publishing.models import save as save_model
from zoo.runs import evaluation, loop
from zoo.runs.run import Run
from zoo.training import losses, optimizers
from zoo.training.state import TrainState
from zoo.training.step import make_eval_step
from zoo.wrappers.ensemble import Ensemble, member_loss, per_member

NUM_BINS = 15


class Predictions(NamedTuple):
    """The probabilities that each member gives each class, and the right labels."""

    probabilities_MNC: Float[np.ndarray, "members examples classes"]
    labels_N: Int[np.ndarray, "examples"]

    @property
    def mean_NC(self) -> Float[np.ndarray, "examples classes"]:
        """What the members say together."""
        return self.probabilities_MNC.mean(0)


def train(
    run: Run,
    make_model: Callable[[Any], PyTree],
    plan: Plan,
    held_out: Plan,
    *,
    tokenizer: Tokenizer | None = None,
    **options: Any,
) -> None:
    """`fit` a classifier, or an ensemble of more than one, and save it."""
    state, metrics = fit(run, make_model, plan, held_out, **options)
    save(run, state.model, metrics, tokenizer)


def fit(
    run: Run,
    make_model: Callable[..., PyTree],
    plan: Plan,
    held_out: Plan,
    *,
    classes: Sequence[str],
    num_members: int = 1,
    flops_per_example: float | None = None,
    **options: Any,
) -> tuple[TrainState, dict[str, Any]]:
    """Train a classifier, or an ensemble of more than one; judge and draw it.

    The model takes a batch of the plan as `losses.classification` does. The run's folder gets
    `confusion.png` and `calibration.png`. `loop.fit` takes the options, and a `fingerprint`.
    Returns the state, and what a saved model's metrics are.
    """
    config = run.config
    optimizer = optimizers.make_optimizer(config.optimizer, config.steps)
    loss_fn: Any = losses.classification
    make, alone = make_model, num_members == 1
    if not alone:
        # Each member is trained as it would be alone, and so clipped alone.
        optimizer = per_member(optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer))
        loss_fn = member_loss(losses.classification)
        make = lambda key: Ensemble(make_model, num_members, key=key)  # noqa: E731
    predict = predictor(run, held_out)
    predictions: Predictions

    def evaluate(model: PyTree, whole: bool) -> dict[str, float]:
        nonlocal predictions
        predictions = predict(model, whole)
        return judge(predictions)

    state, result = loop.fit(
        run,
        make,
        loss_fn,
        optimizer,
        plan,
        evaluate=evaluate,
        schedule=optimizers.make_schedule(config.optimizer, config.steps),
        flops_per_token=flops_per_example,
        clip=alone,
        **options,
    )
    # The last evaluation was of all that is held out.
    run.say(report(predictions, result))
    if run.is_main:
        plot_confusion(run.folder / "confusion.png", predictions, classes)
        plot_calibration(run.folder / "calibration.png", predictions)
    run.say(
        "pictures of what it takes for what, and of how sure it is, are confusion.png and "
        f"calibration.png in {run.folder}"
    )
    return state, {**result, "steps": int(state.step), "classes": list(classes)}


def save(
    run: Run, model: PyTree, metrics: dict[str, Any], tokenizer: Tokenizer | None = None
) -> None:
    """Save a classifier as the run's model."""
    save_model(run.folder / "model", model, tokenizer=tokenizer, metrics=metrics)
    run.say(f"the model is in {run.folder / 'model'}")


def predictor(run: Run, plan: Plan) -> Callable[[PyTree, bool], Predictions]:
    """A function `(model, whole) -> Predictions` on a plan's first epoch, or part of it."""

    def probabilities(model: PyTree, batch: dict[str, Array], key: None) -> Any:
        logits = losses.class_logits(model, batch, None)
        zero = jnp.zeros(())
        members = logits.reshape(-1, *logits.shape[-2:])
        return zero, zero, {"probabilities": jax.nn.softmax(members.astype(jnp.float32))}

    step = make_eval_step(
        probabilities, mesh=run.mesh, rules=run.rules, precision=run.config.precision
    )

    def predict(model: PyTree, whole: bool) -> Predictions:
        found, labels = [], []
        for k, results in evaluation.results(run, step, model, plan, whole):
            result = results["probabilities"]
            if not result.is_fully_addressable:
                result = multihost_utils.process_allgather(result, tiled=True)
            host = plan.batch(k)
            real = host["weights"] > 0
            found.append(np.asarray(result)[:, real])
            labels.append(host["labels"][real])
        return Predictions(np.concatenate(found, 1), np.concatenate(labels))

    return predict


# --- Judging ----------------------------------------------------------------------------------


def judge(predictions: Predictions) -> dict[str, float]:
    """`eval_loss` in nats, `eval_accuracy`, `calibration_error`; of an ensemble, also its members'.

    Those of the members, `member_…`, are the means over them.
    """
    result = _judge(predictions.mean_NC, predictions.labels_N)
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


def report(predictions: Predictions, result: Mapping[str, float]) -> str:
    """The result in words."""
    text = (
        f"held out: accuracy {result['eval_accuracy']:.2%} of {len(predictions.labels_N):,} "
        f"examples, calibration error {result['calibration_error']:.2%}"
    )
    if "member_accuracy" in result:
        text += (
            f"; one of the {len(predictions.probabilities_MNC)} members alone, on average: "
            f"accuracy {result['member_accuracy']:.2%}, calibration error "
            f"{result['member_calibration_error']:.2%}"
        )
    return text


class Bins(NamedTuple):
    """Examples by their confidence, the probability of the likeliest class: a number a bin."""

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
    """How many examples of each class (row) were taken for each class (column)."""
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
    axes.set(xlabel="taken for", ylabel="is", title=f"{matrix.trace()} of {matrix.sum()} right")
    figure.savefig(path, format="png", dpi=130)


def plot_calibration(path: Path, predictions: Predictions) -> None:
    """Draw accuracy against confidence as a PNG, and how many examples have each confidence."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 7), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    top.plot([0, 1], [0, 1], color="0.7", linewidth=1, label="as sure as right")
    members = predictions.probabilities_MNC
    curves = {"the model": members[0]}
    if len(members) > 1:
        curves = {
            f"ensemble of {len(members)}": predictions.mean_NC,
            "its first member": members[0],
        }
    width = 1 / NUM_BINS
    for index, (name, probabilities_NC) in enumerate(curves.items()):
        bins = calibration_bins(probabilities_NC, predictions.labels_N)
        error = calibration_error(probabilities_NC, predictions.labels_N)
        label, color = f"{name} (error {error:.2%})", f"C{index}"
        # No line joins them, as a bin of one example says next to nothing: its dot is small.
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
