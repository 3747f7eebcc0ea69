"""A bounded sample of a corpus, to train a tokenizer on."""

from collections.abc import Callable, Iterator, Sequence

from zoo.data.sources.splits import Split


def sample_texts(
    splits: Sequence[Split],
    field: str = "text",
    *,
    num_bytes: int = 64 * 2**20,
    wanted: Callable[[str], bool] = lambda text: True,
) -> Iterator[str]:
    """Texts of about `num_bytes` in all, from everywhere in the files, whatever the splits.

    All texts where the files have no more; only those that are `wanted`, such as those that are
    not held out.
    """
    raise NotImplementedError
