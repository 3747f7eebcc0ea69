"""The train step of a transformer compared with its peers, in fp32 and bf16, also with remat."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from benchmarks.compare import compare
from benchmarks.peak import worthwhile
from benchmarks.peers.common import Precision
from benchmarks.peers.transformer import zoo_model
from benchmarks.peers.transformer.given import Remat, Shape
from benchmarks.report import Table
from benchmarks.timing import Peer, Timing
from zoo.transformer import num_flops_per_token

Name = Literal[
    "handwritten", "zoo", "zoo-scan", "equinox", "flax-nnx", "pytorch", "pytorch-compiled"
]
PEERS: dict[str, Peer] = {
    "handwritten": Peer("transformer.handwritten"),
    "zoo": Peer("transformer.zoo_model", {"scan": False}),
    "zoo-scan": Peer("transformer.zoo_model", {"scan": True}),
    "equinox": Peer("transformer.equinox_documented"),
    "flax-nnx": Peer("transformer.flax_nnx"),
    "pytorch": Peer("transformer.pytorch", {"compiled": False}),
    "pytorch-compiled": Peer("transformer.pytorch", {"compiled": True}),
}


@dataclass(frozen=True)
class Options:
    """The train step of a transformer."""

    peers: tuple[Name, ...] = get_args(Name)
    """Peers; the first that runs is the baseline of the ratios."""
    precision: tuple[Precision, ...] = field(default_factory=worthwhile)
    """Precisions of the compute, over fp32 weights; bf16 if the device supports it."""
    remat: tuple[Remat, ...] = ("none", "full")
    """Recomputation in the backward pass: of nothing, or of every layer."""
    shape: Shape = field(default_factory=Shape)


def measure(options: Options, timing: Timing) -> list[Table]:
    """One table per precision and remat."""
    shape = options.shape
    sizes = zoo_model.sizes(shape, "none", scan=True)
    return [
        compare(
            f"transformer train step, {precision}, remat {remat}",
            {name: PEERS[name].given(remat=remat) for name in options.peers},
            shape,
            precision,
            timing,
            flops=shape.num_tokens * num_flops_per_token(sizes, shape.seq_len),
            tokens=shape.num_tokens,
        )
        for precision in options.precision
        for remat in options.remat
    ]
