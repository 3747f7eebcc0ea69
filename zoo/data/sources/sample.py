"""A bounded sample of a corpus, to train a tokenizer on."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from zoo.data.sources.reading import read_split
from zoo.data.sources.splits import Split, divide

_PLACES = 256  # in the corpus that are sampled, about


def sample_texts(
    splits: Sequence[Split],
    field: str = "text",
    *,
    num_bytes: int = 64 * 2**20,
    wanted: Callable[[str], bool] = lambda text: True,
) -> Iterator[str]:
    """Texts of about `num_bytes` in all, from everywhere in the files, whatever the splits.

    The first texts of each of some hundred parts of equal size; of a compressed file, its
    beginning. All texts where the files have no more. Only those that are `wanted`, such as those
    that are not held out.
    """
    pieces = (piece for split in splits for piece in split.pieces)
    files = dict.fromkeys(dataclasses.replace(piece, begin=0, end=piece.size) for piece in pieces)
    total = sum(file.size for file in files)
    parts = divide(files, max(2**20, total // _PLACES))
    left = num_bytes
    # The smallest first: what a part leaves of its share is for those after it.
    for index, part in enumerate(sorted(parts, key=lambda part: part.num_bytes)):
        share = left // (len(parts) - index)
        for document in read_split(part, field):
            if wanted(document.text):
                size = len(document.text.encode())
                share, left = share - size, left - size
                yield document.text
            if share <= 0:
                break
