"""Evaluation of language models on tasks: scores, task files, metrics, results that resume."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import xla
from recipe_cases import finish, wait_for
from test_tokenizer import KINDS

import zoo
from zoo import __main__ as main
from zoo.data.tokenizer import BPETokenizer, ByteTokenizer, load_tokenizer, reading
from zoo.tasks.evaluation import command, metrics, rows
from zoo.tasks.evaluation.requests import make_requests
from zoo.tasks.evaluation.results import Results, ResultsError
from zoo.tasks.evaluation.scorer import LogLikelihood, Scorer, encode_pair
from zoo.tasks.evaluation.task import Settings, read_task

GOLDEN = Path(__file__).parent / "golden"
SCORES = json.loads((GOLDEN / "scores" / "scores.json").read_text())
QUICK = ("llama3",)


def records(name: str) -> list[dict]:
    lines = (GOLDEN / "scores" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def cases() -> list:
    assert set(QUICK) <= SCORES.keys()
    return [
        pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow)
        for case in sorted(SCORES)
    ]


# --- Scores -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases())
def test_scores_equal_those_of_transformers(case, caplog):
    tokenizer = load_tokenizer(GOLDEN / "scores")
    scorer = Scorer(zoo.load(GOLDEN / "hf" / case), tokenizer, batch_tokens=512)
    assert scorer.max_length == 64
    task = records("task")
    pairs = [
        encode_pair(tokenizer, one["context"], f" {choice}")
        for one in task
        for choice in one["choices"]
    ]
    wanted = [score for choices in SCORES[case]["choices"] for score in choices]
    found = scorer.log_likelihoods(pairs)
    assert len(found) == len(wanted) > 20
    np.testing.assert_allclose([x.total for x in found], [x for x, _ in wanted], atol=1e-4)
    assert [x.greedy for x in found] == [greedy for _, greedy in wanted]
    assert [x.num_tokens for x in found] == [len(continuation) for _, continuation in pairs]
    assert len([r for r in caplog.records if "the beginning of its context" in r.message]) == 1
    texts = [tokenizer.encode(one["text"]).tolist() for one in records("text")]
    assert max(map(len, texts)) > 2 * scorer.max_length
    rolled = scorer.rolling(texts)
    np.testing.assert_allclose(
        [x.total for x in rolled], SCORES[case]["texts"], atol=1e-4, rtol=1e-6
    )
    assert [x.num_tokens for x in rolled] == [len(ids) for ids in texts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A small model that reads bytes."""
    folder = tmp_path_factory.mktemp("models") / "bytes"
    model = helpers.drawn_transformer(vocab_size=264, max_seq_len=48, num_layers=1)
    zoo.save(folder, model, tokenizer=ByteTokenizer())
    return folder


PAIRS = [
    (list(range(65, 65 + context)), list(range(70, 70 + continuation)))
    for context, continuation in [(0, 3), (2, 1), (20, 4), (14, 3), (15, 1), (3, 9), (40, 20)]
]


def assert_same(found: list[LogLikelihood], wanted: list[LogLikelihood]) -> None:
    assert len(found) == len(wanted) > 5
    np.testing.assert_allclose([x.total for x in found], [x.total for x in wanted], rtol=2e-5)
    assert [x[1:] for x in found] == [x[1:] for x in wanted]


def test_scores_depend_neither_on_batches_nor_on_the_mesh(folder, monkeypatch):
    wanted = Scorer(zoo.load(folder), ByteTokenizer()).log_likelihoods(PAIRS)
    mesh = zoo.make_mesh("data=2,fsdp=2,tensor=2")
    monkeypatch.setattr(rows, "LOGITS_BYTES", 1)  # a token's logits at a time
    meshed = Scorer(zoo.load(folder, mesh=mesh), ByteTokenizer(), batch_tokens=64)
    assert_same(meshed.log_likelihoods(PAIRS), wanted)


