"""Rows to fine-tune on: the forms that their columns show, in every kind of file."""

import gzip
import json

import numpy as np
import pytest
from model_folders import flip_bit, write_tokenizer
from prepared_parts import corpus_of, rows_in
from test_tokenizer import KINDS

import zoo
from zoo.alignment.preferences import Config
from zoo.data import rows
from zoo.data.chats import ChatTemplate
from zoo.data.formats import read_split
from zoo.data.prepared import command, hashes, tokenizing
from zoo.data.prepared.opening import open_prepared
from zoo.data.prepared.prepare import prepare
from zoo.data.splits import plan_splits
from zoo.data.token_datasets import BucketedDataset
from zoo.data.tokenizer import BPETokenizer, ByteTokenizer, load_tokenizer
from zoo.tasks.finetuning import Data, read_text

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER, SYSTEM = {"role": "user", "content": "hi"}, {"role": "system", "content": "be"}
YES, NO = ({"role": "assistant", "content": text} for text in ("yes", "no"))
ASKED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
UNDER_SYSTEM = f"<|im_start|>system\nbe<|im_end|>\n{ASKED}"
BELOW = "Below is an instruction that describes a task"
CHAT_YES = [[ASKED, False], ["yes<|im_end|>", True]]
CHAT_NO = [[ASKED, False], ["no<|im_end|>", True]]
PAIR_OF_CHATS = [CHAT_YES, CHAT_NO]
PAIR_OF_TEXTS = [[["to be", False], [" or not", True]], [["to be", False], [" on", True]]]
# (format, row, what its form is called, its examples)
FORMS = [
    (
        "completions",
        {"prompt": "2+2=", "completion": "4"},
        "texts",
        [[["2+2=", False], ["4", True]]],
    ),
    ("completions", {"prompt": [USER], "completion": [YES]}, "messages", [CHAT_YES]),
    (
        "completions",
        {"instruction": "Add.", "input": "2, 2", "output": "4"},
        "Alpaca's",
        [
            [
                [
                    f"{BELOW}, paired with an input that provides further context. "
                    "Write a response that appropriately completes the request.\n\n"
                    "### Instruction:\nAdd.\n\n"
                    "### Input:\n2, 2\n\n### Response:\n",
                    False,
                ],
                ["4", True],
            ]
        ],
    ),
    (
        "completions",
        {"instruction": "Greet.", "input": "", "output": "hi"},
        "Alpaca's",
        [
            [
                [
                    f"{BELOW}. Write a response that appropriately completes the request.\n\n"
                    "### Instruction:\nGreet.\n\n### Response:\n",
                    False,
                ],
                ["hi", True],
            ]
        ],
    ),
    ("chats", {"messages": [USER, YES]}, "messages", [CHAT_YES]),
    (
        "chats",
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
        "ShareGPT's",
        [CHAT_YES],
    ),
    (
        "chats",
        {
            "system": "be",
            "conversations": [
                {"from": "user", "value": "hi"},
                {"from": "assistant", "value": "yes"},
            ],
        },
        "ShareGPT's",
        [[[UNDER_SYSTEM, False], ["yes<|im_end|>", True]]],
    ),
    ("chats", {"conversations": [USER, YES], "id": 3}, "ShareGPT's", [CHAT_YES]),
    (
        "chats",
        {"system": "other", "conversations": [SYSTEM, USER, YES]},
        "ShareGPT's",
        [[[UNDER_SYSTEM, False], ["yes<|im_end|>", True]]],
    ),
    ("chats", {"instruction": "hi", "output": "yes"}, "Alpaca's", [CHAT_YES]),
    (
        "preferences",
        {"prompt": "to be", "chosen": " or not", "rejected": " on"},
        "texts",
        PAIR_OF_TEXTS,
    ),
    (
        "preferences",
        {"chosen": "to be or not", "rejected": "to be on"},
        "texts without",
        PAIR_OF_TEXTS,
    ),
    (
        "preferences",
        {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
        "messages",
        PAIR_OF_CHATS,
    ),
    (
        "preferences",
        {"prompt": "hi", "chosen": [USER, YES], "rejected": [USER, NO], "messages": [USER, YES]},
        "messages",
        PAIR_OF_CHATS,
    ),
    (
        "preferences",
        {"chosen": [USER, YES], "rejected": [USER, NO]},
        "messages without",
        PAIR_OF_CHATS,
    ),
    (
        "unpaired",
        {"prompt": "2+2=", "completion": "4", "label": True},
        "texts",
        [[["2+2=", False], ["4", True]]],
    ),
    (
        "unpaired",
        {"prompt": [USER], "completion": [YES], "label": False},
        "messages",
        [CHAT_YES],
    ),
]


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, template=TEMPLATE, begins=False)
    return ChatTemplate(load_tokenizer(folder))


