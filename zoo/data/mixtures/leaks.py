"""Documents that one source of a mixture trains on and another one holds out."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from zoo.data.documents import Document
from zoo.data.prepared import hashes
from zoo.data.prepared.parts import Prepared

logger = logging.getLogger(__name__)

Parts = tuple[list[Document], list[Document]]  # to train on, and held out


class _Hashes(NamedTuple):
    """The hashes of a source's texts: those to train on, and those held out, in [begin, end).

    None to train on is below `trains_from`, and all held out are below `held_below`.
    """

    train: Callable[[int, int], np.ndarray]
    held_out: Callable[[int, int], np.ndarray]
    trains_from: int
    held_below: int


def without_leaks(
    memory: Mapping[str, Parts], prepared: Mapping[str, Prepared]
) -> dict[str, Parts]:
    """The parts of the sources in memory, which train on no document that another one holds out.

    All sources hold out by the hash of the text, so that such documents exist only where they
    hold out other shares, where a source has so few that one had to change parts, and among
    functions. Only hashes between the sources' limits are compared, a slice after the other.

    Raises:
        ValueError: a prepared source trains on such documents, or no document is left.
    """
    sources = {name: _in_memory(parts) for name, parts in memory.items()}
    for name, corpus in prepared.items():
        sources[name] = _Hashes(corpus.train.hashes, corpus.held_out.hashes, *corpus.bounds)
    begin = min(source.trains_from for source in sources.values())
    end = max(source.held_below for source in sources.values())
    documents = sum(len(part) for parts in memory.values() for part in parts)
    documents += sum(len(part) for one in prepared.values() for part in (one.train, one.held_out))
    leaks: dict[str, set[bytes]] = {name: set() for name in memory}
    for window in hashes.slices(documents, begin, end):
        held = {name: _as_set(source.held_out(*window)) for name, source in sources.items()}
        for name, source in sources.items():
            others = set[bytes]().union(*(held[other] for other in held if other != name))
            found = _as_set(source.train(*window)) & others
            if found and name in prepared:
                raise ValueError(
                    f"data: the source {name!r} trains on {len(found)} documents or more that "
                    "other sources hold out: prepare all of them with one --held-out, or in one "
                    "folder"
                )
            if found:
                leaks[name] |= found
    return {name: _without(name, parts, leaks[name]) for name, parts in memory.items()}


def _in_memory(parts: Parts) -> _Hashes:
    train, held_out = (hashes.of_texts(texts) for texts in _texts(parts))
    return _Hashes(
        functools.partial(hashes.between, train),
        functools.partial(hashes.between, held_out),
        trains_from=hashes.number_of(train[0]),
        held_below=hashes.number_of(held_out[-1]) + 1,
    )


def _texts(parts: Parts) -> list[list[str]]:
    """The texts of both parts; of a document that was cut in two, the whole in both."""
    train, held_out = parts
    if len(train) == len(held_out) == 1 and train[0].name == held_out[0].name:
        return [[train[0].text + held_out[0].text]] * 2
    return [[document.text for document in part] for part in parts]


def _as_set(records: np.ndarray) -> set[bytes]:
    content, size = records.tobytes(), hashes.HASH.itemsize
    return {content[i : i + size] for i in range(0, len(content), size)}


def _without(name: str, parts: Parts, leaks: set[bytes]) -> Parts:
    """The parts of a source without some of its documents to train on."""
    if not leaks:
        return parts
    train = [
        document
        for document, text in zip(parts[0], _texts(parts)[0], strict=True)
        if hashes.hash_of(text.encode()) not in leaks
    ]
    if not train:
        raise ValueError(
            f"data: the source {name!r} has no document to train on that no other source holds "
            "out: give it more text, or leave it out"
        )
    logger.warning(
        "data: %d documents to train on of the source %r are left out: other sources hold them out",
        len(parts[0]) - len(train),
        name,
    )
    return train, parts[1]
