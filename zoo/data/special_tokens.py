"""Special tokens: the ones that a tokenizer's folder names, and their names in a text.

The files that go out with a tokenizer as they came are listed here too.

Special tokens are read as transformers reads them: from `tokenizer_config.json`, from
`special_tokens_map.json` where that one lists no added tokens, and further ends of text from
`generation_config.json`.
"""

import json
import secrets
from collections.abc import Mapping, Set
from typing import Any

from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
BEGINS = ("<|begin_of_text|>", "<bos>", "<s>")
ENDS = (END_OF_TEXT, "<|end_of_text|>", "<eos>", "</s>")
# Noncharacters, which no text has: AS_TEXT follows a name that is plain text, and HIDDEN precedes
# each name in a tokenizer that reads names as text. Nobody can write it, as it is drawn anew.
AS_TEXT, HIDDEN = "\ufdd2", f"\ufdd4{secrets.token_hex(8)}"

CONFIG_NAME = "tokenizer_config.json"  # names the bos and eos tokens in Hugging Face folders
SPECIAL_TOKENS_MAP_NAME = "special_tokens_map.json"
GENERATION_CONFIG_NAME = "generation_config.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"  # the template of newer Hugging Face folders
# Files beside the tokenizer that belong to it, and go out again as they came.
BESIDE = (
    SPECIAL_TOKENS_MAP_NAME,
    GENERATION_CONFIG_NAME,
    "added_tokens.json",
    CHAT_TEMPLATE_NAME,
    "additional_chat_templates/*.jinja",  # further templates, by name
    # The same vocabulary for other programs, such as converters.
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    # Processors, of models that read other things than text too.
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def named_tokens(
    config: Mapping[str, Any], files: Mapping[str, bytes], vocabulary: Mapping[str, int]
) -> dict[str, str]:
    """The special tokens by the names of Hugging Face's folders: `bos_token`, `pad_token`, …

    Where the folder names no begin, end or class token, they are the usual ones of the vocabulary.
    """
    named = dict(config)
    if "added_tokens_decoder" not in config:
        named |= read_json(files, SPECIAL_TOKENS_MAP_NAME)
    tokens: dict[str, str] = {}
    for name, token in named.items():
        content = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and content:
            tokens[name] = content
    if not tokens.keys() & {"bos_token", "eos_token", "cls_token"}:
        usual = {"bos_token": (*BEGINS, *ENDS), "eos_token": (*ENDS, *BEGINS)}
        for name, candidates in usual.items():
            if token := next((token for token in candidates if token in vocabulary), None):
                tokens[name] = token
    return tokens


def listed_ends(files: Mapping[str, bytes], vocab_size: int) -> list[int]:
    """The ends of text of a `generation_config.json` that lists several."""
    ends = read_json(files, GENERATION_CONFIG_NAME).get("eos_token_id")
    for end in ends if isinstance(ends, list) else []:
        if type(end) is not int or not 0 <= end < vocab_size:
            raise ValueError(
                f"eos_token_id={ends} in {GENERATION_CONFIG_NAME}: {end!r} is no id of the "
                f"tokenizer, which are 0 to {vocab_size - 1}; correct the file"
            )
    return ends if isinstance(ends, list) else []


def read_json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The object in a JSON file; an empty one if there is no such file."""
    try:
        values = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise ValueError(f"{name} beside it is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{name} beside it holds no object, but {values!r:.80}")
    return values


def _without_prefixes(step: Any) -> Any:
    """A step of a tokenizer's file without the steps that put a blank before a text."""
    if isinstance(step, list):
        return [x for x in map(_without_prefixes, step) if x is not None]
    if not isinstance(step, dict):
        return step
    if step.get("type") == "Prepend":
        return None
    never: dict[str, dict[str, Any]] = {
        "Metaspace": {"prepend_scheme": "never"},
        "ByteLevel": {"add_prefix_space": False},
    }
    inner = {name: _without_prefixes(x) for name, x in step.items()}
    return inner | never.get(step.get("type", ""), {})


def variant(tokenizer: Tokenizer, names: Set[str], reading: str, inside: bool) -> Tokenizer:
    """The tokenizer for one reading of its special tokens' names, and for what is inside of a text.

    It has no post-processor, which leaves blanks out of some spans. In "plain" names are not looked
    for, and in "text" no piece has them either: models of some kinds have special tokens among
    their pieces.
    """
    content = json.loads(tokenizer.to_str())
    content["post_processor"] = None
    if inside:
        for step in ("normalizer", "pre_tokenizer"):
            content[step] = _without_prefixes(content[step])
    if reading == "text":
        model = content["model"]
        rename = lambda name: HIDDEN + name if name in names else name  # noqa: E731
        for token in content["added_tokens"]:
            token["content"] = rename(token["content"])
        if isinstance(model["vocab"], dict):
            model["vocab"] = {rename(name): id for name, id in model["vocab"].items()}
        else:
            model["vocab"] = [[rename(name), score] for name, score in model["vocab"]]
        if "unk_token" in model:
            model["unk_token"] = rename(model["unk_token"])
        if "merges" in model:
            model["merges"] = [m for m in model["merges"] if not names & {*m, "".join(m)}]
    changed = Tokenizer.from_str(json.dumps(content))
    changed.encode_special_tokens = reading == "plain"
    return changed