def write(path, records):
    """The records in a file of the format that its name says."""
    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    if path.suffix == ".parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        columns = dict.fromkeys(column for record in records for column in record)
        table = {column: [record.get(column) for record in records] for column in columns}
        parquet.write_table(arrow.table(table), path)
    elif ".array" in path.name:
        data = json.dumps(records, indent=2).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    else:
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return str(path)


FILES = ("a.jsonl", "a.array.json", "lines.json", "a.jsonl.gz", "a.array.json.gz", "a.parquet")


@pytest.mark.parametrize("file", FILES)
def test_forms_are_known_by_their_columns_in_every_file(file, template, tmp_path):
    for format, row, name, examples in FORMS:
        found = rows_in(write(tmp_path / file, [row, row]), format, lambda: template)
        shown = [json.loads(json.dumps(row.examples)) for row in found]
        assert shown == [examples] * 2
        form = found[0].form
        assert form.name.startswith(name), (row, form)
        assert set(form.columns) <= row.keys()
        assert form.is_chat == ("<|im_end|>" in str(examples))
    others = {x: forms for x, forms in rows.FORMS.items() if x != "tags"}  # see test_tags
    tried = {(format, form.name) for format, forms in others.items() for form in forms}
    found = {
        (f, next(x.name for x in rows.FORMS[f] if x.name.startswith(n))) for f, _, n, _ in FORMS
    }
    assert tried == found


def test_a_table_of_texts_has_rows_too(tmp_path):
    (tmp_path / "a.csv").write_text("question,answer\n2+2=,4\n")
    names = {"prompt": "question", "completion": "answer"}
    [row] = rows_in(str(tmp_path / "a.csv"), "completions", None, names)
    assert row.examples == [[("2+2=", False), ("4", True)]]


@pytest.mark.parametrize("file", ["a.jsonl", "a.array.json.gz", "a.parquet"])
@pytest.mark.parametrize("format", ["chats", "completions", "preferences"])  # of several columns
def test_a_row_of_another_form_is_refused_by_its_place(file, format, template, tmp_path):
    own = [row for name, row, _, _ in FORMS if name == format]
    first = own[0]
    others = [row for row in own if row.keys() != first.keys()]
    if file == "a.parquet":  # a column has one type
        is_of = lambda row, column: isinstance(row.get(column, ""), type(first[column]))
        others = [row for row in others if all(is_of(row, c) for c in first if c in row)]
    assert others
    place = {"a.parquet": "row 2", "a.array.json.gz": "element 2"}
    for other in others:
        path = write(tmp_path / file, [first, first, other])
        with pytest.raises(
            ValueError, match=rf"{file}, {place.get(file, 'line 3')}: .*first row"
        ) as e:
            rows_in(path, format, lambda: template)
        assert all(column in str(e.value) for column in first)


@pytest.mark.parametrize(
    ("format", "row", "message"),
    [
        ("completions", {"text": "x"}, r"has the fields prompt and completion or .*\['text'\]"),
        ("chats", {"chosen": "a", "rejected": "b"}, r"rows of --data.format preferences"),
        ("preferences", {"messages": [USER, YES]}, r"rows of --data.format chats"),
        ("chats", {"messages": None, "text": "a"}, r"has the fields messages or conversations"),
        ("chats", {"conversations": [{"from": "function_call", "value": "x"}]}, "'function_call'"),
        ("chats", {"conversations": "hello"}, r"list .* 'conversations'"),
        ("completions", {"prompt": [USER], "completion": "yes"}, r"list .* 'compl"),
        ("completions", {"prompt": [USER], "completion": [YES, USER]}, "give one answer"),
        ("completions", {"instruction": "a", "output": 3}, "field 'output'"),
        ("unpaired", {"prompt": "a", "completion": "b", "label": 1}, "'label' is 1: give true or"),
    ],
)
def test_rows_of_no_form_are_refused(format, row, message, template, tmp_path):
    path = write(tmp_path / "a.jsonl", [row])
    with pytest.raises(ValueError, match=f"a.jsonl, line 1: .*{message}"):
        rows_in(path, format, lambda: template)


