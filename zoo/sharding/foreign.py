"""Names for the arrays of modules that are not the zoo's: given from outside, or built in.

What Equinox's layers have built in is by their layout: of a linear layer, (outputs, inputs). Other
arrays have names by default.
"""

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx

from zoo.sharding.annotations import Names, align, parse
from zoo.sharding.rules import Axes, ShardingError


class Named(NamedTuple):
    """The names of an array's axes, and who named them."""

    names: Names
    by: str
    """`ANNOTATION`, `GIVEN`, the class of Equinox, or `DEFAULT`."""

    @property
    def is_asked_for(self) -> bool:
        """Whether somebody named this very array: what does not fit is an error then."""
        return self.by in (ANNOTATION, GIVEN)


ANNOTATION, GIVEN, DEFAULT = "annotation", "given", "default"


def given(axes: Axes, path: str, leaf: Any) -> Named | None:
    """The names given from outside for the array of a dotted path; None without any."""
    if isinstance(axes, Mapping):
        names = next((axes[each] for each in axes if fnmatch.fnmatchcase(path, each)), None)
    else:
        names = axes(path, leaf)
    return None if names is None else Named(align(parse(names.split()), leaf.shape, path), GIVEN)


def check_patterns(axes: Axes, named: Mapping[str, Named]) -> None:
    """Refuse a pattern that names no array of a model, whose paths are the keys of `named`.

    Raises:
        ShardingError: such a pattern, and why it names nothing.
    """
    if not isinstance(axes, Mapping):
        return
    left = dict(named)
    for pattern in axes:
        matched = fnmatch.filter(named, pattern)
        used = [path for path in matched if path in left and left.pop(path).by == GIVEN]
        if used:
            continue
        if not matched:
            reason = f"matches no array; there are {_shortened(named)}"
        else:
            reason = (
                f"names nothing: {_shortened(matched)} have their axes from an annotation, or from "
                "a pattern before it"
            )
        raise ShardingError(f"axes={{{pattern!r}: {axes[pattern]!r}}} {reason}")


def _shortened(paths: Iterable[str]) -> str:
    paths = list(paths)
    return ", ".join(paths[:20]) + (f" and {len(paths) - 20} more" if len(paths) > 20 else "")


def by_default(leaf: Any) -> Named:
    """The names of an array that nothing names: a matrix, or a vector if its rank is below 2."""
    return Named(("unnamed" if leaf.ndim > 1 else "element",) * leaf.ndim, DEFAULT)


def built_in(nodes: Sequence[Any], paths: Sequence[str], leaf: Any) -> Named | None:
    """The names that a layer of Equinox has for its array; None if no node is such a layer.

    `nodes` are those of the tree on the way to the array, the outermost first, which knows best;
    and `paths` are the dotted paths from each of them to the array.
    """
    for node, path in zip(nodes, paths, strict=True):
        if isinstance(node, eqx.nn.State | eqx.nn.StateIndex):
            return Named((None,) * leaf.ndim, "eqx.nn.State")
        for cls in type(node).__mro__:
            names = BUILT_IN[cls](node).get(path, "").split() if cls in BUILT_IN else []
            if names and len(names) <= leaf.ndim:
                return Named(align(tuple(names), leaf.shape, path), f"eqx.nn.{cls.__name__}")
    return None


def _linear(layer: Any) -> dict[str, str]:
    return {"weight": "fan_out fan_in", "bias": "fan_out"}


def _convolution(layer: Any) -> dict[str, str]:
    window = " element" * layer.num_spatial_dims
    return {"weight": "fan_out fan_in" + window, "bias": "fan_out" + window}


def _attention(layer: Any) -> dict[str, str]:
    names = {"output_proj.weight": "embed heads", "output_proj.bias": "embed"}
    for projection in ("query_proj", "key_proj", "value_proj"):
        names |= {f"{projection}.weight": "heads embed", f"{projection}.bias": "heads"}
    return names


def _cell(layer: Any) -> dict[str, str]:
    # The gates, which share an axis, are taken apart at every time step: not over devices.
    weight = "unnamed fan_in"
    return {"weight_ih": weight, "weight_hh": weight, "bias": "element", "bias_n": "element"}


def _norm(layer: Any) -> dict[str, str]:
    names = " ".join(["element"] * len(getattr(layer, "shape", "1")))
    return {"weight": names, "bias": names}


def _weight_norm(layer: Any) -> dict[str, str]:
    return {"g": "element element" + " element" * getattr(layer.layer, "num_spatial_dims", 0)}


# From a class to the names of its arrays by their path, given a layer of it.
BUILT_IN: Mapping[type, Callable[[Any], dict[str, str]]] = {
    eqx.nn.Linear: _linear,
    eqx.nn.Conv: _convolution,
    eqx.nn.ConvTranspose: _convolution,
    eqx.nn.Embedding: lambda layer: {"weight": "vocab embed"},
    eqx.nn.MultiheadAttention: _attention,
    eqx.nn.GRUCell: _cell,
    eqx.nn.LSTMCell: _cell,
    eqx.nn.LayerNorm: _norm,
    eqx.nn.RMSNorm: _norm,
    eqx.nn.GroupNorm: _norm,
    eqx.nn.BatchNorm: _norm,
    eqx.nn.WeightNorm: _weight_norm,
}
