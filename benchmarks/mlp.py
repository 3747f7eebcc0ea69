"""The train step of a classifier against its peers."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from benchmarks.compare import compare
from benchmarks.peers.common import Precision
from benchmarks.peers.mlp.given import Shape
from benchmarks.report import Table
from benchmarks.timing import Peer, Timing

Name = Literal["handwritten", "zoo", "equinox", "flax-nnx", "pytorch", "pytorch-compiled"]
PEERS: dict[str, Peer] = {
    "handwritten": Peer("mlp.handwritten"),
    "zoo": Peer("mlp.zoo_model"),
    "equinox": Peer("mlp.equinox_documented"),
    "flax-nnx": Peer("mlp.flax_nnx"),
    "pytorch": Peer("mlp.pytorch", {"compiled": False}),
    "pytorch-compiled": Peer("mlp.pytorch", {"compiled": True}),
}


@dataclass(frozen=True)
class Options:
    """The train step of a classifier."""

    peers: tuple[Name, ...] = get_args(Name)
    """Peers; the first that runs is the baseline of the ratios."""
    precision: tuple[Precision, ...] = ("fp32", "bf16")
    """Precisions of the compute, over fp32 weights."""
    shape: Shape = field(default_factory=Shape)


def measure(options: Options, timing: Timing) -> list[Table]:
    """A table for each precision."""
    return [
        compare(
            f"MLP train step, {precision}",
            {name: PEERS[name] for name in options.peers},
            options.shape,
            precision,
            timing,
            examples=options.shape.batch_size,
        )
        for precision in options.precision
    ]
