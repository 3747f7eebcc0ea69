"""Prompts with completions, and chats: texts of which only some parts count in the loss.

Each row becomes examples, in parts (text, whether it counts); a chat may be several examples. An
example is tokenized as a whole, and divided into the ids of its parts.
"""

import json
from typing import Any

import numpy as np

from zoo.data.chats import ChatTemplate, Message, Part, Tools
from zoo.data.special_tokens import AS_TEXT, end_id, unframed
from zoo.data.tokenizer import BPETokenizer, Tokenizer, reading

Counted = tuple[np.ndarray, np.ndarray]  # ids, and whether each of them counts
Record = dict[str, Any]

ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{}\n\n{}### Response:\n"
)
"""The prompt that Alpaca was trained with (Taori et al. 2023)."""
ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    **dict.fromkeys(("human",), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    "observation": "tool",
}
"""Roles of chat templates by the names that ShareGPT's `from` has for them."""


def of_texts(record: Record, template: None) -> list[list[Part]]:
    """A prompt and its completion, which counts."""
    return [[(text_of(record, "prompt"), False), (text_of(record, "completion"), True)]]


def of_alpaca(record: Record, template: None) -> list[list[Part]]:
    """An instruction in Alpaca's own prompt, and the output, which counts."""
    instruction, more = text_of(record, "instruction"), _input(record)
    with_input = ", paired with an input that provides further context" if more else ""
    prompt = ALPACA.format(with_input, instruction, f"### Input:\n{more}\n\n" if more else "")
    return [[(prompt, False), (text_of(record, "output"), True)]]


def of_alpaca_chat(record: Record, template: ChatTemplate) -> list[list[Part]]:
    """An instruction and its input as the user's message, and the output as the answer."""
    asked = "\n\n".join(filter(None, (text_of(record, "instruction"), _input(record))))
    messages: list[Message] = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": text_of(record, "output")},
    ]
    return parts_of(_after_system(record, messages), template, tools_of(record))


def of_messages(record: Record, template: ChatTemplate) -> list[list[Part]]:
    """A prompt of messages and its completion, an answer of the assistant, which counts."""
    prompt, answer = (messages_of(record, field) for field in ("prompt", "completion"))
    return [answer_parts(prompt, answer, template, tools_of(record), "completion")]


def of_chat(record: Record, template: ChatTemplate, field: str = "messages") -> list[list[Part]]:
    """A chat, in which the assistant's messages count.

    What counts is what the template marks by `{% generation %}`, or else each answer up to its end
    of turn. Where the template writes a turn differently once others follow, as those do that drop
    earlier thoughts, each answer is an example of its own, after what a model is given to answer.

    Raises:
        ValueError: it is no chat, has no message of the assistant, or is refused by the template,
            or the template does not show where the assistant's messages begin and end.
    """
    messages = messages_of(record, field)
    if field == "conversations":
        messages = _after_system(record, messages)
    found = parts_of(messages, template, tools_of(record))
    if not found:
        raise ValueError(f"no message of the assistant in {field!r}")
    return found


def of_sharegpt(record: Record, template: ChatTemplate) -> list[list[Part]]:
    """A chat, as `of_chat`, in ShareGPT's column."""
    return of_chat(record, template, "conversations")


def _input(record: Record) -> str:
    return text_of(record, "input") if "input" in record else ""


def _after_system(record: Record, messages: list[Message]) -> list[Message]:
    """The messages after the one in the column `system`, unless they have one of their own."""
    system, own = record.get("system"), messages and messages[0].get("role") == "system"
    return [{"role": "system", "content": system}, *messages] if system and not own else messages


def answer_parts(
    prompt: list[Message],
    answer: list[Message],
    template: ChatTemplate,
    tools: Tools,
    field: str,
) -> list[Part]:
    """The parts of a conversation, of which the answer to the prompt counts."""
    if [message["role"] for message in answer] != ["assistant"]:
        raise ValueError(
            f"{field!r} has {len(answer)} messages after the prompt, of the roles "
            f"{[message['role'] for message in answer]}: give one answer of the assistant"
        )
    parts, begin, counted = parts_of([*prompt, *answer], template, tools)[-1], 0, []
    given = len(template.render(prompt, add_generation_prompt=False, tools=tools))
    for part, counts in parts:
        counted.append((part, counts and begin >= given))
        begin += len(part)
    return counted


def parts_of(
    messages: list[Message], template: ChatTemplate, tools: Tools = None
) -> list[list[Part]]:
    """The examples of a conversation, in parts of which the assistant's answers count."""
    return (_marked if template.has_marks else _turns)(messages, template, tools)


