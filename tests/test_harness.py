"""The zoo's models in lm-eval: its interface by a stand-in, and lm-eval itself where it is."""

import importlib
import inspect
import json
import math
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import helpers
import pytest
from test_generation import make_tokenizer

from zoo import __main__ as main
from zoo.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, reading

NAME = "zoo.tasks.evaluation.harness"
GOLDEN = Path(__file__).parent / "golden"
SCORES = json.loads((GOLDEN / "scores" / "scores.json").read_text())["llama3"]
TEMPLATE = (
    "<bos>{% for m in messages %}{{ m.role }}: {{ m.content }}<eot>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Cache(list):
    """The calls of lm-eval's cache."""

    def add_partial(self, method: str, request: tuple, result: object) -> None:
        self.append((method, request, result))


@pytest.fixture
def stand_in(monkeypatch):
    """The module with a base class in place of lm-eval's, whose registry is `names`."""
    names = {}

    class LM:
        def __init__(self):
            self.cache_hook = Cache()

    def register_model(name):
        return lambda cls: names.setdefault(name, cls)

    modules = {"lm_eval": {}, "lm_eval.api": {}, "lm_eval.api.model": {"LM": LM}}
    modules |= {"lm_eval.api.registry": {"register_model": register_model}, "lm_eval.models": {}}
    for name, contents in modules.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    module = importlib.import_module(NAME)
    assert names == {"zoo": module.ZooLM}
    yield module
    sys.modules.pop(NAME, None)


def asked(*arguments: tuple) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=one) for one in arguments]


