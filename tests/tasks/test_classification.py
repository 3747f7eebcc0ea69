from types import SimpleNamespace

import equinox as eqx
import jax
import numpy as np
import pytest

import zoo
from zoo import classification, mlp
from zoo.runs.config import Config
from zoo.tasks.classification import Judge, Predictions, calibration_bins, calibration_error, judge


def probabilities(confidences, classes, num_classes=3):
    """Rows with that confidence in that class, and the rest shared out."""
    confidences = np.asarray(confidences, np.float32)[:, None]
    rest = (1 - confidences) / (num_classes - 1)
    return np.where(np.arange(num_classes) == np.asarray(classes)[:, None], confidences, rest)


def test_calibration_bins_group_by_confidence():
    given = probabilities([0.61, 0.69, 0.95, 1.0], [0, 1, 2, 0])
    bins = calibration_bins(given, np.array([0, 0, 2, 0]), num_bins=10)
    assert bins.size.tolist() == [0] * 6 + [2, 0, 0, 2]
    assert bins.confidence[[6, 9]] == pytest.approx([0.65, 0.975])
    assert bins.accuracy[[6, 9]] == pytest.approx([0.5, 1.0])
    assert np.isnan(bins.accuracy[0])


def test_calibration_error_compares_confidence_with_accuracy():
    given = probabilities([0.61, 0.69, 0.65, 0.94], [0, 1, 2, 0])
    error = calibration_error(given, np.array([0, 0, 2, 0]), num_bins=10)
    assert error == pytest.approx(0.75 * (2 / 3 - 0.65) + 0.25 * (1 - 0.94))
    # As sure as right: nine of ten, with a confidence of 0.9.
    sure = probabilities([0.9] * 10, [0] * 10)
    assert calibration_error(sure, np.array([0] * 9 + [1])) == pytest.approx(0, abs=1e-6)


def test_ensemble_is_scored_by_mean_and_members():
    labels = np.array([0, 1])
    members = np.stack([probabilities([0.9, 0.6], [0, 2]), probabilities([0.5, 0.9], [0, 1])])
    both, first, second = (
        judge(Predictions(x, labels)) for x in (members, members[:1], members[1:])
    )
    mean = members.mean(0)
    assert both["eval_loss"] == pytest.approx(-np.log([mean[0, 0], mean[1, 1]]).mean())
    assert both["eval_accuracy"] == 1.0
    assert (first["eval_accuracy"], second["eval_accuracy"]) == (0.5, 1.0)
    assert both["member_accuracy"] == 0.75
    for name in ("loss", "calibration_error"):
        of = name if name == "calibration_error" else f"eval_{name}"
        assert both[f"member_{name}"] == pytest.approx((first[of] + second[of]) / 2)
    assert not any(name.startswith("member") for name in first)


def test_whole_evaluations_are_kept_with_their_report_and_pictures(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(20, 4)).astype(np.float32)
    held_out = zoo.ArrayDataset({"inputs": inputs, "labels": rng.integers(0, 3, 20)}, 8, 0)
    model = mlp.MLP(mlp.Config(in_size=4, out_size=3, hidden_size=8), key=jax.random.key(0))
    made, plain = [], Judge._predict
    monkeypatch.setattr(Judge, "_predict", lambda *given: made.append(1) or plain(*given))

    def evaluate(model):
        with zoo.Run(Config(run_dir=tmp_path / "run", steps=1, compilation_cache=None)) as run:
            judged = Judge(run, held_out, "abc")
            return judged(model, True), judged.report

    first = evaluate(model)
    assert "of 20 examples" in first[1]
    assert evaluate(model) == first
    assert len(made) == 1
    (tmp_path / "run" / "confusion.png").unlink()
    assert evaluate(model) == first
    assert (tmp_path / "run" / "confusion.png").exists()
    assert evaluate(jax.tree.map(lambda x: 2 * x if eqx.is_array(x) else x, model)) != first
    assert len(made) == 3


def test_confusion_matrix_rows_are_true_classes():
    given = probabilities([0.9] * 4, [0, 1, 1, 2])
    matrix = classification.confusion_matrix(Predictions(given[None], np.array([0, 0, 1, 2])), 3)
    assert matrix.tolist() == [[1, 1, 0], [0, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize("num_classes", [2, 40])
def test_plots_of_few_and_many_classes(tmp_path, num_classes):
    members = np.stack([probabilities([0.9] * 5, range(5), num_classes + 4)] * 2)
    predictions = Predictions(members, np.arange(5))
    names = [f"class {i}" for i in range(num_classes + 4)]
    classification.plot_confusion(tmp_path / "confusion.png", predictions, names)
    classification.plot_calibration(tmp_path / "calibration.png", predictions)
    for name in ("confusion.png", "calibration.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_f1_of_entities_is_seqevals():
    """By `f1_score(true, found, mode="strict", scheme=IOB2)` of seqeval 1.2.2 on the same rows."""
    classes = ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 6, 200)
    rows = [rng.integers(5, size=n) for n in lengths]
    guesses = [np.where(rng.random(len(x)) < 0.7, x, rng.integers(5, size=len(x))) for x in rows]
    weights = (np.arange(6) < lengths[:, None]).astype(np.float32)
    labels, given = np.zeros((2, 200, 6), int)  # padded, as batches are
    labels[weights > 0], given[weights > 0] = np.concatenate(rows), np.concatenate(guesses)
    results = {"labels": labels, "weights": weights, "probabilities": np.eye(5)[given][None]}
    halves = [
        {name: x[:, part] if x.ndim == 4 else x[part] for name, x in results.items()}
        for part in (slice(120), slice(120, None))
    ]
    judging = object.__new__(Judge)
    evaluator = SimpleNamespace(results=lambda model, whole: enumerate(halves))
    object.__setattr__(judging, "_evaluator", evaluator)
    predictions = judging._predict(None, True)
    result = judge(predictions, classes)
    assert result["eval_entity_f1"] == pytest.approx(0.7125506072874493, abs=1e-12)
    assert "F1 of entities" in classification.report(predictions, result, "tokens")
    # Neither other tags nor examples that are no tokens have entities.
    assert "eval_entity_f1" not in judge(predictions, ["C", "E", "H", "I", "T"])
    assert "eval_entity_f1" not in judge(predictions._replace(lengths=None), classes)
