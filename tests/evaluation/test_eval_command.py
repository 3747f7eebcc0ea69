"""zoo.evaluation.command: `python -m zoo eval`, resumed, on two processes, and what it refuses."""

import contextlib
import json
import sqlite3
import sys
import time
from pathlib import Path

import helpers
import jax
import jax.numpy as jnp
import lm_eval
import lm_eval.api.model
import numpy as np
import pytest
import yaml
from evaluation_cases import CHOICES, CLASSES, LABELS, SCORES, asked, records
from lm_eval.tasks import TaskManager
from recipe_cases import Program, finish, wait_for
from stores import free_port

import zoo
from zoo import __main__ as main
from zoo.data.tokenizer import ByteTokenizer
from zoo.evaluation.harness import ZooLM

FORMS = {
    "multiple_choice": {
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "loglikelihood_rolling": {
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "generate_until": {
        "doc_to_text": "context",
        "doc_to_target": "target",
        "generation_kwargs": {"max_gen_toks": 4, "until": ["\n"]},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def write(folder: Path, name: str, output_type: str, lines: list[dict], **more) -> str:
    """A task file, and its examples beside it."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    form = {"output_type": output_type, **FORMS[output_type], **more}
    files = {"data_files": {"test": str(data)}}
    source = {"dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"task": name, **source, **form}))
    return str(path)


def results(folder: Path) -> dict:
    """The metrics of the tasks in the newest file of results."""
    return json.loads(max(folder.glob("results_*.json")).read_text())["results"]


def kept_in(folder: Path) -> int:
    """How many answers the cache of an evaluation has on the disk."""
    count = 0
    for path in folder.glob("requests_*.db"):
        opened = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        with contextlib.closing(opened), contextlib.suppress(sqlite3.OperationalError):
            count += opened.execute("SELECT COUNT(*) FROM unnamed").fetchone()[0]
    return count


@pytest.mark.slow
def test_command_agrees_with_transformers(golden_model, tmp_path, capsys):
    choice = write(tmp_path, "choice", "multiple_choice", records("task"))
    whole = write(tmp_path, "whole", "loglikelihood_rolling", records("text"))
    flags = ["eval", str(golden_model), "--task", choice, "--task", whole, "--mesh=data=2"]
    main.main([*flags, "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    for text in ("fp32, rows of 64 tokens", "|acc_norm", "|bits_per_byte", "the results are in"):
        assert text in printed
    wanted = [
        np.argmax([total for total, _ in choices]) == record["answer"]
        for choices, record in zip(SCORES["llama3"]["choices"], records("task"), strict=True)
    ]
    found = results(tmp_path / "out")
    assert found["choice"]["acc,none"] == pytest.approx(np.mean(wanted))
    error = np.std(wanted, ddof=1) / np.sqrt(len(wanted))
    assert found["choice"]["acc_stderr,none"] == pytest.approx(error)
    nats = -sum(SCORES["llama3"]["texts"])
    size = sum(len(record["text"]) for record in records("text"))
    bits = nats / size / np.log(2)
    assert found["whole"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-6)
    [samples] = (tmp_path / "out").glob("samples_choice_*.jsonl")
    assert len(samples.read_text().splitlines()) == len(wanted)


LETTERS = [{"context": x * 3, "target": "x", "text": x * 90} for x in "abcdefghij"]


@pytest.mark.slow
def test_an_evaluation_resumes_from_its_answers(folder, tmp_path, monkeypatch, capsys):
    """It is stopped three times, after six answers of each kind; no request is asked twice."""
    flags = ["eval", folder, "--batch-tokens=64"]
    for kind in ("multiple_choice", "generate_until", "loglikelihood_rolling"):
        lines = CHOICES if kind == "multiple_choice" else LETTERS
        flags.append(f"--task={write(tmp_path, kind, kind, lines)}")
    hook = lm_eval.api.model.CacheHook
    keep, answered = hook.add_partial, []
    out = tmp_path / "out"
    for method in ("loglikelihood", "generate_until", "loglikelihood_rolling"):

        def add(self, *entry, method=method):
            if sum(kind == method for kind, _ in answered) == 6:
                raise KeyboardInterrupt
            answered.append((entry[0], str(entry[1])))
            keep(self, *entry)

        monkeypatch.setattr(hook, "add_partial", add)
        with pytest.raises(KeyboardInterrupt):
            main.main([*flags, f"--out={out}"])
        deadline = time.monotonic() + 30
        while kept_in(out) < len(answered):  # which a thread writes
            assert time.monotonic() < deadline
    capsys.readouterr()
    monkeypatch.setattr(
        hook, "add_partial", lambda _, *entry: answered.append((entry[0], str(entry[1])))
    )
    main.main([*flags, f"--out={out}"])
    resumed = capsys.readouterr().out.splitlines()[:-1]
    assert len(answered) == len({*answered}) == 30 + 10 + 10
    monkeypatch.setattr(hook, "add_partial", keep)
    main.main([*flags, f"--out={tmp_path / 'alone'}"])
    assert capsys.readouterr().out.splitlines()[:-1] == resumed
    main.main([*flags[:4], f"--out={out}", "--max-length=32"])  # other answers: their own file
    assert len([*out.glob("requests_*.db")]) == 2


@pytest.mark.slow
def test_shots_options_and_limits_reach_lm_eval(folder, tmp_path, capsys):
    choice = write(tmp_path, "choice", "multiple_choice", CHOICES, fewshot_split="test")
    ask = write(tmp_path, "ask", "generate_until", LETTERS)
    flags = ["eval", folder, "--task", choice, "--task", ask, "--num-shots=1", "--limit=3"]
    options = "--generation=do_sample=true,temperature=1.0,max_gen_toks=6"
    main.main([*flags[:-2], "--limit=3", options, "--out", str(tmp_path / "drawn")])
    main.main([*flags, "--out", str(tmp_path / "out")])
    assert "exact_match" in capsys.readouterr().out

    def samples(name: str) -> list[dict]:
        [path] = tmp_path.glob(f"{name}_*.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]

    found = samples("out/samples_choice")
    assert len(found) == 3
    context = found[1]["arguments"][0][0]
    shot, question = context.split("\n\n")
    assert (question, shot[1]) == ("b", " ")
    drawn, greedy = samples("drawn/samples_ask"), samples("out/samples_ask")
    assert drawn[0]["arguments"][0][1]["max_gen_toks"] == 6
    assert [x["resps"] for x in drawn] != [x["resps"] for x in greedy]


def test_what_cannot_be_evaluated_is_refused(folder, tmp_path, monkeypatch):
    without = lambda include_path, **_: TaskManager(None, include_path, include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", without)  # lm-eval's own take 10 s to read
    with pytest.raises(ValueError, match="task='hellaswagg':"):
        main.main(["eval", folder, "--task", "hellaswagg"])
    with pytest.raises(ValueError, match="task: name"):
        main.main(["eval", folder])
    with pytest.raises(ValueError, match="distributed: name"):
        main.main(["eval", folder, "--task", "x", "--distributed"])
    for name in [x for x in sys.modules if x.partition(".")[0] == "lm_eval"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "zoo.evaluation.harness")
    with pytest.raises(ImportError, match=r"pip install 'zoo\[eval\]'"):
        main.main(["eval", folder, "--task", "python-bodies"])


TEXTS = [f"{100 + i * 7919 % 900} text"[: 3 + 5 * (i % 2)] for i in range(24)]


@pytest.mark.slow
def test_classifiers_choose_among_their_classes(tmp_path, caplog):
    body = helpers.drawn_transformer(vocab_size=264, max_seq_len=48, num_layers=1)
    model = zoo.Classifier(body, 3, key=jax.random.key(0))
    folder = str(tmp_path / "classifier")
    zoo.save(folder, model, tokenizer=ByteTokenizer(), metrics={"classes": [*CLASSES]})
    lines = [{"context": t, "stars": int(x)} for t, x in zip(TEXTS, LABELS, strict=True)]
    form = {"doc_to_choice": [*CLASSES], "metric_list": [{"metric": "acc"}]}
    form["doc_to_target"] = f"{{{{{[*CLASSES]}.index(stars | string)}}}}"
    path = write(tmp_path, "reviews", "multiple_choice", lines, **form)
    flags = ["eval", folder, "--task", path, "--batch-tokens=64", "--mesh=data=2"]
    main.main([*flags, "--out", str(tmp_path / "out")])
    logs = np.zeros((24, 3), np.float32)
    for half in (slice(0, 24, 2), slice(1, 24, 2)):  # of equal lengths: no row is padded
        ids = jnp.asarray([[256, *text.encode()] for text in TEXTS[half]], jnp.int32)
        logs[half] = jax.nn.log_softmax(model(ids))
    likeliest = [CLASSES[i] for i in logs.argmax(1)]
    assert len({*likeliest}) > 1
    wanted = np.mean([a == b for a, b in zip(likeliest, LABELS, strict=True)])
    assert results(tmp_path / "out")["reviews"]["acc,none"] == pytest.approx(wanted)
    lm = ZooLM(folder, max_length=4)
    found = lm.loglikelihood(asked(*((TEXTS[0], f" {name}") for name in CLASSES)))
    np.testing.assert_allclose([total for total, _ in found], logs[0], rtol=1e-4)
    assert [greedy for _, greedy in found] == (logs[0] == logs[0].max()).tolist()
    long, short = lm.loglikelihood(asked((TEXTS[0] + "more", "1"), (TEXTS[0], "1")))
    assert long == pytest.approx(short)
    assert "its end is cut off" in caplog.text
    with pytest.raises(ValueError, match=r"choice '3': .* 1, 2, 5"):
        lm.loglikelihood(asked(("a", "3")))
    for ask in (lm.loglikelihood_rolling, lm.generate_until):
        with pytest.raises(ValueError, match="has a classification head"):
            ask(asked(("a", {})))


def start(*flags: str, devices: int = 1, **variables: str) -> Program:
    return Program(["-m", "zoo", "eval", *flags], devices, **variables)


def table(printed: str) -> list[str]:
    found = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(found) > 2
    return found


@pytest.fixture
def many(tmp_path) -> list[str]:
    """Flags of tasks with many batches."""
    lines = [
        {"context": "x" * (i % 30), "choices": ["ab", "c", f"{i}"], "answer": i % 3}
        for i in range(100)
    ]
    texts = [write(tmp_path, "many", "multiple_choice", lines)]
    texts += [write(tmp_path, "ask", "generate_until", LETTERS)]
    return [f"--task={texts[0]}", f"--task={texts[1]}", "--batch-tokens=64"]


@pytest.mark.slow
def test_two_processes_get_the_results_of_one_and_resume(folder, many, tmp_path):
    out = tmp_path / "out"
    flags = [folder, *many, "--mesh=data=2,fsdp=2", "--distributed", f"--out={out}"]

    def both() -> list[Program]:
        address = f"127.0.0.1:{free_port()}"
        joined = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
        return [start(*flags, devices=2, **joined, JAX_PROCESS_ID=str(i)) for i in range(2)]

    def rows() -> set[tuple]:
        """Each answer that is kept, with a number that changes when it is written again."""
        [path] = out.glob("requests_*.db")
        with contextlib.closing(sqlite3.connect(path)) as opened:
            return {*opened.execute("SELECT rowid, key, value FROM unnamed")}

    pair = both()
    wait_for(lambda: kept_in(out) > 20, pair[0])
    for process in pair:
        process.kill()
        process.wait()
    kept = rows()
    first, second = [finish(process) for process in both()]
    alone = [folder, *many, f"--out={tmp_path / 'alone'}"]
    assert table(first) == table(finish(start(*alone)))
    assert "|acc" not in second  # one of them speaks
    assert 20 < len(kept) < len(rows()) == kept_in(tmp_path / "alone")
    assert kept < rows()
