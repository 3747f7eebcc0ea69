"""The matrices of a model as the modules of Hugging Face's that hold them: `q_proj`, `c_attn`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
from jaxtyping import PyTree

from zoo.hf.folder import family_of
from zoo.hf.names import LAYER, Tensor
from zoo.nn.parameters import resolve
from zoo.sharding.axes import keystr, map_parameters
from zoo.sharding.rules import is_matrix, matrix_axes


@dataclass(frozen=True)
class Linear:
    """A matrix of a model, and the module that it is the weight of, or a part of the weight."""

    module: str
    """The module's name, a template as in `Tensor`."""
    sizes: Mapping[str, int]
    """The sizes of the matrix's axes, in their order; those before `inputs` stack matrices."""
    inputs: str
    """The axes that are the module's input features, joined as in `Tensor`."""
    outputs: str
    """The axes that are its output features."""
    is_transposed: bool
    """Whether the weight is stored as [in, out], as a Conv1D's is."""
    part: tuple[int, int]
    """(i, n): the i-th of n parts of the module's outputs."""
    refusal: str
    """Why PEFT's format has no adapter of this matrix; "" if it has."""

    def names(self, prefix: str) -> list[str]:
        """The name of the module in each layer; where each expert has one, of the first one's."""
        layers = range(self.sizes.get(LAYER, 1))
        return [self.module.format(prefix=prefix, layer=i, experts=0) for i in layers]

    @property
    def stacked(self) -> tuple[str, ...]:
        """The axes that stack matrices."""
        used = {*self.inputs.split("."), *self.outputs.split(".")}
        return tuple(axis for axis in self.sizes if axis not in used)


def linears(model: PyTree) -> tuple[Any, dict[str, Linear]]:
    """The family of a model, with adapters or without, and its matrices by their paths.

    Raises:
        PublishError: no family of Hugging Face's has such a model.
    """
    plain = eqx.filter_eval_shape(resolve, model)
    family = family_of(plain)
    tensors, found = family.tensors, {}

    def add(path: tuple, names: tuple[str | None, ...], leaf: Any) -> None:
        if is_matrix(names):
            key = keystr(path)
            axes = [name or LAYER for name in names]
            sizes = dict(zip(axes, leaf.shape, strict=True))
            found[key] = _linear(key, names, sizes, tensors[key])

    map_parameters(add, plain)
    return family, found


def _linear(
    path: str, names: Sequence[str | None], sizes: Mapping[str, int], tensor: Tensor
) -> Linear:
    axes = [*sizes]
    inputs = {axes[i] for i in matrix_axes(names)[0]}
    stacked = axes[: matrix_axes(names)[0][0]]
    groups = (tensor.axes or " ".join(axes[len(stacked) :])).split()
    is_transposed = inputs <= {*groups[0].split(".")}
    refusal = ""
    if "embedding" in path:
        refusal = "an embedding is no Linear"
    elif stacked not in ([], [LAYER]) or "routes" in axes:
        refusal = "versions of transformers name experts and their routers differently"
    return Linear(
        module=tensor.name.removesuffix(".weight"),
        sizes=sizes,
        inputs=groups[not is_transposed],
        outputs=groups[is_transposed],
        is_transposed=is_transposed,
        part=tensor.part or (0, 1),
        refusal=refusal,
    )
