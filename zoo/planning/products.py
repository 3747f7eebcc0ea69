"""Floating-point operations of the products in a compiled program, by instruction."""

import math
import re

import numpy as np

from zoo.planning import hlo
from zoo.planning.hlo import Computation, Instruction, Program


def flops(
    program: Program, computation: Computation, instruction: Instruction, of: str = ""
) -> float:
    """FLOPs of an instruction, of a fusion those of all that is in it: two per multiply and add.

    TPUs write a product as a convolution. Kernels are left out: the text says nothing of them.
    `of` is a type of HLO's, such as "s8", that the operands of the products counted have.
    """
    if instruction.opcode == "fusion":
        fused = program.computations[instruction.called["calls"][0]]
        return sum(flops(program, fused, each, of) for each in fused.instructions.values())
    if instruction.operands and not _type(computation, instruction).startswith(of):
        return 0.0
    if instruction.opcode == "convolution":
        return _convolution(_operands(computation, instruction), instruction)
    contracted = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}")
    if instruction.opcode == "custom-call":  # of cuBLAS
        found = instruction.attribute(r'lhs_contracting_dimensions":\[([\d,"]*)\]')
        contracted = found and found.replace('"', "")
    if contracted is None or instruction.opcode not in ("dot", "custom-call"):
        return 0.0
    left = _operands(computation, instruction)[0]
    inner = math.prod(left[int(axis)] for axis in contracted.split(",") if axis)
    return 2.0 * inner * math.prod(_sizes(hlo.arrays(instruction.type)[0]))


def _type(computation: Computation, instruction: Instruction) -> str:
    """The type of the first operand."""
    operand = computation.instructions.get(instruction.operands[0])
    return "" if operand is None else operand.type


def _operands(computation: Computation, instruction: Instruction) -> list[list[int]]:
    return [_sizes(computation.instructions[name].type) for name in instruction.operands[:2]]


def _sizes(type_: str) -> list[int]:
    match = re.search(r"\[([\d,<=]*)\]", type_)
    return [int(size.lstrip("<=")) for size in match.group(1).split(",") if size] if match else []


def _convolution(operands: list[list[int]], instruction: Instruction) -> float:
    labels = instruction.attribute(r"dim_labels=([\w]+_[\w]+->[\w]+)") or ""
    left, right = operands
    inputs, kernel, outputs = re.split(r"_|->", labels)
    out = _sizes(instruction.type)
    spatial = sorted(x for x in kernel if x.isdigit())
    pairs = 1.0
    for index, label in enumerate(spatial):
        pairs *= _places(
            left[inputs.index(label)],
            right[kernel.index(label)],
            out[outputs.index(label)],
            {name: _window(instruction, name, index) for name in _WINDOW},
        )
    batch_groups = int(instruction.attribute(r"batch_group_count=(\d+)") or 1)
    rows = left[inputs.index("b")] / batch_groups
    return 2.0 * pairs * rows * right[kernel.index("i")] * right[kernel.index("o")]


_WINDOW = {"stride": "1", "pad": "0_0", "lhs_dilate": "1", "rhs_dilate": "1"}


def _window(instruction: Instruction, name: str, index: int) -> str:
    found = instruction.attribute(rf"window=\{{[^}}]*\b{name}=([\dx_\-]+)")
    return found.split("x")[index] if found else _WINDOW[name]


def _places(size: int, kernel: int, out: int, window: dict[str, str]) -> float:
    """How many places of a kernel lie on a value of the input, over all outputs: not on padding."""
    stride, left, right = (int(window[x]) for x in ("stride", "lhs_dilate", "rhs_dilate"))
    before = int(window["pad"].split("_")[0])
    at = np.arange(out)[:, None] * stride - before + np.arange(kernel)[None, :] * right
    return float(np.sum((at >= 0) & (at <= (size - 1) * left) & (at % left == 0)))
