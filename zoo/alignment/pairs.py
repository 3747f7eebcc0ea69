"""Preferences: pairs of answers to a prompt, of which one was chosen and the other rejected.

A pair is a document of two examples (see `zoo.data.completions`), the chosen one first, and so two
neighbouring documents of a corpus.
"""

import copy
import itertools
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from zoo.data import completions
from zoo.data.chats import ChatTemplate, Message, Part
from zoo.data.corpus import Corpus
from zoo.data.packing import Piece
from zoo.data.plans import HostBatch, Row
from zoo.data.rows import Form
from zoo.data.token_plans import BucketPlan

logger = logging.getLogger(__name__)

SIDES = ("chosen", "rejected")


def of_texts(record: dict[str, Any], template: None) -> list[list[Part]]:
    """Both examples of a pair of texts; without a prompt it is the words they both begin with.

    Raises:
        ValueError: a side that is empty or no text, equal sides, or no common beginning.
    """
    sides = [completions.text_of(record, side) for side in SIDES]
    _check_sides(*sides)
    if "prompt" in record:
        prompt = completions.text_of(record, "prompt")
    else:
        prompt = _common_words(*sides)
        if not prompt:
            raise ValueError(
                "no field 'prompt', and chosen and rejected have no common beginning that would "
                "be the prompt: give it in 'prompt'"
            )
        sides = [side[len(prompt) :] for side in sides]
        _check_sides(*sides)
    return [[(prompt, False), (side, True)] for side in sides]


def _common_words(one: str, other: str) -> str:
    """The words that two texts begin with, without the space after them."""
    same = one[: _count_same(one, other)]
    following = (one[len(same) :], other[len(same) :])
    if any(text and not text[0].isspace() for text in following):
        same = re.sub(r"\S+\Z", "", same)
    return same.rstrip()


