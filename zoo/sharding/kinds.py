"""Matrices and vectors told apart by what their logical axes are: for decay, Muon and adapters."""

from collections.abc import Sequence

from zoo.sharding.rules import Kind, ShardingError, kind_of, rules_in_use, unknown_axis


def is_stack(name: str | None) -> bool:
    """Whether an axis of this name tells arrays apart: of the kind "stack", or without a name."""
    return name is None or kind_of(name) == "stack"


def is_matrix(names: Sequence[str | None], *, field: str = "") -> bool:
    """Whether logical axes name a matrix, which weight decay and Muon are for, and not a vector.

    A head's size is part of its head, and gates of their cell's units: ("heads", "head_dim") and
    ("gates", "hidden") are vectors, and so is ("experts", "embed"), a stack of them. `field` is
    named in an error.

    Raises:
        ShardingError: an axis of activations, or one that neither the table nor the rules in use
            know.
    """
    kinds = [_parameter_kind(name, names, field) for name in names]
    return sum(kind in ("dimension", "end") for kind in kinds) >= 2


def matrix_axes(names: Sequence[str | None]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The input and the output axes of a matrix; the other leading ones tell matrices apart.

    A matrix maps its first dimension, with its parts, to the others: ("heads", "head_dim", "embed")
    is a matrix of heads·head_dim by embed.
    """
    axes = [axis for axis, name in enumerate(names) if not is_stack(name)]
    kinds = [_parameter_kind(names[axis], names, "") for axis in axes]
    inputs = next(i for i, kind in enumerate(kinds) if kind in ("dimension", "end")) + 1
    while kinds[inputs] == "minor":
        inputs += 1
    return tuple(axes[:inputs]), tuple(axes[inputs:])


def is_hidden_matrix(names: Sequence[str | None], *, field: str = "") -> bool:
    """Whether logical axes name a matrix whose inputs and outputs are not the model's own."""
    return is_matrix(names, field=field) and "end" not in (
        _parameter_kind(name, names, field) for name in names
    )


def _parameter_kind(name: str | None, names: Sequence[str | None], field: str) -> Kind:
    """The kind of an axis of a parameter."""
    if name is None:
        return "stack"
    kind = kind_of(name)
    if kind is None:
        raise unknown_axis(name, names, field, rules_in_use())
    if kind == "activation":
        raise ShardingError(
            f"{field or tuple(names)}: {name!r} is an axis of activations, and here of a parameter"
        )
    return kind
