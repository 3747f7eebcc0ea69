"""The tensors of a folder in Hugging Face's format, made of a model's parameters."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from zoo.hf.family import Family, Piece, layouts, pieces
from zoo.publishing.tensors import BLOCK_BYTES, Tensor, parameters
from zoo.sharding.placement import gathered


def tensors_of(model: Any, family: Family, dtypes: Mapping[str, np.dtype]) -> dict[str, Tensor]:
    """The tensors that hold a model, in `dtypes` by the paths of its parameters."""
    arrays = parameters(model)
    found = layouts(family.skeleton(model.config), family, family.prefix(model.config))

    def by_rows(parts: list[Piece], dtype: np.dtype) -> Iterator[np.ndarray]:
        whole = np.empty(found[parts[0].path].tensor_shape, dtype)
        for path, at in parts:
            layout = found[path]
            whole[layout.own_rows] = layout.write(at, gathered(arrays[path], layout.at(at)))
        yield whole

    def each(parts: list[Piece], dtype: np.dtype) -> Iterator[np.ndarray]:
        axis = found[parts[0].path].part_axis
        # Along the first axis one part follows on another, along any other they lie side by side.
        for group in [parts] if axis else [[part] for part in parts]:
            for rows in found[group[0].path].rows(BLOCK_BYTES // dtype.itemsize):
                made = []
                for path, at in group:
                    taken = gathered(arrays[path], found[path].at({**at, **rows}))
                    made.append(found[path].write(at, taken))
                yield found[group[0].path].joined(made, dtype)

    described = {}
    for name, parts in pieces(found).items():
        dtype = np.result_type(*[dtypes[part.path] for part in parts])
        shape = found[parts[0].path].tensor_shape
        write = each if found[parts[0].path].own_rows is None else by_rows
        described[name] = Tensor(shape, dtype, partial(write, parts, dtype))
    return described
