"""The sizes of the blocks that the splash kernel works in, by chip and length of the row.

`python -m benchmarks.splash` measures them on a TPU, and prints rows for this table.
"""

from typing import NamedTuple

from zoo.nn.precision import device_kind

LANES = 128  # a block is a multiple of it


class Blocks(NamedTuple):
    """Queries and keys of a block, forward and backward, and the keys of one product in it."""

    queries: int
    keys: int
    keys_per_product: int


# For rows up to each length. Not measured yet for any chip: large enough that a kernel's time is in
# its products, small enough for the memory of the smallest core.
_DEFAULT = {8_192: Blocks(512, 512, 512), 1 << 30: Blocks(1024, 1024, 512)}
_TABLE: dict[str, dict[int, Blocks]] = {}  # by `device_kind`


def blocks_for(length: int, num_keys: int | None = None) -> Blocks:
    """The blocks for a row on the chip at hand: halved until they add an eighth of it at most.

    `num_keys`, if not as many as the queries, are those that a part of a row sees.
    """
    num_keys = length if num_keys is None else num_keys
    by_length = _TABLE.get(device_kind(), _DEFAULT)
    blocks = by_length[min(most for most in by_length if num_keys <= most)]
    queries, keys = _fitting(blocks.queries, length), _fitting(blocks.keys, num_keys)
    return Blocks(queries, keys, min(blocks.keys_per_product, keys))


def _fitting(block: int, length: int) -> int:
    while block > LANES and -length % block > length // 8:
        block //= 2
    return block
