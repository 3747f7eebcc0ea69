"""Folders whose matrices are quantised: `quantization_config`, and which matrices those are."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from zoo.hf.bitsandbytes import BitsAndBytes
from zoo.hf.family import Fields
from zoo.hf.gptq import Awq, Gptq
from zoo.hf.matrices import Expected, Matrix, Method, Part, stacked
from zoo.hf.names import Layout
from zoo.hf.weights import DTYPES, Weights
from zoo.publishing import PublishError
from zoo.sharding.axes import keystr, map_parameters
from zoo.sharding.rules import is_matrix, matrix_axes

FIELD = "quantization_config"
METHODS: Mapping[str, type[Method]] = {"gptq": Gptq, "awq": Awq, "bitsandbytes": BitsAndBytes}
# Of the tensors that take the place of a matrix's `weight`, or stand beside it.
_MARKS = (".qweight", ".qzeros", ".scales", ".g_idx", ".SCB", ".weight_format")
_INSTEAD = "open the checkpoint that it was made of, by quantize='int8', 'int4' or 'nf4'"


def read_method(
    values: Mapping[str, Any], where: str, quantize: str | None = None
) -> Method | None:
    """How a folder's matrices are quantised, by its `config.json`; None if they are not.

    Raises:
        PublishError: another method, settings that are not supported, or `quantize`, which is for
            matrices that are not quantised.
    """
    found = values.get(FIELD)
    if found is None:
        return None
    if not isinstance(found, dict):
        raise PublishError(f"{where}: {FIELD}={found!r}: has to be a table of settings")
    kind = found.get("quant_method")
    if kind is None and (found.get("load_in_4bit") or found.get("load_in_8bit")):
        kind = "bitsandbytes"  # of the time when it was the only one
    if not isinstance(kind, str) or kind not in METHODS:
        raise PublishError(
            f"{where}: weights quantised by quant_method={kind!r} are not read, only those of "
            f"{', '.join(METHODS)}; {_INSTEAD}"
        )
    if quantize is not None:
        raise PublishError(
            f"{where}: quantize={quantize!r} is for whole weights, and those here are quantised "
            f"already, by {kind}; leave it out, or open the checkpoint that they were made of"
        )
    return METHODS[kind].read(Fields(found, f"{where}: {FIELD} of {kind}"))


def find(
    method: Method | None, weights: Weights, found: Mapping[str, Layout], family: str
) -> dict[str, dict[str, Matrix]]:
    """The quantised matrices by the paths of their parameters, and by their `weight`'s names.

    Raises:
        PublishError: files and configuration disagree, a size that the method can't have, or a
            parameter of which only some layers are quantised.
    """
    marks = [name for name in weights.tensors if name.endswith(_MARKS) or ".weight." in name]
    if method is None:
        if marks:
            raise PublishError(
                f"{weights.folder}: {marks[0]} is of a quantised matrix, and config.json has no "
                f"{FIELD}, which says how; take it from quantize_config.json or quant_config.json, "
                "or get the folder again from its source"
            )
        return {}
    integers = [x for x in weights.tensors if weights.tensors[x].dtype in ("I8", "U8", "I32")]
    modules = {_module(name) for name in marks + integers}
    matrices = {}
    for path, layout in found.items():
        names = [name for name, _ in layout.names()]
        plain = [name for name in names if name.removesuffix(".weight") not in modules]
        if plain and len(plain) < len(names):
            raise PublishError(
                f"{weights.folder}: {path} stacks layers, of which some are quantised and others, "
                f"{plain[0]} for one, are not; {_INSTEAD}"
            )
        if not plain:
            if not _is_linear(layout):
                raise PublishError(
                    f"{weights.folder}: {names[0]} of the family {family} is no matrix as "
                    f"[outputs, inputs], and so it is not read quantised; {_INSTEAD}"
                )
            matrices[path] = {name: _matrix(method, name, layout, weights) for name in names}
    if not matrices:
        raise PublishError(
            f"{weights.folder}: config.json has a {FIELD}, and no matrix here is quantised; take "
            "that field out if the weights are whole, or get them again from their source"
        )
    return matrices


def _matrix(method: Method, name: str, layout: Layout, weights: Weights) -> Matrix:
    module, shape = name.removesuffix(".weight"), layout.tensor_shape
    try:
        return method.matrix(module, (shape[0], shape[1]), weights.tensors)
    except ValueError as error:
        raise PublishError(f"{weights.folder}: {module}: {error}; {_INSTEAD}") from error


def _is_linear(layout: Layout) -> bool:
    """Whether a parameter's tensors are matrices as [outputs, inputs], one each."""
    axes = [axis for axis in layout.axes if axis not in layout.numbered]
    if not is_matrix(axes):
        return False
    inputs, outputs = matrix_axes(axes)
    return layout.factors == [[axes[axis] for axis in group] for group in (outputs, inputs)]


def _module(name: str) -> str:
    return name.partition(".weight.")[0] if ".weight." in name else name.rpartition(".")[0]


def tensors(matrices: Mapping[str, Mapping[str, Matrix]]) -> dict[str, Expected]:
    """The tensors that hold the matrices."""
    every = (matrix for stack in matrices.values() for matrix in stack.values())
    return {name: expected for matrix in every for name, expected in matrix.tensors().items()}


def check_dtypes(weights: Weights, expected: Mapping[str, Expected]) -> None:
    """Refuse tensors of quantised matrices that are of another type."""
    for name, (_, dtypes) in expected.items():
        stored = weights.tensors[name]
        if stored.dtype not in dtypes:
            raise PublishError(
                f"{weights.folder / stored.file}: {name} is of type {stored.dtype}, and has to be "
                f"{' or '.join(dtypes)}; get it again from its source"
            )


def is_zero_bias(weights: Weights, name: str, matrices: Mapping[str, Mapping[str, Matrix]]) -> bool:
    """Whether a tensor is a bias of zeros, which old programs wrote beside every matrix."""
    weight = f"{name.removesuffix('.bias')}.weight"
    if not name.endswith(".bias") or not any(weight in stack for stack in matrices.values()):
        return False
    with weights.reader() as read:
        return not read(name, (slice(None),)).any()


def put(
    skeleton: PyTree,
    found: Mapping[str, Layout],
    matrices: Mapping[str, Mapping[str, Matrix]],
    weights: Weights,
    dtype: DTypeLike,
) -> tuple[PyTree, dict[str, Layout | Part]]:
    """The skeleton with the quantised parameters, and where in the files each array lies.

    `dtype` is that of their values. Raises PublishError for damaged matrices.
    """
    parts: dict[str, Layout | Part] = {x: y for x, y in found.items() if x not in matrices}

    def visit(path: tuple, names: tuple[str | None, ...], leaf: Any) -> Any:
        key = keystr(path)
        if key not in matrices:
            return leaf
        stack = matrices[key]
        with weights.reader() as read:
            for matrix in stack.values():
                try:
                    matrix.prepare(read)
                except ValueError as error:
                    raise PublishError(f"{weights.folder}: {matrix.name}: {error}") from error
        stored = next(iter(stack.values())).stored_scales
        scale_dtype = DTYPES[weights.tensors[stored].dtype] if stored else np.float32
        try:
            made, arrays = stacked(found[key], names, stack, scale_dtype, dtype)
        except ValueError as error:
            raise PublishError(f"{weights.folder}: {key}: {error}; {_INSTEAD}") from error
        parts.update({f"{key}.{name}": part for name, part in arrays.items()})
        return made

    return map_parameters(visit, skeleton), parts
