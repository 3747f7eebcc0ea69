"""Special tokens of a tokenizer: its begin of text, its ends of text, its padding, all of them.

They are read as transformers reads them: from `tokenizer_config.json`, `special_tokens_map.json`
where that one lists no added tokens, and for further ends of text from `generation_config.json`.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

END_OF_TEXT = "<|endoftext|>"
BEGINS = ("<|begin_of_text|>", "<bos>", "<s>")
ENDS = (END_OF_TEXT, "<|end_of_text|>", "<eos>", "</s>")
# In order of preference: the separator precedes each document, so begin tokens come first.
SEPARATORS = BEGINS + ENDS

# Noncharacters, which no text has: one after a name that is text wherever it stands, and one before
# the names that a variant of a tokenizer has for no text.
AS_TEXT, HIDDEN = "\ufdd2", "\ufdd4"

SPECIAL_TOKENS_MAP_NAME = "special_tokens_map.json"
GENERATION_CONFIG_NAME = "generation_config.json"


class SpecialTokens(NamedTuple):
    """Ids of a tokenizer's special tokens; None where it has no such token.

    `begin_id` is the id that its texts begin with: `bos_id` where the tokenizer itself puts it in
    front (`adds_begin`), as Llama's does, or where it is the end of the document before too, as
    GPT-2's is.
    """

    separator_id: int
    bos_id: int | None
    begin_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    special_ids: frozenset[int]
    adds_begin: bool


def named_tokens(
    config: Mapping[str, Any], files: Mapping[str, bytes], vocabulary: Mapping[str, int]
) -> dict[str, str]:
    """The special tokens by the names of Hugging Face's folders: `bos_token`, `pad_token`, …

    Where the folder names no begin, end or class token, they are the usual ones of the vocabulary.
    """
    names = dict(config)
    if "added_tokens_decoder" not in config:
        names |= read_json(files, SPECIAL_TOKENS_MAP_NAME)
    found = {name: _content(token) for name, token in names.items() if name.endswith("_token")}
    tokens = {name: token for name, token in found.items() if token}
    if not tokens.keys() & {"bos_token", "eos_token", "cls_token"}:
        usual = {"bos_token": (*BEGINS, *ENDS), "eos_token": (*ENDS, *BEGINS)}
        for name, candidates in usual.items():
            if token := next((token for token in candidates if token in vocabulary), None):
                tokens[name] = token
    return tokens


def find_special_tokens(
    tokenizer: HFTokenizer, tokens: Mapping[str, str], files: Mapping[str, bytes]
) -> SpecialTokens:
    """The ids of a tokenizer's special tokens, of which `tokens` has the names.

    Raises:
        ValueError: the names are no tokens, there is no separator, or an end is no id.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = {id: t for id, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    id_of = {name: vocabulary.get(token) for name, token in tokens.items()}
    bos, eos = id_of.get("bos_token"), id_of.get("eos_token")
    first, last = id_of.get("cls_token"), id_of.get("sep_token")
    separator = next((id for id in (bos, eos, first) if id is not None), None)
    if separator is None:
        named = [token for name, token in tokens.items() if name in ("bos_token", "eos_token")]
        problem = f"no token {named[0]!r}" if named else "no usual separator"
        raise ValueError(
            f"the tokenizer has {problem} (looked for {', '.join(SEPARATORS)}): pass "
            f"separator=, the token to put before and after each document; its special tokens are "
            f"{[token.content for token in added.values()] or 'none'}"
        )
    if bos is None and eos is None:  # BERT's
        bos, eos = first, last
    end = separator if eos is None else eos
    adds_begin = tokenizer.encode("").ids[:1] == [bos]
    begins = bos in (end, first) or adds_begin
    pad = id_of.get("pad_token")
    listed = _listed_ends(files, max(vocabulary.values()))
    return SpecialTokens(
        separator_id=separator,
        bos_id=bos,
        begin_id=bos if begins else None,
        eos_ids=tuple(dict.fromkeys([end, *listed])),
        pad_id=pad,
        special_ids=frozenset([*added, *listed, *(id for id in id_of.values() if id is not None)]),
        adds_begin=adds_begin,
    )


def begin_id(tokenizer: Any) -> int | None:
    """The id that a tokenizer's texts begin with; a tokenizer that does not say has a separator."""
    return getattr(tokenizer, "begin_id", tokenizer.separator_id)


def end_id(tokenizer: Any) -> int:
    """The id that ends a tokenizer's texts; a tokenizer that does not say has a separator."""
    return next(iter(getattr(tokenizer, "eos_ids", ())), tokenizer.separator_id)


def described(count: int, parsed: bool, flag: str = "--data.special-tokens") -> str:
    """The number of special tokens, or of their names that are plain text, in words."""
    if not count:
        return ""
    if parsed:
        return f"{count:,} special tokens parsed"
    return (
        f"the text has {count:,} names of special tokens, read as plain characters: {flag} parse "
        "makes tokens of them"
    )


def unframed(tokenizer: Any, ids: Any) -> slice:
    """The part of a text's ids between its begin and its end, which rows have of their own."""
    first = int(len(ids) > 0 and ids[0] == begin_id(tokenizer))
    return slice(first, len(ids) - int(len(ids) > first and ids[-1] == end_id(tokenizer)))


def begun(tokenizer: Any, ids: list[int]) -> list[int]:
    """The ids of a text after the one that texts begin with, unless that is there already."""
    begin = begin_id(tokenizer)
    return ids if begin is None or ids[:1] == [begin] else [begin, *ids]


def mark(tokenizer: HFTokenizer, ids: Collection[int]) -> None:
    """Mark tokens as special ones, as transformers does: files may name some that are not."""
    added = tokenizer.get_added_tokens_decoder()
    for id in sorted(ids):
        token = added.get(id) or AddedToken(tokenizer.id_to_token(id) or "", normalized=False)
        if token.content and not token.special:
            tokenizer.add_special_tokens([token])


def unknown_id(tokenizer: HFTokenizer) -> int | None:
    """The id of text that a tokenizer does not know."""
    model = json.loads(tokenizer.to_str())["model"]
    token = model.get("unk_token")
    return model.get("unk_id") if token is None else tokenizer.token_to_id(token)


def variant(tokenizer: HFTokenizer, inside: bool, hidden: Collection[int]) -> HFTokenizer:
    """A copy of a tokenizer without its post-processor, which leaves blanks out of some spans.

    It puts no blank before a text if that is `inside` of another, and gives the `hidden` ids to no
    text: models of some kinds have special tokens among their pieces.
    """
    content = json.loads(tokenizer.to_str())
    content["post_processor"] = None
    if inside:
        content = _without_prefixes(content)
    model, names = content["model"], {tokenizer.id_to_token(id) for id in hidden}
    rename = lambda name: HIDDEN + name if name in names else name  # noqa: E731
    for token in content["added_tokens"]:
        token["content"] = rename(token["content"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {rename(name): id for name, id in model["vocab"].items()}
    else:
        model["vocab"] = [[rename(name), score] for name, score in model["vocab"]]
    if "unk_token" in model:
        model["unk_token"] = rename(model["unk_token"])
    if names and "merges" in model:
        model["merges"] = [m for m in model["merges"] if names.isdisjoint([*m, "".join(m)])]
    return HFTokenizer.from_str(json.dumps(content))


def _without_prefixes(part: Any) -> Any:
    """A part of a tokenizer's file whose steps put no blank before a text."""
    if isinstance(part, list):
        return [_without_prefixes(x) for x in part if not _is_prefix(x)]
    if not isinstance(part, dict):
        return part
    part = {name: None if _is_prefix(x) else _without_prefixes(x) for name, x in part.items()}
    if part.get("type") == "Metaspace":
        part["prepend_scheme"] = "never"
    if part.get("type") == "ByteLevel":
        part["add_prefix_space"] = False
    return part


def _is_prefix(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "Prepend"


def with_ends_of(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, bytes]:
    """The files with a `generation_config.json`; without one, made of the ends in `config.json`."""
    ends = config.get("eos_token_id")
    if GENERATION_CONFIG_NAME in files or not isinstance(ends, list):
        return dict(files)
    return {**files, GENERATION_CONFIG_NAME: json.dumps({"eos_token_id": ends}).encode()}


def read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The object in one of some JSON files; an empty one if there is no such file."""
    if name not in files:
        return {}
    try:
        values = json.loads(files[name])
    except ValueError as error:
        raise ValueError(f"{name} beside it is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{name} beside it holds no object, but {values!r:.80}")
    return values


def _listed_ends(files: Mapping[str, bytes], last: int) -> list[int]:
    ends = read_json(files, GENERATION_CONFIG_NAME).get("eos_token_id")
    if not isinstance(ends, list):
        return []
    for end in ends:
        if type(end) is not int or not 0 <= end <= last:
            raise ValueError(
                f"eos_token_id={ends} in {GENERATION_CONFIG_NAME}: {end!r} is no id of the "
                f"tokenizer, which are 0 to {last}; correct the file"
            )
    return ends


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token
