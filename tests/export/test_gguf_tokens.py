"""zoo.export.gguf_tokens: tokenizers of each kind that llama.cpp has, read as it reads them."""

import json
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import zoo
from zoo import transformer
from zoo.data.tokenizer import BPETokenizer, ByteTokenizer, load_tokenizer
from zoo.export import gguf_tokens
from zoo.export.gguf_file import add_value
from zoo.publishing import PublishError

CONFIG = transformer.Config(vocab_size=2000, eos_ids=(2, 0))
PATTERNS = {name: patterns for patterns, name in gguf_tokens.PRE_TOKENIZERS.items()}
SPECIAL = "<|endoftext|>"
TEXTS = [
    "Grüße aus Köln, 12345 Äpfel für 3,50 €!",
    "Привет, Мир! ЁЖ и ёж",
    "日本語のテキスト と 한국어 문장",
    "עברית وعربي ١٢٣ मानक हिन्दी ไทยภาษา",
    "emoji 🙂🚀 👩‍👩‍👧 ﬁ Ⅷ ① x²+y³=½",
    "a\r\nb\r\n\r\n\tc   two  blanks   ",
    "I'll we'RE don't CAN'T It'S HTTPServer2XMLParser snake_case",
    f"a{SPECIAL}b  {SPECIAL} c",
    " ",
    "\n\n\n",
    "\t\t  \n",
]


def many_texts() -> list[str]:
    """1,000 texts: the ones above, random characters, and pieces of this file and its page."""
    draw, texts = random.Random(0), [*TEXTS]
    letters = "abcXYZ 019.,'\"!?-_/\\\n\t  äßÉжЯ中あ한🙂"
    texts += ["".join(draw.choices(letters, k=draw.randint(1, 60))) for _ in range(300)]
    source = Path(__file__).read_text() + Path(gguf_tokens.__file__).read_text()
    while len(texts) < 1000:
        start = draw.randrange(len(source))
        texts.append(source[start : start + draw.randint(1, 200)])
    return texts


def of_bytes(name: str, **options: Any) -> BPETokenizer:
    """Byte-level BPE with the pre-tokenizer of a name, as Hugging Face's files have it."""
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if name == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif name != "gpt-2":
        steps = [pre_tokenizers.Split(Regex(x), "isolated") for x in PATTERNS[name]]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS * 20, Path(__file__).read_text()], trainer)
    return BPETokenizer(tokenizer, SPECIAL)


