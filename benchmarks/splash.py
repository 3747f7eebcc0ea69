"""The time of the splash kernel by the sizes of its blocks, on the TPU at hand.

    python -m benchmarks.splash --lengths 4096 8192 32768

times the attention of one layer of Llama 3 8B, forward and backward, for each length and each size
of blocks that the chip's memory has room for, and prints the fastest as rows for the table in
`zoo/nn/attention/splash.py`.
"""

import itertools
import statistics
import sys
import time
from dataclasses import dataclass
from unittest import mock

import jax
import jax.numpy as jnp
import tyro

from benchmarks.attention import shapes, step
from zoo.nn.attention.splash import Blocks

SIZES = (256, 512, 1024, 2048)


@dataclass(frozen=True)
class Config:
    """Time the kernel with blocks of several sizes."""

    lengths: tuple[int, ...] = (4_096, 8_192, 32_768)
    """Positions of a row."""
    rounds: int = 10
    """Timings of each, of which the median counts."""


def main(config: Config) -> None:
    """Time all, and print the table's rows."""
    device = jax.devices()[0]
    if device.platform != "tpu":
        sys.exit(f"python -m benchmarks.splash needs a TPU, and this machine's is {device}")
    best = {length: fastest(length, config.rounds) for length in config.lengths}
    print(f"    {device.device_kind!r}: {best},")


def candidates(length: int) -> list[Blocks]:
    """Blocks that divide the row, by powers of two."""
    sizes = [size for size in SIZES if length % size == 0]
    found = itertools.starmap(Blocks, itertools.product(sizes, repeat=3))
    return [blocks for blocks in found if blocks.keys_per_product <= blocks.keys]


def fastest(length: int, rounds: int) -> Blocks:
    """The blocks with the least median time; those that do not compile are left out."""
    times: dict[Blocks, float] = {}
    for blocks in candidates(length):
        try:
            times[blocks] = seconds(length, blocks, rounds)
        except jax.errors.JaxRuntimeError as error:  # no room in the chip's memory
            print(f"{length:,} {blocks}: {str(error).splitlines()[0][:100]}", flush=True)
        else:
            print(f"{length:,} {blocks}: {1e3 * times[blocks]:.2f} ms", flush=True)
    return min(times, key=lambda blocks: times[blocks])


def seconds(length: int, blocks: Blocks, rounds: int) -> float:
    """The median time of a forward and a backward pass."""
    inputs = [jnp.ones(x.shape, x.dtype) for x in shapes("tpu", length)]
    with mock.patch("zoo.nn.attention.splash.blocks_for", return_value=blocks):
        run = jax.jit(step("splash")).lower(*inputs).compile()
    jax.block_until_ready(run(*inputs))
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        jax.block_until_ready(run(*inputs))
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


if __name__ == "__main__":
    main(tyro.cli(Config, description=Config.__doc__))