@pytest.mark.parametrize("content", ["[1, 2]", '[{"a": 1}', "{\n}", '[{"prompt": "\\ud800"'])
def test_damaged_json_is_refused_by_its_file(content, tmp_path):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=r"a\.json"):
        rows_in(str(tmp_path / "a.json"), "completions")


def test_an_array_has_documents_of_text_too(tmp_path):
    write(tmp_path / "a.array.json", [{"text": "one"}, {"text": "two"}])
    [split] = plan_splits(str(tmp_path / "*.json"), shard_bytes=2**20)
    assert split.names == ["a.array.json"]
    assert [(found.record, found.text) for found in read_split(split)] == [(0, "one"), (1, "two")]


# --- Completions -----------------------------------------------------------------------------


def test_only_completions_have_weight(tmp_path):
    pairs = [("2+2=", "4"), ("capital of France: ", "Paris"), ("a", "bcd")]
    path = write(tmp_path / "a.jsonl", [{"prompt": p, "completion": c} for p, c in pairs])
    corpus = corpus_of(rows_in(path, "completions"), ByteTokenizer())
    assert corpus.num_bytes == len("4Parisbcd")
    batch = BucketedDataset(corpus, 256, buckets=(32,), batch_size=3, shuffle=False).batch(0)
    counted = [
        row[w > 0].tolist() for row, w in zip(batch["targets"], batch["weights"], strict=True)
    ]
    assert counted == [[*text.encode(), 256] for _, text in pairs]
    # What is read is all of it, from a separator on.
    assert batch["tokens"][0][:6].tolist() == [256, *b"2+2=4"]


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("words", "word pieces", "merges")])
@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("def f", "(x)"),  # f( is a token
        ("a ", "b"),
        ("", "x y"),
    ],
)
def test_a_completion_goes_on_where_its_prompt_ends(kind, prompt, completion, tmp_path):
    """No blank comes between them, and a model is given the prompt's own ids."""
    inner = KINDS[kind](["<s>", "</s>"])
    inner.add_special_tokens(["<s>", "</s>"])
    tokenizer = BPETokenizer(inner)
    path = write(tmp_path / "a.jsonl", [{"prompt": prompt, "completion": completion}])
    corpus = corpus_of(rows_in(path, "completions"), tokenizer)
    shown = inner.decode(corpus[0].tolist())
    if kind == "unigram, words apart":  # which has no text for a blank alone
        shown, prompt, completion = (x.replace(" ", "") for x in (shown, prompt, completion))
    assert shown.lstrip(" ") == (prompt + completion).lstrip(" ")
    given = tokenizer.encode(prompt)
    if prompt and kind != "unigram, words apart":
        np.testing.assert_array_equal(corpus[0][: len(given)], given)
        assert int(np.argmax(corpus.counted(0))) == len(given)
    assert corpus.counted(0)[-1]


@pytest.mark.parametrize(
    ("kind", "prompt", "completion", "apart"),
    [
        ("bytes", "a\n\n", "x", "aĊĊx"),  # of the whole, each line break is a token
        ("bytes", "a ", "b", "aĠb"),  # " b" is one
        ("unigram", "a \u00e9", "\u00fc x", "▁a▁<unk><unk>▁x"),  # of what is unknown, one
    ],
)
def test_a_model_is_given_the_prompt_s_own_ids(kind, prompt, completion, apart, tmp_path):
    tokenizer = BPETokenizer(KINDS[kind](["<s>", "</s>"]))
    record = {"prompt": prompt, "completion": completion}
    path = write(tmp_path / "a.jsonl", [record, record])
    corpus = corpus_of(rows_in(path, "completions"), tokenizer)
    assert "".join(map(tokenizer.tokenizer.id_to_token, corpus[1].tolist())) == apart
    given = tokenizer.encode(prompt)
    np.testing.assert_array_equal(corpus[0][: len(given)], given)
    assert corpus.counted(1).tolist() == [i >= len(given) for i in range(len(corpus[1]))]
    assert len(tokenizer.encode(prompt + completion)) != len(corpus[0])