@pytest.mark.slow
def test_texts_depend_neither_on_the_mesh_nor_greedy_ones_on_batches(folder):
    one = Scorer(zoo.load(folder), ByteTokenizer())
    mesh = zoo.make_mesh("data=2,fsdp=2,tensor=2")
    meshed = Scorer(zoo.load(folder, mesh=mesh), ByteTokenizer(), batch_tokens=64)
    prompts = [context for context, _ in PAIRS]
    texts = one.generate(prompts, max_new_tokens=6)
    assert meshed.generate(prompts, max_new_tokens=6) == texts
    assert len({*texts}) > 1
    meshed = Scorer(zoo.load(folder, mesh=mesh), ByteTokenizer())
    sampling = {"temperature": 1.0, "key": jax.random.key(1), "max_new_tokens": 6}
    assert meshed.generate(prompts, **sampling) == one.generate(prompts, **sampling) != texts


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


def test_scores_are_those_of_whole_logits(folder):
    model = zoo.load(folder)
    scorer = Scorer(model, ByteTokenizer())
    found = scorer.log_likelihoods(PAIRS)
    np.testing.assert_allclose([x.total for x in found], whole_scores(model, PAIRS), rtol=1e-5)
    single = scorer.log_likelihoods([([80, 81], [i]) for i in range(264)])
    assert np.exp([x.total for x in single]).sum() == pytest.approx(1, rel=1e-4)
    likeliest = int(np.argmax([x.total for x in single]))
    assert [i for i, x in enumerate(single) if x.greedy] == [likeliest]
    pairs = [([80, 81], [first, second]) for first in (likeliest, 5) for second in range(264)]
    greedy = [
        pair[1] for pair, x in zip(pairs, scorer.log_likelihoods(pairs), strict=True) if x.greedy
    ]
    assert [first for first, _ in greedy] == [likeliest]


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_recurrent_scores_are_those_of_whole_logits(cell):
    model = helpers.drawn_rnn(cell, vocab_size=264)
    scorer = Scorer(model, ByteTokenizer())
    assert scorer.max_length == 2048
    found = scorer.log_likelihoods(PAIRS[:-1])
    wanted = whole_scores(model, PAIRS[:-1])
    np.testing.assert_allclose([x.total for x in found], wanted, rtol=1e-5)
    assert scorer.generate([[70], [80, 81]], max_new_tokens=4)


@pytest.mark.slow
def test_scores_in_few_bits_are_near(folder):
    wanted = [x.total for x in Scorer(zoo.load(folder), ByteTokenizer()).log_likelihoods(PAIRS)]
    for options in ({"dtype": "bf16"}, {"quantize": "int8"}, {"dtype": "bf16", "quantize": "int8"}):
        scorer = Scorer(zoo.load(folder, **options), ByteTokenizer())
        found = [x.total for x in scorer.log_likelihoods(PAIRS)]
        np.testing.assert_allclose(found, wanted, rtol=0.05)
        assert found != wanted


def test_scorer_refuses_what_cannot_be_scored(folder):
    scorer = Scorer(zoo.load(folder), ByteTokenizer())
    with pytest.raises(ValueError, match="pair 1 has an empty continuation"):
        scorer.log_likelihoods([([65], [66]), ([65], [])])
    with pytest.raises(ValueError, match="49 tokens, and a row of this model has 48"):
        scorer.log_likelihoods([([65], [66] * 49)])
    with pytest.raises(ValueError, match="id 264 is none of the model's, which are 0 to 263"):
        scorer.log_likelihoods([([65], [264])])
    with pytest.raises(ValueError, match="max_new_tokens=48 leaves no room"):
        scorer.generate([[65]], max_new_tokens=48)
    with pytest.raises(ValueError, match="max_length=64 must be at least 1, and at most the 48"):
        Scorer(zoo.load(folder), ByteTokenizer(), max_length=64)
    with pytest.raises(ValueError, match="is no decoder"):
        Scorer(zoo.load("mlp-digits"), ByteTokenizer())


@pytest.mark.slow
def test_generated_texts_end_before_a_stop(folder):
    scorer = Scorer(zoo.load(folder), ByteTokenizer())
    [whole] = scorer.generate([[70, 71]], max_new_tokens=8)
    stop = next(x for x in whole[1:] if whole.index(x) > 0)
    assert scorer.generate([[70, 71]], max_new_tokens=8, stops=[stop]) == [
        whole[: whole.index(stop)]
    ]