def _marked(messages: list[Message], template: ChatTemplate, tools: Tools) -> list[list[Part]]:
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return []
    parts = template.marked(messages[: answers[-1] + 1], tools)
    rest = ""
    while parts and not parts[-1][1]:
        rest = parts.pop()[0] + rest
    if not parts:
        raise ValueError("the chat template marks no part of it by {% generation %}")
    end, ended = template.answer(rest)
    if ended and not template.answer(parts[-1][0])[1]:
        parts.append((end, True))  # a model that is not taught the end of a turn never stops
    return [parts]


def _turns(messages: list[Message], template: ChatTemplate, tools: Tools) -> list[list[Part]]:
    examples: list[list[Part]] = []
    written, ended = "", False
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = template.render(messages[:i], add_generation_prompt=True, tools=tools)
        whole = template.render(messages[: i + 1], add_generation_prompt=False, tools=tools)
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


def messages_of(record: Record, field: str) -> list[Message]:
    """The messages in a field of a record; a ValueError unless they are some."""
    messages = record.get(field)
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError(f"no list of messages in {field!r}; its fields are {sorted(record)}")
    messages = [_with_role(message, field) for message in messages]
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


def _with_role(message: Record, field: str) -> Record:
    """A message with a role and a content, in place of ShareGPT's `from` and `value`."""
    if "from" not in message or message.get("role") is not None:
        return message
    role, rest = message["from"], {k: v for k, v in message.items() if k not in ("from", "value")}
    if role not in ROLES:
        raise ValueError(
            f"a message in {field!r} is from {role!r}, and the roles are {', '.join(ROLES)}"
        )
    return {**rest, "role": ROLES[role], "content": message.get("value")}


def tools_of(record: Record) -> Tools:
    """The functions in a record's `tools`, a list or its JSON; None without any."""
    tools = record.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ValueError(f"field 'tools' is no JSON: {error}") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"field 'tools' is {tools!r:.80}: give a list of functions, or its JSON")
    return tools


def text_of(record: Record, field: str) -> str:
    """The text in a field of a record; a ValueError unless it is one."""
    value = record.get(field)
    if not isinstance(value, str):
        raise ValueError(f"no text in field {field!r}; its fields are {sorted(record)}")
    return value


def encode_text(tokenizer: Tokenizer, parts: list[Part]) -> Counted:
    """The ids of an example, and whether they count.

    A begin or an end of text at its ends is left out, as rows have their own.
    """
    ids, counted = encode_parts(tokenizer, parts)
    inner = unframed(tokenizer, ids)
    return ids[inner], counted[inner]


def encode_chat(tokenizer: Tokenizer, parts: list[Part]) -> Counted:
    """As `encode_text`, of a conversation that begins and ends as its template does.

    One that ends with no special token gets the tokenizer's end.
    """
    tokenizer = reading(tokenizer, "parse")
    assert isinstance(tokenizer, BPETokenizer)
    ids, counted = encode_parts(tokenizer, parts)
    if int(ids[-1]) not in tokenizer.special_ids:
        ids, counted = np.append(ids, np.int32(end_id(tokenizer))), np.append(counted, True)
    return ids, counted


def counted_bytes(parts: list[Part]) -> int:
    """The size in UTF-8 of the parts that count."""
    return sum(len(text.replace(AS_TEXT, "").encode()) for text, counts in parts if counts)


def encode_parts(tokenizer: Tokenizer, parts: list[Part], inside: bool = False) -> Counted:
    """The ids of an example, tokenized as a whole, and whether they count.

    A model is given a prompt's own ids: where the whole has others, the answer is tokenized apart.
    """
    if not isinstance(tokenizer, BPETokenizer):  # bytes
        found = tokenizer.encode_batch([text for text, _ in parts])
        flags = [np.full(len(ids), counts) for ids, (_, counts) in zip(found, parts, strict=True)]
        return np.concatenate(found), np.concatenate(flags)
    whole = "".join(text for text, _ in parts)
    ids, spans = tokenizer.encode_spans(whole, inside=inside)
    starts, stops = spans.T
    counted, begin = np.zeros(len(ids), bool), 0
    for i, (text, counts) in enumerate(parts):
        if counts and begin:
            prompt, _ = tokenizer.encode_spans(whole[:begin], inside=inside)
            reaches_over = ((starts < begin) & (stops > begin)).any()
            if reaches_over or not np.array_equal(ids[: len(prompt)], prompt):
                before = encode_parts(tokenizer, parts[:i], inside)
                after = encode_parts(tokenizer, parts[i:], True)
                return np.concatenate([before[0], after[0]]), np.concatenate([before[1], after[1]])
        counted |= (starts >= begin) & (starts < begin + len(text)) & counts
        begin += len(text)
    return ids, counted
