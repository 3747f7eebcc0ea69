"""GPTQ's layout of quantised matrices, and AWQ's: integers packed into words of 32 bits.

After the sources of AutoGPTQ 0.7.1 and AutoAWQ 0.2.9. Both store codes, a scale and a zero point
per group of inputs, and value (code - zero) * scale. GPTQ packs the codes of eight inputs (or four
of 8 bits), AWQ those of eight outputs, not in their order.
"""

# ruff: noqa: D102 (`Matrix` and `Method` document the methods)

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from zoo.hf.family import Fields, words
from zoo.hf.matrices import FLOATS, Expected, Matrix, Method, Read
from zoo.hf.weights import Stored
from zoo.quantization.codes import StoredKind

# How the codes were found, and how other programs are to multiply by them.
_IGNORED = words(
    """
    act_group_aware amp auto_mixed_precision backend batch_size block_name_to_quantize
    cache_block_outputs cache_examples_on_gpu damp_auto_increment damp_percent dataset desc_act
    disable_exllama do_fuse exllama_config fuse_max_seq_len lm_head max_input_length meta
    model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block
    modules_in_block_to_quantize modules_to_fuse modules_to_not_convert mse offload_to_disk
    offload_to_disk_path pad_token_id quant_method static_groups tokenizer true_sequential
    use_cuda_fp16 use_exllama zero_point
    """
)
# Where the eight outputs of a word of AWQ's lie in it: it has 0, 2, 4, 6, 1, 3, 5, 7.
_AWQ = np.array([0, 4, 1, 5, 2, 6, 3, 7])


@dataclass(frozen=True)
class Gptq(Method):
    """GPTQ's settings."""

    bits: int
    group_size: int
    """Of inputs; -1: all of them."""
    sym: bool
    """Whether each zero point is said to be the middle of the codes."""
    one_less: bool
    """Whether zero points are stored less one, as the first version of the layout has them."""

    @classmethod
    def read(cls, fields: Fields) -> "Gptq":
        layout = fields.take("checkpoint_format", None) or fields.take("format", None) or "gptq"
        fields.take("format", None)
        if layout not in ("gptq", "gptq_v2") or fields.take("is_marlin_format", False):
            raise fields.refusal(f"the layout {layout!r} of GPTQ is not read, only gptq, gptq_v2")
        if changed := fields.take("dynamic", None):
            raise fields.refusal(f"dynamic={changed!r}: settings per module are not supported")
        if (dtype := fields.take("pack_dtype", "int32")) != "int32":
            raise fields.refusal(f"pack_dtype={dtype!r} is not supported, only 'int32'")
        bits, size = _bits_and_size(fields, (4, 8))
        sym = bool(fields.take("sym", False))
        fields.finish(_IGNORED)
        return cls(bits, size, sym, layout == "gptq")

    def matrix(self, name: str, shape: tuple[int, int], stored: Mapping[str, Stored]) -> Matrix:
        return GptqMatrix(self, name, shape)


@dataclass(frozen=True)
class Awq(Gptq):
    """AWQ's settings."""

    @classmethod
    def read(cls, fields: Fields) -> "Awq":
        layout = str(fields.take("version", None) or fields.take("format", None) or "gemm")
        fields.take("format", None)
        if layout.lower() != "gemm":
            raise fields.refusal(f"the layout {layout!r} of AWQ is not read, only gemm")
        bits, size = _bits_and_size(fields, (4,))
        fields.finish(_IGNORED | {"checkpoint_format", "sym"})
        return cls(bits, size, sym=False, one_less=False)

    def matrix(self, name: str, shape: tuple[int, int], stored: Mapping[str, Stored]) -> Matrix:
        return AwqMatrix(self, name, shape)


def _bits_and_size(fields: Fields, choices: tuple[int, ...]) -> tuple[int, int]:
    bits, size = fields.take("bits"), fields.take("group_size")
    if bits not in choices:
        raise fields.refusal(f"bits={bits!r} is not supported, only {choices}")
    if type(size) is not int or not (size == -1 or size > 0):
        raise fields.refusal(f"group_size={size!r}: must be a positive number, or -1")
    return bits, size