# --- Task files -------------------------------------------------------------------------------


def write(path: Path, *lines: dict | str) -> str:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return str(path)


QUESTION = {"question": "2+2?", "choices": ["3", "4"], "answer": "B"}
FORMS = [
    (QUESTION, {}, ("Question: 2+2?\nAnswer:", ("3", "4"), 1)),
    ({"ctx": "He", "endings": ["ran", "sat"], "label": "1"}, {}, ("He", ("ran", "sat"), 1)),
    ({"query": "He", "choices": ["ran", "sat"], "gold": 0}, {}, ("He", ("ran", "sat"), 0)),
    (
        {
            "question": "Q",
            "choices": {"text": ["x", "y"], "label": ["1", "2"]},
            "answerKey": "2",
        },
        {},
        ("Question: Q\nAnswer:", ("x", "y"), 1),
    ),
    ({"input": "He", "options": ["ran", "sat"], "target": "sat"}, {}, ("He", ("ran", "sat"), 1)),
    (QUESTION, {"letters": True}, ("Question: 2+2?\nA. 3\nB. 4\nAnswer:", ("A", "B"), 1)),
    (
        QUESTION,
        {"letters": True, "prompt": r"{question}\n{choices}\n="},
        ("2+2?\nA. 3\nB. 4\n=", ("A", "B"), 1),
    ),
    (
        {"body": "He", "picks": ["ran", "sat"], "right": 1},
        {"fields": ("context=body", "choices=picks", "answer=right")},
        ("He", ("ran", "sat"), 1),
    ),
    (
        {"text": "fine", "label": 1},
        {"labels": ("bad", "good"), "prompt": "{text} is"},
        ("fine is", ("bad", "good"), 1),
    ),
]


@pytest.mark.parametrize(("record", "settings", "wanted"), FORMS)
def test_choices_are_read_in_the_usual_forms(tmp_path, record, settings, wanted):
    task = read_task(write(tmp_path / "t.jsonl", record), Settings(**settings))
    [example] = task.examples
    assert (example.context, example.choices, example.answer) == wanted
    assert task.name == "t"
    assert task.kind == ("classification" if "labels" in settings else "multiple_choice")


def test_answers_texts_and_labels_are_read(tmp_path, caplog):
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "1+1=", "target": 2},
        {"prompt": "two:", "target": ["2", "II"], "id": 7},
        "",
    )
    task = read_task(path)
    assert task.kind == "generate"
    assert [example.targets for example in task.examples] == [("2",), ("2", "II")]
    assert "not read are the fields id" in caplog.text
    pattern = read_task(write(tmp_path / "p.jsonl", {"question": "Q", "regex": "^a+$"}))
    assert pattern.examples[0].pattern == "^a+$"
    assert read_task(write(tmp_path / "x.jsonl", {"text": "some"})).kind == "perplexity"
    labels = [{"sentence": "s", "label": word} for word in ("no", "yes", "no")]
    task = read_task(write(tmp_path / "l.jsonl", *labels))
    assert task.kind == "classification"
    assert task.examples[1].choices == ("no", "yes")
    assert [example.answer for example in task.examples] == [0, 1, 0]


def test_a_table_has_settings_that_flags_come_before(tmp_path):
    write(tmp_path / "q.jsonl", QUESTION, QUESTION, QUESTION)
    table = tmp_path / "q.toml"
    table.write_text("data = 'q.jsonl'\nnum_shots = 2\nprompt = '{question}'\n")
    task = read_task(str(table), Settings(prompt="Q {question}"), limit=2)
    assert (task.name, task.settings.num_shots, len(task.examples)) == ("q", 2, 2)
    assert task.examples[0].context == "Q 2+2?"
    table.write_text("data = 'q.jsonl'\nnum_shot = 2\n")
    with pytest.raises(ValueError, match=r"q\.toml: no field num_shot \(known are kind"):
        read_task(str(table))
    table.write_text("num_shots = 2\n")
    with pytest.raises(ValueError, match=r"q\.toml names no file of examples"):
        read_task(str(table))


