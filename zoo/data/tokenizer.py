"""Text to token ids and back: raw bytes, or any `tokenizer.json` of the `tokenizers` library."""

# ruff: noqa: D102 (`Tokenizer` documents the methods of all tokenizers)

import copy
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HFTokenizer

from zoo.common.files import local_path
from zoo.data import letters
from zoo.data.special_tokens import (
    AS_TEXT,
    BEGINS,
    BESIDE,
    CONFIG_NAME,
    END_OF_TEXT,
    ENDS,
    GENERATION_CONFIG_NAME,
    listed_ends,
    named_tokens,
    read_json,
    variant,
)

Ids = Int32[np.ndarray, "length"]
Spans = Int32[np.ndarray, "length 2"]
Reading = Literal["parse", "text"]
"""Whether the name of a special token in a text is that token, or plain characters."""

FILE_NAME = "tokenizer.json"
# Pre-tokens for source code, which merges never cross. In turn: a line break with the blank lines
# and the indentation around it; a dotted name with up to two marks before it ("(self.name"); other
# marks, with a space or a line break after them ("):\n    "); runs of spaces. Held-out Python has
# 11% fewer tokens than by GPT-2's pattern with 2048 ids, and 14% fewer with 4096.
PRE_TOKENS = r"\s*\n\s*| ?[^\s\w]{0,2}\w+(?:\.\w+)*| ?[^\s\w]+(?:\s*\n\s*| )?|\s+(?!\S)|\s+"


@runtime_checkable
class Tokenizer(Protocol):
    """The interface of a tokenizer for the data pipeline, the recipes and generation."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id, the separator's too, is below it."""

    @property
    def separator_id(self) -> int:
        """Id of the document separator, which precedes each document and follows it.

        A tokenizer in which the two differ has them as `begin_id`, an id or None, and as the first
        of `eos_ids`, as `BPETokenizer`.
        """

    def encode(self, text: str) -> Ids:
        """Ids of a text, without a separator; names of special tokens are plain text."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text."""

    def encode_spans(self, text: str, *, inside: bool = False) -> tuple[Ids, Spans]:
        """Ids of a text, or of a part `inside` of one, and the characters [start, stop) of each."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids; invalid UTF-8 becomes U+FFFD, separators and unknown ids vanish."""

    def save(self, folder: Path) -> None:
        """Write the files that `load_tokenizer(folder)` opens."""


class ByteTokenizer:
    """The 256 byte values of UTF-8, and the separator as id 256."""

    vocab_size = 257
    separator_id = 256
    bos_id = begin_id = 256
    eos_ids = (256,)
    pad_id = None
    special_ids = frozenset([256])
    adds_begin = True

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [self.encode(text) for text in texts]

    def encode_spans(self, text: str, *, inside: bool = False) -> tuple[Ids, Spans]:
        ids = self.encode(text)
        characters = np.cumsum(ids >> 6 != 0b10, dtype=np.int32) - 1  # others are continued
        return ids, np.stack([characters, characters + 1], 1)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return bytes(int(i) for i in ids if 0 <= i < 256).decode(errors="replace")

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE_NAME).write_text(json.dumps({"type": "bytes"}) + "\n")