class _Words(Matrix):
    """A matrix of codes, scales and zero points, the last packed along the outputs."""

    def __init__(self, config: Gptq, name: str, shape: tuple[int, int]):
        super().__init__(name, shape)
        self.bits, self.per_word, self.config = config.bits, 32 // config.bits, config
        self.group = self.inputs if config.group_size == -1 else config.group_size
        self.has_zeros = True
        if self.inputs % self.group:
            raise ValueError(f"group_size={self.group} does not divide the {self.inputs} inputs")
        for count, what in ((self.inputs, "inputs"), (self.outputs, "outputs")):
            if count % self.per_word:
                raise ValueError(f"{count} {what} can't be packed {self.per_word} to a word")

    @property
    def kind(self) -> StoredKind:
        return "int8" if self.bits == 8 else "int4"

    def tensors(self) -> dict[str, Expected]:
        groups = self.inputs // self.group
        return {
            f"{self.name}.qzeros": Expected((groups, self.outputs // self.per_word), ("I32",)),
            f"{self.name}.scales": Expected((groups, self.outputs), FLOATS),
        }

    @property
    def stored_scales(self) -> str:
        return f"{self.name}.scales"

    def scales(self, rows: slice, at: np.ndarray, read: Read) -> np.ndarray:
        groups = at // self.group
        where = slice(groups[0], groups[-1] + 1)
        return read(self.stored_scales, (where, rows))[groups - groups[0]].T

    def zeros(self, rows: slice, at: np.ndarray, read: Read) -> np.ndarray:
        groups = at // self.group
        first, last = rows.start // self.per_word, -(-rows.stop // self.per_word)
        where = slice(groups[0], groups[-1] + 1), slice(first, last)
        packed = read(f"{self.name}.qzeros", where)
        if self.config.one_less:
            # Added to whole words, as GPTQModel does: a zero of 0 was stored with a borrow.
            ones = 0x01010101 if self.bits == 8 else 0x11111111
            packed = (packed.view(np.uint32) + np.uint32(ones)).view(np.int32)
        found = self._in_order(self._unpack(packed)).reshape(len(packed), -1)
        start = first * self.per_word
        cut = found[groups - groups[0], rows.start - start : rows.stop - start]
        return self._signed(cut.T)

    def _in_order(self, unpacked: np.ndarray) -> np.ndarray:
        return unpacked

    def _unpack(self, packed: np.ndarray) -> np.ndarray:
        """The [..., 8 or 4] numbers of words, lowest bits first."""
        parts = np.ascontiguousarray(packed).view(np.uint8).reshape(*packed.shape, 4)
        if self.bits == 8:
            return parts
        return np.stack([parts & 15, parts >> 4], -1).reshape(*packed.shape, 8)

    def _signed(self, codes: np.ndarray) -> np.ndarray:
        """Codes of 8 bits less 128, as int8."""
        codes = np.ascontiguousarray(codes)
        return (codes ^ np.uint8(128)).view(np.int8) if self.bits == 8 else codes


class GptqMatrix(_Words):
    """A matrix in GPTQ's layout."""

    def tensors(self) -> dict[str, Expected]:
        return super().tensors() | {
            f"{self.name}.qweight": Expected(
                (self.inputs // self.per_word, self.outputs), ("I32",)
            ),
            f"{self.name}.g_idx": Expected((self.inputs,), ("I32",)),
        }

    def prepare(self, read: Read) -> None:
        groups = read(f"{self.name}.g_idx", (slice(None),))
        sizes = np.bincount(groups, minlength=1) if groups.min() >= 0 else np.array([])
        if sizes.tolist() != [self.group] * (self.inputs // self.group):
            raise ValueError(
                f"g_idx is damaged: it has to have each of the {self.inputs // self.group} groups "
                f"{self.group} times"
            )
        if (np.diff(groups) < 0).any():
            self.order = np.argsort(groups, kind="stable").astype(np.int32)
        if self.config.sym:
            # What the configuration says of it is checked: old programs wrote it for all files.
            every = self.zeros(slice(0, self.outputs), np.arange(0, self.inputs, self.group), read)
            self.has_zeros = bool((every != (0 if self.bits == 8 else 8)).any())

    def codes(self, rows: slice, columns: slice, read: Read) -> np.ndarray:
        first, last = columns.start // self.per_word, -(-columns.stop // self.per_word)
        if self.order is not None:
            first, last = 0, self.inputs // self.per_word
        unpacked = self._unpack(read(f"{self.name}.qweight", (slice(first, last), rows)))
        found = unpacked.swapaxes(0, 1).reshape(unpacked.shape[1], -1)
        if self.order is not None:
            return self._signed(found[:, self.order[columns]])
        start = first * self.per_word
        return self._signed(found[:, columns.start - start : columns.stop - start])


class AwqMatrix(_Words):
    """A matrix in AWQ's layout."""

    def tensors(self) -> dict[str, Expected]:
        shape = self.inputs, self.outputs // self.per_word
        return super().tensors() | {f"{self.name}.qweight": Expected(shape, ("I32",))}

    def codes(self, rows: slice, columns: slice, read: Read) -> np.ndarray:
        first, last = rows.start // self.per_word, -(-rows.stop // self.per_word)
        packed = read(f"{self.name}.qweight", (columns, slice(first, last)))
        found = self._in_order(self._unpack(packed)).reshape(len(packed), -1).T
        start = first * self.per_word
        return np.ascontiguousarray(found[rows.start - start : rows.stop - start])

    def _in_order(self, unpacked: np.ndarray) -> np.ndarray:
        return unpacked[..., _AWQ]
