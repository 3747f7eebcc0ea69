"""Prompts with completions, and chats: texts of which only some parts count in the loss.

Each becomes a document whose text is JSON, a list of examples, each of which is a list of
[part, whether it counts]; a chat may be several examples. The parts of a completion are tokenized
one by one, as a prompt is in generation, and a chat is tokenized as a whole.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zoo.data.chats import ChatTemplate, Message, Part
from zoo.data.corpus import Corpus
from zoo.data.documents import Document, read_json_lines
from zoo.data.special_tokens import end_id
from zoo.data.tokenizer import BPETokenizer, Tokenizer

Counted = tuple[np.ndarray, np.ndarray]  # ids, and whether each of them counts


def read_completions(
    pattern: str, *, prompt: str = "prompt", completion: str = "completion"
) -> list[Document]:
    """The lines of the matching `.jsonl` files; the completions count in the loss.

    Raises:
        ValueError: a line lacks one of the fields, or has something else than text in it.
    """

    def examples(record: dict[str, Any]) -> list[list[Part]]:
        texts = [text_of(record, field) for field in (prompt, completion)]
        return [[(texts[0], False), (texts[1], True)]]

    return _read(pattern, examples)


def read_chats(pattern: str, template: ChatTemplate, *, field: str) -> list[Document]:
    """The chats of the matching `.jsonl` files; the assistant's messages count in the loss.

    `field` holds a chat's messages, each with a `role` and a `content`. What counts is what the
    template marks by `{% generation %}`, or else each answer up to its end of turn. Where the
    template writes a turn differently once others follow, as those do that drop earlier thoughts,
    each answer is an example of its own, after what a model is given to answer.

    Raises:
        ValueError: a line is no chat, has no message of the assistant, or is refused by the
            template, or the template does not show where the assistant's messages begin and end.
    """

    def examples(record: dict[str, Any]) -> list[list[Part]]:
        found = parts_of(messages_of(record, field), template)
        if not found:
            raise ValueError(f"no message of the assistant in {field!r}")
        return found

    return _read(pattern, examples)


def parts_of(messages: list[Message], template: ChatTemplate) -> list[list[Part]]:
    """The examples of a conversation, in parts of which the assistant's answers count."""
    return _marked(messages, template) if template.has_marks else _turns(messages, template)


def _marked(messages: list[Message], template: ChatTemplate) -> list[list[Part]]:
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return []
    parts = template.marked(messages[: answers[-1] + 1])
    rest = ""
    while parts and not parts[-1][1]:
        rest = parts.pop()[0] + rest
    if not parts:
        raise ValueError("the chat template marks no part of it by {% generation %}")
    end, ended = template.answer(rest)
    if ended and not template.answer(parts[-1][0])[1]:
        parts.append((end, True))  # a model that is not taught the end of a turn never stops
    return [parts]


def _turns(messages: list[Message], template: ChatTemplate) -> list[list[Part]]:
    examples: list[list[Part]] = []
    written, ended = "", False
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = template(messages[:i], add_generation_prompt=True)
        whole = template(messages[: i + 1], add_generation_prompt=False)
        if not whole.startswith(prompt):
            raise ValueError(
                f"the chat template writes message {i} differently from an answer to the messages "
                "before it, so that the assistant's part can't be told apart: mark it in the "
                "template by {% generation %} and {% endgeneration %}"
            )
        if not (ended and prompt.startswith(written)):
            examples.append([])
            written = ""
        answer, ended = template.answer(whole[len(prompt) :])
        examples[-1] += [(prompt[len(written) :], False), (answer, True)]
        written = prompt + answer
    return examples


def messages_of(record: dict[str, Any], field: str) -> list[Message]:
    """The messages in a field of a record; a ValueError unless they are some."""
    messages = record.get(field)
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError(f"no list of messages in {field!r}; its fields are {sorted(record)}")
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise ValueError(
                f"no text in field 'role' of message {i} in {field!r}: {message!r:.80}"
            )
        content = message.get("content")
        empty = content is None and bool(message.get("tool_calls"))
        if not isinstance(content, str | list) and not empty:
            raise ValueError(
                f"no text in field 'content' of message {i} in {field!r}: {message!r:.80}"
            )
    return messages


def _read(pattern: str, examples: Callable[[dict[str, Any]], list[list[Part]]]) -> list[Document]:
    documents = []
    for name, where, record in read_json_lines(pattern):
        try:
            documents.append(Document(name, json.dumps(examples(record))))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    if not documents:
        raise ValueError(f"{pattern!r} has no lines")
    return documents


def text_of(record: dict[str, Any], field: str) -> str:
    """The text in a field of a record; a ValueError unless it is one."""
    value = record.get(field)
    if not isinstance(value, str):
        raise ValueError(f"no text in field {field!r}; its fields are {sorted(record)}")
    return value


def tokenize_parts(
    documents: Sequence[Document], tokenizer: Tokenizer, cache_folder: Path | None = None
) -> Corpus:
    """The corpus of documents of parts, with the tokens that count; there is no cache."""

    def encode(parts: list[Part]) -> Counted:
        ids = tokenizer.encode_batch([text for text, _ in parts])
        counted = [np.full(len(i), counts) for i, (_, counts) in zip(ids, parts, strict=True)]
        return np.concatenate(ids), np.concatenate(counted)

    return _tokenize(documents, tokenizer.vocab_size, encode)


def tokenize_chats(
    documents: Sequence[Document], tokenizer: Tokenizer, cache_folder: Path | None = None
) -> Corpus:
    """As `tokenize_parts`, of whole conversations: a special token's name is that token.

    They begin as the template does. One that ends with no special token gets the tokenizer's end.
    """
    assert isinstance(tokenizer, BPETokenizer)

    def encode(parts: list[Part]) -> Counted:
        ids, counted = _encode_chat(tokenizer, parts)
        if int(ids[-1]) not in tokenizer.special_ids:
            ids, counted = np.append(ids, np.int32(end_id(tokenizer))), np.append(counted, True)
        return ids, counted

    return _tokenize(documents, tokenizer.vocab_size, encode, framed=True)


def _encode_chat(tokenizer: BPETokenizer, parts: list[Part]) -> Counted:
    ids, spans = tokenizer.encode_spans("".join(text for text, _ in parts))
    starts, counted = spans[:, 0], np.zeros(len(ids), bool)
    begin = 0
    for i, (text, counts) in enumerate(parts):
        if counts and ((starts < begin) & (spans[:, 1] > begin)).any():
            # A model is given the prompt's own ids, so that none may reach into the answer.
            halves = _encode_chat(tokenizer, parts[:i]), _encode_chat(tokenizer, parts[i:])
            ids, counted = map(np.concatenate, zip(*halves, strict=True))
            return ids, counted
        counted |= (starts >= begin) & (starts < begin + len(text)) & counts
        begin += len(text)
    return ids, counted


def _tokenize(
    documents: Sequence[Document],
    vocab_size: int,
    encode: Callable[[list[Part]], Counted],
    framed: bool = False,
) -> Corpus:
    names, arrays, all_counted, num_bytes = [], [], [], 0
    for document in documents:
        for example in json.loads(document.text):
            parts = [(text, counts) for text, counts in example]
            ids, counted = encode(parts)
            names.append(document.name)
            arrays.append(ids)
            all_counted.append(counted)
            num_bytes += sum(len(text.encode()) for text, counts in parts if counts)
    return Corpus.from_arrays(arrays, vocab_size, num_bytes, names, all_counted, framed)