class BPETokenizer:
    """A `tokenizers.Tokenizer` that knows its special tokens.

    `config` is the content of a `tokenizer_config.json`, and `files` has those beside it, such as
    chat templates, by name; they are saved too. `separator` is one token that begins documents and
    ends them, in place of the ones that `config` names. Truncation and padding are switched off,
    whatever the file says: no document is cut. Tokens that the files name as special are marked so.

    `begin_id` is the id that texts begin with: `bos_id` where the tokenizer itself puts it in front
    (`adds_begin`), as Llama's does, or where it is the end of the document before too, as GPT-2's
    is. The first of `eos_ids` ends documents. An id is None where the tokenizer has no such token.

    Raises:
        ValueError: `separator`, or the token that `config` names, is no token; there is neither,
            and no token has a usual name; or an end of `generation_config.json` is no id.
    """

    special_tokens: Reading = "text"

    def __init__(
        self,
        tokenizer: HFTokenizer,
        separator: str | None = None,
        config: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
    ):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        # Ids may have gaps, so that the number of tokens would be too small.
        self.vocab_size: int = max(vocabulary.values()) + 1
        config, self.files = dict(config or {}), dict(files or {})
        self.tokens = named_tokens(config, self.files, vocabulary)
        own_names = ("bos_token", "eos_token")  # in one order: the files have a digest
        if separator is not None:
            self.tokens |= dict.fromkeys(own_names, separator)
        if separator is not None or not config.keys() & {*own_names, "cls_token"}:
            config |= {name: self.tokens[name] for name in own_names if name in self.tokens}
        self.config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
        self._find_special_tokens(vocabulary)
        self._variants: dict[tuple[str, bool], HFTokenizer] = {}

    def _find_special_tokens(self, vocabulary: Mapping[str, int]) -> None:
        """Set the ids of the special tokens, and mark the ones that files name but do not mark."""
        added = self.tokenizer.get_added_tokens_decoder()
        special = {id: token.content for id, token in added.items() if token.special}
        id_of = {name: vocabulary.get(token) for name, token in self.tokens.items()}
        bos, eos, first, last = (id_of.get(f"{x}_token") for x in ("bos", "eos", "cls", "sep"))
        separator = next((id for id in (bos, eos, first) if id is not None), None)
        if separator is None:
            named = [self.tokens[name] for name in ("bos_token", "eos_token") if name in id_of]
            raise ValueError(
                f"the tokenizer has {f'no token {named[0]!r}' if named else 'no usual separator'} "
                f"(looked for {', '.join(BEGINS + ENDS)}): pass separator=, the token to put "
                f"before and after each document; its special tokens are {[*special.values()]}"
            )
        if bos is None and first is not None:  # BERT's, and ESM's, which has an end
            bos, eos = first, last if eos is None else eos
        end = separator if eos is None else eos
        ends = listed_ends(self.files, self.vocab_size)
        self.adds_begin: bool = self.tokenizer.encode("").ids[:1] == [bos]
        self.separator_id: int = separator
        self.bos_id: int | None = bos
        self.begin_id: int | None = bos if self.adds_begin or bos in (end, first) else None
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([end, *ends]))
        self.pad_id: int | None = id_of.get("pad_token")
        named_ids = (id for id in id_of.values() if id is not None)
        self.special_ids: frozenset[int] = frozenset([*special, *ends, *named_ids])
        for id in sorted(self.special_ids - special.keys()):
            name = self.tokenizer.id_to_token(id)
            token = added.get(id) or (AddedToken(name, normalized=False) if name else None)
            if token is not None:
                self.tokenizer.add_special_tokens([token])

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "BPETokenizer":
        """Byte-level BPE with `vocab_size` ids: 256 bytes, the separator, and merges.

        Any text round-trips. Little text gives fewer ids: see the attribute `vocab_size`.
        """
        if vocab_size < 257:
            raise ValueError(
                f"vocab_size={vocab_size} has no room for 256 bytes and a separator: at least 257"
            )
        tokenizer = HFTokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(PRE_TOKENS), behavior="isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer, END_OF_TEXT)

    def encode(self, text: str) -> Ids:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        is_parsed = self.special_tokens == "parse"
        tokenizer = self._variant("parse" if is_parsed else "plain")
        encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        found = [np.asarray(encoding.ids, np.int32) for encoding in encodings]
        if is_parsed:
            return found
        return [
            self.encode_spans(text)[0] if self._has_special(text, ids) else ids
            for text, ids in zip(texts, found, strict=True)
        ]

    def encode_spans(self, text: str, *, inside: bool = False) -> tuple[Ids, Spans]:
        """Ids of a text, and the characters [start, stop) of each.

        A name that `AS_TEXT` follows is plain characters in either reading. A text that goes on
        `inside` of another has no blank put before it, as Metaspace tokenizers put one.
        """
        parts: list[tuple[int, int, Reading]] = []
        begin = 0
        for marked in self.marked.finditer(text) if AS_TEXT in text else ():
            parts.append((begin, marked.start(), self.special_tokens))
            parts.append((*marked.span(1), "text"))
            begin = marked.end()
        ids, spans = list[int](), [np.zeros((0, 2), np.int32)]
        for start, stop, reading in [*parts, (begin, len(text), self.special_tokens)]:
            within = inside or start > 0
            parsed = within and reading == "parse"
            name = self.names.search(text, start, stop) if parsed else None
            anew = stop if name is None else name.start()  # what follows a name begins anew
            for first, end, goes_on in ((start, anew, within), (anew, stop, False)):
                if first < end:
                    encoding = self._encoding(text[first:end], reading, goes_on)
                    ids += encoding.ids
                    spans.append(first + np.asarray(encoding.offsets, np.int32).reshape(-1, 2))
        return np.asarray(ids, np.int32), np.concatenate(spans)

    def _encoding(self, text: str, reading: Reading, inside: bool) -> Any:
        """A text in one reading. Pieces lose the special names only where one would come out."""
        tokenizer = self._variant("parse" if reading == "parse" else "plain", inside)
        encoding = tokenizer.encode(text, add_special_tokens=False)
        if reading == "parse" or not self._has_special(text, np.asarray(encoding.ids, np.int32)):
            return encoding
        return self._variant("text", inside).encode(text, add_special_tokens=False)

    def _has_special(self, text: str, ids: Ids) -> bool:
        """Whether ids of a text as plain characters have a special token, but for unknown ones."""
        found = self.special_ids.intersection(ids.tolist())
        unknown = found & {self.unknown_id}
        return bool(found - unknown) or (bool(unknown) and self.names.search(text) is not None)

    @functools.cached_property
    def is_of_letters(self) -> bool:
        """Whether all tokens but the special ones are letters, as in proteins."""
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        return all(len(x) == 1 for x, id in vocabulary.items() if id not in self.special_ids)

    @functools.cached_property
    def unknown_id(self) -> int | None:
        """The id of the unknown token, where there is one."""
        model = json.loads(self.tokenizer.to_str())["model"]
        token = model.get("unk_token")
        return model.get("unk_id") if token is None else self.tokenizer.token_to_id(token)

    def _variant(self, reading: str, inside: bool = False) -> HFTokenizer:
        """See `zoo.data.special_tokens.variant`; each is made once."""
        if (key := (reading, inside)) not in self._variants:
            self._variants[key] = variant(self.tokenizer, self.special_names, *key)
        return self._variants[key]

    @functools.cached_property
    def special_names(self) -> set[str]:
        """The names of the special tokens in a text; `id_to_token` may have normalised ones."""
        added, token = self.tokenizer.get_added_tokens_decoder(), self.tokenizer.id_to_token
        found = (added[id].content if id in added else token(id) for id in self.special_ids)
        return {*filter(None, found)}

    @functools.cached_property
    def names(self) -> re.Pattern[str]:
        """A pattern of the names of the special tokens."""
        escaped = map(re.escape, self.special_names)
        return re.compile("|".join(sorted(escaped, key=len, reverse=True)))

    @functools.cached_property
    def marked(self) -> re.Pattern[str]:
        """A pattern of what `AS_TEXT` follows, a name or nothing."""
        return re.compile(f"({self.names.pattern}|){AS_TEXT}")

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        """Write the files that `load_tokenizer` and Hugging Face's `AutoTokenizer` open."""
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save(str(folder / FILE_NAME))
        (folder / CONFIG_NAME).write_text(json.dumps(self.config, indent=2) + "\n")
        for name, content in self.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)


