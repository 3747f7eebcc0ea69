"""The tokenizer of a prepared corpus beside that of a configuration, and a sample of its text."""

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zoo.data.documents import Document
from zoo.data.prepared.parts import Part, Prepared
from zoo.data.special_tokens import begin_id, end_id
from zoo.data.tokenizer import FILE_NAME, ByteTokenizer, Tokenizer, get_tokenizer

_REMEDY = "leave the flag out, or prepare the text again with it"
SAMPLE_BYTES = 2**20  # of held-out text, for compressors


def same_ids(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether all texts get equal ids from both tokenizers."""
    return one is other or _identity(one) == _identity(other)


def check_tokenizer(
    prepared: Prepared, tokenizer: Tokenizer, whose: str, remedy: str = "prepare the text again"
) -> None:
    """Raise a ValueError unless a tokenizer gives the ids of the prepared one."""
    if not same_ids(tokenizer, prepared.tokenizer):
        raise ValueError(
            f"{whose} has another tokenizer ({_described(tokenizer)}) than {prepared.folder} was "
            f"prepared with ({_described(prepared.tokenizer)}): {remedy}"
        )


def check_named(prepared: Prepared, config: Any, default: Any) -> None:
    """Raise a ValueError unless the fields of a configuration name what was prepared.

    They are the tokenizer, vocab_size, field, held_out and special_tokens, where it has them with
    another value than `default`.
    """
    named = {
        name: value
        for name in ("tokenizer", "vocab_size", "field", "held_out", "special_tokens")
        if (value := getattr(config, name, None)) != getattr(default, name, None)
    }
    if (spec := named.get("tokenizer")) is not None:
        _check_spec(prepared, spec)
    given = {**prepared.manifest.options, "vocab_size": prepared.tokenizer.vocab_size}
    given["special_tokens"] = prepared.reading
    for name in ("vocab_size", "field", "held_out", "special_tokens"):
        if named.get(name) not in (None, given.get(name), prepared.manifest.options.get(name)):
            raise ValueError(
                f"data.{name}={named[name]!r}: {prepared.folder} was prepared with {given[name]!r}"
                f"; {_REMEDY}"
            )


def _check_spec(prepared: Prepared, spec: str) -> None:
    if spec not in ("bytes", "bpe"):
        check_tokenizer(prepared, get_tokenizer(spec), f"data.tokenizer={spec!r}", _REMEDY)
    elif (spec == "bytes") != isinstance(prepared.tokenizer, ByteTokenizer):
        raise ValueError(
            f"data.tokenizer={spec!r}: {prepared.folder} was prepared with another "
            f"({_described(prepared.tokenizer)}); {_REMEDY}"
        )


def _described(tokenizer: Tokenizer) -> str:
    ids = f"{tokenizer.vocab_size:,} ids"
    return f"bytes, {ids}" if isinstance(tokenizer, ByteTokenizer) else ids


def _identity(tokenizer: Tokenizer) -> tuple[object, ...]:
    """The tokenizer's file, begin and end: equal where all texts get equal ids."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        content = Path(folder, FILE_NAME).read_bytes()
    return content, begin_id(tokenizer), end_id(tokenizer)


class Sample(Sequence[Document]):
    """The first documents of a part, in about `num_bytes` of text, decoded when it is used."""

    def __init__(self, part: Part, tokenizer: Tokenizer, num_bytes: int = SAMPLE_BYTES):
        self._part, self._tokenizer, self._num_bytes = part, tokenizer, num_bytes

    @functools.cached_property
    def _documents(self) -> list[Document]:
        documents: list[Document] = []
        left = self._num_bytes
        for i in range(len(self._part)):
            # An id is a byte at least.
            text = self._tokenizer.decode(self._part.ids(i, 0, left))
            documents.append(Document(self._part.name(i), text))
            left -= len(text.encode())
            if left <= 0:
                break
        return documents

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, i):
        return self._documents[i]
