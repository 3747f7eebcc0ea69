"""Evaluation: a model of the zoo as lm-eval asks it, the command, answers that are kept."""

import contextlib
import json
import sqlite3
import sys
import time
from pathlib import Path

import datasets
import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import lm_eval
import lm_eval.api.model
import numpy as np
import pytest
import tokenizers
import yaml
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from model_folders import write_tokenizer
from recipe_cases import Program, finish, wait_for
from stores import free_port

import zoo
from zoo import __main__ as main
from zoo.data.tokenizer import ByteTokenizer, load_tokenizer
from zoo.evaluation.harness import ZooLM, generation
from zoo.evaluation.scorer import Scorer

GOLDEN = Path(__file__).parents[1] / "golden"
SCORES = json.loads((GOLDEN / "scores" / "scores.json").read_text())


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.fixture(scope="module")
def model():
    return helpers.drawn_transformer(vocab_size=264, max_seq_len=48, num_layers=1)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> str:
    """A small model that reads bytes."""
    folder = tmp_path_factory.mktemp("models") / "bytes"
    zoo.save(folder, model, tokenizer=ByteTokenizer())
    return str(folder)


def records(name: str) -> list[dict]:
    lines = (GOLDEN / "scores" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def asked(*arguments: tuple) -> list[Instance]:
    return [Instance("loglikelihood", {}, one, 0) for one in arguments]


def everything(streamed) -> list:
    """The results of all batches in the order of what was asked."""
    found: dict = {}
    for batch in streamed:
        assert not found.keys() & batch.keys()
        found |= batch
    return [found[at] for at in range(len(found))]


# --- Scores -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["llama3", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_scores_equal_those_of_transformers(case, caplog, monkeypatch):
    kept = []
    lm = ZooLM(zoo.load(GOLDEN / "hf" / case), load_tokenizer(GOLDEN / "scores"), batch_tokens=512)
    monkeypatch.setattr(lm.cache_hook, "add_partial", lambda *entry: kept.append(entry))
    assert lm.max_length == 64
    pairs = [(one["context"], f" {x}") for one in records("task") for x in one["choices"]]
    wanted = [score for choices in SCORES[case]["choices"] for score in choices]
    found = lm.loglikelihood(asked(*pairs))
    assert len(found) == len(wanted) > 20
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in wanted], atol=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert len([r for r in caplog.records if "its beginning is cut off" in r.message]) == 1
    texts = [(one["text"],) for one in records("text")]
    assert max(len(lm.tok_encode(text)) for (text,) in texts) > 2 * lm.max_length
    rolled = lm.loglikelihood_rolling(asked(*texts))
    np.testing.assert_allclose(rolled, SCORES[case]["texts"], atol=1e-4, rtol=1e-6)
    assert len(kept) == len(pairs) + len(texts)
    by_request = {(method, *request): result for method, request, result in kept}
    assert by_request["loglikelihood", *pairs[-1]] == found[-1]
    assert by_request["loglikelihood_rolling", *texts[0]] == rolled[0]


PAIRS = [
    (list(range(65, 65 + context)), list(range(70, 70 + continuation)))
    for context, continuation in [(0, 3), (2, 1), (20, 4), (14, 3), (15, 1), (3, 9), (40, 20)]
]


def totals(model, pairs, **options) -> list[float]:
    found = everything(Scorer(model, ByteTokenizer(), **options).stream(pairs))
    assert len(found) == len(pairs)
    return [total for total, _ in found]


def test_scores_depend_neither_on_batches_nor_on_the_mesh(folder, monkeypatch):
    wanted = totals(zoo.load(folder), PAIRS)
    mesh = zoo.make_mesh("data=2,fsdp=2,tensor=2")
    monkeypatch.setattr("zoo.training.losses.LOGITS_BYTES", 1)  # a token's logits at a time
    found = totals(zoo.load(folder, mesh=mesh), PAIRS, batch_tokens=64)
    np.testing.assert_allclose(found, wanted, rtol=2e-5)


def whole_scores(model, pairs) -> list[float]:
    """The sums of the log-probabilities of all continuations, by one call of the model."""
    every = [[*(context or [256]), *continuation][-49:] for context, continuation in pairs]
    tokens = np.zeros((len(every), 48), np.int32)
    for row, ids in enumerate(every):
        tokens[row, : len(ids) - 1] = ids[:-1]
    logs = np.asarray(jax.nn.log_softmax(eqx.filter_jit(model)(jnp.asarray(tokens))))
    return [
        sum(logs[row, at, ids[at + 1]] for at in range(len(ids) - 1)[-len(pair[1]) :])
        for row, (ids, pair) in enumerate(zip(every, pairs, strict=True))
    ]


