"""The values of batches, checked on the host before a step uses them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np


class Ids(NamedTuple):
    """The numbers that an integer entry of a batch may hold."""

    values: range
    source: str
    """Where they are from, as "vocab_size=512"."""
    is_target: bool
    """Only those count whose weight, if the batch has `weights`, is not 0."""


Accepted = Mapping[str, Ids | None]  # by entry; None: any value


def check_values(
    batch: Any, accepted: Accepted, *, where: str = "the batch", first_row: int = 0
) -> None:
    """Raise a ValueError that names an entry, a row and a value that a step can do nothing with.

    Those are nan and infinity, numbers that do not fit the dtype that JAX has for them (int64
    becomes int32), and integers that are not `accepted`. Only arrays of numpy are looked at:
    what is on a device was one. `first_row` is the number of the first row in its batch.
    """
    entries = [(_name(path), x) for path, x in jtu.tree_leaves_with_path(batch)]
    for name, x in entries:
        if not isinstance(x, np.ndarray) or not x.ndim or not x.size:
            continue
        ids = accepted.get(name)
        why = ""
        if jnp.issubdtype(x.dtype, jnp.integer):
            wrong, why = _unfit(x)
            if ids is not None and not wrong.any():
                wrong = (x < ids.values.start) | (x >= ids.values.stop)
                if ids.is_target:
                    wrong &= _counted(dict(entries).get("weights"), x)
                why = (
                    f"and {ids.source}: the numbers there are {ids.values.start} to "
                    f"{ids.values.stop - 1}; mend the data, or take a model that has more"
                )
        elif jnp.issubdtype(x.dtype, jnp.inexact) and (ids is not None or name not in accepted):
            wrong, why = _unfit(x)
        if why and wrong.any():
            place = [int(i) for i in np.unravel_index(int(np.argmax(wrong)), x.shape)]
            value, place[0] = x[tuple(place)], place[0] + first_row
            raise ValueError(f"{where}: {name}{place} is {value}, {why}")


def _name(path: tuple) -> str:
    entry = path[-1] if path else ""
    return str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", entry))))


def _unfit(x: np.ndarray) -> tuple[Any, str]:
    """Which numbers are not finite, or not in JAX's dtype for them, and what to say of them."""
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    narrower = dtype != x.dtype
    if jnp.issubdtype(x.dtype, jnp.integer):
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        wrong: Any = (x < least) | (x > most) if narrower else np.False_
        return wrong, f"which {dtype} does not hold: JAX has no {x.dtype}; give smaller numbers"
    wrong = ~np.isfinite(x)
    if narrower:
        wrong |= np.abs(x) > np.finfo(dtype).max
    advice = "mend the row or leave it out; a loss that takes any value says so by"
    return wrong, f"which is no finite {dtype}: {advice} zoo.losses.accepts(NAME=None)"


def _counted(weights: Any, x: np.ndarray) -> Any:
    """Whether each number counts: by its own weight, by its row's, or as all do."""
    if not isinstance(weights, np.ndarray) or weights.shape != x.shape[: weights.ndim]:
        return np.True_
    return (weights != 0).reshape(*weights.shape, *[1] * (x.ndim - weights.ndim))
