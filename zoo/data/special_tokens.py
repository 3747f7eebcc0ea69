"""Special tokens of a tokenizer: its begin of text, its ends of text, its padding, all of them.

They are read as transformers reads them: from `tokenizer_config.json`, `special_tokens_map.json`
where that one lists no added tokens, and for further ends of text from `generation_config.json`.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from tokenizers import Tokenizer as HFTokenizer

END_OF_TEXT = "<|endoftext|>"
BEGINS = ("<|begin_of_text|>", "<bos>", "<s>")
ENDS = (END_OF_TEXT, "<|end_of_text|>", "<eos>", "</s>")
# In order of preference: the separator precedes each document, so begin tokens come first.
SEPARATORS = BEGINS + ENDS

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


def with_ends_of(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, bytes]:
    """The files with a `generation_config.json`: if there is none, of the ends in `config.json`."""
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