BAD = [
    (['{"question": '], {}, r"t\.jsonl, line 1 is not JSON"),
    ([], {}, r"t\.jsonl has no lines"),
    ([{"what": 1}], {}, r"line 1 is of no known form: its fields are \['what'\], and the forms"),
    ([QUESTION, {"question": "Q"}], {}, r"line 2 has no field 'choices' or 'endings' or"),
    ([{**QUESTION, "choices": ["3", " "]}], {}, r"line 1: choice 1 is empty \(' '\)"),
    ([{**QUESTION, "choices": ["3"]}], {}, r"line 1: choices are \['3'\], and have to be a list"),
    ([QUESTION, {**QUESTION, "answer": 2}], {}, "line 2: the answer 2 is out of range: the 2"),
    ([{**QUESTION, "answer": "C"}], {}, "line 1: the answer 'C' is none of A, B"),
    ([{**QUESTION, "answer": "five"}], {}, "line 1: the answer 'five' is no index, no letter"),
    ([{**QUESTION, "label": 1}], {}, r"line 1 has both 'answer' and 'label': say which one"),
    ([QUESTION], {"fields": ("answer=gold",)}, r"line 1 has no field 'gold', for the answer"),
    ([QUESTION], {"prompt": "{query}"}, r"line 1 has no field 'query', which the prompt names"),
    ([{"text": ""}], {}, r"line 1: the text is empty, and has no bits per byte"),
    ([{"text": "a", "label": 0}], {}, r"line 1: the label is 0, and no word: give the words"),
    ([{"prompt": "a", "target": []}], {}, r"line 1: the target is \[\]: give a text that is"),
    ([{"prompt": "a", "regex": "("}], {}, r"line 1: '\(' is no regular expression"),
    ([QUESTION], {"num_shots": 1}, r"num_shots=1: .*t\.jsonl has 1 examples, 0 beside each"),
    ([{"text": "a"}], {"num_shots": 1}, r"num_shots=1: .*t\.jsonl is scored as text"),
]


@pytest.mark.parametrize(("lines", "settings", "message"), BAD)
def test_bad_tasks_are_refused_by_file_and_line(tmp_path, lines, settings, message):
    path = write(tmp_path / "t.jsonl", *lines)
    with pytest.raises(ValueError, match=message) as raised:
        read_task(path, Settings(**settings))
    assert "t.jsonl" in str(raised.value)


def test_bad_settings_are_refused():
    for options, message in [
        ({"fields": ("answr=x",)}, "fields='answr=x': write role=field"),
        ({"extract": "("}, r"extract='\(' is no regular expression"),
        ({"shots": "x.jsonl"}, "shots='x.jsonl': say how many"),
    ]:
        with pytest.raises(ValueError, match=message):
            Settings(**options)
    with pytest.raises(FileNotFoundError, match=r"no file matches 'none\.jsonl'"):
        read_task("none.jsonl")


# --- Requests ---------------------------------------------------------------------------------


def decoded(pair) -> tuple[str, str]:
    return tuple(ByteTokenizer().decode(ids) for ids in pair)


def test_shots_stand_before_the_question_and_are_never_it(tmp_path):
    lines = [{"question": f"q{i}", "choices": ["no", "yes"], "answer": i % 2} for i in range(6)]
    path = write(tmp_path / "q.jsonl", *lines)
    settings = Settings(num_shots=3)
    requests = make_requests(read_task(path, settings), ByteTokenizer(), 500)
    assert requests == make_requests(read_task(path, settings), ByteTokenizer(), 500)
    assert len(requests) == 12
    drawn = set()
    for i, request in enumerate(requests):
        context, continuation = decoded(request.pair)
        *shots, question = context.split("\n\n")
        assert question == f"Question: q{i // 2}\nAnswer:"
        assert continuation == (" no", " yes")[i % 2]
        assert len({*shots}) == 3
        for shot in shots:
            number = int(shot[len("Question: q")])
            assert number != i // 2
            assert shot.endswith(f"\nAnswer: {lines[number]['choices'][number % 2]}")
        drawn.add(tuple(shots))
        assert request.pair[0][0] == ByteTokenizer.begin_id
    assert len(drawn) > 3
    other = write(tmp_path / "s.jsonl", *lines[:2])
    task = read_task(path, Settings(num_shots=2, shots=other, begin=False))
    context, _ = decoded(make_requests(task, ByteTokenizer(), 500)[0].pair)
    assert sorted(context.split("\n\n")[:2]) == [
        "Question: q0\nAnswer: no",
        "Question: q1\nAnswer: yes",
    ]


