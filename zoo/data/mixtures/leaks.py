"""Documents that one source of a mixture trains on and another one holds out."""

from collections.abc import Mapping

import numpy as np

from zoo.data.prepared import hashes
from zoo.data.prepared.opening import Prepared


def find_leaks(sources: Mapping[str, Prepared]) -> dict[str, set[bytes]]:
    """The hashes of documents that sources train on and others hold out, of sources that do.

    All sources hold out by the hash of the text, so that such documents exist only where they
    hold out other shares, where a source has so few that one had to change parts, and among
    functions. Only hashes between the sources' limits are compared, a slice after the other.
    """
    bounds = [source.bounds for source in sources.values()]
    begin, end = min(first for first, _ in bounds), max(last for _, last in bounds)
    documents = sum(len(part) for one in sources.values() for part in (one.train, one.held_out))
    leaks: dict[str, set[bytes]] = {}
    for window in hashes.slices(documents, begin, end):
        held = {name: _as_set(source.held_out.hashes(*window)) for name, source in sources.items()}
        for name, source in sources.items():
            others = set[bytes]().union(*(held[other] for other in held if other != name))
            if found := _as_set(source.train.hashes(*window)) & others:
                leaks.setdefault(name, set()).update(found)
    return leaks


def _as_set(records: np.ndarray) -> set[bytes]:
    content, size = records.tobytes(), hashes.HASH.itemsize
    return {content[i : i + size] for i in range(0, len(content), size)}