def texts(name: str) -> list[dict]:
    lines = (GOLDEN / "scores" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_scores_are_those_of_transformers(stand_in, golden_model):
    lm = stand_in.ZooLM(str(golden_model), mesh="data=2")
    task = texts("task")[:4]
    pairs = [(one["context"], f" {choice}") for one in task for choice in one["choices"]]
    found = lm.loglikelihood(asked(*pairs))
    wanted = [tuple(score) for choices in SCORES["choices"][:4] for score in choices]
    assert [x for x, _ in found] == pytest.approx([x for x, _ in wanted], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    whole = [(one["text"],) for one in texts("text")[:2]]
    rolled = lm.loglikelihood_rolling(asked(*whole))
    assert rolled == pytest.approx(SCORES["texts"][:2], rel=1e-5)
    kept = {(method, request): result for method, request, result in lm.cache_hook}
    assert len(kept) == len({*pairs}) + len(whole)
    assert kept["loglikelihood", pairs[-1]] == found[-1]
    assert kept["loglikelihood_rolling", whole[0]] == rolled[0]
    info = lm.get_model_info()
    assert (info["pretrained"], info["dtype"], info["max_length"]) == (
        str(golden_model),
        "fp32",
        64,
    )


@pytest.fixture(scope="module")
def model():
    return helpers.drawn_transformer(vocab_size=264, max_seq_len=48, num_layers=1)


def test_answers_come_in_the_order_of_their_requests(stand_in, model):
    lm = stand_in.ZooLM(model, ByteTokenizer(), seed=3)
    greedy, long = {"until": ["\n\n"], "max_gen_toks": 4}, {"max_gen_toks": 6, "until": []}
    drawn = {"do_sample": True, "temperature": 1.0, "top_k": 40, "max_gen_toks": 6}
    requests = asked(("b", drawn), ("a", greedy), ("a", long), ("c", greedy), ("b", drawn))
    found = lm.generate_until(requests)
    texts = lm.scorer.generate([[256, *b"a"], [256, *b"c"]], max_new_tokens=4, stops=["\n\n"])
    [text] = lm.scorer.generate([[256, *b"a"]], max_new_tokens=6)
    assert [found[1], found[3], found[2]] == [*texts, text]
    assert len({texts[0], texts[1], found[0], found[4]}) == 4  # each draws for itself
    both = [requests[0], requests[4]]
    again = stand_in.ZooLM(model, ByteTokenizer(), seed=3).generate_until(both)
    other = stand_in.ZooLM(model, ByteTokenizer(), seed=4).generate_until(both)
    assert again == [found[0], found[4]] != other
    assert [entry[:2] for entry in lm.cache_hook].count(("generate_until", ("a", long))) == 1


def test_generation_is_read_as_lm_eval_does(stand_in, caplog):
    read = stand_in.generation
    none = {"stops": [], "max_new_tokens": 256, "temperature": 0.0}
    assert read({}) == none
    assert read({"until": "x", "max_new_tokens": 9}) == {
        **none,
        "stops": ["x"],
        "max_new_tokens": 9,
    }
    assert read({"temperature": 0.5, "top_p": 0.9}) == {**none, "temperature": 0.5, "top_p": 0.9}
    ignored = {"do_sample": False, "temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.1}
    assert read(ignored) == {**none, "repetition_penalty": 1.1}
    assert not caplog.records
    assert read({"do_sample": True}) == none
    assert "do_sample without a temperature" in caplog.text
    with pytest.raises(ValueError, match="the zoo has no 'num_beams'; it has until, do_sample"):
        read({"num_beams": 4})


def test_chats_are_written_by_the_template(stand_in, model, tmp_path):
    ids = helpers.write_tokenizer(tmp_path, template=TEMPLATE)
    tokenizer = load_tokenizer(tmp_path)
    lm = stand_in.ZooLM(model, tokenizer)
    chat = [{"role": "user", "content": "text"}]
    text = lm.apply_chat_template(chat)
    assert text == "<bos>user: text<eot>assistant: "
    before, after = lm._pair(text, "12<eot>")
    assert before == [ids["<bos>"], *tokenizer.encode("user: text"), ids["<eot>"],
                      *tokenizer.encode("assistant:")]  # fmt: skip
    assert after[-1] == ids["<eot>"]
    assert lm._prompt("text") == [ids["<bos>"], *tokenizer.encode("text")]
    plain = stand_in.ZooLM(model, tokenizer, begin=False)
    assert plain._prompt("text") == tokenizer.encode("text").tolist()
    begun = [*chat, {"role": "assistant", "content": "some "}]
    continued = lm.apply_chat_template(begun, add_generation_prompt=False)
    assert continued == "<bos>user: text<eot>assistant: some"
    assert lm.chat_template(True) == TEMPLATE
    assert lm.chat_template(False) is None
    other = tmp_path / "other"
    helpers.write_tokenizer(other, template=TEMPLATE + " ")
    names = {stand_in.ZooLM(model, load_tokenizer(at)).tokenizer_name for at in (tmp_path, other)}
    assert len(names | {lm.tokenizer_name}) == 2
    with pytest.raises(ValueError, match=r"apply_chat_template='tools': .* give True"):
        lm.chat_template("tools")


def test_what_cannot_be_asked_is_refused(stand_in, model):
    with pytest.raises(ValueError, match="tokenizer: give that of the model"):
        stand_in.ZooLM(model)
    with pytest.raises(ValueError, match="dtype='bf16': a model that is given stays as it is"):
        stand_in.ZooLM(model, ByteTokenizer(), dtype="bf16")
    with pytest.raises(ValueError, match="dtype='bfloat': "):
        stand_in.ZooLM("lm-python", dtype="bfloat")
    lm = stand_in.ZooLM(model, ByteTokenizer())
    with pytest.raises(ValueError, match="pair 1 has an empty continuation"):
        lm.loglikelihood(asked(("a", "b"), ("a", "")))
    with pytest.raises(ValueError, match="max_new_tokens=256 leaves no room"):
        lm.generate_until(asked(("a", {})))
    with pytest.raises(ValueError, match="no chat template"):
        lm.apply_chat_template([{"role": "user", "content": "a"}])


def test_without_lm_eval_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    with pytest.raises(ImportError, match=r"pip install 'zoo\[lm-eval\]'"):
        importlib.import_module(NAME)


def test_a_tokenizer_that_parses_is_one_for_every_python():
    """Since 3.12 a protocol is checked by the attributes that an object itself has."""
    given = make_tokenizer()
    named = reading(given, "parse")
    members = set(Tokenizer.__annotations__) | {
        name for name in vars(Tokenizer) if not name.startswith("_")
    }
    assert {"encode", "encode_batch", "decode", "save", "vocab_size", "separator_id"} <= members
    for name in members:
        inspect.getattr_static(named, name)
    assert isinstance(named, Tokenizer)
    special = given.tokenizer.token_to_id("<|end|>")
    assert named.encode("<|end|>").tolist() == [special]
    assert named.encode_batch(["<|end|>"])[0].tolist() == [special]
    assert named.decode(given.encode("ab")) == "ab"
    assert (named.vocab_size, named.separator_id) == (given.vocab_size, given.separator_id)


def test_models_of_lm_eval_stay_registered():
    pytest.importorskip("lm_eval")
    code = (
        f"import {NAME}; from lm_eval.api.registry import get_model, model_registry; "
        "found = set(model_registry.keys()); get_model('dummy'); "
        "import lm_eval.models as own; "  # which registers what is not there yet
        "print(len(own.MODEL_MAPPING), len(own.MODEL_MAPPING.keys() - found), 'zoo' in found)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, lost, has_ours = done.stdout.split()[-3:]
    assert int(count) > 20
    assert (lost, has_ours) == ("0", "True")


TASKS = {
    "task": "output_type: multiple_choice\ndoc_to_text: context\ndoc_to_choice: choices\n"
    "doc_to_target: answer\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n",
    "text": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: text\n"
    "metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]\n",
}


@pytest.mark.slow
def test_lm_eval_agrees_with_the_command(golden_model, tmp_path, monkeypatch):
    """On a golden model and a task file that is here."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    lm_eval = pytest.importorskip("lm_eval")
    tasks = importlib.import_module("lm_eval.tasks")
    for name, form in TASKS.items():
        file = GOLDEN / "scores" / f"{name}.jsonl"
        (tmp_path / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {file}}}\n"
            f"test_split: train\n{form}"
        )
    importlib.import_module(NAME)
    found = lm_eval.simple_evaluate(
        model="zoo",
        model_args={"pretrained": str(golden_model)},
        tasks=[*TASKS],
        task_manager=tasks.TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )["results"]
    files = [f"--task={GOLDEN / 'scores' / name}.jsonl" for name in TASKS]
    main.main(["eval", str(golden_model), *files, "--out", str(tmp_path / "out")])
    ours = json.loads((tmp_path / "out" / "results.json").read_text())["tasks"]
    compared = 0
    for name in TASKS:
        for metric, estimate in ours[name]["metrics"].items():
            if f"{metric},none" in found[name]:
                theirs = found[name][f"{metric},none"]
                assert math.isclose(theirs, estimate["value"], rel_tol=1e-6), (name, metric)
                compared += 1
    assert compared == 4
