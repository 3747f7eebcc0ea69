import functools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from model_folders import write_tokenizer
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from zoo import tokenizer as tok
from zoo.data.prepared import tokenizing
from zoo.data.special_tokens import AS_TEXT
from zoo.data.tokenizer import reading
from zoo.tasks.generation import TextStream

TEXTS = [
    "def greet(name):\n    if name:\n        return f'hello {name}'\n\n\n",
    "\ttabs\r\nand\x00control\x7f, ünïcödé ✓ 🐍 \u2028 \ud7ff",
    "    \n  \n trailing   ",
    "",
    "<|endoftext|> is text here",
]


@pytest.fixture(scope="module")
def bpe():
    source = "class A:\n    def f(self, x):\n        return self.y + x\n\n" * 50
    return tok.BPETokenizer.train([source, *TEXTS], 300)


# --- Tokenizers of every kind. Each is made with special tokens, and without: of the second one
# `tokenizers` itself makes what a text is in which their names mean nothing.

WORDS = ["def f(x): return x and more text", "a b c def f(y) s < / > < / s >", "a b\n\n"] * 9


@functools.cache
def pieces():
    """Unigram pieces with scores, trained on words."""
    trained = HFTokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(WORDS, trainers.UnigramTrainer(vocab_size=60, show_progress=False))
    return [tuple(piece) for piece in json.loads(trained.to_str())["model"]["vocab"]]


def unigram(special, scheme="always", normalizer=None, before=()):
    first = [("<unk>", 0.0), *((name, 0.0) for name in special)]
    inner = HFTokenizer(models.Unigram([*first, *pieces()], unk_id=0))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [*before, pre_tokenizers.Metaspace(prepend_scheme=scheme)]
    )
    if normalizer is not None:
        inner.normalizer = normalizer
    inner.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return inner


def word_model(special, model, before, **options):
    words = ["[UNK]", *special, "a", "b", "x", "more", *options.pop("more", ())]
    vocabulary = {word: id for id, word in enumerate(words)}
    inner = HFTokenizer(model(vocabulary, unk_token="[UNK]", **options))
    inner.pre_tokenizer = before
    return inner


def word_piece(special):
    inner = word_model(
        special, models.WordPiece, pre_tokenizers.WhitespaceSplit(), more=["<", "##/", "##s", "##>"]
    )
    inner.normalizer = normalizers.Lowercase()
    return inner


def byte_pairs(special):
    inner = HFTokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        WORDS, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    )
    inner.add_special_tokens(list(special))
    return inner


def merged_name(special):
    """Byte pairs among which "</s>" is, by its merges."""
    letters = ["[UNK]", "<", "/", "s", ">", "a", "b", "x", " ", "</", "s>", *special]
    merges = [("<", "/"), ("s", ">"), *([("</", "s>")] if special else [])]
    vocabulary = {word: id for id, word in enumerate(letters)}
    return HFTokenizer(models.BPE(vocabulary, merges, unk_token="[UNK]"))


def llama(special):
    """As Llama 2's: a blank is put in front, and no word is apart from the next."""
    inner = unigram(special, "never", normalizers.Sequence([normalizers.Prepend("\u2581")]))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    return inner


KINDS = {
    "bytes": byte_pairs,
    "unigram": unigram,
    "unigram, first": lambda special: unigram(special, "first"),
    "unigram, words apart": lambda special: unigram(
        special, before=[pre_tokenizers.WhitespaceSplit()]
    ),
    "unigram, NFKC": lambda special: unigram(special, normalizer=normalizers.NFKC()),
    "llama": llama,
    "words": lambda special: word_model(
        special, models.WordLevel, pre_tokenizers.WhitespaceSplit()
    ),
    "word pieces": word_piece,
    "merges": merged_name,
}
NAMED = [
    "a </s> b",
    "a</s>b",
    "</s>",
    "</s></s> x<s>more",
    "x </S> a \uff1c/s\uff1e b",
    "</s>\ufdd4</s>",
    "no name at all x",
]


def names_of(tokenizer, ids):
    return [tokenizer.id_to_token(id) for id in ids]


@pytest.fixture(params=KINDS)
def kind(request):
    """(the tokenizer, the one that has no special tokens, that of the library alone)."""
    plain = KINDS[request.param]([])
    found = KINDS[request.param](["<s>", "</s>"])
    if request.param != "words":  # whose names are in the configuration alone
        found.add_special_tokens(["<s>", "</s>"])
    library = HFTokenizer.from_str(found.to_str())
    library.add_special_tokens(["<s>", "</s>"])
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    return tok.BPETokenizer(found, config=config), plain, library


