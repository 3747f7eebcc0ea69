"""Generation as text: prompts and chats as tokens, what ends a text, its words as they come."""

import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxtyping import PyTree

from zoo.data.chats import ChatTemplate, Message
from zoo.data.tokenizer import Reading, Tokenizer, begun, reading
from zoo.decoding import sampling
from zoo.publishing.families import tokenizer_eos_ids

logger = logging.getLogger(__name__)


def encode_prompt(
    tokenizer: Tokenizer,
    text: str,
    special_tokens: Reading = "parse",
    *,
    as_stored: bool = False,
) -> list[int]:
    """The tokens of a text to continue, after the one that the tokenizer's texts begin with.

    `special_tokens` is the reading of their names in the text. With `as_stored` texts begin with
    that token only where the tokenizer's own post-processor puts it, as models in Hugging Face's
    format have it: GPT-2's does not. An empty text always begins with it.

    Raises:
        ValueError: there is no token at all.
    """
    ids = reading(tokenizer, special_tokens).encode(text).tolist()
    if not (ids and as_stored) or getattr(tokenizer, "adds_begin", True):
        ids = begun(tokenizer, ids)
    if not ids:
        raise ValueError(
            "the prompt is empty, and this model's tokenizer has no token that texts begin with: "
            "give the beginning of a text"
        )
    return ids


class Stops(NamedTuple):
    """The ends of a continuation: some tokens, and some texts that its own text may come to."""

    ids: tuple[int, ...]
    texts: tuple[str, ...] = ()


def make_stops(
    model: PyTree,
    tokenizer: Tokenizer,
    given: Sequence[str] = (),
    own: Sequence[int] | None = None,
) -> Stops:
    """The `own` ends of text and some `given` ones.

    `own` are the model's if not given, or if it has none the tokenizer's. Among the `given` ones
    the name of a special token is that token, and any other a text.

    Raises:
        ValueError: an empty text.
    """
    if own is None:
        own = getattr(getattr(model, "config", None), "eos_ids", ()) or tokenizer_eos_ids(tokenizer)
    ids, texts = [*own], []
    for stop in given:
        if not stop:
            raise ValueError(
                "stop='': give the name of a token, or a text of one character or more"
            )
        parsed = reading(tokenizer, "parse").encode(stop).tolist()
        if len(parsed) == 1 and parsed[0] in getattr(tokenizer, "special_ids", ()):
            ids += parsed
            continue
        texts.append(stop)
        if re.fullmatch(r"<\S+>", stop):
            logger.warning("stop=%r is no special token of this model's, but taken as text", stop)
        if len(one := tokenizer.encode(stop).tolist()) == 1:
            ids += one
    return Stops(tuple(dict.fromkeys(ids)), tuple(texts))


def check_stop_tokens(tokenizer: Tokenizer, stops: Stops) -> None:
    """Raise a ValueError for a stop of several tokens, which a beam search does not look for."""
    for stop in stops.texts:
        if (count := len(tokenizer.encode(stop))) != 1:
            raise ValueError(
                f"stop={stop!r} is {count} tokens of this model's: a search of several beams stops "
                "at tokens alone, so name one, or sample with num_beams=1"
            )


def have_same_tokens(tokenizer: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers have the same vocabulary."""
    vocabularies = [getattr(t, "tokenizer", None) for t in (tokenizer, other)]
    known = [None if v is None else v.get_vocab(with_added_tokens=True) for v in vocabularies]
    return known[0] == known[1] and tokenizer.vocab_size == other.vocab_size


class TextStream:
    """Ids to text as they arrive: `add` returns the text that is final, in whole characters."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._length = 0  # of the text returned so far

    def add(self, *ids: int) -> str:
        """The text that these ids complete."""
        self._ids.extend(ids)
        text = self._tokenizer.decode(self._ids)
        # The bytes of an incomplete character, three at most, are decoded as U+FFFD.
        for _ in range(3):
            text = text.removesuffix("\ufffd")
        return self._rest(text)

    def end(self) -> str:
        """The rest of the text, after the last id."""
        return self._rest(self._tokenizer.decode(self._ids))

    def _rest(self, text: str) -> str:
        new = text[self._length :]
        self._length += len(new)
        return new


class Continuation:
    """The text of one row as its tokens come, to the first stop; `prompt` is the text before it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Stops):
        self._stream = TextStream(tokenizer)
        self._stops = stops
        self.prompt = self._stream.add(*prompt)
        self.text = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The new text; none after a stop."""
        if self.stopped:
            return ""
        self.stopped = token in self._stops.ids
        return self._take(self._stream.add(token))

    def end(self) -> str:
        """The rest of the text, after the last token."""
        came_to_text = any(self.text.endswith(stop) for stop in self._stops.texts)
        return "" if came_to_text else self._take(self._stream.end())

    def _take(self, new: str) -> str:
        before = len(self.text)
        self.text += new
        ends = []
        for stop in self._stops.texts:
            at = self.text.find(stop, max(0, before - len(stop) + 1))
            ends += [] if at < 0 else [at + len(stop)]
        if ends:
            self.stopped = True
            self.text = self.text[: min(ends)]
        return self.text[before:]


def stream_texts(
    model: PyTree,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    stops: Stops,
    **options: Any,
) -> tuple[list[Continuation], Iterator[list[str]]]:
    """A continuation of each prompt, and an iterator that makes them and yields their new texts.

    The `options` are those of `zoo.stream`, which is called at once.
    """
    rows = [Continuation(tokenizer, ids, stops) for ids in prompts]
    tokens = sampling.stream(model, prompts, stop_tokens=stops.ids, **options)

    def texts() -> Iterator[list[str]]:
        for step in tokens:
            yield [row.add(token) for row, token in zip(rows, step.tolist(), strict=True)]
            if all(row.stopped for row in rows):
                return

    return rows, texts()


class Chat:
    """A conversation by the template of a model's tokenizer; `messages` grow with each turn.

    Raises:
        ValueError: the tokenizer has no template, or it is no Jinja.
    """

    def __init__(
        self, tokenizer: Tokenizer, system: str | None = None, special_tokens: Reading = "text"
    ):
        self.template = ChatTemplate(tokenizer, special_tokens=special_tokens)
        self.messages: list[Message] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    def ask(self, text: str) -> list[int]:
        """The tokens of the whole conversation, from its beginning to where the answer begins.

        Raises:
            ValueError: the template refuses the conversation, or fails on it.
        """
        ids = self.check(text)
        self.messages.append({"role": "user", "content": text})
        return ids

    def check(self, text: str) -> list[int]:
        """The result of `ask`, or the error that it would raise, without asking."""
        return self.template.encode([*self.messages, {"role": "user", "content": text}]).tolist()

    def hear(self, text: str) -> None:
        """Keep the assistant's answer."""
        self.messages.append({"role": "assistant", "content": text})