def test_blanks_move_to_the_continuation():
    assert decoded(encode_pair(ByteTokenizer(), "a \n", "b")) == ("a", " \nb")
    assert encode_pair(ByteTokenizer(), "", "b", begin=False) == ([], [98])


def test_long_texts_are_cut_into_windows(tmp_path):
    path = write(tmp_path / "x.jsonl", {"text": "abcdefghij"})
    pairs = [request.pair for request in make_requests(read_task(path), ByteTokenizer(), 4)]
    assert [decoded(pair) for pair in pairs] == [("", "abcd"), ("d", "efgh"), ("fgh", "ij")]
    assert pairs[0][0] == [256]


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_chats_are_written_by_the_template(tmp_path):
    helpers.write_tokenizer(tmp_path, begins=False, template=TEMPLATE)
    tokenizer = load_tokenizer(tmp_path)
    lines = [{"question": f"q{i}", "choices": ["no", "yes"], "answer": 1} for i in range(2)]
    path = write(tmp_path / "q.jsonl", *lines)
    task = read_task(path, Settings(num_shots=1, chat=True, prompt="{question}"))
    [_, (context, continuation), *_] = [
        request.pair for request in make_requests(task, tokenizer, 500)
    ]
    turns = [("user", "q1"), ("assistant", "yes"), ("user", "q0")]
    text = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert context == reading(tokenizer, "parse").encode(f"{text}<|im_start|>assistant\n").tolist()
    assert continuation == tokenizer.encode("yes").tolist()
    with pytest.raises(ValueError, match="no chat template"):
        make_requests(task, ByteTokenizer(), 500)


@pytest.mark.parametrize("special_tokens", [None, "parse", "text"])
@pytest.mark.parametrize("kind", ["choices", "perplexity", "generate"])
def test_names_of_special_tokens_are_tokens_unless_told(kind, special_tokens, tmp_path):
    """lm-eval's own models tokenize rendered chats so; see `tokenizers` itself for the ids."""
    ids = helpers.write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    text = "<bos><|im_start|>user\nsome<|im_end|>"
    line = {
        "choices": {"context": text, "choices": ["text<|im_end|>", "12"], "answer": 0},
        "perplexity": {"text": text},
        "generate": {"prompt": text, "target": "12"},
    }[kind]
    path = write(tmp_path / "q.jsonl", line)
    settings = Settings(special_tokens=special_tokens, delimiter="")
    first, *_ = make_requests(read_task(path, settings), tokenizer, 500)
    whole = text + ("text<|im_end|>" if kind == "choices" else "")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.encode_special_tokens = special_tokens == "text"
    expected = library.encode(whole, add_special_tokens=False).ids
    found = [*first.pair[0], *first.pair[1]]
    if special_tokens == "text" or kind == "perplexity":  # whose text follows the begin
        expected = [ids["<bos>"], *expected]
    assert found == expected
    assert (ids["<|im_end|>"] in found) == (special_tokens != "text")


def test_answers_to_chats_go_on_where_the_turn_begins(tmp_path):
    inner = KINDS["unigram"](["<s>", "</s>"])
    inner.add_special_tokens(["<s>", "</s>"])
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = BPETokenizer(inner, config={"eos_token": "</s>", "chat_template": template})
    path = write(tmp_path / "q.jsonl", {"context": "def f(", "choices": ["x)", "y)"], "answer": 0})
    first, _ = make_requests(read_task(path, Settings(chat=True)), tokenizer, 500)
    assert inner.decode([*first.pair[0], *first.pair[1]]) == "def f(x)"


def test_answers_without_room_are_refused(tmp_path):
    path = write(tmp_path / "q.jsonl", {**QUESTION, "choices": ["3", "4" * 20]})
    with pytest.raises(ValueError, match="line 1: choice 1 has 21 tokens, and a row of this model"):
        make_requests(read_task(path), ByteTokenizer(), 16)