def test_names_in_a_text_are_plain_characters_for_every_kind(kind):
    tokenizer, plain, library = kind
    differ = 0
    for text, ids in zip(NAMED, tokenizer.encode_batch(NAMED), strict=True):
        tokens = names_of(tokenizer.tokenizer, ids)
        assert tokens == names_of(plain, plain.encode(text).ids)
        assert not set(tokens) & {"<s>", "</s>"}
        np.testing.assert_array_equal(tokenizer.encode(text), ids)
        differ += ids.tolist() != library.encode(text, add_special_tokens=False).ids
    assert differ >= 4  # there was something to read otherwise


def test_parsed_names_are_those_of_the_library_for_every_kind(kind):
    tokenizer, _, library = kind
    parsed = reading(tokenizer, "parse")
    found = 0
    for text in NAMED:
        ids = parsed.encode(text)
        assert ids.tolist() == library.encode(text, add_special_tokens=False).ids
        found += np.isin(ids, tokenizer.eos_ids).sum()
    assert found >= 5
    assert "</s>" not in tokenizer.decode(parsed.encode("a </s> b"))
    # The other reading is as it was.
    assert not np.isin(tokenizer.encode(NAMED[0]), list(tokenizer.special_ids)).any()


def test_a_quoted_name_is_text_among_parsed_ones(kind):
    tokenizer, plain, _ = kind
    ids, spans = reading(tokenizer, "parse").encode_spans(f"a</s>{AS_TEXT}</s>b")
    tokens = names_of(tokenizer.tokenizer, ids)
    assert tokens.count("</s>") == 1
    at = tokens.index("</s>")
    assert spans[at].tolist() == [6, 10]
    inside = [token.replace("\u2581", "") for token in names_of(plain, plain.encode("</s>").ids)]
    quoted = [token.replace("\u2581", "") for token in tokens[1:at]]
    assert list(filter(None, quoted)) == list(filter(None, inside))


def test_an_unmarked_token_that_the_configuration_names_is_special():
    inner = byte_pairs([])
    inner.add_tokens(["</s>"])  # no special one, as some converted files have it
    tokenizer = tok.BPETokenizer(inner, config={"eos_token": "</s>"})
    end = tokenizer.separator_id
    assert end not in tokenizer.encode("a</s>b")
    assert tokenizer.encode("a</s>b").tolist() == byte_pairs([]).encode("a</s>b").ids
    assert end in reading(tokenizer, "parse").encode("a</s>b")
    assert tokenizer.decode([*tokenizer.encode("ab").tolist(), end]) == "ab"


def test_a_stream_comes_to_the_text_of_the_library_for_every_kind(kind):
    tokenizer, _, library = kind
    ids = tokenizer.encode("def f(x): return x and more text a b").tolist()
    stream = TextStream(tokenizer)
    parts = [stream.add(id) for id in ids]
    assert len(list(filter(None, parts))) > 3
    assert "".join(parts) + stream.end() == library.decode(ids)


def test_long_texts_have_the_tokens_of_the_whole_for_every_kind(kind):
    tokenizer, plain, _ = kind
    text = "def f(x): </s>\n  return x\n\n" * 90 + "a b" * 500
    [ids] = tokenizing.encode(tokenizer, [text], longest=200)
    assert names_of(tokenizer.tokenizer, ids) == names_of(plain, plain.encode(text).ids)
    assert len(ids) > 200


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request, bpe):
    return tok.ByteTokenizer() if request.param == "bytes" else bpe


def word_level(words):
    return HFTokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))


def test_any_text_round_trips(tokenizer):
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert tokenizer.decode(ids) == text
        assert ids.dtype == np.int32
        assert all(0 <= i < tokenizer.vocab_size and i != tokenizer.separator_id for i in ids)
        np.testing.assert_array_equal(tokenizer.encode(text), ids)


def test_byte_ids_are_utf8_bytes():
    ids, spans = tok.ByteTokenizer().encode_spans("A\u00e9b")
    np.testing.assert_array_equal(ids, [0x41, 0xC3, 0xA9, 0x62])
    assert spans.tolist() == [[0, 1], [1, 2], [1, 2], [2, 3]]


def test_decode_never_fails(tokenizer):
    cut = tokenizer.encode("é")[:1] if tokenizer.vocab_size == 257 else tokenizer.encode("\x80")[:1]
    assert tokenizer.decode(cut) == "\ufffd"
    letter = tokenizer.encode("z").tolist()
    noise = [tokenizer.separator_id, *letter, tokenizer.vocab_size + 100, tokenizer.separator_id]
    assert tokenizer.decode(noise) == "z"
    assert tokenizer.decode([]) == ""


