"""Chat templates: the text and the ids of a conversation, as transformers makes them."""

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from zoo.data.tokenizer import CHAT_TEMPLATE_NAME, BPETokenizer, Ids, Tokenizer

Message = Mapping[str, Any]
Part = tuple[str, bool]  # a text, and whether it counts

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Around what a template marks as generated; no text has these noncharacters.
BEGIN, END = "\ufdd0generation\ufdd1", "\ufdd0endgeneration\ufdd1"


class ChatTemplate:
    """A tokenizer's own chat template, a function `(messages, add_generation_prompt=…) -> text`.

    Templates are Jinja, run in its sandbox, with the functions that Hugging Face's templates use.
    `now` is the time that they may write; None is the time of the call.

    Raises:
        ImportError: Jinja is not installed.
        ValueError: the tokenizer has no template, or it is no Jinja; at a call, the template
            refuses the messages, or fails on them.
    """

    def __init__(self, tokenizer: Tokenizer, now: datetime.datetime | None = None):
        source = _source(tokenizer)
        if source is None:
            raise ValueError(
                "the model's tokenizer has no chat template (chat_template in "
                "tokenizer_config.json, or chat_template.jinja): add one to its folder, or give "
                "the data as prompts and completions"
            )
        assert isinstance(tokenizer, BPETokenizer)
        self.tokenizer, self.source = tokenizer, source
        self.has_marks = GENERATION.search(source) is not None
        self.writes_time = "strftime_now" in source
        self._now = now
        self._template = _compile(source)

    def __call__(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The text of a conversation; at its end, if asked for, the beginning of an answer."""
        return self._render(messages, add_generation_prompt, str)

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> Ids:
        """The ids of a conversation; at their end, by default, the beginning of an answer."""
        text = self(messages, add_generation_prompt=add_generation_prompt)
        return self.tokenizer.encode_special([text])[0]

    def marked(self, messages: Sequence[Message]) -> list[Part]:
        """The text in parts, of which those between `{% generation %}` and its end count."""
        text = self._render(messages, False, lambda text: BEGIN + text + END)
        parts: list[Part] = []
        for at, piece in enumerate(re.split(f"{BEGIN}|{END}", text)):
            parts += [(piece, at % 2 == 1)] if piece else []
        return parts

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
        tokens = map(self.tokenizer.tokenizer.id_to_token, self.tokenizer.special_ids)
        longest_first = sorted(map(re.escape, filter(None, tokens)), key=len, reverse=True)
        return re.compile(rf"({'|'.join(longest_first)})\s*\Z")

    def _render(self, messages: Sequence[Message], prompt: bool, mark: Any) -> str:
        now = self._now or datetime.datetime.now()
        try:
            return self._template.render(
                # A field that is None counts as missing: templates would write the word.
                messages=[{k: v for k, v in m.items() if v is not None} for m in messages],
                tools=None,
                documents=None,
                add_generation_prompt=prompt,
                strftime_now=now.strftime,
                mark_generation=mark,
                **self.tokenizer.tokens,
            )
        except Refusal as error:
            raise ValueError(f"the chat template refuses it: {error}") from error
        except Exception as error:  # of Jinja, or of Python from inside the template
            raise ValueError(f"the chat template fails on it: {error}") from error


class Refusal(Exception):
    """A template's own objection to a conversation."""


def _refuse(message: str) -> None:
    raise Refusal(message)


def _source(tokenizer: Tokenizer) -> str | None:
    if not isinstance(tokenizer, BPETokenizer):
        return None
    if CHAT_TEMPLATE_NAME in tokenizer.files:
        return tokenizer.files[CHAT_TEMPLATE_NAME].decode()
    source = tokenizer.config.get("chat_template")
    if isinstance(source, list):  # several by name
        return next((one["template"] for one in source if one["name"] == "default"), None)
    return source


def _compile(source: str) -> Any:
    try:
        import jinja2
        from jinja2 import nodes
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
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is no Jinja: line {error.lineno}: {error}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes what HTML reserves.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