def has_tokenizer(folder: Path) -> bool:
    """Whether `load_tokenizer` finds one in a folder."""
    return (folder / FILE_NAME).is_file() or letters.is_described(folder)


TRAINED = {"bpe": BPETokenizer.train}
"""The tokenizers that a corpus trains, from its texts and a number of ids; others are loaded."""


def load_tokenizer(path: str | Path, separator: str | None = None) -> Tokenizer:
    """The tokenizer in a `tokenizer.json`, in a folder with one or ESM's `vocab.txt`, or "bytes".

    The special tokens are named by the files beside it, or are the usual ones of its vocabulary;
    `separator` names one token for begin and end.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no tokenizer, has no separator, or is on another machine; or one
            beside it is damaged.
    """
    if path == "bytes":
        return ByteTokenizer()
    file = local_path(path, "tokenizer")
    file = file / FILE_NAME if file.is_dir() else file
    of_letters = not file.is_file() and letters.is_described(file.parent)
    if not (file.is_file() or of_letters):
        raise FileNotFoundError(
            f"no tokenizer at {file} (in {Path.cwd()}): give 'bytes', a {FILE_NAME}, a folder that "
            f"holds one, or for a corpus {', '.join(map(repr, TRAINED))}; "
            "zoo.save(…, tokenizer=…) puts one beside a model"
        )
    try:
        if of_letters:
            tokenizer = letters.read_letters(file.parent)
        elif json.loads(file.read_text(encoding="utf-8")) == {"type": "bytes"}:
            return ByteTokenizer()
        else:
            tokenizer = HFTokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{file} is no tokenizer: {error}") from error
    folder = file.parent
    beside = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for pattern in (CONFIG_NAME, "config.json", *BESIDE)
        for path in sorted(folder.glob(pattern))
        if path.is_file()
    }
    try:
        config, model = (read_json(beside, name) for name in (CONFIG_NAME, "config.json"))
        if of_letters:
            config = letters.SPECIAL | {"tokenizer_class": "EsmTokenizer"} | config
        ends = model.get("eos_token_id")
        if GENERATION_CONFIG_NAME not in beside and isinstance(ends, list):
            beside[GENERATION_CONFIG_NAME] = json.dumps({"eos_token_id": ends}).encode()
        files = {n: beside[n] for n in beside if n not in (CONFIG_NAME, "config.json")}
        return BPETokenizer(tokenizer, separator, config, files)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def reading(tokenizer: Tokenizer, special_tokens: Reading) -> Tokenizer:
    """The same tokenizer, with a reading of special tokens' names where it knows names."""
    if isinstance(tokenizer, BPETokenizer):
        tokenizer = copy.copy(tokenizer)
        tokenizer.special_tokens = special_tokens
    return tokenizer


def begin_id(tokenizer: Any) -> int | None:
    """The id that a tokenizer's texts begin with; a tokenizer that does not say has a separator."""
    return getattr(tokenizer, "begin_id", tokenizer.separator_id)


def end_id(tokenizer: Any) -> int:
    """The id that ends a tokenizer's texts; a tokenizer that does not say has a separator."""
    return next(iter(getattr(tokenizer, "eos_ids", ())), tokenizer.separator_id)


def begun(tokenizer: Any, ids: list[int]) -> list[int]:
    """The ids of a text after the one that texts begin with, unless that is there already."""
    begin = begin_id(tokenizer)
    return ids if begin is None or ids[:1] == [begin] else [begin, *ids]


def unframed(tokenizer: Any, ids: Any) -> slice:
    """The part of a text's ids between its begin and its end, which rows have of their own."""
    first = int(len(ids) > 0 and ids[0] == begin_id(tokenizer))
    return slice(first, len(ids) - int(len(ids) > first and ids[-1] == end_id(tokenizer)))
