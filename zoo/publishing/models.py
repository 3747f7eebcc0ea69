"""A model as a folder that anyone can open: configuration, safetensors, card and checksums.

The folder holds `config.json` (family, parameter count, the fields of its `Config`),
`model.safetensors` (a tensor per parameter, named by its dotted path in the model), `README.md`,
`metrics.json` and the tokenizer's files where there are any, and `checksums.json`. Folders in
Hugging Face's format, whose `config.json` has a `model_type`, are read and written by `hf`.
"""

import json
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from zoo.base import checksums
from zoo.nn.parameters import is_derived
from zoo.publishing import adapters, hf
from zoo.publishing.families import describe, family_name, read_skeleton
from zoo.publishing.folder import (
    CONFIG,
    METRICS,
    README,
    WEIGHTS,
    hugging_face_config,
    replacing,
    verify,
)
from zoo.publishing.shelf import find
from zoo.publishing.tensors import (
    PublishError,
    parameter_shapes,
    parse_dtype,
    read_tensors,
    write_tensors,
)


def save(
    folder: Path | str,
    model: eqx.Module,
    *,
    format: Literal["zoo", "hf"] = "zoo",
    tokenizer: Any = None,
    card: str = "",
    metrics: dict | None = None,
) -> None:
    """Writes `model`, in the dtypes it has, as the folder that `load` opens, all or nothing.

    A model already there is replaced, and a folder with other files is refused. `format="hf"` is
    what transformers opens too. `tokenizer` is any object with `.save(folder)`, `card` is Markdown
    for the README, `metrics` is JSON, which is written with the checksums of what was measured.
    All processes call it, and the first writes. Raises PublishError where `load` could not make
    the model again, or no Hugging Face family has it.
    """
    if any(map(is_derived, jax.tree.leaves(model, is_leaf=is_derived))):
        raise PublishError(
            "the model has adapters: merge them by zoo.lora.merge, or save them alone by "
            "zoo.save_adapters"
        )
    with replacing(folder) as new:
        if format == "hf":
            family, description = hf.describe(model, tokenizer)
            hf.write(new, model, family)
        else:
            description = describe(model)
            write_tensors(new and new / WEIGHTS, model)
        if new is not None:
            (new / CONFIG).write_text(json.dumps(description, indent=1) + "\n")
            readme = _readme(Path(folder).absolute().name, model, card)
            (new / README).write_text(readme, encoding="utf-8")
            if tokenizer is not None:
                tokenizer.save(new)
            # A card may be edited by hand, and the model opens still.
            if metrics is not None:  # with what they were measured on
                measured = {**metrics, "files": checksums.of(new, skip=(README,))}
                (new / METRICS).write_text(json.dumps(measured, indent=1) + "\n")
            checksums.write(new, skip=(README,))


def load(
    name_or_folder: str | Path, *, mesh: Mesh | None = None, dtype: DTypeLike | None = None
) -> Any:
    """The model in a folder, of a name on the shelf, or of a Hugging Face hub id.

    It is born on `mesh` (None: one device): each device reads its own slices, so that no device
    or host holds the whole. Floating point parameters are cast to `dtype` slice by slice: "bf16",
    "fp16", "fp32", or any floating point dtype (None: as stored). The checksums of a folder that
    has them are verified first; Hugging Face's have none.
    Nothing in a folder is executed. Raises PublishError, naming the file, field or tensor at fault.
    """
    dtype = parse_dtype(dtype)
    folder = find(name_or_folder)
    values = hugging_face_config(folder)
    if values is None or (folder / checksums.NAME).exists():
        verify(folder)
    if values is not None:
        return hf.load(folder, values, mesh=mesh, dtype=dtype)
    if adapters.are_adapters(folder):
        base = load(adapters.base_of(folder), mesh=mesh, dtype=dtype)
        return adapters.load_adapters(folder, base, mesh=mesh, dtype=dtype)
    return read_tensors(folder / WEIGHTS, read_skeleton(folder), mesh, dtype)


def _readme(name: str, model: eqx.Module, card: str) -> str:
    num_parameters = sum(int(np.prod(shape)) for shape in parameter_shapes(model).values())
    return (
        f"# {name}\n\n{card.strip()}\n\n"
        f"- Family: `{family_name(model)}`, {num_parameters:,} parameters\n"
        f'- Open it with `zoo.load("{name}")`, or the path of this folder\n'
    )