# --- Metrics ----------------------------------------------------------------------------------


def judged(tmp_path, lines, results, **settings) -> dict:
    task = read_task(write(tmp_path / "t.jsonl", *lines), Settings(**settings))
    return metrics.estimates(task, make_requests(task, ByteTokenizer(), 64), results)


def scores(*totals: float) -> list[LogLikelihood]:
    return [LogLikelihood(total, 1, False) for total in totals]


def test_accuracy_is_plain_and_per_byte(tmp_path):
    lines = [{"query": "q", "choices": ["a", "äb"], "gold": gold} for gold in (0, 0, 1, 1)]
    found = judged(tmp_path, lines, scores(-1, -2, -1, -4, -1, -2.5, -1, -2))
    assert found["acc"].value == 0.5  # right: the first two
    assert found["acc_norm"].value == 0.75  # per byte of three: -0.67, -1.33, -0.83, -0.67
    wanted = np.std([1, 1, 0, 0], ddof=1) / 2
    assert found["acc"].stderr == pytest.approx(wanted)
    # Wilson's interval holds the p with |share - p| <= 1.96 sqrt(p (1 - p) / n).
    for bound in (found["acc"].low, found["acc"].high, found["acc_norm"].low):
        value = 0.75 if bound == found["acc_norm"].low else 0.5
        assert abs(value - bound) == pytest.approx(
            1.96 * np.sqrt(bound * (1 - bound) / 4), abs=1e-4
        )
    none = judged(tmp_path, lines[:2], scores(-2, -1, -2, -1))["acc"]
    assert (none.value, none.low, none.stderr) == (0, 0, 0)
    assert none.high > 0.5


def test_macro_f1_is_that_of_each_class(tmp_path):
    labels = ["x", "x", "x", "y", "y", "z"]
    lines = [{"text": "t", "label": label} for label in labels]
    found = [0, 0, 1, 1, 0, 0]
    rows = [-1.0 * (np.arange(3) != i) for i in found]
    result = judged(tmp_path, lines, scores(*np.concatenate(rows).tolist()))
    each = [2 * 2 / (3 + 4), 2 * 1 / (2 + 2), 0.0]
    assert result["macro_f1"].value == pytest.approx(np.mean(each))
    assert result["acc"].value == 0.5
    assert result["macro_f1"].low < result["macro_f1"].value < result["macro_f1"].high
    assert result == judged(tmp_path, lines, scores(*np.concatenate(rows).tolist()))


def test_generated_answers_match_exactly_or_by_an_expression(tmp_path):
    lines = [{"prompt": "p", "target": "#### 4"}, {"prompt": "p", "target": ["5", "five"]}]
    texts = ["it is\n#### 4 ", " five\n"]
    assert judged(tmp_path, lines, texts)["exact_match"].value == 0.5
    texts = ["so #### 4, or #### 5", "five"]
    found = judged(tmp_path, lines, texts, extract=r"#### (\d+)")
    assert found["exact_match"].value == 0.5
    lines = [{"prompt": "p", "regex": "^a+$"}] * 2
    assert judged(tmp_path, lines, ["aaa", "ab"])["regex_match"].value == 0.5


def test_bits_per_byte_are_of_the_whole_text(tmp_path):
    lines = [{"text": "ä b"}, {"text": "cccc"}]
    results = [LogLikelihood(-6.0, 4, False), LogLikelihood(-2.0, 4, False)]
    found = judged(tmp_path, lines, results)
    assert found["bits_per_byte"].value == pytest.approx(8 / 8 / np.log(2))
    assert found["perplexity"].value == pytest.approx(np.exp(8 / 8))
    assert found["word_perplexity"].value == pytest.approx(np.exp(8 / 3))
    low, high = 2 / 4 / np.log(2), 6 / 4 / np.log(2)
    assert (found["bits_per_byte"].low, found["bits_per_byte"].high) == pytest.approx((low, high))
    assert found["bits_per_byte"].by == "bootstrap"
    [alone] = [judged(tmp_path, lines[:1], results[:1])["bits_per_byte"]]
    assert np.isnan(alone.stderr)


