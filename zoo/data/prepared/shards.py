"""The files of one shard, memory-mapped, of which each block is verified when it is first read."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import xxhash
from jaxtyping import UInt8

from zoo.data.prepared.format import BLOCK, SUMS, DamagedError, block_sums


class Shard:
    """The maps of files with a common stem. Any number of threads may read them.

    `sizes` are those of the files by suffix; `stem.sums` has the xxh3_64 of each of their blocks,
    and `digest` is its xxh3_128. `verified`, a byte per block, is passed on where the files are
    mapped again, so that no block is hashed twice. `remedy` says in an error how to get them back.
    """

    def __init__(
        self,
        stem: Path,
        sizes: Mapping[str, int],
        digest: str,
        remedy: str,
        verified: bytearray | None = None,
    ):
        self._stem, self._sizes, self._remedy = stem, dict(sizes), remedy
        self._maps: dict[str, np.ndarray] = {}
        self._first, count = {}, 0
        for suffix, size in sizes.items():
            self._first[suffix], count = count, count - -size // BLOCK
        self._sizes[SUMS] = 8 * count
        self.verified = bytearray(count) if verified is None else verified
        sums = self._map(SUMS)
        if xxhash.xxh3_128_hexdigest(sums.data) != digest:
            raise DamagedError(f"{stem}{SUMS} is not what was written: {remedy}")
        self._sums = sums.view("<u8")

    def path(self, suffix: str) -> Path:
        """The file of that suffix."""
        return Path(f"{self._stem}{suffix}")

    def read(self, suffix: str, begin: int, end: int) -> UInt8[np.ndarray, "bytes"]:
        """Bytes [begin, end) of a file, not to be written to.

        Raises:
            DamagedError: a block of them is not what was written.
            FileNotFoundError: the file is missing.
        """
        content = self._map(suffix)
        for block in range(begin // BLOCK, -(-end // BLOCK)):
            if not self.verified[self._first[suffix] + block]:
                self._verify(suffix, block, content[block * BLOCK : (block + 1) * BLOCK])
        return content[begin:end]

    def _verify(self, suffix: str, block: int, content: UInt8[np.ndarray, "bytes"]) -> None:
        number = self._first[suffix] + block
        if xxhash.xxh3_64_intdigest(content.data) != self._sums[number]:
            first = block * BLOCK
            raise DamagedError(
                f"{self._stem}{suffix}: block {block} (bytes {first:,} to "
                f"{first + len(content) - 1:,}) is not what was written: {self._remedy}"
            )
        self.verified[number] = 1

    def _map(self, suffix: str) -> UInt8[np.ndarray, "bytes"]:
        if suffix not in self._maps:
            path, size = self.path(suffix), self._sizes[suffix]
            check_size(path, size, self._remedy)
            # No bytes cannot be mapped.
            mapped = np.memmap(path, np.uint8, "r").view(np.ndarray) if size else np.zeros(0, "u1")
            self._maps[suffix] = mapped
        return self._maps[suffix]


def check_size(path: Path, size: int, remedy: str) -> None:
    """Raise an error where a file is missing, or has another size than was written."""
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: {remedy}") from None
    if found != size:
        raise DamagedError(f"{path} has {found:,} bytes instead of {size:,}: {remedy}")


def write_sums(stem: Path, suffixes: Sequence[str]) -> str:
    """Write the sums of the files with a stem, and return their digest."""
    sums = b"".join(block_sums(Path(f"{stem}{suffix}")) for suffix in suffixes)
    Path(f"{stem}{SUMS}").write_bytes(sums)
    return xxhash.xxh3_128_hexdigest(sums)
