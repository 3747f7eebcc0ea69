"""Low-rank adapters (Hu et al. 2021) on the matrices of any family.

A product with an adapted matrix is x·W + scale · (x·down)·up, with the adapter sharded as W is, and
gathered a layer at a time. W is not trained, and has no gradient. Experts and recurrences, which
are no plain products, take W + scale · down·up, computed in fp32 a layer at a time.
"""

import dataclasses
import fnmatch
import zlib
from dataclasses import dataclass
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.tree_util as jtu
from jaxtyping import Array, Key, PyTree

from zoo.common.configuration import check, require
from zoo.nn.parameters import takes_operands
from zoo.nn.products import is_operand
from zoo.sharding.axes import keystr, map_parameters, named_alone
from zoo.sharding.kinds import is_hidden_matrix, is_matrix
from zoo.wrappers.adapted import Adapted as Adapted
from zoo.wrappers.adapted import adapted
from zoo.wrappers.adapted import is_adapted as is_adapted

Model = TypeVar("Model")


@dataclass(frozen=True)
class Config:
    """Which matrices have adapters, of which rank and kind."""

    rank: int = 8
    """Rank of the matrix that is added to each target."""
    alpha: float = 16.0
    """The added matrix is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Paths of matrices, such as blocks.attention.*; empty: all but embeddings and heads."""
    rank_stabilized: bool = False
    """Scale by alpha / sqrt(rank) instead, for high ranks (Kalajdzievski 2023)."""
    dora: bool = False
    """Train the length of each column of a matrix apart from its direction (Liu et al. 2024)."""
    dropout: float = 0.0
    """Rate of dropout on the input of each adapter in training."""

    def __post_init__(self) -> None:
        check(self)
        require(
            self.rank > 0 and self.alpha > 0,
            f"rank={self.rank}, alpha={self.alpha}: both must be positive",
        )
        require(0 <= self.dropout < 1, f"dropout={self.dropout}: must be in [0, 1)")


def adapt(model: Model, config: Config, *, key: Key[Array, ""]) -> Model:
    """The model with an adapter on each target, which adds nothing before training.

    Adapters that the model has already stay as they are from then on, as parts of what the new ones
    adapt: they are frozen, and have no dropout.

    Raises:
        ValueError: a target that matches no matrix, or with dropout one that has none: an
            embedding, a head, experts, a recurrence.
    """
    chosen, outline = targets(model, config), _outline(model)
    options = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    del options["targets"]

    def place(path: tuple, leaf: Any, node: Any) -> Any:
        name = keystr(path)
        if is_adapted(node):
            node = dataclasses.replace(node, frozen=True)
        if name not in chosen:
            return node
        named = named_alone(outline, path, leaf)
        if config.dropout and not (takes_operands(outline, path) and is_hidden_matrix(named.names)):
            raise ValueError(
                f"dropout={config.dropout}: {name} has none, as it is no hidden layer's plain "
                "product: leave dropout at 0, or choose other targets"
            )
        # By its name: a matrix's draw does not depend on which others are adapted.
        own = jax.random.fold_in(key, zlib.crc32(name.encode()))
        return adapted(node, named, **options, key=own)

    return jtu.tree_map_with_path(place, outline, model)


def _outline(model: Model) -> Model:
    """The model with a skeleton in the place of each operand, which is one matrix."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_operand(x) else x,
        model,
        is_leaf=is_operand,
    )


def matrices(model: PyTree) -> dict[str, bool]:
    """The dotted paths of a model's matrices, and whether each is a hidden one."""
    found: dict[str, bool] = {}

    def add(path: tuple, names: tuple[str | None, ...], leaf: Any) -> None:
        if is_matrix(names, field=keystr(path)):
            found[keystr(path)] = is_hidden_matrix(names)

    map_parameters(add, _outline(model))
    return found


def targets(model: PyTree, config: Config) -> list[str]:
    """The dotted paths of the matrices that a configuration chooses."""
    known = matrices(model)
    for pattern in config.targets:
        if not fnmatch.filter(known, pattern):
            raise ValueError(f"targets={pattern!r} matches no matrix; those are {[*known]}")
    found = [
        name
        for name, hidden in known.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in config.targets)
        or (hidden and not config.targets)
    ]
    if not found:
        raise ValueError(
            "targets=() chooses all but embeddings and heads, and the model has no other matrix: "
            f"name some of {[*known]}"
        )
    return found


def has_adapters(model: PyTree) -> bool:
    """Whether a model has adapters that are not merged."""
    return any(is_adapted(x) for x in jax.tree.leaves(model, is_leaf=is_adapted))


def has_trained_adapters(model: PyTree) -> bool:
    """Whether a model has adapters; only the newest train."""
    leaves = jax.tree.leaves(model, is_leaf=is_adapted)
    return any(is_adapted(x) and not x.frozen for x in leaves)


def merge(model: Model) -> Model:
    """The model without adapters that computes the same: each is added to its matrix."""
    return jax.tree.map(lambda x: x.value() if is_adapted(x) else x, model, is_leaf=is_adapted)


def base(model: Model) -> Model:
    """The model that the trained adapters stand on, as it was before they were put there."""
    return jax.tree.map(
        lambda x: x.weight if is_adapted(x) and not x.frozen else x, model, is_leaf=is_adapted
    )


def config_of(model: PyTree) -> Config:
    """The configuration of a model's trained adapters, whose targets are their paths.

    Raises:
        ValueError: a model that has none.
    """
    leaves = jtu.tree_leaves_with_path(model, is_leaf=is_adapted)
    found = {keystr(path): x for path, x in leaves if is_adapted(x) and not x.frozen}
    if not found:
        raise ValueError("the model has no adapters to save")
    one = next(iter(found.values()))
    return Config(
        one.rank,
        one.alpha,
        tuple(found),
        rank_stabilized=one.rank_stabilized,
        dora=one.magnitude is not None,
        dropout=one.dropout,
    )


def trainable(model: PyTree) -> PyTree:
    """A tree of booleans, for `make_train_step`: the adapters alone are trained.

    Of adapters on adapters those are that were put on last.
    """

    def mark(node: Any) -> Any:
        chosen = jax.tree.map(lambda _: False, node)
        if not is_adapted(node) or node.frozen:
            return chosen
        parts = lambda x: [x.down, x.up] + ([] if x.magnitude is None else [x.magnitude])  # noqa: E731
        return eqx.tree_at(parts, chosen, [True] * len(parts(node)))

    return jax.tree.map(mark, model, is_leaf=is_adapted)