# --- The start of a run -----------------------------------------------------------------------


def started(tmp_path, capsys, tokenizer, records, **data):
    """The text of a run, and what its start says."""
    path = write(tmp_path / "a.jsonl", records)
    config = Config(
        run_dir=tmp_path / str(len([*tmp_path.iterdir()])),
        steps=1,
        compilation_cache=None,
        objective="kto" if data.get("format") == "unpaired" else "dpo",
        data=Data(files=path, cache=None, **data),
    )
    capsys.readouterr()
    with zoo.Run(config) as run:
        return read_text(run, tokenizer), capsys.readouterr().out


@pytest.mark.parametrize("form", ["completions", "preferences"])
def test_rendered_chats_are_read_as_chats(form, template, tmp_path, capsys):
    """The same rows, rendered by their owner or by the template, train on the same tokens."""
    tokenizer = template.tokenizer
    users = [f"hi {i}" for i in range(9)]
    asked = [ASKED.replace("hi", user) for user in users]
    turns = [{"role": "user", "content": user} for user in users]
    by_hand = [{"prompt": prompt, "completion": "yes<|im_end|>"} for prompt in asked]
    chats = [{"messages": [user, YES]} for user in turns]
    if form == "preferences":
        ends = {"chosen": "yes<|im_end|>", "rejected": "no<|im_end|>"}
        by_hand = [{"prompt": prompt, **ends} for prompt in asked]
        chats = [{"prompt": [user], "chosen": [YES], "rejected": [NO]} for user in turns]
    one, said = started(tmp_path, capsys, tokenizer, by_hand, format=form)
    two, also = started(
        tmp_path, capsys, tokenizer, chats, format="chats" if form == "completions" else form
    )

    def rows_of(data):  # whichever of them are held out, by the hash of the text
        corpora = data.train.corpus, data.held_out.corpus
        return sorted(
            (x[i].tolist(), x.counted(i).tolist()) for x in corpora for i in range(len(x))
        )

    assert len(rows_of(one)) >= 9
    assert rows_of(one) == rows_of(two)
    rows = 18 if form == "preferences" else 9
    assert f"{4 * rows} special tokens parsed" in said
    assert "9 examples of " in said
    assert "texts (prompt, " in said
    assert "special tokens" not in also
    text, said = started(tmp_path, capsys, tokenizer, by_hand, format=form, special_tokens="text")
    special = list(tokenizer.special_ids)
    assert not np.isin(text.train.corpus[0], special).any()
    assert np.isin(one.train.corpus[0], special).any()
    assert f"the text has {4 * rows} names of special tokens" in said
    assert "--data.special-tokens parse" in said


def test_unpaired_answers_have_a_mismatched_one_beside_them(tmp_path, capsys):
    answers = {f"question {i}: ": f"answer {i}" for i in range(24)}
    told = [
        {"prompt": prompt, "completion": answer, "label": i % 3 > 0}
        for i, (prompt, answer) in enumerate(answers.items())
    ]
    given = {"format": "unpaired", "rows": "bucketed", "buckets": (64,), "held_out": 0.3}
    data, said = started(tmp_path, capsys, ByteTokenizer(), told, **given)
    assert "24 examples of unpaired: texts (prompt, completion, label)" in said
    seen, others = {}, []
    for part in (data.train, data.held_out):
        for k in range(part.batches_per_epoch):
            batch = part.batch(k)
            for row in np.flatnonzero(batch["segment_ids"].any(1)):
                texts = []
                for side in (1, 2):
                    here = batch["segment_ids"][row] == side
                    counted = here & (batch["weights"][row] > 0)
                    ids = batch["targets"][row]
                    whole, answer = (bytes(ids[x][:-1].tolist()) for x in (here, counted))
                    texts.append((whole.removesuffix(answer).decode(), answer.decode()))
                (prompt, answer), (again, other) = texts
                assert answers[prompt] == answer
                assert again == prompt
                assert other != answer
                seen[prompt] = int(batch["labels"][row])
                others.append(other)
    assert [seen[row["prompt"]] for row in told] == [int(row["label"]) for row in told]
    assert sorted(others) == sorted(answers.values())
    assert len(data.held_out.corpus) > 2
    with pytest.raises(ValueError, match="one unpaired answer alone: it needs another's"):
        started(tmp_path, capsys, ByteTokenizer(), told[:1], **given)