def of_pieces(*, prepend: bool, lost: int = 0, late: bool = False) -> BPETokenizer:
    """BPE of characters as conversions from SentencePiece have it, Llama 2's or Gemma's."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁*[^▁]*"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    trained.train_from_iterator([*TEXTS[5:7] * 20, Path(__file__).read_text()], trainer)
    model = json.loads(trained.to_str())["model"]
    known = model["vocab"]
    pieces = dict.fromkeys("".join(pair) for pair in model["merges"])
    halves = [(x[:i], x[i:]) for x in pieces for i in range(1, len(x))]
    merges = [pair for pair in halves if pair[0] in known and pair[1] in known][lost:]
    if late:  # one of two ways to a piece comes after other pieces
        pieces = ["".join(pair) for pair in merges]
        merges.append(merges.pop(next(i for i, x in enumerate(pieces) if pieces.count(x) > 1)))
    tokenizer = Tokenizer(
        models.BPE(known, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    steps = [normalizers.Prepend("▁")] if prepend else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens(special[:3])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return BPETokenizer(tokenizer, None, names)


def described(tokenizer: Any, config: Any = CONFIG) -> dict[str, Any]:
    found, _ = gguf_tokens.describe(tokenizer, config, gguf.TokenType)
    return {name.removeprefix("tokenizer.ggml."): value for name, value in found.items()}


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_kinds_of_bytes(name: str):
    tokenizer = of_bytes(name)
    found = described(tokenizer)
    assert (found["model"], found["pre"]) == ("gpt2", name)
    assert found["tokens"][tokenizer.separator_id] == SPECIAL
    assert len(found["tokens"]) == len(found["token_type"]) == CONFIG.vocab_size
    types = [gguf.TokenType(x).name for x in found["token_type"]]
    assert types[tokenizer.separator_id] == "CONTROL"
    assert {*types[: tokenizer.vocab_size]} == {"CONTROL", "NORMAL"}
    assert {*types[tokenizer.vocab_size :]} == {"UNUSED"}
    # As `tokenizers` itself writes merges of version 1: two tokens with a blank between them.
    left, right = found["merges"][0].split(" ")
    assert left + right in found["tokens"]


def test_pieces():
    tokenizer = of_pieces(prepend=True)
    found = described(tokenizer)
    assert (found["model"], found["add_space_prefix"]) == ("llama", True)
    assert not described(of_pieces(prepend=False))["add_space_prefix"]
    kinds = {token: kind for token, kind in zip(found["tokens"], found["token_type"], strict=True)}
    assert kinds["<0x0A>"] == gguf.TokenType.BYTE
    assert kinds["<unk>"] == gguf.TokenType.UNKNOWN
    assert kinds["<s>"] == gguf.TokenType.CONTROL
    scores = dict(zip(found["tokens"], found["scores"], strict=True))
    merges = json.loads(tokenizer.tokenizer.to_str())["model"]["merges"]
    of_merges = [scores["".join(pair)] for pair in merges]
    assert of_merges == sorted(of_merges, reverse=True)
    assert of_merges[0] > of_merges[-1]


def test_special_tokens_and_chat_template():
    tokenizer = of_pieces(prepend=True)
    tokenizer.config["chat_template"] = "{{ messages }}"
    found = described(tokenizer)
    assert (found["bos_token_id"], found["unknown_token_id"]) == (1, 0)
    assert (found["eos_token_id"], found["eot_token_id"]) == (2, 0)  # the model's, in its order
    assert found["tokenizer.chat_template"] == "{{ messages }}"
    assert found["add_bos_token"] is False
    assert described(None) == {"model": "no_vocab"}


def test_words_before_merges():
    assert described(of_bytes("smaug-bpe", ignore_merges=True))["pre"] == "llama-bpe"
    with pytest.raises(PublishError, match="before merges"):
        described(of_bytes("qwen2", ignore_merges=True))


def test_other_kinds_are_refused():
    lm = load_tokenizer(Path(zoo.__file__).parents[1] / "models" / "lm-python")
    with pytest.raises(PublishError, match=r"patterns .*--no-tokenizer"):
        described(lm, transformer.Config(vocab_size=lm.vocab_size))
    with pytest.raises(PublishError, match="bytes"):
        described(ByteTokenizer())
    with pytest.raises(PublishError, match="scores"):
        described(of_pieces(prepend=True, lost=3))
    with pytest.raises(PublishError, match="scores"):
        described(of_pieces(prepend=True, late=True))
    unigram = Tokenizer(models.Unigram([("<s>", 0.0), ("a", -1.0)], unk_id=0))
    with pytest.raises(PublishError, match="Unigram"):
        described(BPETokenizer(unigram, "<s>"))
    prefixed = of_bytes("gpt-2")
    prefixed.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(PublishError, match="add_prefix_space"):
        described(prefixed)
    lowered = of_bytes("gpt-2")
    lowered.tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(PublishError, match="Lowercase"):
        described(lowered)
    with pytest.raises(PublishError, match="vocab_size=9"):
        described(of_bytes("gpt-2"), transformer.Config(vocab_size=9))


def test_what_is_read_otherwise_is_said():
    tokenizer = of_bytes("qwen2")
    tokenizer.tokenizer.normalizer = normalizers.NFC()
    _, notes = gguf_tokens.describe(tokenizer, CONFIG, gguf.TokenType)
    assert ["NFC" in note for note in notes] == [True]
    _, notes = gguf_tokens.describe(of_bytes("tekken"), CONFIG, gguf.TokenType)
    assert ["marks" in note for note in notes] == [True]


def tokenizer_of(name: str) -> BPETokenizer:
    if name in PATTERNS:
        return of_bytes(name)
    if name == "llama-bpe":
        return of_bytes("smaug-bpe", ignore_merges=True)
    return of_pieces(prepend=name == "llama")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*sorted(PATTERNS), "llama-bpe", "llama", "gemma"])
def test_llama_cpp_has_the_same_ids(tmp_path: Path, name: str):
    cpp = pytest.importorskip("llama_cpp", reason="pip install 'zoo[engines]'")
    tokenizer = tokenizer_of(name)
    found, _ = gguf_tokens.describe(tokenizer, CONFIG, gguf.TokenType)
    writer = gguf.GGUFWriter(None, "llama")
    for key, value in found.items():
        add_value(writer, key, value)
    writer.write_header_to_file(tmp_path / "x.gguf")
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    silent = cpp.llama_log_callback(lambda level, text, data: None)
    cpp.llama_log_set(silent, None)
    options = cpp.llama_model_default_params()
    options.vocab_only = True
    model = cpp.llama_model_load_from_file(str(tmp_path / "x.gguf").encode(), options)
    vocabulary = cpp.llama_model_get_vocab(model)
    for text in many_texts():
        if name in gguf_tokens.LATIN_CASES and any("\u0900" <= x <= "\u0e7f" for x in text):
            continue  # Hindi and Thai, as `describe` says
        content = text.encode()
        ids = (cpp.llama_token * (len(content) + 9))()
        count = cpp.llama_tokenize(vocabulary, content, len(content), ids, len(ids), False, True)
        theirs = tokenizer.tokenizer.encode(text, add_special_tokens=False).ids
        assert [*ids[:count]] == theirs, repr(text)
