"""A model to begin a training with that is not loaded yet: `Pretrained`."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jaxtyping import PyTree

from zoo.sharding.axes import is_parameter, keystr


@dataclass(frozen=True)
class Pretrained:
    """A stored model to begin with, which is loaded as often as a training needs its arrays."""

    skeleton: PyTree
    """The model, with a `jax.ShapeDtypeStruct` in the place of each array."""
    load: Callable[[], PyTree]
    """Its arrays, on the run's mesh. The caller owns what it returns, and may donate it."""
    checksum: str = ""
    """Checksum of the files. With one, a checkpoint holds what is trained, and this checksum."""
    flag: str = "--model"
    """The flag that names it, for messages."""


def skeleton_of(pretrained: PyTree) -> PyTree:
    """The skeleton of a `Pretrained`; a model as it is."""
    return pretrained.skeleton if isinstance(pretrained, Pretrained) else pretrained


def check_loaded(loaded: PyTree, skeleton: PyTree) -> None:
    """Raise a ValueError for arrays that differ from a skeleton's."""
    have, want = _described(loaded), _described(skeleton)
    if differing := sorted(x for x in have.keys() | want.keys() if have.get(x) != want.get(x)):
        name = differing[0]
        raise ValueError(
            f"what `load` of a Pretrained returned has {name} as {have.get(name, 'none')}, and "
            f"its skeleton as {want.get(name, 'none')}"
        )


def _described(tree: PyTree) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves if is_parameter(x)}