def test_the_ends_of_a_text_are_there_once(tmp_path, capsys):
    ids = write_tokenizer(tmp_path / "t")  # begins texts with <bos>, and ends them with <eot>
    tokenizer = load_tokenizer(tmp_path / "t")
    words = "abcdefghi"
    with_ends = [{"prompt": f"<bos>{x}", "completion": " text<eot>"} for x in words]
    without = [{"prompt": x, "completion": " text"} for x in words]

    def rows_of(records):
        data = started(tmp_path, capsys, tokenizer, records, format="completions")[0]
        corpora = data.train.corpus, data.held_out.corpus
        return sorted(
            (x[i].tolist(), x.counted(i).tolist()) for x in corpora for i in range(len(x))
        )

    assert len(rows_of(without)) == 9
    assert rows_of(with_ends) == rows_of(without)
    data, _ = started(tmp_path, capsys, tokenizer, with_ends, format="completions")
    assert (data.train.batch(0)["targets"] == ids["<eot>"]).any()


def test_no_command_is_needed_for_many_rows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("zoo.data.prepared.opening.BY_ITSELF", 10)
    records = [{"prompt": f"{i}", "completion": "yes"} for i in range(9)]
    _, said = started(tmp_path, capsys, ByteTokenizer(), records, format="completions")
    assert "9 examples of completions: texts (prompt, completion)" in said
    with pytest.raises(ValueError, match=r"above 0 GiB .*python -m zoo prepare"):
        started(tmp_path, capsys, ByteTokenizer(), [{"text": "some text"}] * 9)


# --- In the store -----------------------------------------------------------------------------


ROWS = {"format": "completions", "names": {}, "now": None}
STORED = {"special_tokens": None, "rows": ROWS, "held_out": 0.3, "shard_megabytes": 0.001}


def test_a_killed_start_takes_up_the_shards_of_rows(tmp_path, monkeypatch):
    for file in "ab":
        records = [{"prompt": f"{file}{i}", "completion": f"{i}" * 20} for i in range(40)]
        write(tmp_path / f"{file}.jsonl", records)
    data, whole = str(tmp_path / "*.jsonl"), tmp_path / "whole"
    expected = prepare(data, whole, workers=1, **STORED)

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hashes, "write_parts", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare(data, tmp_path / "out", workers=1, **STORED)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizing, "read_rows", killed)  # nothing is read again
        found = prepare(data, tmp_path / "out", workers=1, **STORED)
    assert len(found.shards) > 1
    assert found == expected
    assert command.verify(tmp_path / "out") == (1 + 6 * len(found.shards), [])
    flip_bit(tmp_path / "out" / "shards" / "00000000.weights", 3, 0)
    assert "00000000.weights: block 0" in command.verify(tmp_path / "out")[1][0]


def test_files_of_two_forms_are_refused(tmp_path):
    write(tmp_path / "a.jsonl", [{"prompt": f"{i}", "completion": "x" * 50} for i in range(40)])
    write(tmp_path / "b.jsonl", [{"instruction": f"{i}", "output": "x" * 50} for i in range(40)])
    with pytest.raises(ValueError, match=r"texts \(prompt, completion\) and of Alpaca's"):
        prepare(str(tmp_path / "*.jsonl"), tmp_path / "out", workers=1, **STORED)


def test_labelled_rows_are_there_once(tmp_path):
    """A copy is one with the same label; two labels of a text are in one part."""
    records = [{"text": f"text {i}", "kind": kind} for i in range(40) for kind in ("one", "two")]
    write(tmp_path / "a.jsonl", [*records, *records[:7], {"text": "", "kind": "three"}])
    manifest = prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", label="kind", held_out=0.3)
    assert (manifest.duplicates, manifest.empty, manifest.classes) == (7, 1, ("one", "two"))
    prepared, found = open_prepared(tmp_path / "out"), []
    for corpus in (prepared.train, prepared.held_out):
        texts = [prepared.tokenizer.decode(corpus[i]) for i in range(len(corpus))]
        assert texts[::2] == texts[1::2] != []
        found += zip(texts, (manifest.classes[label] for label in corpus.labels()), strict=True)
    assert sorted(found) == sorted((record["text"], record["kind"]) for record in records)