def test_scores_are_those_of_whole_logits(model):
    np.testing.assert_allclose(totals(model, PAIRS), whole_scores(model, PAIRS), rtol=1e-5)
    single = everything(
        Scorer(model, ByteTokenizer()).stream([([80, 81], [i]) for i in range(264)])
    )
    assert np.exp([total for total, _ in single]).sum() == pytest.approx(1, rel=1e-4)
    likeliest = int(np.argmax([total for total, _ in single]))
    assert [i for i, (_, greedy) in enumerate(single) if greedy] == [likeliest]
    pairs = [([80, 81], [first, second]) for first in (likeliest, 5) for second in range(264)]
    found = zip(pairs, everything(Scorer(model, ByteTokenizer()).stream(pairs)), strict=True)
    assert [ids[0] for (_, ids), (_, greedy) in found if greedy] == [likeliest]


@pytest.mark.slow
def test_recurrent_scores_are_those_of_whole_logits():
    model = helpers.drawn_rnn("lstm", vocab_size=264)
    assert ZooLM(model, ByteTokenizer()).max_length == 2048
    wanted = whole_scores(model, PAIRS[:-1])
    np.testing.assert_allclose(totals(model, PAIRS[:-1]), wanted, rtol=1e-5)


@pytest.mark.slow
def test_scores_in_few_bits_are_near(folder):
    wanted = totals(zoo.load(folder), PAIRS)
    pairs = asked(("ab", "c"), ("", "defg"))
    plain = ZooLM(folder).loglikelihood(pairs)
    for options in ({"dtype": "bf16"}, {"quantize": "int8"}):
        found = totals(zoo.load(folder, **options), PAIRS)
        np.testing.assert_allclose(found, wanted, rtol=0.05)
        assert found != wanted
        lm = ZooLM(folder, **options)
        assert lm.get_model_info()["dtype"] == options.get("dtype", "fp32")
        assert lm.loglikelihood(pairs) != plain


def test_what_cannot_be_asked_is_refused(folder, model):
    lm = ZooLM(model, ByteTokenizer())
    with pytest.raises(ValueError, match=r"request 1 .* 0 tokens"):
        lm.loglikelihood(asked(("a", "b"), ("a", "")))
    with pytest.raises(ValueError, match=r"continuation of 49 tokens, and .* has 1 to 48"):
        lm.loglikelihood(asked(("a", "b" * 49)))
    with pytest.raises(ValueError, match=r"id 264: .* 0 to 263"):
        next(lm.scorer.stream([([65], [264])]))
    with pytest.raises(ValueError, match="max_new_tokens=256"):
        lm.generate_until(asked(("a", {})))
    with pytest.raises(ValueError, match="no chat template"):
        lm.apply_chat_template([{"role": "user", "content": "a"}])
    with pytest.raises(ValueError, match="tokenizer: give that of the model"):
        ZooLM(model)
    with pytest.raises(ValueError, match="dtype='bf16', quantize=None:"):
        ZooLM(model, ByteTokenizer(), dtype="bf16")
    with pytest.raises(ValueError, match=r"max_length=64 .* 1, .* 48"):
        ZooLM(folder, max_length=64)
    with pytest.raises(ValueError, match=r"mlp-digits .* tokenizer"):
        ZooLM("mlp-digits")


# --- Texts, tokens and chats ------------------------------------------------------------------


@pytest.mark.slow
def test_texts_depend_neither_on_the_mesh_nor_greedy_ones_on_batches(folder):
    mesh = zoo.make_mesh("data=2,fsdp=2,tensor=2")
    prompts = [context for context, _ in PAIRS]

    def texts(mesh, batch_tokens=8192, **sampling):
        scorer = Scorer(zoo.load(folder, mesh=mesh), ByteTokenizer(), batch_tokens=batch_tokens)
        return everything(scorer.stream_texts(prompts, max_new_tokens=6, **sampling))

    greedy = texts(None)
    assert texts(mesh, 64) == greedy
    assert len({*greedy}) > 1
    sampling = {"temperature": 1.0, "key": jax.random.key(1)}
    assert texts(mesh, **sampling) == texts(None, **sampling) != greedy


def test_answers_come_in_the_order_of_their_requests(model):
    greedy, long = {"until": ["\n\n"], "max_gen_toks": 4}, {"max_gen_toks": 6, "until": []}
    drawn = {"do_sample": True, "temperature": 1.0, "top_k": 40, "max_gen_toks": 6}
    requests = asked(("b", drawn), ("a", greedy), ("a", long), ("c", greedy), ("b", drawn))
    found = ZooLM(model, ByteTokenizer(), seed=3).generate_until(requests)
    scorer = Scorer(model, ByteTokenizer())
    prompts = [[256, *b"a"], [256, *b"c"]]
    texts = everything(scorer.stream_texts(prompts, max_new_tokens=4, stops=["\n\n"]))
    [text] = everything(scorer.stream_texts(prompts[:1], max_new_tokens=6))
    assert [found[1], found[3], found[2]] == [*texts, text]
    assert len({texts[0], texts[1], found[0], found[4]}) == 4  # each draws for itself
    both = [requests[0], requests[4]]
    again = ZooLM(model, ByteTokenizer(), seed=3).generate_until(both)
    other = ZooLM(model, ByteTokenizer(), seed=4).generate_until(both)
    assert again == [found[0], found[4]] != other
    stop = next(x for x in text[1:] if text.index(x) > 0)
    [ended] = ZooLM(model, ByteTokenizer()).generate_until(asked(("a", {**long, "until": stop})))
    assert ended == text[: text.index(stop)]