def test_vocab_size_covers_every_id(bpe):
    assert bpe.vocab_size == 300
    assert max(bpe.tokenizer.get_vocab().values()) == 299
    holes = word_level(["a", "<s>"])
    holes.model = models.WordLevel({"a": 0, "<s>": 1, "b": 9}, unk_token="a")
    assert tok.BPETokenizer(holes).vocab_size == 10


def test_training_is_deterministic_and_learns_indentation(bpe):
    source = "class A:\n    def f(self, x):\n        return self.y + x\n\n" * 50
    again = tok.BPETokenizer.train([source, *TEXTS], 300)
    assert again.tokenizer.to_str() == bpe.tokenizer.to_str()
    assert len(bpe.encode("):\n        ")) == 1


def test_too_small_vocabularies_are_refused():
    with pytest.raises(ValueError, match=r"vocab_size=256 .* at least 257"):
        tok.BPETokenizer.train(["text"], 256)


@pytest.mark.parametrize("as_folder", [True, False])
def test_save_and_load(tokenizer, tmp_path, as_folder):
    tokenizer.save(tmp_path / "model")
    path = tmp_path / "model" if as_folder else tmp_path / "model" / "tokenizer.json"
    loaded = tok.load_tokenizer(str(path))
    assert type(loaded) is type(tokenizer)
    assert (loaded.vocab_size, loaded.separator_id) == (
        tokenizer.vocab_size,
        tokenizer.separator_id,
    )
    for text in TEXTS:
        np.testing.assert_array_equal(loaded.encode(text), tokenizer.encode(text))


