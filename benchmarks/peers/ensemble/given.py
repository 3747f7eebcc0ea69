"""The inputs of both peers: the classifiers of `peers.mlp`, with different initial weights."""

from dataclasses import dataclass

from benchmarks.peers.mlp import given as mlp


@dataclass(frozen=True)
class Shape(mlp.Shape):
    """A number of classifiers, all with the same batch."""

    num_members: int = 8


def weights(shape: Shape) -> list[mlp.Weights]:
    """The initial weights of each member."""
    return [mlp.weights(shape, seed) for seed in range(shape.num_members)]


batch = mlp.batch
