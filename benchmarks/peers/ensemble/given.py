"""What both peers are given: the classifiers of `peers.mlp`, each with first weights of its own."""

from dataclasses import dataclass

from benchmarks.peers.mlp import given as mlp


@dataclass(frozen=True)
class Shape(mlp.Shape):
    """So many classifiers, all of which see the same batch."""

    num_members: int = 8


def weights(shape: Shape) -> list[mlp.Weights]:
    """The first weights of each member."""
    return [mlp.weights(shape, seed) for seed in range(shape.num_members)]


batch = mlp.batch
