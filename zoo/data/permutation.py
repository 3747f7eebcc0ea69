"""Keyed permutations of range(size), computed and not stored, for orders of billions of rows."""

import hashlib
import math
from typing import overload

import numpy as np
from jaxtyping import Int64

LARGEST = 2**62
Key = tuple[int | str, ...]

_ROUNDS, _ROUNDS_OF_FEW = 6, 24  # few elements have few hashes to be mixed with
_FEW = 2**12
_CHUNK = 2**13  # indices at a time, so that the rounds stay in the cache of a core
_MASK = 2**64 - 1
_ODD = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93  # multipliers that spread a difference of any bit


class Permutation:
    """A pseudo-random permutation of range(size), which a key chooses: `p[i]` is where i goes.

    `i` is an integer or an array of int64, and so is the result. Integer arithmetic alone: equal
    on every machine. Memory does not depend on the size, nor does the time per index.

    It is a Feistel network over pairs (i // b, i % b) with a * b a little above `size`, each half
    shifted in turn by a hash of the other, modulo a or b; an image outside of range(size) is
    mapped again until it is inside (J. Black and P. Rogaway, "Ciphers with Arbitrary Finite
    Domains", 2002). It shuffles; it is no cipher to keep a secret with.

    Raises:
        ValueError: the size is not in 1, 2, …, 2^62.
        IndexError: an index is outside of range(size).
    """

    def __init__(self, size: int, key: Key):
        if not 1 <= size <= LARGEST:
            raise ValueError(f"size={size}: a permutation has 1 to 2^62 = {LARGEST} elements")
        self.size = size
        self._left = math.isqrt(size - 1) + 1
        self._right = -(-size // self._left)
        rounds = _ROUNDS_OF_FEW if size <= _FEW else _ROUNDS
        self._keys = np.frombuffer(_hashed(key, 8 * rounds), "<u8").tolist()

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, i: int | np.integer) -> int: ...

    @overload
    def __getitem__(self, i: Int64[np.ndarray, "..."]) -> Int64[np.ndarray, "..."]: ...

    def __getitem__(self, i):
        if isinstance(i, np.ndarray):
            return self._of_array(i)
        if not 0 <= i < self.size:
            raise IndexError(f"index {i} of a permutation of {self.size}")
        image = self._rounds(int(i))
        while image >= self.size:
            image = self._rounds(image)
        return image

    def _of_array(self, indices: Int64[np.ndarray, "..."]) -> Int64[np.ndarray, "..."]:
        if indices.size and not 0 <= indices.min() <= indices.max() < self.size:
            raise IndexError(
                f"indices from {indices.min()} to {indices.max()} of a permutation of {self.size}"
            )
        flat = indices.ravel().astype(np.uint64)
        for begin in range(0, len(flat), _CHUNK):
            chunk = flat[begin : begin + _CHUNK]
            chunk[:] = self._rounds(chunk)
            while len(outside := np.flatnonzero(chunk >= self.size)):
                chunk[outside] = self._rounds(chunk[outside])
        return flat.astype(np.int64).reshape(indices.shape)

    def _rounds(self, x):  # an integer, or an array of uint64; alike for both
        left, right = x // self._right, x % self._right
        for number, key in enumerate(self._keys):
            if number % 2:
                right = _shifted(right, _mixed(left, key), self._right)
            else:
                left = _shifted(left, _mixed(right, key), self._left)
        return left * self._right + right


def hashed_integer(below: int, key: Key) -> int:
    """An integer in range(below), at most 2^64, that a key chooses, equal on every machine."""
    return int.from_bytes(_hashed(key, 16), "big") * below >> 128


def _hashed(key: Key, num_bytes: int) -> bytes:
    return hashlib.shake_128("\0".join(map(str, key)).encode()).digest(num_bytes)


def _mixed(half, key: int):
    """32 bits that depend on every bit of half and key."""
    mixed = (half + key & _MASK) * _ODD[0] & _MASK
    return ((mixed ^ mixed >> 32) * _ODD[1] & _MASK) >> 32


def _shifted(half, by, modulus: int):
    """(half + by * modulus / 2^32) modulo `modulus`, which is at most 2^31."""
    return (half + (by * modulus >> 32)) % modulus
