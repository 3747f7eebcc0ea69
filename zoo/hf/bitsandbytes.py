"""bitsandbytes' layouts of quantised matrices, as transformers saves them: nf4, fp4 and int8.

After the sources of bitsandbytes 0.50. 4 bits: [outputs, inputs] as one row of codes, two to a
byte, the first one in the high bits, with a scale per block of the row. The scales may be codes of
8 bits themselves, with scales of their own. 8 bits: a scale per output.
"""

# ruff: noqa: D102 (`Matrix` and `Method` document the methods)

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from zoo.hf.family import Fields, words
from zoo.hf.matrices import Expected, Matrix, Method, Read
from zoo.hf.weights import Stored
from zoo.quantization.codes import TABLES, StoredKind

_IGNORED = words(
    """
    _load_in_4bit _load_in_8bit bnb_4bit_compute_dtype llm_int8_enable_fp32_cpu_offload
    llm_int8_skip_modules llm_int8_threshold quant_method
    """
)


@dataclass(frozen=True)
class BitsAndBytes(Method):
    """The settings of bitsandbytes."""

    kind: StoredKind
    nested: bool
    """Whether the scales are quantised too."""

    @classmethod
    def read(cls, fields: Fields) -> "BitsAndBytes":
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
        fields.finish(_IGNORED)
        return cls(kind if in_4bit else "int8", nested)

    def matrix(self, name: str, shape: tuple[int, int], stored: Mapping[str, Stored]) -> Matrix:
        if self.kind == "int8":
            return Int8Matrix(name, shape, stored)
        return BlockMatrix(self, name, shape)


class Int8Matrix(Matrix):
    """A matrix of 8 bits per code, with a scale per output."""

    kind: StoredKind = "int8"

    def __init__(self, name: str, shape: tuple[int, int], stored: Mapping[str, Stored]):
        super().__init__(name, shape)
        self.group = self.inputs
        self._format = f"{name}.weight_format"
        self._has_format = self._format in stored

    def tensors(self) -> dict[str, Expected]:
        found = {
            f"{self.name}.weight": Expected((self.outputs, self.inputs), ("I8",)),
            f"{self.name}.SCB": Expected((self.outputs,), ("F32",)),
        }
        return found | ({self._format: Expected((), ("U8",))} if self._has_format else {})

    def prepare(self, read: Read) -> None:
        if self._has_format and (layout := int(read(self._format, ()))) != 0:
            raise ValueError(f"weight_format={layout}: only 0, rows as they are, is read")

    def codes(self, rows: slice, columns: slice, read: Read) -> np.ndarray:
        return read(f"{self.name}.weight", (rows, columns))

    def scales(self, rows: slice, at: np.ndarray, read: Read) -> np.ndarray:
        found = read(f"{self.name}.SCB", (rows,)) / np.float32(127)
        return np.broadcast_to(found[:, None], (len(found), len(at)))


class BlockMatrix(Matrix):
    """A matrix of 4 bits per code, with a scale per block of the flattened matrix."""

    def __init__(self, config: BitsAndBytes, name: str, shape: tuple[int, int]):
        super().__init__(name, shape)
        self.config = config
        if self.inputs % 2:
            raise ValueError(f"rows of {self.inputs} inputs, an odd number, are not supported")

    @property
    def kind(self) -> StoredKind:
        return self.config.kind

    def tensors(self) -> dict[str, Expected]:
        size, name = self.outputs * self.inputs, f"{self.name}.weight"
        found = {
            name: Expected((-(-size // 2), 1), ("U8",)),
            f"{name}.absmax": Expected(None, ("U8",) if self.config.nested else ("F32",)),
            f"{name}.quant_map": Expected((16,), ("F32",)),
            self._state: Expected(None, ("U8",)),
        }
        if self.config.nested:
            found[f"{name}.nested_absmax"] = Expected(None, ("F32",))
            found[f"{name}.nested_quant_map"] = Expected((256,), ("F32",))
        return found

    @property
    def _state(self) -> str:
        return f"{self.name}.weight.quant_state.bitsandbytes__{self.kind}"

    def prepare(self, read: Read) -> None:
        name, every = f"{self.name}.weight", (slice(None),)
        if not np.allclose(read(f"{name}.quant_map", every), TABLES[self.kind], atol=1e-6):
            raise ValueError(f"quant_map is another table than that of {self.kind}")
        try:
            state = json.loads(read(self._state, every).tobytes())
            self._block, shape = state["blocksize"], state["shape"]
            nested = self.config.nested
            self._nested_block = state["nested_blocksize"] if nested else 1
            self._offset = np.float32(state["nested_offset"] if nested else 0)
            blocks = -(-self.outputs * self.inputs // self._block)
            counts = {"absmax": blocks}
            if nested:
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
        self._nested_map = read(f"{name}.nested_quant_map", every) if nested else None
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
