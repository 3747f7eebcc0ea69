"""The layouts of quantised matrices in files: GPTQ's, AWQ's, and bitsandbytes'.

GPTQ and AWQ, after the sources of AutoGPTQ 0.7.1 and AutoAWQ 0.2.9, have integers packed into words
of 32 bits: codes, a scale and a zero point per group of inputs, and value (code - zero) * scale.
GPTQ packs the codes of eight inputs (or four of 8 bits), AWQ those of eight outputs, not in their
order.

bitsandbytes, after the sources of 0.50, as transformers saves it: in 4 bits (nf4, fp4) [outputs,
inputs] as one row of codes, two to a byte, the first one in the high bits, with a scale per block
of the row, which may be a code of 8 bits itself; in 8 bits a scale per output.
"""

# ruff: noqa: D102 (`Matrix` and `Method` document the methods)

import json
import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import numpy as np

from zoo.hf.quantization import FIELD, FLOATS, INSTEAD, Expected, Matrix, Method, Read
from zoo.hf.rules import Fields, words
from zoo.publishing import PublishError
from zoo.quantization.codes import TABLES, StoredKind

# How the codes were found, and how other programs are to multiply by them.
_OF_GPTQ = words(
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


def _gptq(fields: Fields) -> Method:
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
    fields.finish(_OF_GPTQ)
    return partial(GptqMatrix, bits, size, sym=sym, one_less=layout == "gptq")


def _awq(fields: Fields) -> Method:
    layout = str(fields.take("version", None) or fields.take("format", None) or "gemm")
    fields.take("format", None)
    if layout.lower() != "gemm":
        raise fields.refusal(f"the layout {layout!r} of AWQ is not read, only gemm")
    bits, size = _bits_and_size(fields, (4,))
    fields.finish(_OF_GPTQ | {"checkpoint_format", "sym"})
    return partial(AwqMatrix, bits, size)


def _bits_and_size(fields: Fields, choices: tuple[int, ...]) -> tuple[int, int]:
    bits, size = fields.take("bits"), fields.take("group_size")
    if bits not in choices:
        raise fields.refusal(f"bits={bits!r} is not supported, only {choices}")
    if type(size) is not int or not (size == -1 or size > 0):
        raise fields.refusal(f"group_size={size!r}: must be a positive number, or -1")
    return bits, size


class _Words(Matrix):
    """A matrix of codes, scales and zero points, the last packed along the outputs.

    A `group_size` of -1 has all inputs. `sym` says that each zero point is the middle of the codes,
    and `one_less` that they are stored less one, as the first version of GPTQ's layout has them.
    """

    has_zeros = True
    places = np.arange(8)
    """Where the outputs of a word lie in it."""

    def __init__(
        self, bits: int, group_size: int, *place: Any, sym: bool = False, one_less: bool = False
    ):
        super().__init__(*place)
        self.bits, self.per_word, self.sym, self.one_less = bits, 32 // bits, sym, one_less
        self.group = self.inputs if group_size == -1 else group_size
        self.stored_scales = f"{self.name}.scales"
        self.kind = "int8" if bits == 8 else "int4"
        if self.inputs % self.group:
            raise ValueError(f"group_size={self.group} does not divide the {self.inputs} inputs")
        for count, what in ((self.inputs, "inputs"), (self.outputs, "outputs")):
            if count % self.per_word:
                raise ValueError(f"{count} {what} can't be packed {self.per_word} to a word")

    def tensors(self) -> dict[str, Expected]:
        groups = self.inputs // self.group
        return {
            f"{self.name}.qzeros": Expected((groups, self.outputs // self.per_word), ("int32",)),
            f"{self.name}.scales": Expected((groups, self.outputs), FLOATS),
        }

    def scales(self, rows: slice, at: np.ndarray, read: Read) -> np.ndarray:
        groups = at // self.group
        where = slice(groups[0], groups[-1] + 1)
        return read(f"{self.name}.scales", (where, rows))[groups - groups[0]].T

    def zeros(self, rows: slice, at: np.ndarray, read: Read) -> np.ndarray:
        groups = at // self.group
        first, last = rows.start // self.per_word, -(-rows.stop // self.per_word)
        where = slice(groups[0], groups[-1] + 1), slice(first, last)
        packed = read(f"{self.name}.qzeros", where)
        if self.one_less:
            # Added to whole words, as GPTQModel does: a zero of 0 was stored with a borrow.
            ones = 0x01010101 if self.bits == 8 else 0x11111111
            packed = (packed.view(np.uint32) + np.uint32(ones)).view(np.int32)
        found = self._unpack(packed)[..., self.places[: self.per_word]].reshape(len(packed), -1)
        start = first * self.per_word
        cut = found[groups - groups[0], rows.start - start : rows.stop - start]
        return self._signed(cut.T)

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
                (self.inputs // self.per_word, self.outputs), ("int32",)
            ),
            f"{self.name}.g_idx": Expected((self.inputs,), ("int32",)),
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
        if self.sym:
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

    places = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # it has 0, 2, 4, 6, 1, 3, 5, 7

    def tensors(self) -> dict[str, Expected]:
        shape = self.inputs, self.outputs // self.per_word
        return super().tensors() | {f"{self.name}.qweight": Expected(shape, ("int32",))}

    def codes(self, rows: slice, columns: slice, read: Read) -> np.ndarray:
        first, last = rows.start // self.per_word, -(-rows.stop // self.per_word)
        packed = read(f"{self.name}.qweight", (columns, slice(first, last)))
        found = self._unpack(packed)[..., self.places].reshape(len(packed), -1).T
        start = first * self.per_word
        return np.ascontiguousarray(found[rows.start - start : rows.stop - start])


_OF_BITSANDBYTES = words(
    """
    _load_in_4bit _load_in_8bit bnb_4bit_compute_dtype llm_int8_enable_fp32_cpu_offload
    llm_int8_skip_modules llm_int8_threshold quant_method
    """
)


def _bitsandbytes(fields: Fields) -> Method:
    in_4bit, in_8bit = fields.take("load_in_4bit", False), fields.take("load_in_8bit", False)
    kind = fields.take("bnb_4bit_quant_type", "fp4")
    nested = bool(fields.take("bnb_4bit_use_double_quant", False))
    storage = fields.take("bnb_4bit_quant_storage", "uint8")
    if bool(in_4bit) == bool(in_8bit):
        raise fields.refusal("has to have one of load_in_4bit and load_in_8bit")
    if in_4bit and kind not in TABLES:
        raise fields.refusal(f"bnb_4bit_quant_type={kind!r} is not supported, only {[*TABLES]}")
    if in_4bit and storage not in ("uint8", None):
        raise fields.refusal(f"bnb_4bit_quant_storage={storage!r} is not supported, only uint8")
    if fields.take("llm_int8_has_fp16_weight", False):
        raise fields.refusal("llm_int8_has_fp16_weight is not supported")
    fields.finish(_OF_BITSANDBYTES)
    return partial(BlockMatrix, kind, nested) if in_4bit else Int8Matrix


class Int8Matrix(Matrix):
    """A matrix of 8 bits per code, with a scale per output."""

    kind: StoredKind = "int8"

    def __init__(self, name: str, shape: tuple[int, int], stored: Collection[str]):
        super().__init__(name, shape, stored)
        self.group = self.inputs
        self._format = f"{name}.weight_format"
        self._has_format = self._format in stored

    def tensors(self) -> dict[str, Expected]:
        found = {
            f"{self.name}.weight": Expected((self.outputs, self.inputs), ("int8",)),
            f"{self.name}.SCB": Expected((self.outputs,), ("float32",)),
        }
        return found | ({self._format: Expected((), ("uint8",))} if self._has_format else {})

    def prepare(self, read: Read) -> None:
        if self._has_format and (layout := int(read(self._format, ()))) != 0:
            raise ValueError(f"weight_format={layout}: only 0, rows as they are, is read")

    def codes(self, rows: slice, columns: slice, read: Read) -> np.ndarray:
        return read(f"{self.name}.weight", (rows, columns))

    def scales(self, rows: slice, at: np.ndarray, read: Read) -> np.ndarray:
        found = read(f"{self.name}.SCB", (rows,)) / np.float32(127)
        return np.broadcast_to(found[:, None], (len(found), len(at)))


class BlockMatrix(Matrix):
    """A matrix of 4 bits per code, with a scale per block of the flattened matrix.

    The scales may be `nested`: quantised too.
    """

    def __init__(self, kind: StoredKind, nested: bool, *place: Any):
        super().__init__(*place)
        self.kind, self.nested = kind, nested
        self._state = f"{self.name}.weight.quant_state.bitsandbytes__{kind}"
        if self.inputs % 2:
            raise ValueError(f"rows of {self.inputs} inputs, an odd number, are not supported")

    def tensors(self) -> dict[str, Expected]:
        size, name = self.outputs * self.inputs, f"{self.name}.weight"
        found = {
            name: Expected((-(-size // 2), 1), ("uint8",)),
            f"{name}.absmax": Expected(None, ("uint8",) if self.nested else ("float32",)),
            f"{name}.quant_map": Expected((16,), ("float32",)),
            self._state: Expected(None, ("uint8",)),
        }
        if self.nested:
            found[f"{name}.nested_absmax"] = Expected(None, ("float32",))
            found[f"{name}.nested_quant_map"] = Expected((256,), ("float32",))
        return found

    def prepare(self, read: Read) -> None:
        name, every = f"{self.name}.weight", (slice(None),)
        if not np.allclose(read(f"{name}.quant_map", every), TABLES[self.kind], atol=1e-6):
            raise ValueError(f"quant_map is another table than that of {self.kind}")
        try:
            state = json.loads(read(self._state, every).tobytes())
            self._block, shape = state["blocksize"], state["shape"]
            self._nested_block = state["nested_blocksize"] if self.nested else 1
            self._offset = np.float32(state["nested_offset"] if self.nested else 0)
            blocks = -(-self.outputs * self.inputs // self._block)
            counts = {"absmax": blocks}
            if self.nested:
                counts["nested_absmax"] = -(-blocks // self._nested_block)
        except (ValueError, LookupError, TypeError, ArithmeticError) as error:
            raise ValueError(f"{self._state} is damaged: {error!r}") from error
        if tuple(shape) != (self.outputs, self.inputs):
            raise ValueError(
                f"{self._state} is of a matrix {tuple(shape)}, and the configuration of "
                f"{(self.outputs, self.inputs)}"
            )
        for each, count in counts.items():
            if (found := len(read(f"{name}.{each}", every))) != count:
                raise ValueError(f"{each} has {found} numbers, and {count} blocks need one each")
        self._nested_map = read(f"{name}.nested_quant_map", every) if self.nested else None
        # Blocks are of the flattened matrix: one may end inside of a row.
        self.group = math.gcd(self._block, self.inputs)

    def codes(self, rows: slice, columns: slice, read: Read) -> np.ndarray:
        half = self.inputs // 2
        where = slice(rows.start * half, rows.stop * half), slice(0, 1)
        both = read(f"{self.name}.weight", where).reshape(-1, half)
        return np.stack([both >> 4, both & 15], -1).reshape(len(both), -1)[:, columns]

    def scales(self, rows: slice, at: np.ndarray, read: Read) -> np.ndarray:
        blocks = (np.arange(rows.start, rows.stop)[:, None] * self.inputs + at) // self._block
        found = _picked(f"{self.name}.weight.absmax", blocks, read)
        if self._nested_map is None:
            return found
        outer = _picked(f"{self.name}.weight.nested_absmax", blocks // self._nested_block, read)
        return self._nested_map[found] * outer + self._offset


def _picked(name: str, index: np.ndarray, read: Read) -> np.ndarray:
    """The numbers of a vector at ascending indices, of which only their range is read."""
    first, last = int(index.min()), int(index.max()) + 1
    return read(name, (slice(first, last),))[index - first]


METHODS: Mapping[str, Callable[[Fields], Method]] = {
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
}
"""By `quant_method`: the method of its settings, which refuses what is not supported."""


def read_method(found: Any, where: str, quantize: str | None = None) -> Method:
    """How a folder's matrices are quantised, by the `quantization_config` of its `config.json`.

    Raises:
        PublishError: another method, settings that are not supported, or `quantize`, which is for
            matrices that are not quantised.
    """
    if not isinstance(found, dict):
        raise PublishError(f"{where}: {FIELD}={found!r}: has to be a table of settings")
    kind = found.get("quant_method")
    if kind is None and (found.get("load_in_4bit") or found.get("load_in_8bit")):
        kind = "bitsandbytes"  # from the time when it was the only one
    if not isinstance(kind, str) or kind not in METHODS:
        raise PublishError(
            f"{where}: weights quantised by quant_method={kind!r} are not read, only "
            f"{', '.join(METHODS)}; {INSTEAD}"
        )
    if quantize is not None:
        raise PublishError(
            f"{where}: quantize={quantize!r} is for whole weights, and those here are quantised "
            f"already, by {kind}; leave it out, or open the checkpoint that they were made of"
        )
    return METHODS[kind](Fields(found, f"{where}: {FIELD} of {kind}"))
