"""Tags of a text: of its words, as for named entities, or of its letters, as for proteins.

A part has its tag in the place of "counts"; a part without a tag is between words.
"""

from collections.abc import Sequence

import numpy as np

from zoo.data.chats import Part, Record
from zoo.data.tokenizer import Tokenizer

MOST = 255  # tags, whose codes are bytes


def of_tags(record: Record, template: None) -> list[list[Part]]:
    """Words, a list, or letters, a text, each with its tag.

    Raises:
        ValueError: another number of tags than of words or letters, or tags that are no texts.
    """
    text, tags = record["text"], record["tags"]
    what = "words" if isinstance(text, list) else "letters"
    if not (isinstance(text, str | list) and isinstance(tags, str | list) and text):
        raise ValueError(
            f"the text is {text!r:.40} and its tags {tags!r:.40}: give a list of words and one of "
            "tags, or a text and a tag per letter"
        )
    if len(text) != len(tags):
        raise ValueError(f"there are {len(text)} {what} and {len(tags)} tags: give one tag to each")
    for one in (*text, *tags):
        if not isinstance(one, str) or not one:
            raise ValueError(f"{one!r} among the {what} and their tags is no text: write names")
    parts: list[Part] = [(str(one), str(tag)) for one, tag in zip(text, tags, strict=True)]
    if what == "letters":
        return [parts]
    return [[x for part in parts for x in (part, (" ", False))][:-1]]


def encode_tags(
    tokenizer: Tokenizer, parts: list[Part], classes: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a text, and for each 1 + the number of its tag; 0 if it is no word's first token.

    Raises:
        ValueError: a word without a token of its own.
    """
    ids, spans = tokenizer.encode_spans("".join(text for text, _ in parts))
    starts, stops = spans.T
    codes, begin = np.zeros(len(ids), np.uint8), 0
    for text, tag in parts:
        end = begin + len(text)
        if tag:
            first = int(np.searchsorted(stops, begin, side="right"))
            if first == len(ids) or starts[first] >= end or codes[first]:
                raise ValueError(
                    f"{text!r} at character {begin} has a tag, and the model's tokenizer no token "
                    "that begins with it: write it otherwise, or tag what the tokenizer divides"
                )
            codes[first] = 1 + classes.index(str(tag))
        begin = end
    return ids, codes
