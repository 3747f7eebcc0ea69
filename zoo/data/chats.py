"""Chats: a tokenizer's template as transformers runs it, and the parts of a chat that count."""

import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zoo.common.files import local_path
from zoo.data.special_tokens import AS_TEXT, CHAT_TEMPLATE_NAME
from zoo.data.tokenizer import BPETokenizer, Ids, Reading, Tokenizer, reading

Record = dict[str, Any]
Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
Part = tuple[str, bool | str]  # a text, and whether it counts, or its tag
ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    "observation": "tool",
}
"""Roles of chat templates by the names that ShareGPT's `from` has for them."""

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Around what a template marks as generated; no text has these noncharacters.
BEGIN, END = "\ufdd0generation\ufdd1", "\ufdd0endgeneration\ufdd1"


class ChatTemplate:
    """A tokenizer's own chat template, a function `(messages, add_generation_prompt=…) -> text`.

    Templates are Jinja, run in its sandbox, with the functions that Hugging Face's templates use.
    `now` is the time that they may write; None is the time of the call. The name of a special token
    in a message is plain text, which no user can end a turn with, unless `special_tokens` is
    "parse"; names that the template itself writes are always tokens.

    Raises:
        ImportError: Jinja is not installed.
        ValueError: the tokenizer has no template, or it is no Jinja; at a call, the template
            refuses the messages, fails on them, or does not take `tools`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        now: datetime.datetime | None = None,
        special_tokens: Reading = "text",
    ):
        source = template_source(tokenizer)
        if source is None:
            raise ValueError(
                "the model's tokenizer has no chat template (chat_template in "
                "tokenizer_config.json, or chat_template.jinja): name a file of one by "
                "--chat-template, or give the data as prompts and completions"
            )
        tokenizer = reading(tokenizer, "parse")
        assert isinstance(tokenizer, BPETokenizer)
        self.tokenizer, self.source, self.special_tokens = tokenizer, source, special_tokens
        self.has_marks = GENERATION.search(source) is not None
        self._now = now
        self._template, self._takes_tools = _compile(source)

    def __call__(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Tools = None
    ) -> str:
        """The text of a conversation; at its end, if asked for, the beginning of an answer."""
        text = self.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        return text.replace(AS_TEXT, "")

    def encode(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Tools = None,
    ) -> Ids:
        """The ids of a conversation; at their end, by default, the beginning of an answer."""
        text = self.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        return self.tokenizer.encode_spans(text)[0]

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Tools = None,
        mark: Callable[[str], str] = str,
    ) -> str:
        """The text for `BPETokenizer.encode_spans`, with `AS_TEXT` after names that are text.

        `mark` is applied to what the template marks by `{% generation %}`.
        """
        now = self._now or datetime.datetime.now()
        if tools and not self._takes_tools:
            raise ValueError(
                f"'tools' has {len(tools)} tools, and the chat template writes none: give a "
                "template that takes tools (--chat-template FILE), or take the field out"
            )
        try:
            # A field that is None counts as missing: templates would write the word.
            given = [{k: v for k, v in m.items() if v is not None} for m in messages]
            return self._template.render(
                messages=self._quoted(given),
                tools=self._quoted(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                strftime_now=now.strftime,
                mark_generation=mark,
                **self.tokenizer.tokens,
            )
        except Refusal as error:
            raise ValueError(f"the chat template refuses it: {error}") from error
        except Exception as error:  # of Jinja, or of Python from inside the template
            raise ValueError(f"the chat template fails on it: {error}") from error

    def _quoted(self, value: Any) -> Any:
        """Messages in which `AS_TEXT` follows the names of special tokens that are text.

        It also follows the beginning of a name at the end of a text, as the next could complete it.
        A text that has more names once it is normalised, as by full-width letters, is taken so.
        """
        if self.special_tokens == "parse":
            return value
        if isinstance(value, str):
            names, normalizer = self.tokenizer.names, self.tokenizer.tokenizer.normalizer
            normal = value if normalizer is None else normalizer.normalize_str(value)
            if len(names.findall(normal)) > len(names.findall(value)):
                return self._quoted(normal)
            marked = names.sub(rf"\g<0>{AS_TEXT}", value)
            return marked + AS_TEXT * any(x.endswith(self._beginnings) for x in (marked, normal))
        if isinstance(value, list | tuple):
            return [self._quoted(x) for x in value]
        if isinstance(value, dict):
            return {self._quoted(k): self._quoted(x) for k, x in value.items()}
        return value

    @functools.cached_property
    def _beginnings(self) -> tuple[str, ...]:
        names = self.tokenizer.special_names
        return tuple({name[:i] for name in names for i in range(1, len(name))})

    def answer(self, text: str) -> tuple[str, bool]:
        """An answer up to its end of turn, and whether it has one.

        The end of turn is a special token that nothing but blanks follows.
        """
        found = self._ends.search(text)
        return (text, False) if found is None else (text[: found.end(1)], True)

    @functools.cached_property
    def ends_of_turn(self) -> tuple[int, ...]:
        """The id of the special token with which the template ends an answer, if it shows one."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            text = self(messages, add_generation_prompt=False)
        except ValueError:  # it refuses the plainest of conversations
            return ()
        found = self._ends.search(text)
        end = None if found is None else self.tokenizer.tokenizer.token_to_id(found[1])
        return () if end is None else (end,)

    @functools.cached_property
    def _ends(self) -> re.Pattern[str]:
        return re.compile(rf"({self.tokenizer.names.pattern})\s*\Z")


