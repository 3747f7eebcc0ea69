"""Texts as the ids of contexts and continuations, as lm-eval makes them."""

from collections.abc import Sequence

from zoo.data.special_tokens import begin_id, begun, end_id
from zoo.data.tokenizer import Tokenizer
from zoo.tasks.evaluation.rows import Pair


def encode_pair(
    tokenizer: Tokenizer, context: str, continuation: str, *, begin: bool = True
) -> tuple[list[int], list[int]]:
    """The ids of a context and of its continuation, tokenised together as lm-eval does.

    Blanks at the end of the context move to the continuation; the whole is encoded, and split at
    the length of the context alone. With `begin`, the token that the tokenizer's texts begin with
    comes first, as it does in training. An empty context has no ids (the scorer's `prefix_id`).
    """
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    before, whole = tokenizer.encode_batch([stripped, stripped + continuation])
    ids = before.tolist()
    return begun(tokenizer, ids) if begin else ids, whole[len(before) :].tolist()


def prefix_id(tokenizer: Tokenizer) -> int:
    """The id that stands before a text without a context: the begin of text, or its end."""
    begin = getattr(tokenizer, "bos_id", begin_id(tokenizer))
    return end_id(tokenizer) if begin is None else begin


def windows(text: Sequence[int], prefix: int, length: int) -> list[Pair]:
    """The rows of a whole text: its parts of `length` tokens, each after the token before it.

    These are the windows of lm-eval: each token is scored once, the first one after `prefix`, and
    the last window has as much context as a row has room for.
    """
    size = len(text)
    found: list[Pair] = [([prefix], text[:length])] if size else []
    for done in range(length, size, length):
        stop = min(done + length, size)
        found.append((text[stop - length - 1 : done], text[done:stop]))
    return found
