"""The train step of an ensemble: as one program, and as one program per member in turn."""

from dataclasses import dataclass

from benchmarks.compare import compare
from benchmarks.peers.common import Precision
from benchmarks.peers.ensemble.given import Shape
from benchmarks.peers.mlp.zoo_model import config
from benchmarks.report import Table
from benchmarks.timing import Peer, Timing
from zoo.mlp import num_flops_per_example

PEERS: dict[str, Peer] = {
    "one by one": Peer("ensemble.zoo_model", {"as_one": False}),
    "as one": Peer("ensemble.zoo_model", {"as_one": True}),
}


@dataclass(frozen=True)
class Options:
    """The train step of an ensemble."""

    precision: tuple[Precision, ...] = ("fp32",)
    """Precisions of the compute, over fp32 weights."""
    small: Shape = Shape(in_size=64, hidden_size=256, batch_size=64)
    """A model whose matrix products are too small to use all cores."""
    large: Shape = Shape()
    """A model whose matrix products use all cores."""


def measure(options: Options, timing: Timing) -> list[Table]:
    """One table per precision and size."""
    return [
        compare(
            f"train step of {shape.num_members} MLPs {'-'.join(map(str, shape.sizes))}, "
            f"batch {shape.batch_size}, {precision}",
            PEERS,
            shape,
            precision,
            timing,
            flops=shape.num_members * shape.batch_size * num_flops_per_example(config(shape)),
            examples=shape.batch_size,
        )
        for precision in options.precision
        for shape in (options.small, options.large)
    ]