def _count_same(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The length of the common beginning of two sequences."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def of_messages(record: dict[str, Any], template: ChatTemplate) -> list[list[Part]]:
    """Both examples of a pair of messages, each with one answer of the assistant.

    Without a list of messages as the prompt, the sides are whole conversations, whose common
    beginning is the prompt.

    Raises:
        ValueError: as `of_texts`, of messages.
    """
    sides = [completions.messages_of(record, side) for side in SIDES]
    _check_sides(*sides)
    if isinstance(record.get("prompt"), list):
        prompt = completions.messages_of(record, "prompt")
    else:
        count = _count_same(*sides)
        prompt, sides = sides[0][:count], [side[count:] for side in sides]
        _check_prompt(record, prompt)
    tools = completions.tools_of(record)
    examples = [
        completions.answer_parts(prompt, side, template, tools, name)
        for name, side in zip(SIDES, sides, strict=True)
    ]
    _check_sides(*(side[0].get("content") for side in sides))
    return examples


def _check_prompt(record: dict[str, Any], prompt: list[Message]) -> None:
    """Refuse conversations without a common beginning, or another than the prompt that is given."""
    if not prompt:
        raise ValueError(
            "no list of messages in 'prompt', and chosen and rejected have no common beginning"
        )
    given = record.get("prompt")
    if given is not None and given != prompt[-1].get("content"):
        raise ValueError(
            f"'prompt' is {given!r:.80}, and the common beginning of chosen and rejected ends in "
            f"{prompt[-1].get('content')!r:.80}: the prompt must be their common beginning"
        )


def _check_sides(chosen: Any, rejected: Any) -> None:
    """Refuse sides that are equal or empty."""
    for name, side in zip(SIDES, (chosen, rejected), strict=True):
        if not (side.strip() if isinstance(side, str) else side):
            raise ValueError(f"{name!r} is empty: give an answer")
    if chosen == rejected:
        raise ValueError("'chosen' and 'rejected' are equal: a pair must differ")


class PairPlan(BucketPlan):
    """One pair per row, in two segments: 1 is the chosen example, 2 the rejected one.

    `corpus` has the two examples of pair i as its documents 2i and 2i + 1. A batch is that of a
    `BucketPlan`, of whole pairs only; and, once `with_reference`, `reference`, float32[batch, 2].
    A pair too long for the largest bucket is an error, or its longer example is truncated, then
    both. One whose examples do not differ then, or have no token that counts, is left out, with a
    warning.

    Raises:
        ValueError: an odd number of documents; a pair that is too long, or `too_long` "split".
    """

    unit = "examples"
    reference: Float32[np.ndarray, "pairs 2"] | None = None
    """Log-probabilities of the chosen and the rejected examples under a reference model."""

    def _cut(
        self, corpus: Corpus, longest: int, too_long: str, room: str
    ) -> Int64[np.ndarray, "rows 3"]:
        """The pairs as rows (pair, 0, length)."""
        if len(corpus) % 2:
            raise ValueError(f"{len(corpus)} documents are no pairs: their number must be even")
        if too_long not in ("error", "truncate"):
            raise ValueError(
                f"too_long={too_long!r}: a pair is in one row: choose 'error' or 'truncate'"
            )
        lengths = self._positions(corpus).reshape(-1, 2)
        cut = lengths.sum(1) > longest
        if too_long == "error" and cut.any():
            first = int(np.argmax(cut))
            raise ValueError(
                f"the pair {corpus.name(2 * first)} has {lengths[first].sum()} tokens in both of "
                f"its examples, and {room}, or set too_long to 'truncate' (now 'error'); "
                f"{cut.sum()} of {len(lengths)} pairs are too long"
            )
        other = lengths[:, ::-1]
        room_left = np.maximum(longest - other, longest // 2)
        self._pair_lengths = np.where(cut[:, None], np.minimum(lengths, room_left), lengths)
        kept = ~cut
        for pair in np.flatnonzero(cut):
            kept[pair] = self._is_of_use(corpus, int(pair))
        if not kept.all():
            message = (
                f"{(~kept).sum()} of {len(kept)} pairs, {corpus.name(2 * int(np.argmin(kept)))} "
                f"the first, have no answers that differ once they are truncated: {room}"
            )
            if not kept.any():
                raise ValueError(message)
            logger.warning("%s; they are left out", message)
        pairs = np.flatnonzero(kept)
        return np.stack([pairs, 0 * pairs, self._pair_lengths[pairs].sum(1)], 1)

    def _is_of_use(self, corpus: Corpus, pair: int) -> bool:
        """Whether the examples of a truncated pair have tokens that count, and differ."""
        first, kept = int(self.begin_id is not None), []
        for document, length in zip(
            (2 * pair, 2 * pair + 1), self._pair_lengths[pair], strict=True
        ):
            counted = corpus.counted(document)
            stop = int(length) + 1 - first
            if counted is not None and not counted[1 - first : stop].any():
                return False
            kept.append(corpus.ids(document, 0, stop))
        chosen, rejected = kept
        return not np.array_equal(chosen, rejected)

    def row_pieces(self, epoch: int, row: int) -> list[Piece]:
        """The two pieces in a row of an epoch; none in a row of padding."""
        return [
            Piece(2 * pair + side, 0, int(length))
            for pair, _, _ in super().row_pieces(epoch, row)
            for side, length in enumerate(self._pair_lengths[pair])
        ]

    @property
    def num_pairs(self) -> int:
        """Pairs of the corpus, including the ones that are left out."""
        return len(self.corpus) // 2

    def pairs(self, k: int) -> Int64[np.ndarray, "batch"]:
        """The pair in each row of batch k; -1 in a row of padding."""
        pieces = [self._pieces(k, row) for row in range(self.batch_size)]
        return np.asarray([row[0].document // 2 if row else -1 for row in pieces])

    def with_reference(self, reference: Float32[np.ndarray, "pairs 2"]) -> "PairPlan":
        """The same plan, whose batches have their rows of `reference` too."""
        if reference.shape != (self.num_pairs, 2):
            raise ValueError(f"reference{reference.shape}: there are {self.num_pairs} pairs")
        plan = copy.copy(self)
        plan.reference = reference
        return plan

    def _content(self) -> Iterator[Any]:
        yield from super()._content()
        yield self.reference

    def row(self, bucket: int) -> Row:
        """The arrays of one row of a bucket."""
        more: Row = {} if self.reference is None else {"reference": ((2,), np.float32)}
        return super().row(bucket) | more

    def _build(self, k: int, rows: range) -> HostBatch:
        batch = super()._build(k, rows)
        if self.reference is not None:
            pairs = self.pairs(k)[rows.start : rows.stop : rows.step]
            of_rows = np.where(pairs[:, None] >= 0, self.reference[pairs], 0)
            batch["reference"] = of_rows.astype(np.float32)
        return batch


FORMS = (
    Form("texts", ("prompt", *SIDES), False, False, of_texts, PairPlan),
    Form("messages", ("prompt", *SIDES), True, True, of_messages, PairPlan),
    Form("texts without a prompt", SIDES, False, False, of_texts, PairPlan),
    Form("messages without a prompt", SIDES, True, True, of_messages, PairPlan),
)
"""The forms of pairs, as `zoo.row_forms` has them."""
