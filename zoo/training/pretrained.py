"""A model to begin a training with that is not loaded yet: `Pretrained`."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import PyTree


@dataclass(frozen=True)
class Pretrained:
    """A stored model to begin with, which is loaded as often as a training needs its arrays."""

    skeleton: PyTree
    """The model, with a `jax.ShapeDtypeStruct` in the place of each array."""
    load: Callable[[], PyTree]
    """Its arrays, on the run's mesh. The caller owns what it returns, and may donate it."""
    checksum: str = ""
    """Checksum of the files. With one, a checkpoint holds what is trained, and this checksum."""
