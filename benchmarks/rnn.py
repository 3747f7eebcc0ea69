"""The train step of an LSTM language model compared with its peers, and its memory by length."""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.compare import compare
from benchmarks.peak import worthwhile
from benchmarks.peers.common import Precision
from benchmarks.peers.rnn.given import Shape
from benchmarks.peers.rnn.zoo_model import sizes
from benchmarks.report import Table
from benchmarks.timing import Peer, Timing
from zoo.rnn import num_flops_per_token

Name = Literal[
    "handwritten", "zoo", "zoo-remat", "equinox", "flax-nnx", "pytorch", "pytorch-compiled"
]
PEERS: dict[str, Peer] = {
    "handwritten": Peer("rnn.handwritten"),
    "zoo": Peer("rnn.zoo_model", {"remat": "none"}),
    "zoo-remat": Peer("rnn.zoo_model", {"remat": "full"}),
    "equinox": Peer("rnn.equinox_documented"),
    "flax-nnx": Peer("rnn.flax_nnx"),
    "pytorch": Peer("rnn.pytorch", {"compiled": False}),
    "pytorch-compiled": Peer("rnn.pytorch", {"compiled": True}),
}
# For `rnn-memory`: models that only output their last state.
READERS = {
    "zoo-reader": Peer("rnn.zoo_reader", {"remat": "none"}),
    "zoo-reader-remat": Peer("rnn.zoo_reader", {"remat": "full"}),
}


@dataclass(frozen=True)
class Options:
    """The train step of an LSTM language model."""

    peers: tuple[Name, ...] = (
        "handwritten",
        "zoo",
        "equinox",
        "flax-nnx",
        "pytorch",
        "pytorch-compiled",
    )
    """Peers; the first that runs is the baseline of the ratios."""
    precision: tuple[Precision, ...] = field(default_factory=worthwhile)
    """Precisions of the compute, over fp32 weights; bf16 if the device supports it."""
    shape: Shape = field(default_factory=Shape)


def measure(options: Options, timing: Timing) -> list[Table]:
    """One table per precision."""
    shape = options.shape
    return [
        compare(
            f"LSTM train step, {precision}",
            {name: PEERS[name] for name in options.peers},
            shape,
            precision,
            timing,
            flops=shape.batch_size * shape.seq_len * num_flops_per_token(sizes(shape, "none")),
            tokens=shape.batch_size * shape.seq_len,
        )
        for precision in options.precision
    ]


@dataclass(frozen=True)
class MemoryOptions:
    """The memory of an LSTM's train step by the length of its sequences."""

    peers: tuple[
        Literal["handwritten", "equinox", "zoo", "zoo-remat", "zoo-reader", "zoo-reader-remat"],
        ...,
    ] = ("handwritten", "equinox", "zoo", "zoo-remat", "zoo-reader", "zoo-reader-remat")
    """Peers that XLA compiles."""
    lengths: tuple[int, ...] = (256, 1024, 4096)
    """Lengths of a sequence."""
    precision: Precision = "fp32"
    """Precision of the compute."""
    shape: Shape = Shape(hidden_size=256, batch_size=8)
    """Sizes of the model, except for the length."""


def measure_memory(options: MemoryOptions) -> list[Table]:
    """XLA's planned peak of a step at each length, which is compiled but not run."""
    table = Table(f"LSTM train step, {options.precision}: XLA plan in MiB by sequence length")
    for name in options.peers:
        planned = {}
        for length in options.lengths:
            shape = dataclasses.replace(options.shape, seq_len=length)
            built = (PEERS | READERS)[name].build(shape, options.precision)
            planned[str(length)] = built.planned_bytes / 2**20
        table.rows.append({"peer": name, **planned})
    table.print()
    return [table]
