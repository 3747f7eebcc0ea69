"""A loss function called in a step's precision, and its values, checked."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from zoo.data.loader import Accepted, Ids
from zoo.nn.parameters import dropping_out
from zoo.nn.precision import KEPT, Precision, cast_inputs, in_precision
from zoo.nn.stateful import is_state, states, with_states
from zoo.training.state import described, difference

# For a model with States it returns the new ones as a fourth value.
LossFunction = Callable[[Any, Any, Any], tuple[Any, ...]]

EVAL_NAMES = frozenset({"loss", "tokens"})  # of the sums, which a loss's own may not have
SUMS = "(total, weight, metrics): the summed loss, the summed weight, a dict of further sums"


def call_loss(
    loss_fn: LossFunction,
    precision: Precision | str,
    model: PyTree,
    batch: PyTree,
    key: Array | None,
) -> Any:
    """The result of a loss function for a model and a batch, both in a precision."""
    batch = cast_inputs(model, batch, precision, kept_by(loss_fn))
    given = in_precision(with_states(model, states(model)), precision)
    with dropping_out(key), given as model:
        return loss_fn(model, batch, key)


def loss_values(
    loss_fn: LossFunction,
    precision: Precision | str,
    taken: frozenset[str],
    model: PyTree,
    batch: PyTree,
    key: Array | None,
) -> tuple[dict[str, Any], list[eqx.nn.State]]:
    """The sums in float32, `loss`, `tokens` and the function's own, and the model's new States.

    `taken` are names that its own may not have. An evaluation, which has no key, needs no new
    States, and gets none.
    """
    name = _name(loss_fn)
    old, values = states(model), call_loss(loss_fn, precision, model, batch, key)
    if not isinstance(values, tuple | list) or len(values) not in (3, 4):
        raise TypeError(f"loss_fn {name} returned {_described(values)}, and not {SUMS}")
    total, weight, metrics, *fourth = values
    if not isinstance(metrics, Mapping):
        raise TypeError(f"loss_fn {name} returned {_described(values)}, and not {SUMS}")
    for what, x in (("total", total), ("weight", weight)):
        if jnp.ndim(x) != 0:
            raise ValueError(
                f"loss_fn {name} returned a {what} {_described(x)}: sum it over the batch"
            )
    if key is not None:
        check_scalars(name, metrics)
    if both := sorted(taken & metrics.keys()):
        raise ValueError(
            f"loss_fn {name} has a metric {both[0]!r}, which the step has itself: rename it"
        )
    new = [] if key is None and old else _new_states(name, fourth, old)
    sums = {"loss": total, "tokens": weight, **metrics}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), sums), new


def check_scalars(name: str, metrics: Mapping[str, Any]) -> None:
    """Raise a ValueError for a metric that is neither a scalar nor a pair of them."""
    for metric, value in metrics.items():
        pair = value if isinstance(value, tuple) else (value,)
        if len(pair) > 2 or any(jnp.ndim(x) for x in pair):
            raise ValueError(
                f"loss_fn {name} has a metric {metric!r}, {_described(value)}: a metric is one "
                "number, a sum over the batch, or a pair of a sum and its own weight"
            )


def only_scalars(loss_fn: LossFunction) -> LossFunction:
    """A loss function that refuses what `check_scalars` does, where it is traced."""

    @functools.wraps(loss_fn)
    def checked(model: Any, batch: Any, key: Any) -> tuple[Any, ...]:
        values = loss_fn(model, batch, key)
        match values:
            case [_, _, Mapping() as metrics, *_]:
                check_scalars(_name(loss_fn), metrics)
        return values

    return checked if callable(loss_fn) else loss_fn


def kept_by(loss_fn: Any) -> frozenset[str | int]:
    """The entries that a loss names by `keeps_dtype`, also inside a partial or a decorator."""
    return frozenset().union(*(getattr(x, "keeps_dtype", ()) for x in unwrapped(loss_fn)))


def unwrapped(loss_fn: Any) -> list[Any]:
    """A loss, and the functions that it is a partial or a decorator of, the innermost last."""
    found = []
    while loss_fn is not None:
        found.append(loss_fn)
        loss_fn = getattr(loss_fn, "func", None) or getattr(loss_fn, "__wrapped__", None)
    return found


def accepted_by(loss_fn: Any, model: PyTree) -> Accepted:
    """The values that entries of a batch may have, by name: by `zoo.losses.accepts` and model."""
    stated: dict[str, Any] = {}
    for each in reversed(unwrapped(loss_fn)):
        stated |= getattr(each, "accepts", {})
    # A number is the model's, or that of a model that it holds, or of a `config`.
    nodes = jax.tree.leaves(model, is_leaf=lambda x: hasattr(x, "config"))
    holders = [x for node in nodes if hasattr(node, "config") for x in (node, node.config)]
    found: dict[str, Ids | None] = {}
    for name, values in stated.items():
        source = f"the loss accepts {values}"
        if isinstance(values, str | tuple):
            fields = (values,) if isinstance(values, str) else values
            sizes = [(x, getattr(holder, x, None)) for x in fields for holder in holders]
            field, size = next(((x, n) for x, n in sizes if isinstance(n, int)), ("", 0))
            if not field:
                continue
            values, source = range(size), f"the model's {field} is {size}"
        found[name] = None if values is None else Ids(values, source, name in KEPT)
    return found


def _name(loss_fn: Any) -> str:
    return getattr(loss_fn, "__name__", repr(loss_fn))


def _new_states(name: str, fourth: list[Any], old: list[eqx.nn.State]) -> list[eqx.nn.State]:
    """The States that a loss returned, in the model's order, if they are like the model's."""
    if not old and not fourth:
        return []
    if not old:
        raise TypeError(
            f"loss_fn {name} returned a fourth value, {_described(fourth[0])}, and the model has "
            "no eqx.nn.State: let make_model return the pair of eqx.nn.make_with_state(Net)(key)"
        )
    if not fourth:
        raise TypeError(
            f"loss_fn {name} returned three values, and the model has an eqx.nn.State: return the "
            "new State as a fourth value, (total, weight, metrics, state)"
        )
    new = jax.tree.leaves(fourth[0], is_leaf=is_state)
    if not all(map(is_state, new)) or len(new) != len(old):
        raise TypeError(
            f"loss_fn {name} returned a fourth value {_described(fourth[0])}: return the new State"
            + (f", a list of {len(old)} in the model's order" if len(old) > 1 else "")
        )
    if text := difference(_arrays(new), _arrays(old)):
        raise ValueError(
            f"loss_fn {name} returned another State: {text}; keep its structure, shapes and dtypes"
        )
    return new


def _arrays(given: list[eqx.nn.State]) -> dict[str, str]:
    """The dtype and shape of each array of States, by the path of its layer."""
    found: dict[str, str] = {}
    for state in given:
        values, names = state.tree_flatten()
        for name, value in zip(names, values, strict=True):
            found |= {f"{name}.{path}".rstrip("."): x for path, x in described(value).items()}
    return found


def _described(x: Any) -> str:
    if isinstance(x, tuple | list):
        return f"({', '.join(map(_described, x))})"
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, jax.Array) else type(x).__name__
