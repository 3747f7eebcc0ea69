"""Tokenizers whose tokens are letters, by the `vocab.txt` of a protein model's folder (ESM-2)."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, models, pre_tokenizers, processors
from tokenizers import Tokenizer as HFTokenizer

VOCABULARY = "vocab.txt"  # a token a line
SPECIAL = {
    "cls_token": "<cls>",
    "eos_token": "<eos>",
    "mask_token": "<mask>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}


def is_described(folder: Path) -> bool:
    """Whether a folder has the `vocab.txt` of ESM's tokenizer, by one of the files beside it."""

    def value(file: str, name: str) -> Any:
        path = folder / file
        return json.loads(path.read_text()).get(name) if path.is_file() else None

    if not (folder / VOCABULARY).is_file():
        return False
    kind = value("tokenizer_config.json", "tokenizer_class") or ""
    return kind.startswith("Esm") or value("config.json", "model_type") == "esm"


def read_letters(folder: Path) -> HFTokenizer:
    """The tokenizer of a folder's `vocab.txt`, in which `<cls>` begins a text and `<eos>` ends it.

    Spaces have no token, and what is no token of the file is one `<unk>`, as by ESM's own.

    Raises:
        ValueError: a vocabulary without one of these special tokens.
    """
    lines = (folder / VOCABULARY).read_text(encoding="utf-8").splitlines()
    ids = {line.strip(): id for id, line in enumerate(lines)}
    if missing := [token for token in SPECIAL.values() if token not in ids]:
        raise ValueError(f"{folder / VOCABULARY} has no {missing[0]}, which ESM's tokenizer has")
    tokenizer = HFTokenizer(models.WordLevel(ids, unk_token=SPECIAL["unk_token"]))
    known = "|".join(map(re.escape, sorted(ids, key=len, reverse=True)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(known), "isolated")]
    )
    begin, end = ((SPECIAL[name], ids[SPECIAL[name]]) for name in ("cls_token", "eos_token"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin[0]} $A {end[0]}", special_tokens=[begin, end]
    )
    names = [token for token in ids if token.startswith("<")]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in names])
    return tokenizer


def check_known(tokenizer: Any, text: str, ids: np.ndarray, name: str) -> None:
    """Raise a ValueError for a letter of a text that a tokenizer of letters does not know.

    `ids` are those of the text, and `name` is its name.
    """
    if tokenizer.unknown_id not in ids:
        return
    found, spans = tokenizer.encode_spans(text)
    begin, end = spans[found == tokenizer.unknown_id][0].tolist()
    raise ValueError(
        f"{name} has {text[begin:end]!r} at character {begin}, which is no token of the model's: "
        "correct the sequence, as by X for any amino acid, or leave it out"
    )
