"""Maximal update parametrization (muP): initial scales and rates per matrix, by a model's width.

A learning rate found at `base_width` then fits every width (Yang, Hu et al. 2022, Tensor Programs
V, table 8; for muon the spectral condition of Yang, Simon & Bernstein 2023). With m = width /
base_width, the standard parametrization's initial values and rates are multiplied by

| parameter                                                  | initial | rate | muon's rate |
| :--------------------------------------------------------- | :------ | :--- | :---------- |
| vector: a bias, the gain of a norm                         | 1       | 1    |             |
| input matrix: vocabulary, positions or features to a width | 1       | 1    |             |
| hidden matrix: a width to a width                          | 1       | 1/m  | 1/√m        |
| output matrix: a width to a vocabulary, classes or experts | 1/√m    | 1/m  | 1/m         |
| gain before an output head that is the embedding           | 1/m     | 1/m  |             |

Muon leaves the others to adamw; of output matrices it takes a router's. At the base width all is as
the standard parametrization has it.

All of it follows from the logical axes: kinds tell inputs and outputs of the model from its widths,
and the first dimension of a matrix is its fan-in. The width is the size of "hidden" (a recurrent
network's units), or else of "embed".

It is assumed that every width grows in proportion (d_ff, embed_size, heads, and with grouped
queries kv_heads), and that the size of a head, the depth, the number of experts, inputs and outputs
do not (a BERT's pooler has outputs that do: take pooler=False). Attention stays scaled by the root
of the size of a head. Initial weights have a variance of 1/fan-in, and embeddings one of their own,
as in all families. The rules normalise their updates, as all of `optimizers.Config.name` do. A
model of one's own whose embedding is its output head needs `hidden` and `readout`,
`config.tie_embeddings`, and `final_norm`, as a transformer has.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import optax
from jaxtyping import PyTree

from zoo.nn.protocols import HasReadout
from zoo.sharding.axes import ANNOTATION, Named, keystr, map_named, map_parameters
from zoo.sharding.rules import is_hidden_matrix, is_matrix, kind_of, matrix_axes
from zoo.wrappers.ensemble import Ensemble

WIDTHS = ("hidden", "embed")  # the first that a model has is its width
FIXED = frozenset({"routes", "rank"})  # dimensions of matrices that do not grow with it
GENERIC = frozenset({"fan_in", "fan_out", "unnamed"})  # of any place in a model


class Factors(NamedTuple):
    """The factors of one parameter, relative to the standard parametrization."""

    initial: float = 1.0
    rate: float = 1.0


def factors(model: PyTree, base_width: int, *, orthogonal: bool = False) -> Any:
    """The tree of a model, its gradient or its skeleton with `Factors` in place of each parameter.

    `orthogonal` is for muon, which turns hidden matrices into orthogonal ones.

    Raises:
        ValueError: a model without a width or with several, a matrix without named axes, heads that
            a model of the base width would have a fraction of, an embedding scaled by the width, or
            an output head that is the embedding without a norm before it.
        ShardingError: a logical axis that neither the table nor the rules in use know.
    """
    ratio = _width(model, base_width) / base_width
    gains = jax.tree.leaves(_tied_norm(model))

    def of_parameter(path: tuple, names: tuple[str | None, ...], leaf: Any) -> Factors:
        if any(leaf is gain for gain in gains):
            return Factors(1 / ratio, 1 / ratio)
        return _factors(names, ratio, orthogonal, keystr(path))

    return map_parameters(of_parameter, model)


def initialise(model: PyTree, base_width: int) -> PyTree:
    """A model as it is drawn by the standard parametrization, with muP's initial scales.

    Raises:
        ValueError: as for `factors`.
    """
    norm = _tied_norm(model)
    gains, offset = jax.tree.leaves(norm), getattr(norm, "offset", 0.0)

    def scale(x: Any, found: Factors) -> Any:
        if any(x is gain for gain in gains):  # of a norm that may be stored less its offset
            return (x + offset) * found.initial - offset
        return x if found.initial == 1 else x * found.initial

    return jax.tree.map(scale, model, factors(model, base_width))


def scale_by_width(base_width: int, *, orthogonal: bool = False) -> optax.GradientTransformation:
    """Multiplies each parameter's update by muP's rate; see `factors`."""

    def update(updates: PyTree, params: PyTree | None) -> PyTree:
        found = factors(updates, base_width, orthogonal=orthogonal)
        return jax.tree.map(lambda x, of_x: x * of_x.rate, updates, found)

    return optax.stateless(update)


def _factors(names: Sequence[str | None], ratio: float, orthogonal: bool, field: str) -> Factors:
    """A parameter's factors by its logical axes, for a model of `ratio` times the base width."""
    if not is_matrix(names, field=field):
        return Factors()
    inputs, outputs = (any(_grows(names[axis]) for axis in axes) for axes in matrix_axes(names))
    initial = ratio**-0.5 if inputs and not outputs else 1.0
    if orthogonal and is_hidden_matrix(names):
        # The spectral norm of an update is to be √(fan-out/fan-in), and is √max(fan-in, fan-out).
        return Factors(initial, ratio ** ((outputs - inputs - 1) / 2))
    return Factors(initial, 1 / ratio if inputs else 1.0)


