"""The writing of adapters in PEFT's format, module by module."""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from zoo.publishing import peft_config
from zoo.publishing.errors import PublishError
from zoo.publishing.folder import ADAPTER_CONFIG
from zoo.publishing.hf.linears import Linear, linears
from zoo.publishing.peft import ENDS, METADATA, WEIGHTS, layout, refusal
from zoo.publishing.tensors import Tensor, write_file
from zoo.sharding.axes import keystr
from zoo.sharding.placement import on_host
from zoo.wrappers import lora


def write(
    folder: Path | None, model: PyTree, config: lora.Config, base: dict[str, Any], metadata: str
) -> None:
    """Write the adapters of a model, which `config` describes.

    All processes call it, and those without a folder take part in gathering. `base` are the fields
    of `adapter_config.json` that name the model, `metadata` goes into the header of the weights.

    Raises:
        PublishError: no family of Hugging Face's has the model, or PEFT no adapters on a matrix.
    """
    family, table = linears(model)
    prefix, modules = family.prefixes[0], _modules(table, config)
    leaves = jtu.tree_leaves_with_path(model, is_leaf=lora.is_adapted)
    nodes = {keystr(path): node for path, node in leaves if keystr(path) in config.targets}
    tensors: dict[str, Tensor] = {}
    for parts in modules:
        tensors |= _tensors({path: (nodes[path], linear) for path, linear in parts.items()}, prefix)
    if folder is not None:
        chosen = [next(iter(parts.values())) for parts in modules]
        values = {
            **base,
            **peft_config.fields(config, chosen, table.values(), prefix),
            "task_type": "CAUSAL_LM" if "LM" in family.architecture else "FEATURE_EXTRACTION",
        }
        text = json.dumps(values, indent=2, sort_keys=True)
        (folder / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")
    write_file(folder and folder / WEIGHTS, tensors, {"format": "pt", METADATA: metadata})


def check(model: PyTree, config: lora.Config) -> None:
    """Raise a PublishError if `write` cannot write adapters of a model on these paths."""
    for parts in _modules(linears(model)[1], config):
        _check_parts(parts, dora=config.dora)


def _check_parts(parts: Mapping[str, Linear], *, dora: bool) -> None:
    count = next(iter(parts.values())).part[1]
    if dora and len(parts) < count:
        raise PublishError(
            f"PEFT's format has DoRA for all {count} matrices of a module or for none, and here "
            f"only {', '.join(parts)} would have it; take the zoo's format, or adapt all of them"
        )


def _modules(table: dict[str, Linear], config: lora.Config) -> list[dict[str, Linear]]:
    """The matrices with adapters, by their paths, of one module after the other."""
    found: dict[str, dict[str, Linear]] = {}
    for path in config.targets:
        if table[path].refusal:
            raise PublishError(refusal(path, table[path].refusal) + "; take the zoo's format")
        found.setdefault(table[path].module, {})[path] = table[path]
    return [*found.values()]


def _tensors(parts: dict[str, tuple[lora.Adapted, Linear]], prefix: str) -> dict[str, Tensor]:
    """The tensors of a module's adapters in all layers, given the matrices in it.

    Of several, the ranks are one after the other in A, and B is zero where the rank of one meets
    the outputs of another; so are both where a matrix has no adapter.
    """
    nodes = {linear.part[0]: node for node, linear in parts.values()}
    count = next(iter(parts.values()))[1].part[1]
    one = next(iter(nodes.values()))
    fields = [field for field in ENDS if getattr(one, field) is not None]
    places = {
        (linear.part[0], field): layout(path, linear, field, one.rank, prefix)
        for path, (_, linear) in parts.items()
        for field in fields
    }

    def pieces(field: str, at: Mapping[str, int]) -> Iterator[np.ndarray]:
        for number in range(count):
            known = number if number in nodes else min(nodes)
            found, array = places[known, field], getattr(nodes[known], field)
            values = found.write(at, on_host(array[found.at(at)]))
            values = values if number in nodes else np.zeros_like(values)
            if field == "up":
                before, after = number * one.rank, (count - 1 - number) * one.rank
                values = np.pad(values, ((0, 0), (before, after)))
            yield values

    tensors = {}
    for field in fields:
        first = places[min(nodes), field]
        axis = {"down": 0, "up": 1}.get(field)  # of the rank
        shape = tuple(n * count if i == axis else n for i, n in enumerate(first.tensor_shape))
        dtype = np.result_type(*[getattr(node, field).dtype for node in nodes.values()])
        for name, at in first.names():
            tensors[name] = Tensor(shape, dtype, partial(pieces, field, at))
    return tensors
