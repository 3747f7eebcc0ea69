"""The train step of a classifier compared with its peers."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from benchmarks.compare import compare
from benchmarks.peak import worthwhile
from benchmarks.peers.common import Precision
from benchmarks.peers.mlp.given import Shape
from benchmarks.peers.mlp.zoo_model import config
from benchmarks.report import Table
from benchmarks.timing import Peer, Timing
from zoo.mlp import num_flops_per_example

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
    precision: tuple[Precision, ...] = field(default_factory=worthwhile)
    """Precisions of the compute, over fp32 weights; bf16 if the device supports it."""
    shape: Shape = field(default_factory=Shape)


def measure(options: Options, timing: Timing) -> list[Table]:
    """One table per precision."""
    return [
        compare(
            f"MLP train step, {precision}",
            {name: PEERS[name] for name in options.peers},
            options.shape,
            precision,
            timing,
            flops=options.shape.batch_size * num_flops_per_example(config(options.shape)),
            examples=options.shape.batch_size,
        )
        for precision in options.precision
    ]