# --- Results ----------------------------------------------------------------------------------


def test_results_come_back_and_a_torn_line_is_dropped(tmp_path):
    path, mark = tmp_path / "t.jsonl", {"model": "m", "task": "t"}
    batches = [{0: LogLikelihood(-1.25, 3, True), 2: LogLikelihood(-1 / 3, 1, False)}, {1: "text"}]
    results = Results(path, mark)
    for batch in batches:
        results.add(batch)
    wanted = {**batches[0], **batches[1]}
    assert Results(path, mark).known == wanted
    whole = path.read_bytes()
    for size in (len(whole) - 1, len(whole) - 20):
        path.write_bytes(whole[:size])
        assert Results(path, mark).known == batches[0]
        results = Results(path, mark)
        results.add(batches[1])
        assert path.read_bytes() == whole
    path.write_bytes(whole[:10])
    assert Results(path, mark).known == {}


def test_damaged_and_foreign_results_are_refused(tmp_path):
    path, mark = tmp_path / "t.jsonl", {"model": "m", "task": "t"}
    results = Results(path, mark)
    results.add({0: "one"})
    results.add({1: "two"})
    with pytest.raises(ResultsError, match=r"t\.jsonl has results with task='t', and .* has 'u'"):
        Results(path, {**mark, "task": "u"})
    whole = path.read_text()
    for damaged in (whole.replace("one", "onu"), whole.replace('"one"]', '"one"'), whole[3:]):
        path.write_text(damaged)
        number = 1 if damaged == whole[3:] else 2
        with pytest.raises(ResultsError, match=rf"t\.jsonl, line {number}: .* is damaged"):
            Results(path, mark)


@pytest.mark.parametrize("content", ['{"query": "a", "gold": 0}', '{"query": "a"}\n', "ab\n", "x"])
def test_a_file_of_something_else_stays(content, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    with pytest.raises(ResultsError, match=r"or is none .*: give another --out, or move it away"):
        Results(path, {"task": "t"})
    assert path.read_text() == content


# --- The command ------------------------------------------------------------------------------


def test_command_agrees_with_transformers_and_resumes(golden_model, tmp_path, capsys, monkeypatch):
    tasks = [str(GOLDEN / "scores" / f"{name}.jsonl") for name in ("task", "text")]
    flags = [str(golden_model), "--task", tasks[0], "--task", tasks[1], "--batch-tokens=128"]
    flags = ["eval", *flags, "--out", str(tmp_path / "out")]
    added = []

    def add(self, batch):
        if len(added) == 3:
            raise KeyboardInterrupt
        added.append(batch)
        keep(self, batch)

    keep = Results.add
    monkeypatch.setattr(Results, "add", add)
    with pytest.raises(KeyboardInterrupt):
        main.main(flags)
    capsys.readouterr()
    monkeypatch.setattr(Results, "add", keep)
    kept = (tmp_path / "out" / "task.jsonl").read_bytes()
    main.main(flags)
    first = capsys.readouterr().out
    lines = (tmp_path / "out" / "task.jsonl").read_bytes()
    assert lines.startswith(kept)
    places = [at for line in lines.splitlines()[1:] for at in json.loads(line)["results"]]
    assert len(places) == len({*places}) == sum(len(one["choices"]) for one in records("task"))
    for name in ("task", "multiple_choice", "acc_norm", "bits_per_byte", "95 % interval"):
        assert name in first
    wanted = [
        np.argmax([total for total, _ in choices]) == record["answer"]
        for choices, record in zip(SCORES["llama3"]["choices"], records("task"), strict=True)
    ]
    found = json.loads((tmp_path / "out" / "results.json").read_text())["tasks"]
    assert found["task"]["metrics"]["acc"]["value"] == pytest.approx(np.mean(wanted))
    nats = -sum(SCORES["llama3"]["texts"])
    size = sum(len(record["text"]) for record in records("text"))
    bits = found["text"]["metrics"]["bits_per_byte"]["value"]
    assert bits == pytest.approx(nats / size / np.log(2), rel=1e-6)
    monkeypatch.setattr(command, "Scorer", None)  # nothing is left to score
    main.main([*flags[:4], *flags[6:]])
    assert json.loads((tmp_path / "out" / "results.json").read_text())["tasks"] == found
    capsys.readouterr()
    main.main(flags)
    assert capsys.readouterr().out == first
    with pytest.raises(
        ResultsError, match=r"task\.jsonl has results with max_length=64, and .* has 32"
    ):
        main.main([*flags, "--max-length=32"])


def test_command_generates_and_classifies(folder, tmp_path, capsys):
    ask = write(tmp_path / "ask.jsonl", *[{"prompt": x, "target": "x"} for x in "abc"])
    sort = write(tmp_path / "sort.jsonl", {"text": "a", "label": "p"}, {"text": "b", "label": "q"})
    flags = ["eval", str(folder), "--task", ask, "--task", sort, "--max-new-tokens=4"]
    flags = [*flags, "--temperature=1", f"--out={tmp_path / 'out'}"]
    main.main(flags)
    found = json.loads((tmp_path / "out" / "results.json").read_text())["tasks"]
    assert [*found["ask"]["metrics"], *found["sort"]["metrics"]] == [
        "exact_match",
        "acc",
        "macro_f1",
    ]
    lines = (tmp_path / "out" / "ask.jsonl").read_text()
    (tmp_path / "out" / "ask.jsonl").unlink()
    main.main(flags)
    assert (tmp_path / "out" / "ask.jsonl").read_text() == lines
    with pytest.raises(ValueError, match="two of them are named 'ask'"):
        main.main(["eval", str(folder), "--task", ask, "--task", ask])
    with pytest.raises(ValueError, match="task: name one at least"):
        main.main(["eval", str(folder)])


# --- Processes of their own -------------------------------------------------------------------


def start(*flags: str, devices: int = 1, **variables: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "zoo", "eval", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": xla.flags(devices=devices),
            **variables,
        },
    )


