"""A tokenizer as GGUF describes it, for the kinds of tokenizers that llama.cpp has."""

import json
from collections.abc import Sequence
from typing import Any

from zoo.data.chats import template_source
from zoo.data.tokenizer import BPETokenizer, Tokenizer
from zoo.publishing import PublishError

_REMEDY = "--no-tokenizer writes the file without one, for ids alone"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
# llama.cpp's names of pre-tokenizers, by the patterns that split a text one after another.
PRE_TOKENIZERS: dict[tuple[str, ...], str] = {
    (_GPT2,): "gpt-2",
    (r"\p{N}", _GPT2): "smollm",
    (rf"{_ENDS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",): "smaug-bpe",
    (rf"{_ENDS}|{_WORDS}|\p{{N}}|{_REST}",): "qwen2",
    ("|".join((*(x + _ENDINGS for x in _CASED), r"\p{N}{1,3}", _SLASHED)),): "gpt-4o",
    ("|".join((*_CASED, r"\p{N}", _SLASHED)),): "tekken",
    _DEEPSEEK: "deepseek-v3",
}
# The ones that differ from llama.cpp's own patterns.
LATIN_CASES = ("gpt-4o", "tekken")
# The same patterns for tokenizers that take a whole word of the vocabulary before any merge.
_WHOLE_WORDS = {"smaug-bpe": "llama-bpe", "tekken": "tekken"}


def describe(
    tokenizer: Tokenizer | None, config: Any, kinds: Any
) -> tuple[dict[str, Any], list[str]]:
    """The metadata of a tokenizer, and what llama.cpp reads otherwise, in sentences.

    `kinds` are GGUF's types of tokens. Tokens that the model has beyond the tokenizer's are unused.

    Raises:
        PublishError: llama.cpp has no tokenizer of this kind, or the model too few tokens.
    """
    if tokenizer is None:
        return {"tokenizer.ggml.model": "no_vocab"}, []
    if not isinstance(tokenizer, BPETokenizer):
        raise PublishError(f"llama.cpp has no tokenizer of bytes alone: {_REMEDY}")
    if tokenizer.vocab_size > config.vocab_size:
        raise PublishError(
            f"vocab_size={config.vocab_size}: the tokenizer has {tokenizer.vocab_size} ids, and so "
            f"it is not the model's; {_REMEDY}"
        )
    content = json.loads(tokenizer.tokenizer.to_str())
    tokens, types = _tokens(content, config.vocab_size, kinds)
    is_pieces = content["model"].get("byte_fallback", False)
    found, notes = (_pieces if is_pieces else _bytes)(content, tokens)
    found |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    found["tokenizer.ggml.add_bos_token"] = tokenizer.adds_begin
    found["tokenizer.ggml.add_eos_token"] = False
    ends = dict.fromkeys((*config.eos_ids, *tokenizer.eos_ids))
    names = dict(zip(("eos", "eot", "eom"), ends, strict=False))
    unknown = tokenizer.tokens.get("unk_token")
    names |= {"bos": tokenizer.bos_id, "padding": tokenizer.pad_id}
    names["unknown"] = None if unknown is None else tokenizer.tokenizer.token_to_id(unknown)
    found |= {f"tokenizer.ggml.{x}_token_id": id for x, id in names.items() if id is not None}
    if len(ends) > 3:
        notes.append(f"GGUF names three ends of text, and these are more: {[*ends]}")
    if (template := template_source(tokenizer)) is not None:
        found["tokenizer.chat_template"] = template
    stripped = [x["content"] for x in content["added_tokens"] if x["lstrip"] or x["rstrip"]]
    if stripped:
        notes.append(f"llama.cpp keeps the blanks beside these tokens: {', '.join(stripped)}")
    return found, notes


def _tokens(content: dict, size: int, kinds: Any) -> tuple[list[str], list[int]]:
    """The tokens by id, and the type of each."""
    tokens = [f"[PAD{id}]" for id in range(size)]
    types = [int(kinds.UNUSED)] * size
    vocabulary = content["model"]["vocab"]
    if not isinstance(vocabulary, dict):
        kind = content["model"]["type"]
        raise PublishError(f"llama.cpp's tokenizers are of merges, and this is {kind}: {_REMEDY}")
    is_pieces, unknown = content["model"].get("byte_fallback"), content["model"].get("unk_token")
    for token, id in vocabulary.items():
        is_byte = is_pieces and len(token) == 6 and token.startswith("<0x")
        kind = kinds.BYTE if is_byte else kinds.NORMAL
        tokens[id], types[id] = token, int(kinds.UNKNOWN if token == unknown else kind)
    for token in content["added_tokens"]:
        tokens[token["id"]] = token["content"]
        if types[token["id"]] != int(kinds.UNKNOWN):
            kind = kinds.CONTROL if token["special"] else kinds.USER_DEFINED
            types[token["id"]] = int(kind)
    return tokens, types


