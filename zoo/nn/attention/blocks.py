"""The sizes of the blocks that the splash kernel works in, by chip and length of the row.

`python -m benchmarks.splash` measures them on a TPU, and prints rows for this table.
"""

from typing import NamedTuple

import jax

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


def blocks_for(length: int) -> Blocks:
    """The blocks for a row on the chip at hand: halved until they add an eighth of it at most."""
    by_length = _TABLE.get(_device_kind(), _DEFAULT)
    blocks = by_length[min(most for most in by_length if length <= most)]
    queries, keys = _fitting(blocks.queries, length), _fitting(blocks.keys, length)
    # The row is padded to the larger of the two, which the smaller one divides.
    return Blocks(queries, keys, min(blocks.keys_per_product, keys))


def _fitting(block: int, length: int) -> int:
    while block > LANES and -length % block > length // 8:
        block //= 2
    return block


def _device_kind() -> str:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.devices()[0] if device is None else device).device_kind