@pytest.fixture
def many(tmp_path) -> list[str]:
    """Flags of a model's tasks with many batches."""
    lines = [
        {"query": "x" * (i % 30), "choices": ["ab", "c", f"{i}"], "gold": i % 3} for i in range(400)
    ]
    task = write(tmp_path / "many.jsonl", *lines)
    ask = write(tmp_path / "ask.jsonl", *[{"prompt": x, "target": "x"} for x in "abcdefg"])
    return ["--task", task, "--task", ask, "--batch-tokens=64", "--max-new-tokens=4"]


@pytest.mark.slow
def test_a_killed_evaluation_resumes_to_the_same_table(folder, many, tmp_path):
    flags = [str(folder), *many, "--out"]
    alone = finish(start(*flags, str(tmp_path / "alone")))
    process, results = start(*flags, str(tmp_path / "out")), tmp_path / "out" / "many.jsonl"
    wait_for(lambda: results.exists() and results.read_bytes().count(b"\n") > 20, process)
    process.kill()
    process.wait()
    kept = results.read_bytes()
    assert 20 < kept.count(b"\n") < 400
    resumed = finish(start(*flags, str(tmp_path / "out")))
    assert resumed.replace(str(tmp_path / "out"), "") == alone.replace(str(tmp_path / "alone"), "")
    assert results.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    assert sorted(results.read_text().splitlines()) == sorted(
        (tmp_path / "alone" / "many.jsonl").read_text().splitlines()
    )


@pytest.mark.slow
def test_two_processes_get_the_results_of_one(folder, many, tmp_path):
    alone = finish(start(str(folder), *many))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = [str(folder), *many, "--mesh=data=2,fsdp=2", "--distributed", f"--out={tmp_path / 'o'}"]

    def both() -> list[str]:
        joined = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
        pair = [start(*flags, devices=2, **joined, JAX_PROCESS_ID=str(i)) for i in range(2)]
        return [finish(process) for process in pair]

    first, second = both()
    table = alone[alone.index("task ") :].strip()
    assert table in first
    assert "acc_norm" in table
    assert "acc" not in second  # one of them speaks
    lines = (tmp_path / "o" / "many.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "o" / "many.jsonl").write_bytes(b"".join(lines[:30]))
    assert table in both()[0]
