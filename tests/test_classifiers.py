"""The evaluation of models with a classification head."""

import json

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo import __main__ as main
from zoo.data.tokenizer import ByteTokenizer
from zoo.tasks.classification import calibration_error
from zoo.tasks.evaluation import classifiers, metrics
from zoo.tasks.evaluation.results import Results, ResultsError

CLASSES = ("1", "2", "5")
TEXTS = [f"{100 + i * 7919 % 900} text"[: 3 + 5 * (i % 2)] for i in range(24)]
LABELS = [int(CLASSES[i * i % 3]) for i in range(24)]


@pytest.fixture(scope="module")
def model():
    body = helpers.drawn_transformer(vocab_size=264, max_seq_len=48, num_layers=1)
    return zoo.Classifier(body, 3, key=jax.random.key(0))


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    zoo.save(folder, model, tokenizer=ByteTokenizer(), metrics={"classes": [*CLASSES]})
    return str(folder)


def write(path, *records: dict) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_metrics_are_those_of_each_text_alone(model, folder, tmp_path, capsys):
    records = [{"text": t, "stars": label} for t, label in zip(TEXTS, LABELS, strict=True)]
    path = write(tmp_path / "reviews.jsonl", *records)
    flags = ["eval", folder, "--task", path, "--fields", "label=stars", "--batch-tokens=64"]
    main.main([*flags, "--mesh", "data=2", "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert "calibration_error" in printed
    assert "reviews: confusion" in printed
    probabilities = np.zeros((24, 3), np.float32)
    for half in (slice(0, 24, 2), slice(1, 24, 2)):  # of equal lengths: no row is padded
        ids = jnp.asarray([[256, *text.encode()] for text in TEXTS[half]], jnp.int32)
        probabilities[half] = jax.nn.softmax(model(ids))
    labels = np.array([CLASSES.index(str(label)) for label in LABELS])
    likeliest = probabilities.argmax(1)
    matrix = [[int(((labels == a) & (likeliest == b)).sum()) for b in range(3)] for a in range(3)]
    assert len({*likeliest}) > 1
    found = json.loads((tmp_path / "out" / "results.json").read_text())["tasks"]["reviews"]
    assert (found["classes"], found["confusion"]) == ([*CLASSES], matrix)
    scores = []
    for i in range(3):
        true, predicted = sum(matrix[i]), sum(row[i] for row in matrix)
        scores.append(2 * matrix[i][i] / (true + predicted))
    wanted = {
        "acc": np.mean(likeliest == labels),
        "macro_f1": np.mean(scores),
        "calibration_error": calibration_error(probabilities, labels),
    }
    assert found["metrics"].keys() == wanted.keys()
    for name, value in wanted.items():
        assert found["metrics"][name]["value"] == pytest.approx(value, rel=1e-5), name


def test_an_evaluation_resumes_and_classifies_nothing_twice(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(metrics, "RESAMPLES", 9)
    records = [{"text": t, "label": label} for t, label in zip(TEXTS, LABELS, strict=True)]
    tasks = [write(tmp_path / f"{name}.jsonl", *records) for name in ("one", "two")]
    flags = ["eval", folder, "--task", tasks[0], "--task", tasks[1], "--batch-tokens=64", "--out"]
    main.main([*flags, str(tmp_path / "alone")])
    alone = capsys.readouterr().out.replace("alone", "out")
    added = []

    def add(self, batch):
        if len(added) == 8:
            raise KeyboardInterrupt
        added.append(batch)
        keep(self, batch)

    keep = Results.add
    monkeypatch.setattr(Results, "add", add)
    with pytest.raises(KeyboardInterrupt):
        main.main([*flags, str(tmp_path / "out")])
    monkeypatch.setattr(Results, "add", keep)
    kept = [(tmp_path / "out" / f"{name}.jsonl").read_bytes() for name in ("one", "two")]
    assert [one.count(b"\n") for one in kept] == [7, 3]  # with the first line
    capsys.readouterr()
    main.main([*flags, str(tmp_path / "out")])
    assert capsys.readouterr().out == alone
    for name, begin in zip(("one", "two"), kept, strict=True):
        lines = (tmp_path / "out" / f"{name}.jsonl").read_bytes()
        assert lines.startswith(begin)
        assert lines == (tmp_path / "alone" / f"{name}.jsonl").read_bytes()
        places = [at for x in lines.splitlines()[1:] for at in json.loads(x)["results"]]
        assert sorted(map(int, places)) == [*range(24)]
    found, wanted = ((tmp_path / x / "results.json").read_bytes() for x in ("out", "alone"))
    assert found == wanted
    monkeypatch.setattr(classifiers.models, "load", None)  # nothing is left to classify
    main.main([*flags, str(tmp_path / "out")])
    assert capsys.readouterr().out == alone
    with pytest.raises(ResultsError, match=r"one\.jsonl has results with max_length=48, and .* 32"):
        main.main([*flags, str(tmp_path / "out"), "--max-length=32"])


def test_what_cannot_be_classified_is_refused(folder, tmp_path, caplog):
    path = write(tmp_path / "x.jsonl", {"text": "a", "label": 1}, {"text": "b", "label": 3})
    with pytest.raises(ValueError, match=r"line 2.* label 3 is none of .* classes: 1, 2, 5"):
        main.main(["eval", folder, "--task", path])
    path = write(tmp_path / "x.jsonl", {"text": ["a"], "label": 1})
    with pytest.raises(ValueError, match=r"line 1.* the text is \['a'\]"):
        main.main(["eval", folder, "--task", path])
    with pytest.raises(ValueError, match=r"num_shots=2: .* has a classification head"):
        main.main(["eval", folder, "--task", path, "--num-shots=2"])
    with pytest.raises(ValueError, match="leave out --distributed and --temperature"):
        main.main(["eval", folder, "--task", path, "--temperature=1"])
    with pytest.raises(ValueError, match="mlp-digits reads rows of numbers"):
        main.main(["eval", "mlp-digits", "--task", path])
    task = classifiers.read_labelled(
        write(tmp_path / "long.jsonl", {"text": "abcdef", "label": "5"}, {"text": "", "label": 2}),
        CLASSES,
        classifiers.Settings(),
    )
    assert classifiers.encoded(task, ByteTokenizer(), 4) == [[256, *b"abc"], [256]]
    assert "long: 1 texts are cut to their first 4 tokens" in caplog.text
    bare = classifiers.Settings(begin=False)
    task = classifiers.read_labelled(str(tmp_path / "long.jsonl"), CLASSES, bare)
    with pytest.raises(ValueError, match=r"line 2.*: the text has no token"):
        classifiers.encoded(task, ByteTokenizer(), 4)
