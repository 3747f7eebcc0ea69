"""Prompts with completions, and chats: texts of which only some parts count in the loss.

Each becomes a document whose text is JSON, a list of [part, whether it counts]. Parts are tokenized
one by one, as a prompt is in generation.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zoo.data.corpus import Corpus
from zoo.data.documents import Document, read_json_lines
from zoo.data.tokenizer import CHAT_TEMPLATE_NAME, BPETokenizer, Tokenizer

Part = tuple[str, bool]  # a text, and whether it counts


def read_completions(
    pattern: str, *, prompt: str = "prompt", completion: str = "completion"
) -> list[Document]:
    """The lines of the matching `.jsonl` files; the completions count in the loss.

    Raises:
        ValueError: a line lacks one of the fields, or has something else than text in it.
    """

    def parts(record: dict[str, Any]) -> list[Part]:
        texts = [_text(record, field) for field in (prompt, completion)]
        return [(texts[0], False), (texts[1], True)]

    return _read(pattern, parts)


def read_chats(pattern: str, template: Callable[..., str], *, field: str) -> list[Document]:
    """The chats of the matching `.jsonl` files; the assistant's messages count in the loss.

    `field` holds a chat's messages, each with a `role` and a `content`; `template` is a
    `chat_template`.

    Raises:
        ValueError: a line is no chat, has no message of the assistant, or is refused by the
            template, or the template does not show where the assistant's messages begin and end.
    """

    def parts(record: dict[str, Any]) -> list[Part]:
        messages = record.get(field)
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise ValueError(f"no list of messages in {field!r}; its fields are {sorted(record)}")
        found: list[Part] = []
        written = ""
        for i, message in enumerate(messages):
            if _text(message, "role") != "assistant":
                continue
            _text(message, "content")
            before = template(messages[:i], add_generation_prompt=True)
            after = template(messages[: i + 1], add_generation_prompt=False)
            if not before.startswith(written) or not after.startswith(before):
                raise ValueError(
                    f"the chat template writes the text before message {i} differently when "
                    "messages follow, so that the assistant's part can't be told apart"
                )
            found += [(before[len(written) :], False), (after[len(before) :], True)]
            written = after
        if not found:
            raise ValueError(f"no message of the assistant in {field!r}")
        return found

    return _read(pattern, parts)


def _read(pattern: str, parts: Callable[[dict[str, Any]], list[Part]]) -> list[Document]:
    documents = []
    for name, where, record in read_json_lines(pattern):
        try:
            documents.append(Document(name, json.dumps(parts(record))))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    if not documents:
        raise ValueError(f"{pattern!r} has no lines")
    return documents


def _text(record: dict[str, Any], field: str) -> str:
    value = record.get(field)
    if not isinstance(value, str):
        raise ValueError(f"no text in field {field!r}; its fields are {sorted(record)}")
    return value


def tokenize_parts(
    documents: Sequence[Document], tokenizer: Tokenizer, cache_folder: Path | None = None
) -> Corpus:
    """The corpus of documents of parts, with the tokens that count; there is no cache."""
    return _tokenize(documents, tokenizer, tokenizer.encode_batch)


def tokenize_chats(
    documents: Sequence[Document], tokenizer: Tokenizer, cache_folder: Path | None = None
) -> Corpus:
    """As `tokenize_parts`; a special token's name, as chat templates write it, is that token.

    A separator that the template begins with is dropped: each document has one before it already.
    """
    assert isinstance(tokenizer, BPETokenizer)
    return _tokenize(documents, tokenizer, tokenizer.encode_special)


def _tokenize(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    encode: Callable[[Sequence[str]], list[np.ndarray]],
) -> Corpus:
    arrays, counts, num_bytes = [], [], 0
    for document in documents:
        parts = json.loads(document.text)
        ids = encode([text for text, _ in parts])
        counted = [np.full(len(i), counts) for i, (_, counts) in zip(ids, parts, strict=True)]
        begins = int(len(ids[0]) > 0 and ids[0][0] == tokenizer.separator_id)
        arrays.append(np.concatenate(ids)[begins:])
        counts.append(np.concatenate(counted)[begins:])
        num_bytes += sum(len(text.encode()) for text, counts in parts if counts)
    names = [document.name for document in documents]
    return Corpus.from_arrays(arrays, tokenizer.vocab_size, num_bytes, names, counts)


def chat_template(tokenizer: Tokenizer) -> Callable[..., str]:
    """The tokenizer's own template as a function `(messages, add_generation_prompt=...) -> text`.

    Templates are Jinja, run in its sandbox, with the functions that Hugging Face's templates use.

    Raises:
        ImportError: Jinja is not installed.
        ValueError: the tokenizer has no template.
    """
    config = tokenizer.config if isinstance(tokenizer, BPETokenizer) else {}
    source = config.get("chat_template")
    if isinstance(tokenizer, BPETokenizer) and CHAT_TEMPLATE_NAME in tokenizer.files:
        source = tokenizer.files[CHAT_TEMPLATE_NAME].decode()
    if isinstance(source, list):  # several by name
        source = next((one["template"] for one in source if one["name"] == "default"), None)
    if source is None:
        raise ValueError(
            "the model's tokenizer has no chat template (chat_template in tokenizer_config.json): "
            "add one to its folder, or give the data as prompts and completions"
        )
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ImportError("a chat template needs an extra: pip install 'zoo[hf]'") from error

    def refuse(message: str) -> None:
        raise ValueError(f"the chat template refuses it: {message}")

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals |= {"raise_exception": refuse}
    environment.filters["tojson"] = lambda x, indent=None: json.dumps(
        x, ensure_ascii=False, indent=indent
    )
    tokens = {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in config.items()
        if name.endswith("_token") and token is not None
    }
    template = environment.from_string(source)

    def render(messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        try:
            return template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **tokens
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template fails on it: {error}") from error

    return render
