"""Retrained embeddings and heads in PEFT's format: `trainable_token_indices`, `modules_to_save`.

For the rows of some tokens PEFT stores their values, in the order of the ids; for a whole module
its weight. Where the head is the embedding, trained rows are in both, but a whole embedding only
with `ensure_weight_tying`.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import PyTree

from zoo.hf.layouts import Layout
from zoo.hf.layouts import Tensor as Place
from zoo.hf.peft_config import ROOT, Linear, Options, matches, short_names
from zoo.publishing import PublishError
from zoo.publishing.tensors import Tensor
from zoo.sharding.placement import gathered
from zoo.wrappers.retrained import Retrained

TIED = f"{ROOT}lm_head.weight"  # an embedding once more, as the head that it is too
_EMBEDDING = "embed_tokens"  # whose ids PEFT takes as a list


def layout(path: str, linear: Linear, ids: tuple[int, ...] | None, prefix: str) -> Layout:
    """The place of the new values in the tensors of PEFT."""
    sizes, end = dict(linear.sizes), "weight"
    if ids is not None:
        sizes[linear.inputs], end = len(ids), "token_adapter.trainable_tokens_delta"
    axes = [linear.outputs, linear.inputs]
    theirs = " ".join(reversed(axes) if linear.is_transposed else axes)
    tensor = Place(f"{ROOT}{linear.module}.{end}", theirs)
    return Layout(f"{path}.new", tuple(sizes.values()), tuple(sizes), tensor, prefix)


def fields(
    model: PyTree, nodes: Mapping[str, Any], by_path: Mapping[str, Linear], prefix: str
) -> dict[str, Any]:
    """The fields of `adapter_config.json` for what is retrained among nodes of a model."""
    tables = {path: node.ids for path, node in nodes.items() if _is_new(node)}
    names = {path: short_names(by_path[path], by_path.values(), prefix)[0] for path in tables}
    whole = [names[path] for path, ids in tables.items() if ids is None]
    rows = {names[path]: [*ids] for path, ids in tables.items() if ids is not None}
    found: dict[str, Any] = {"modules_to_save": whole or None}
    if rows:
        found["trainable_token_indices"] = rows.get(_EMBEDDING, rows)
    return found | ({"ensure_weight_tying": True} if whole and _is_tied(model) else {})


def tensors(
    model: PyTree, nodes: Mapping[str, Any], by_path: Mapping[str, Linear], prefix: str
) -> dict[str, Tensor]:
    """The tensors of the new values among nodes of a model."""

    def write(found: Layout, at: Mapping[str, int], node: Retrained) -> Iterator[np.ndarray]:
        yield found.write(at, gathered(node.new))

    written = {}
    for path, node in nodes.items():
        if _is_new(node):
            found = layout(path, by_path[path], node.ids, prefix)
            [(name, at)] = found.names()
            values = partial(write, found, at, node)
            written[name] = Tensor(found.tensor_shape, node.new.dtype, values)
            if node.ids is None and _is_tied(model):
                written[TIED] = written[name]
    return written


def _is_new(node: Any) -> bool:
    return isinstance(node, Retrained) and not node.frozen


def chosen(
    model: PyTree, options: Options, by_path: Mapping[str, Linear], prefix: str, where: Path
) -> dict[str, tuple[int, ...] | None]:
    """The matrices of a model that options choose.

    Raises:
        PublishError: a module that is no embedding or head, or of which the zoo has no such rows.
    """
    ends = {path: x for path, x in by_path.items() if x.end}
    find = lambda name: [p for p, x in ends.items() if matches((name,), x.names(prefix)[0])]  # noqa: E731
    found: dict[str, tuple[int, ...] | None] = {}
    for name in options.modules_to_save or ():
        if not (paths := find(name)):
            raise PublishError(
                f"{where}: modules_to_save has {name!r}, and the zoo retrains embeddings and heads "
                f"alone; those are {', '.join(x.names(prefix)[0] for x in ends.values())}"
            )
        found |= dict.fromkeys(paths)
    if found and _is_tied(model) and not options.ensure_weight_tying:
        raise PublishError(
            f"{where}: modules_to_save has the embedding, which is the head too, and without "
            "ensure_weight_tying=True PEFT trains it apart from the head; train it with that"
        )
    given = options.trainable_token_indices or {}
    rows = given if isinstance(given, dict) else {_EMBEDDING: given}
    for name, ids in rows.items():
        paths = [path for path in find(name) if ends[path].end == "embedding"]
        if name == _EMBEDDING and not paths:  # PEFT takes whatever the model's embedding is called
            paths = [path for path, x in ends.items() if x.end == "embedding"]
        if len(paths) != 1 or paths[0] in found:
            raise PublishError(
                f"{where}: trainable_token_indices has {name!r}, and the zoo trains rows of one "
                "embedding, which modules_to_save does not have"
            )
        size = next(iter(ends[paths[0]].sizes.values()))
        if not ids or not all(isinstance(x, int) and 0 <= x < size for x in ids):
            raise PublishError(
                f"{where}: trainable_token_indices={ids!r:.80}: must be ids of the {size} rows of "
                f"{name}"
            )
        found[paths[0]] = tuple(ids)
    return found


def _is_tied(model: PyTree) -> bool:
    return bool(getattr(getattr(model, "config", None), "tie_embeddings", False))
