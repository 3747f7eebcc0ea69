import json

import jax
import numpy as np
import pytest
from helpers import arrays, drawn_transformer
from prepared_parts import corpus_of, rows_in
from test_tokenizer import KINDS
from tokenizers import Tokenizer, models, pre_tokenizers

from zoo import losses
from zoo.data.chats import ChatTemplate
from zoo.data.token_datasets import BucketedDataset, PackedDataset
from zoo.data.tokenizer import BPETokenizer, ByteTokenizer, load_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_lines(path, *records):
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


@pytest.fixture
def rows(tmp_path):
    pairs = [("2+2=", "4"), ("capital of France: ", "Paris"), ("a", "bcd")]
    return write_lines(tmp_path / "rows.jsonl", *({"prompt": p, "completion": c} for p, c in pairs))


def counted(batch):
    """The targets that count, row by row."""
    return [row[w > 0].tolist() for row, w in zip(batch["targets"], batch["weights"], strict=True)]


def test_only_completion_tokens_have_weight(rows):
    tokenizer = ByteTokenizer()
    corpus = corpus_of(rows_in(rows, "completions"), tokenizer)
    assert corpus.num_bytes == len("4Parisbcd")
    dataset = BucketedDataset(corpus, 256, buckets=(32,), batch_size=3, shuffle=False)
    batch = dataset.batch(0)
    assert counted(batch) == [[*text.encode(), 256] for text in ("4", "Paris", "bcd")]
    # What is read is all of it, from a separator on.
    assert batch["tokens"][0][:6].tolist() == [256, *b"2+2=4"]


def test_packed_rows_keep_completion_weights(rows):
    corpus = corpus_of(rows_in(rows, "completions"), ByteTokenizer())
    options = {"seq_len": 7, "batch_size": 2, "seed": 0, "shuffle": False, "too_long": "split"}
    dataset = PackedDataset(corpus, 256, **options)
    found = [
        t
        for k in range(dataset.batches_per_epoch)
        for row in counted(dataset.batch(k))
        for t in row
    ]
    assert sorted(t for t in found if t < 256) == sorted(b"4Parisbcd")
    assert found.count(256) == 3


def test_packing_never_cuts_a_completion_from_its_prompt(rows):
    corpus = corpus_of(rows_in(rows, "completions"), ByteTokenizer())
    dataset = PackedDataset(corpus, 256, seq_len=26, batch_size=2, seed=0)
    batch = dataset.batch(0)
    assert dataset.batches_per_epoch == 1
    lines = [bytes(t for t in row if t < 256) for row in batch["tokens"].tolist()]
    assert sorted(line.rstrip(b"\0") for line in lines) == [
        b"2+2=4abcd",
        b"capital of France: Paris",
    ]
    with pytest.raises(ValueError, match=r"rows.jsonl:2' has 25 tokens .* seq_len=24: raise it"):
        PackedDataset(corpus, 256, seq_len=24, batch_size=2, seed=0)


def test_no_gradient_comes_from_a_prompt(rows):
    model = drawn_transformer(vocab_size=320)
    corpus = corpus_of(rows_in(rows, "completions"), ByteTokenizer())
    batch = BucketedDataset(corpus, 256, buckets=(32,), batch_size=3, shuffle=False).batch(0)
    other = {**batch, "targets": np.where(batch["weights"] > 0, batch["targets"], 7)}
    assert not np.array_equal(other["targets"], batch["targets"])

    @jax.jit
    def gradient(batch):
        return jax.grad(lambda model: losses.next_token(model, batch, None)[0])(model)

    for name, array in arrays(gradient(batch)).items():
        np.testing.assert_array_equal(array, arrays(gradient(other))[name])


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("words", "word pieces", "merges")])
@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("def f(", "x)"),
        ("def f", "(x)"),  # f( is a token
        ("def f(x):", " return x"),
        ("a ", "b"),
        ("more", "text"),
        ("", "x y"),
    ],
)
def test_a_completion_goes_on_where_its_prompt_ends(kind, prompt, completion, tmp_path):
    """No blank comes between them, and a model is given the prompt's own ids."""
    inner = KINDS[kind](["<s>", "</s>"])
    inner.add_special_tokens(["<s>", "</s>"])
    tokenizer = BPETokenizer(inner)
    path = write_lines(tmp_path / "rows.jsonl", {"prompt": prompt, "completion": completion})
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
    path = write_lines(tmp_path / "rows.jsonl", record, record)
    corpus = corpus_of(rows_in(path, "completions"), tokenizer)
    assert "".join(map(tokenizer.tokenizer.id_to_token, corpus[1].tolist())) == apart
    given = tokenizer.encode(prompt)
    np.testing.assert_array_equal(corpus[0][: len(given)], given)
    assert corpus.counted(1).tolist() == [i >= len(given) for i in range(len(corpus[1]))]
    assert len(tokenizer.encode(prompt + completion)) != len(corpus[0])


# --- Chats ------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer(tmp_path):
    vocabulary = {chr(i): i for i in range(128)}
    special = ("<s>", "<|user|>", "<|assistant|>", "<|end|>", "<|system|>")
    vocabulary |= {name: 128 + i for i, name in enumerate(special)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    inner.add_special_tokens(list(special))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    BPETokenizer(inner, "<s>", {"chat_template": TEMPLATE, "bos_token": "<s>"}).save(tmp_path / "t")
    return load_tokenizer(tmp_path / "t")


CHAT = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "bye"},
]


def test_only_assistant_messages_have_weight(tokenizer, tmp_path):
    path = write_lines(tmp_path / "chats.jsonl", {"messages": CHAT})
    template = ChatTemplate(tokenizer)
    corpus = corpus_of(rows_in(path, "chats", lambda: template), tokenizer)
    batch = BucketedDataset(corpus, 128, buckets=(64,), batch_size=1, shuffle=False).batch(0)
    end = 131
    # A model stops at the end of turn: neither the line break after it nor another end counts.
    assert counted(batch) == [[*b"yo", end, *b"ok", end]]
    # The template's own separator is not there twice, and special tokens are one token each.
    assert batch["tokens"][0][:6].tolist() == [128, 132, ord("S"), end, 10, 129]


def test_bytes_have_no_chat_template():
    with pytest.raises(ValueError, match="has no chat template"):
        ChatTemplate(ByteTokenizer())
