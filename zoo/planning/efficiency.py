"""Measured shares of the peaks of chips, by kind of instruction, with their sources."""

from typing import NamedTuple

import numpy as np

from zoo.training.chips import Chip

Shares = tuple[tuple[int, float], ...]  # (size, share of the peak) in ascending order


class Efficiency(NamedTuple):
    """Shares of a chip's peaks, and times beside them; 1 and 0 where nothing is known."""

    products: Shares = ((1, 1.0),)
    """For products in bf16, by their size: the edge of a cube of as many FLOPs."""
    flash: Shares = ((1, 1.0),)
    """For the FLOPs that flash kernels execute, with heads of 128, by the length of rows."""
    grouped: float = 1.0
    """For the products of experts' rows (megablox)."""
    memory: float = 1.0
    """Share of the memory's bandwidth."""
    links: float = 1.0
    """Share of the links' bytes per second."""
    start: float = 0.0
    """Seconds that each collective takes beside that."""
    per_key: float = 0.0
    """Seconds of a sort per key, with the numbers that go along."""
    per_number: float = 0.0
    """Seconds of a gather of single numbers, per number."""

    @property
    def best_flash(self) -> "Efficiency":
        """No more than the best share of flash kernels, all else at the peaks."""
        return Efficiency(flash=((1, max(share for _, share in self.flash)),))

    def of_product(self, flops: float) -> float:
        """The share of a product of so many FLOPs."""
        return _at(self.products, (flops / 2) ** (1 / 3))

    def of_kernel(self, name: str, row: int) -> float:
        """The share of a Pallas kernel of that name, in rows of so many tokens."""
        if name.startswith("splash"):
            return _at(self.flash, float(row))
        return self.grouped if "gmm" in name else self.products[-1][1]


def _at(shares: Shares, size: float) -> float:
    """The share at a size, between the measured ones by the logarithm of the size."""
    sizes, measured = zip(*shares, strict=True)
    return float(np.interp(np.log(max(size, 1.0)), np.log(sizes), measured))


PEAKS = Efficiency()


def efficiency(chip: Chip) -> Efficiency:
    """The measured shares of a chip; its peaks, if it is not in the table."""
    return EFFICIENCIES.get(chip.name, PEAKS)


# Sources: [bench] the benchmarks in AI-Hypercomputer/tpu-recipes, c8cfe2f
# (microbenchmarks/README.md of v6e, microbenchmarks/ironwood of tpu7x); [runs]
# training/ironwood/README.md there; [pedia] yangwhale/gpu-tpu-pedia, 3fa9ce1, tpu/; [marin]
# marin-community/marin#6736; [book] sharding.md of jax-ml/scaling-book; [pallas]
# docs/pallas/tpu/matmul.ipynb of JAX.
#
# products, timed on the device. tpu7x: 105, 350, 679, 893 and 950 TFLOP/s [bench]. v6e: 8,192 in
# each size take 1.511 ms [pedia, v7_perf] (1.329 with xla_tpu_scoped_vmem_limit_kib=65536 [bench]).
# v5e: 5.220 ms more for 8,192 than for 4,096 [pallas], both timed with what starts them. v4, v5p:
# by v5e, whose matrix units are as wide. Of smaller products tpu7x alone is measured.
#
# flash. tpu7x, rows of 4,096: 338 TFLOP/s forward and 401 backward by a profile [pedia,
# Hunyuan3-295B-Pretraining/TUNING-v7.md] that counts FLOPs without a mask, of which blocks of 2,048
# execute three quarters. Longer rows: two runs of Llama 3.1 70B [runs], 2,670.55 tokens/s per chip
# in rows of 8,192 and 963.03 in rows of 131,072. The difference, 5.40 ns per token and position of
# its row, is taken for attention's, and its share for that of all lengths between. The maths needs
# 6 * 80 * 8192 FLOPs of it: 728 TFLOP/s, 32% of the peak of 2,307; the kernel, with a fused
# backward pass, executes 7/6 as many. v6e: by tpu7x, whose matrix units are as wide: 256, of which
# heads of 128 fill half. v5p: fitted on Llama 3.1 8B in rows of 65,536
# (benchmarks/results/2026-11-27-calibration.md). v4, v5e: by v5p.
#
# grouped. tpu7x: 51.9% of the 1,028.75 TFLOP/s that the profiler takes for the peak, in a step with
# 192 experts of 1,536, each with about 1,200 rows at once [pedia, as above]. Wider ones may reach
# more: Mixtral's of 14,336 on v5p are at what products reach, by its published step. Others: their
# products.
#
# memory. Copies of 32 MiB on v6e 1,360 GB/s, of 8 GiB on tpu7x 3,210 [bench]. Others: between them.
#
# links, start. v5p, v6e: permutes take 4.55 µs and 86.3 GB/s, 2.29 µs and 86.8, of 100 [marin].
# v5e: gathers 95% of 45 GB/s, of 50 [book]. tpu7x: gathers on 4 devices 13 µs and 179.5 GB/s of
# 200, by five sizes [bench]; a permute is taken to start in a quarter of that. v4: by v5p.
#
# per_key. tpu7x: 161 ms of a step sort the rows of 79 layers, 229,376 in each [pedia,
# kernel-equivalence-validation/README.md]; 4 to 6 sorts per layer are taken for it, so that it may
# be wrong by a half. per_number. v6e: 11.2 ns [vllm-project/tpu-inference#3476]. Others: by these.
# What gathers and scatters of whole rows reach is not measured; they count by their bytes.
_RARE = {"per_key": 2e-9, "per_number": 11.2e-9}
_WIDE = ((4096, 0.24), (8192, 0.37))
EFFICIENCIES = {
    "v4": Efficiency(((1, 0.94),), ((1, 0.69),), 0.94, 0.85, 0.86, 4.6e-6, **_RARE),
    "v5e": Efficiency(((1, 0.94),), ((1, 0.69),), 0.94, 0.85, 0.86, 2.3e-6, **_RARE),
    "v5p": Efficiency(((1, 0.94),), ((1, 0.69),), 0.94, 0.85, 0.86, 4.6e-6, **_RARE),
    "v6e": Efficiency(((1, 0.79),), _WIDE, 0.79, 0.83, 0.87, 2.3e-6, **_RARE),
    "tpu7x": Efficiency(
        ((512, 0.09), (1024, 0.30), (2048, 0.59), (4096, 0.77), (16384, 0.82)),
        _WIDE, 0.46, 0.87, 0.90, 3.3e-6, **_RARE,
    ),
}  # fmt: skip
