"""Weights stored as floats of 4 or 8 bits with a scale per block, read as bfloat16.

MXFP4 (Rouhani et al. 2023, the OCP microscaling formats; as gpt-oss has its experts): blocks of 32
inputs in e2m1, two to a byte, the first one in the low bits, with a power of two. And fp8 as
DeepSeek-V3 has it: e4m3, with a scale in fp32 per square of a matrix.
"""

import math
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import numpy as np

from zoo.hf.layouts import Index
from zoo.hf.rules import Fields
from zoo.hf.weights import Derived, Made, Read, Stored, Weights

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])
_BLOCK = 32


def _mxfp4(weights: Weights, name: str) -> Made:
    """A stack of matrices [experts, in, out], of blocks [experts, out, in / 32, 16]."""
    stored = weights.tensors[f"{name}_blocks"]
    experts, outputs, blocks, _ = stored.shape

    def read_part(at: Index, read: Read) -> np.ndarray:
        start, stop, _ = at[1].indices(blocks * _BLOCK)
        where = (at[0], at[2], slice(start // _BLOCK, math.ceil(stop / _BLOCK)))
        codes = read(f"{name}_blocks", (*where, slice(0, _BLOCK // 2)))
        values = _E2M1[np.stack([codes & 15, codes >> 4], -1)].reshape(*codes.shape[:-1], _BLOCK)
        powers = read(f"{name}_scales", where).astype(np.int32) - 127
        values = np.ldexp(values, powers[..., None]).reshape(*values.shape[:2], -1)
        first = start // _BLOCK * _BLOCK
        values = values[:, :, start - first : stop - first].swapaxes(1, 2)
        return values.astype(jnp.bfloat16)

    shape = (experts, blocks * _BLOCK, outputs)
    return Stored(stored.file, shape, "bfloat16"), read_part


def _fp8(weights: Weights, block: tuple[int, int], name: str) -> Made:
    """A matrix with a scale per block of rows and columns."""
    stored = weights.tensors[name]

    def read_part(at: Index, read: Read) -> np.ndarray:
        ranges = [x.indices(size)[:2] for x, size in zip(at, stored.shape, strict=True)]
        firsts = [start // size for (start, _), size in zip(ranges, block, strict=True)]
        ends = [math.ceil(stop / size) for (_, stop), size in zip(ranges, block, strict=True)]
        scales = read(f"{name}_scale_inv", tuple(map(slice, firsts, ends)))
        rows, columns = (
            np.arange(*pair) // size - first
            for pair, size, first in zip(ranges, block, firsts, strict=True)
        )
        values = read(name, at).astype(np.float32) * scales[rows[:, None], columns[None]]
        return values.astype(jnp.bfloat16)

    return Stored(stored.file, stored.shape, "bfloat16"), read_part


METHODS = ("mxfp4", "fp8")


def decoded(weights: Weights, settings: dict, where: str) -> Weights:
    """The tensors of a folder, decoded by its `quantization_config`, which names one of `METHODS`.

    Raises:
        PublishError: settings that are not supported.
    """
    fields = Fields(settings, f"{where}: quantization_config")
    gone: tuple[str, ...]
    make: Callable[[str], Made]
    if settings["quant_method"] == "mxfp4":
        make, last, gone = partial(_mxfp4, weights), "_blocks", ("_blocks", "_scales")
    else:
        size = fields.take("weight_block_size", None)
        form, scheme = fields.take("fmt", "e4m3"), fields.take("activation_scheme", "dynamic")
        if not isinstance(size, list) or len(size) != 2 or form != "e4m3" or scheme != "dynamic":
            raise fields.refusal(
                f"fp8 with weight_block_size={size!r}, fmt={form!r}, activation_scheme={scheme!r} "
                "is not read, only e4m3 with a scale per block of weights, and dynamic ones else"
            )
        make, last, gone = partial(_fp8, weights, (size[0], size[1])), "_scale_inv", ("_scale_inv",)
    names = [name.removesuffix(last) for name in weights.tensors if name.endswith(last)]
    surplus = {name + end for name in names for end in gone}
    return Derived(weights, {name: make(name) for name in names}, surplus)