def _flat(step: dict | None, inner: str) -> list[dict]:
    """The steps of a normalizer or a pre-tokenizer, one after another."""
    if step is None:
        return []
    return [x for one in step[inner] for x in _flat(one, inner)] if inner in step else [step]


def _bytes(content: dict, tokens: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Merges of bytes, in the words that a pattern splits a text into."""
    model, notes = content["model"], []
    patterns = []
    for step in _flat(content["pre_tokenizer"], "pretokenizers"):
        if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            patterns.append(step["pattern"].get("Regex", step["pattern"].get("String")))
        elif step["type"] == "Digits" and step["individual_digits"]:
            patterns.append(r"\p{N}")
        elif step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            patterns += [_GPT2] if step["use_regex"] else []
        else:
            patterns.append(json.dumps(step))
    pre = PRE_TOKENIZERS.get(tuple(patterns))
    if model.get("ignore_merges"):
        pre = _WHOLE_WORDS.get(pre or "")
    normalizers = [x["type"] for x in _flat(content["normalizer"], "normalizers")]
    if (
        pre is None
        or {*normalizers} - {"NFC"}
        or "ByteLevel" not in json.dumps(content["pre_tokenizer"])
    ):
        whole = ", words of the vocabulary before merges" if model.get("ignore_merges") else ""
        raise PublishError(
            f"llama.cpp has no tokenizer of this kind (patterns {patterns}, normalizers "
            f"{normalizers}{whole}), and would read texts otherwise: {_REMEDY}"
        )
    if normalizers:
        notes.append("llama.cpp reads accents as they are written, without normalization (NFC)")
    if pre in LATIN_CASES:
        notes.append("llama.cpp cuts words of scripts with marks, such as Hindi's, otherwise")
    merges = [x if isinstance(x, str) else " ".join(x) for x in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.merges": merges,
    }, notes


def _pieces(content: dict, tokens: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Merges of characters, as in SentencePiece: the pair whose piece has the highest score."""
    steps = _flat(content["normalizer"], "normalizers")
    steps += _flat(content["pre_tokenizer"], "pretokenizers")
    prepends, notes = False, []
    for step in steps:
        if step["type"] == "Metaspace":
            prepends = step["prepend_scheme"] != "never"
            if step["prepend_scheme"] == "first":
                notes.append("llama.cpp puts a blank after each special token too")
        elif step["type"] == "Prepend":
            prepends = True
        elif step["type"] not in ("Replace", "Split"):
            raise PublishError(
                f"llama.cpp has no tokenizer of this kind ({step['type']}), and would read texts "
                f"otherwise: {_REMEDY}"
            )
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": _scores(content["model"], tokens),
        "tokenizer.ggml.add_space_prefix": prepends,
    }, notes


def _scores(model: dict, tokens: Sequence[str]) -> list[float]:
    """A score for each piece, by which its merges have their order.

    Raises:
        PublishError: no scores give that order.
    """
    pairs = [tuple(x.split(" ")) if isinstance(x, str) else tuple(x) for x in model["merges"]]
    scores: dict[str, float] = {}
    for left, right in pairs:
        scores.setdefault(left + right, -float(len(scores)))
    order = [scores[left + right] for left, right in pairs]
    known, given = model["vocab"], {*pairs}
    lost = next(
        (
            f"{piece[:i]!r} and {piece[i:]!r}"
            for piece in scores
            for i in range(1, len(piece))
            if piece[:i] in known and piece[i:] in known and (piece[:i], piece[i:]) not in given
        ),
        None,
    )
    if lost is not None or order != sorted(order, reverse=True):
        raise PublishError(
            "llama.cpp merges by the scores of pieces, and no scores give this tokenizer's merges"
            + (f" ({lost} stay apart in it)" if lost else "")
            + f": {_REMEDY}"
        )
    return [scores.get(token, 0.0 if token not in known else -1e6) for token in tokens]