def test_generation_is_read_as_lm_eval_does():
    none = {"stops": [], "max_new_tokens": 256, "temperature": 0.0}
    assert generation({}) == none
    assert generation({"do_sample": True}) == none
    found = generation({"until": "x", "max_new_tokens": 9})
    assert found == {**none, "stops": ["x"], "max_new_tokens": 9}
    found = generation({"temperature": 0.5, "top_p": 0.9})
    assert found == {**none, "temperature": 0.5, "top_p": 0.9}
    ignored = {"do_sample": False, "temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.1}
    assert generation(ignored) == {**none, "repetition_penalty": 1.1}
    with pytest.raises(ValueError, match=r"'num_beams'; .* do_sample"):
        generation({"num_beams": 4})


TEMPLATE = (
    "<bos>{% for m in messages %}{{ m.role }}: {{ m.content }}<eot>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_chats_are_written_by_the_template(model, tmp_path, monkeypatch):
    ids = write_tokenizer(tmp_path, template=TEMPLATE)
    tokenizer = load_tokenizer(tmp_path)
    lm = ZooLM(model, tokenizer)
    given = lambda _, stops, **options: iter([{0: " ".join(stops)}])
    monkeypatch.setattr(lm.scorer, "stream_texts", given)
    [before] = lm.generate_until(asked(("a", {"until": ["x"]})))
    chat = [{"role": "user", "content": "text"}]
    text = lm.apply_chat_template(chat)
    [stops] = lm.generate_until(asked(("a", {"until": ["x"]})))
    assert (before, stops) == ("x", "x <eot>")  # the end of a turn
    assert text == "<bos>user: text<eot>assistant: "
    context, continuation = lm._encode_pair(text, "12<eot>")
    assert context == [ids["<bos>"], *tokenizer.encode("user: text"), ids["<eot>"],
                       *tokenizer.encode("assistant:")]  # fmt: skip
    assert continuation[-1] == ids["<eot>"]
    started = [*chat, {"role": "assistant", "content": "some "}]
    continued = lm.apply_chat_template(started, add_generation_prompt=False)
    assert continued == "<bos>user: text<eot>assistant: some"
    assert (lm.chat_template(True), lm.chat_template(False)) == (TEMPLATE, None)
    other = tmp_path / "other"
    write_tokenizer(other, template=TEMPLATE + " ")
    assert lm.tokenizer_name == ZooLM(model, load_tokenizer(tmp_path)).tokenizer_name
    assert lm.tokenizer_name != ZooLM(model, load_tokenizer(other)).tokenizer_name
    with pytest.raises(ValueError, match=r"apply_chat_template='tools': .* give True"):
        lm.chat_template("tools")


def test_names_of_special_tokens_are_tokens_after_the_begin(model, tmp_path):
    """lm-eval's own models tokenize rendered chats so; see `tokenizers` itself for the ids."""
    ids = write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    plain = library.encode("user\nsome<|im_end|>", add_special_tokens=False).ids
    assert plain[-1] == ids["<|im_end|>"]
    lm, bare = ZooLM(model, tokenizer), ZooLM(model, tokenizer, begin=False)
    begun = [ids["<bos>"], *plain]
    assert lm.tok_encode("user\nsome<|im_end|>") == begun
    assert lm.tok_encode("<bos>user\nsome<|im_end|>") == begun
    assert lm.tok_encode("user\nsome<|im_end|>", add_special_tokens=False) == plain
    assert bare.tok_encode("user\nsome<|im_end|>") == plain
    assert lm.prefix_token_id == ids["<bos>"]


# --- The command ------------------------------------------------------------------------------


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
CHOICES = [{"context": x, "choices": ["ab", "c", f"{i}"], "answer": i % 3}
           for i, x in enumerate("abcdefghij")]  # fmt: skip


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


# --- Models with a classification head --------------------------------------------------------


CLASSES = ("1", "2", "5")
TEXTS = [f"{100 + i * 7919 % 900} text"[: 3 + 5 * (i % 2)] for i in range(24)]
LABELS = [CLASSES[i * i % 3] for i in range(24)]


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


# --- Processes of their own -------------------------------------------------------------------


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