class Refusal(Exception):
    """A template's own objection to a conversation."""


def _refuse(message: str) -> None:
    raise Refusal(message)


def template_source(tokenizer: Tokenizer) -> str | None:
    """The source of a tokenizer's chat template; None without one."""
    if not isinstance(tokenizer, BPETokenizer):
        return None
    if CHAT_TEMPLATE_NAME in tokenizer.files:
        return tokenizer.files[CHAT_TEMPLATE_NAME].decode()
    source = tokenizer.config.get("chat_template")
    if isinstance(source, list):  # several by name
        return next((one["template"] for one in source if one["name"] == "default"), None)
    return source


def writes_time(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer has a chat template that writes the time."""
    return "strftime_now" in (template_source(tokenizer) or "")


def with_chat_template(tokenizer: Tokenizer, path: str) -> Tokenizer:
    """The tokenizer with the chat template of a file in place of its own, if a file is named.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the tokenizer has no special tokens that a template could write.
    """
    if not path:
        return tokenizer
    if not isinstance(tokenizer, BPETokenizer):
        raise ValueError(f"chat_template={path!r}: bytes have no special tokens; leave it out")
    source = local_path(path, "chat_template").read_bytes()
    tokenizer.files = {**tokenizer.files, CHAT_TEMPLATE_NAME: source}
    ChatTemplate(tokenizer)  # fails unless it is Jinja
    return tokenizer


def _compile(source: str) -> tuple[Any, bool]:
    """The template, and whether it reads `tools`."""
    try:
        import jinja2
        from jinja2 import meta, nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ImportError("a chat template needs an extra: pip install 'zoo[hf]'") from error

    class Generation(Extension):
        """`{% generation %}`: passes what is inside of it to `mark_generation`."""

        tags = {"generation"}  # noqa: RUF012 (mypy takes it for the base class's)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_mark", [nodes.ContextReference()])
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark(self, context: Any, caller: Any) -> str:
            return context["mark_generation"](caller())

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.globals["raise_exception"] = _refuse
    environment.filters["tojson"] = _to_json
    try:
        names = meta.find_undeclared_variables(environment.parse(source))
        return environment.from_string(source), "tools" in names
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is no Jinja: line {error.lineno}: {error}") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
    # Jinja's own escapes what HTML reserves.
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
    return text.replace(json.dumps(AS_TEXT)[1:-1], AS_TEXT)


def messages_of(record: Record, field: str) -> list[Message]:
    """The messages in a field of a record; a ValueError unless it holds messages.

    ShareGPT's `from` and `value` become a role and a content.
    """
    messages = record.get(field)
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError(f"no list of messages in {field!r}; its fields are {sorted(record)}")
    found: list[Message] = []
    for i, message in enumerate(messages):
        if "from" in message and message.get("role") is None:
            role = message["from"]
            if role not in ROLES:
                raise ValueError(
                    f"a message in {field!r} is from {role!r}, and the roles are {', '.join(ROLES)}"
                )
            rest = {k: v for k, v in message.items() if k not in ("from", "value")}
            message = {**rest, "role": ROLES[role], "content": message.get("value")}
        content = message.get("content")
        empty = content is None and bool(message.get("tool_calls"))
        wrong = [] if isinstance(content, str | list) or empty else ["content"]
        wrong = wrong if isinstance(message.get("role"), str) else ["role"]
        if wrong:
            raise ValueError(
                f"no text in field {wrong[0]!r} of message {i} in {field!r}: {message!r:.80}"
            )
        found.append(message)
    return found


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


def answer_parts(
    prompt: list[Message], answer: list[Message], template: ChatTemplate, tools: Tools, field: str
) -> list[Part]:
    """The parts of a conversation, of which the answer to the prompt counts."""
    if [message["role"] for message in answer] != ["assistant"]:
        raise ValueError(
            f"{field!r} has {len(answer)} messages after the prompt, of the roles "
            f"{[message['role'] for message in answer]}: give one answer of the assistant"
        )
    parts, begin = parts_of([*prompt, *answer], template, tools)[-1], 0
    counted: list[Part] = []
    given = len(template.render(prompt, tools=tools))
    for part, counts in parts:
        counted.append((part, bool(counts) and begin >= given))
        begin += len(part)
    return counted


def parts_of(
    messages: list[Message], template: ChatTemplate, tools: Tools = None
) -> list[list[Part]]:
    """The examples of a conversation, in parts of which the assistant's answers count.

    What counts is what the template marks by `{% generation %}`, or else each answer up to its end
    of turn. Where a turn is written differently once others follow, as by templates that drop
    earlier thoughts, each answer is an example of its own, after what a model is given to answer.

    Raises:
        ValueError: the template refuses it, or does not show where answers begin and end.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not template.has_marks or not answers:
        return _turns(messages, template, tools)
    text = template.render(
        messages[: answers[-1] + 1], tools=tools, mark=lambda text: BEGIN + text + END
    )
    pieces = enumerate(re.split(f"{BEGIN}|{END}", text))
    parts: list[Part] = [(piece, at % 2 == 1) for at, piece in pieces if piece]
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
        whole = template.render(messages[: i + 1], tools=tools)
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