def test_separator_survives_save_and_load(tmp_path):
    chosen = tok.BPETokenizer(word_level(["a", "b", "<s>"]), separator="b")
    chosen.save(tmp_path)
    assert tok.load_tokenizer(tmp_path).separator_id == 1
    assert tok.load_tokenizer(tmp_path, separator="<s>").separator_id == 2
    (tmp_path / "tokenizer_config.json").unlink()
    assert tok.load_tokenizer(tmp_path).separator_id == 2
    config = {"bos_token": None, "eos_token": {"content": "b", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert tok.load_tokenizer(tmp_path).separator_id == 1


def test_special_tokens_are_known_apart(tmp_path):
    ids = write_tokenizer(tmp_path)
    ends = [ids["<eos>"], ids["<eot>"]]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    tokenizer = tok.load_tokenizer(tmp_path)
    tokenizer.save(tmp_path / "copy")  # without the model's folder
    for found in (tokenizer, tok.load_tokenizer(tmp_path / "copy")):
        assert found.bos_id == found.begin_id == found.separator_id == ids["<bos>"]
        assert found.eos_ids == (ids["<eot>"], ids["<eos>"])  # documents end with the first
        assert found.pad_id == ids["<pad>"]
        named = {name for name in ids if "think" not in name}  # those are no special ones
        assert found.special_ids == {ids[name] for name in named} | {0}


@pytest.mark.parametrize("files", ["config", "special_tokens_map"])
def test_special_tokens_come_from_all_files(files, tmp_path):
    ids = write_tokenizer(tmp_path, begins=False, config={"bos_token": None})
    content = {
        "config": {"eos_token_id": [ids["<eos>"], ids["<pad>"]]},
        "special_tokens_map": {"eos_token": {"content": "<eos>"}, "pad_token": "<eot>"},
    }[files]
    (tmp_path / f"{files}.json").write_text(json.dumps(content))
    tokenizer = tok.load_tokenizer(tmp_path)
    tokenizer.save(tmp_path / "copy")
    for found in (tokenizer, tok.load_tokenizer(tmp_path / "copy")):
        if files == "config":
            assert found.eos_ids == (ids["<eot>"], ids["<eos>"], ids["<pad>"])
        else:
            assert (found.eos_ids, found.pad_id) == ((ids["<eos>"],), ids["<eot>"])
        assert found.bos_id is found.begin_id is None  # as Qwen's
        assert found.separator_id == found.eos_ids[0]


def test_listed_tokens_outrank_the_special_tokens_map(tmp_path):
    listed = {"added_tokens_decoder": {"278": {"content": "<eot>", "special": True}}}
    ids = write_tokenizer(tmp_path, config=listed, special_tokens_map={"eos_token": "<eos>"})
    assert tok.load_tokenizer(tmp_path).eos_ids == (ids["<eot>"],)


def test_texts_begin_as_the_tokenizer_says(tmp_path):
    ids = write_tokenizer(tmp_path, begins=False)
    found = tok.load_tokenizer(tmp_path)
    assert (found.bos_id, found.begin_id) == (ids["<bos>"], None)
    both = tok.load_tokenizer(tmp_path, separator="<eot>")
    assert (both.bos_id, both.begin_id, both.eos_ids) == (
        ids["<eot>"],
        ids["<eot>"],
        (ids["<eot>"],),
    )


def test_own_tokenizers_have_one_separator(tokenizer):
    one = tokenizer.separator_id
    assert tokenizer.bos_id == tokenizer.begin_id == one
    assert (tokenizer.eos_ids, tokenizer.special_ids, tokenizer.pad_id) == ((one,), {one}, None)


@pytest.mark.parametrize("end", [-1, 10_000, "2", True])
def test_ends_that_are_no_ids_are_refused(end, tmp_path):
    write_tokenizer(tmp_path, generation_config={"eos_token_id": [2, end]})
    with pytest.raises(ValueError, match=r"tokenizer.json: eos_token_id=.* 0 to 283"):
        tok.load_tokenizer(tmp_path)


def test_damaged_files_beside_a_tokenizer_are_refused(tmp_path):
    write_tokenizer(tmp_path, config={})
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config.json .* JSON"):
        tok.load_tokenizer(tmp_path)


def test_missing_separator_lists_candidates(tmp_path):
    tokenizer = word_level(["a", "b"])
    tokenizer.add_special_tokens(["[SEP]"])
    with pytest.raises(ValueError, match=r"<\|endoftext\|>.*pass separator=.*\['\[SEP\]'\]"):
        tok.BPETokenizer(tokenizer)
    with pytest.raises(ValueError, match=r"no token 'x'"):
        tok.BPETokenizer(tokenizer, separator="x")
    assert tok.BPETokenizer(tokenizer, separator="[SEP]").separator_id == 2
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"tokenizer\.json: .*pass separator="):
        tok.load_tokenizer(tmp_path)


def test_stored_truncation_and_padding_are_disabled():
    tokenizer = word_level(["a", "b", "<s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=6)
    np.testing.assert_array_equal(tok.BPETokenizer(tokenizer).encode("a b a b"), [0, 1, 0, 1])


@pytest.mark.parametrize("content", ["not json", '{"model": 1}', b"\xff\xfe"])
def test_malformed_tokenizer_files_are_refused(tmp_path, content):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer"):
        tok.load_tokenizer(file)


def test_missing_tokenizers_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.*'bytes'"):
        tok.load_tokenizer(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("text", TEXTS)
def test_stream_yields_only_whole_characters(tokenizer, text):
    stream = TextStream(tokenizer)
    parts = [stream.add(int(id)) for id in tokenizer.encode(text)]
    assert not any("\ufffd" in part for part in parts)
    assert "".join(parts) + stream.end() == text


def test_stream_replaces_incomplete_characters():
    stream = TextStream(tok.ByteTokenizer())
    assert stream.add(*"a漢".encode()[:3]) == "a"
    assert stream.add(*b"b") == "\ufffdb"
    assert stream.add(*"漢".encode()[:2]) == ""
    assert stream.end() == "\ufffd"


def test_files_are_the_same_in_every_process(tmp_path):
    """The order of a set is another one in each process."""
    program = "import sys, pathlib; from zoo.data.tokenizer import BPETokenizer; "
    program += "BPETokenizer.train(['ab ab'], 258).save(pathlib.Path(sys.argv[1]))"
    for seed in "12":
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", program, str(tmp_path / seed)]
        subprocess.run(command, env=environment, check=True)
    contents = [
        {path.name: path.read_bytes() for path in (tmp_path / seed).iterdir()} for seed in "12"
    ]
    assert len(contents[0]) == 2
    assert contents == [contents[0]] * 2


def test_pieces_with_an_ordinary_name_stay_in_ordinary_text():
    """A padding token that is a character: merges with it stay where it does not come out."""
    vocabulary = {"a": 0, "!": 1, "!!": 2, "[UNK]": 3}
    inner = HFTokenizer(models.BPE(vocabulary, [("!", "!")], unk_token="[UNK]"))
    tokenizer = tok.BPETokenizer(inner, None, {"pad_token": "!", "eos_token": "a"})
    assert tokenizer.encode("!!").tolist() == [2]
    assert tokenizer.encode_spans("!!")[0].tolist() == [2]