def _grows(name: str | None) -> bool:
    return name is not None and name not in FIXED and kind_of(name) == "dimension"


def _tied_norm(model: PyTree) -> Any:
    """The norm before an output head that is the embedding; None where the head is its own.

    The one matrix counts as an input, and yet logits are to be divided by m. The gain before them
    is instead, and its rate too: for a rule that normalises its updates that is the same.
    """
    model = model.members if isinstance(model, Ensemble) else model
    config = getattr(model, "config", None)
    if not isinstance(model, HasReadout) or not getattr(config, "tie_embeddings", False):
        return None
    norm = getattr(model, "final_norm", None)
    if norm is None:
        raise ValueError(
            "tie_embeddings=True: optimizer.parametrization='mup' divides the logits by the gain "
            "of the norm before them, and norm='none': choose another norm, or an output head"
        )
    return norm


def _width(model: PyTree, base_width: int) -> int:
    """The width of a model, which has a counterpart at the base width.

    Raises:
        ValueError: a model that has none, or several, or no such counterpart.
    """
    sizes = _sizes(model)
    name = next((name for name in WIDTHS if name in sizes), None)
    if name is None or len(sizes[name]) > 1:
        found = "no axis of that name" if name is None else f"{name!r} of {sorted(sizes[name])}"
        raise ValueError(
            "optimizer.parametrization='mup' takes the width from the logical axis 'hidden', or "
            f"else 'embed', of one size, and the {type(model).__name__} has {found}"
        )
    size = min(sizes[name])
    for name in ("heads", "kv_heads"):
        for count in sizes.get(name, ()):
            if count * base_width % size:
                raise ValueError(
                    f"{count} {name} at a width of {size} are {count * base_width / size:g} at "
                    f"optimizer.base_width={base_width}: with parametrization='mup' their number "
                    "grows with the width, and head_dim does not; change either"
                )
    inner = model.members if isinstance(model, Ensemble) else model
    if getattr(getattr(getattr(inner, "config", None), "residual", None), "scale_embedding", False):
        raise ValueError(
            "residual.scale_embedding=True multiplies by the root of the width, which "
            "optimizer.parametrization='mup' has no rule for: choose False"
        )
    return size


def _sizes(model: PyTree) -> dict[str, set[int]]:
    """The sizes of each logical axis of a model's parameters."""
    sizes: dict[str, set[int]] = {}

    def add(path: tuple, named: Named, leaf: Any) -> None:
        names = named.names
        if leaf.ndim > 1 and not _is_clear(named):
            raise ValueError(
                f"{keystr(path)} of shape {leaf.shape} and axes {names}, named by {named.by}: "
                "optimizer.parametrization='mup' can't tell whether it reads inputs or gives "
                'outputs; annotate it, fan-in first, as weight: Float[Array, "embed classes"]'
            )
        for name, size in zip(names, leaf.shape, strict=True):
            if name is not None:
                sizes.setdefault(name, set()).add(size)

    map_named(add, model)
    return sizes


def _is_clear(named: Named) -> bool:
    """Whether the axes of a parameter say what it maps to what, as far as that matters.

    Names given from outside may be those of a layer that has its outputs first.
    """
    names = named.names
    if not any(names):
        return False
    if named.by in (ANNOTATION, "eqx.nn.Embedding") or not is_matrix(names):
        return True
    return is_hidden_matrix(names) and not GENERIC.intersection(names)
