"""The hyperparameters of a recurrent network, and the numbers that follow from them."""

import math
from dataclasses import dataclass
from typing import Literal

from zoo.common import configuration
from zoo.common.configuration import may_differ, of_training, require
from zoo.nn.layers import OptionalNorm
from zoo.nn.recurrences.chunks import RecurrenceConfig
from zoo.nn.recurrences.marks import Chunks
from zoo.nn.recurrences.mixers import MIXERS, check_settings
from zoo.rnn.cells import CELLS, CellName


@dataclass(frozen=True)
class Config:
    """Hyperparameters of a recurrent network."""

    vocab_size: int | None = None
    """Number of token ids; None for real-valued inputs, of in_size features per step."""
    in_size: int | None = None
    """Features per step of real-valued inputs, in place of token ids."""
    out_size: int | None = None
    """Outputs: classes, or values of a regression; the vocabulary (a language model) if None."""
    hidden_size: int = 256
    """Units per layer and direction."""
    num_layers: int = 2
    """Number of layers."""
    cell: CellName = "lstm"
    """Recurrent cell; those named min… are parallel in time, those with a matrix as state (see
    recurrence) go by chunks of it, the others step by step."""
    embed_size: int | None = None
    """Width of the embedding; hidden_size if not given."""
    bidirectional: bool = False
    """A second recurrence in each layer, from the end."""
    pooling: Literal["none", "last", "mean"] = "none"
    """Input of the head: each step, a row's final state, or the mean of its steps."""
    norm: OptionalNorm = "none"
    """Norm of the output of each layer."""
    dropout: float = of_training(0.0)
    """Rate of dropout on the embedding and on each layer's output; one mask for all steps."""
    tie_embeddings: bool = False
    """Use the embedding as the output head: one leaf."""
    truncate: int | None = of_training(None)
    """Truncated back-propagation: the gradient stops every so many steps, the state does not."""
    remat: Literal["none", "full"] = may_differ("none")
    """full keeps the states at the ends of chunks of √seq (or truncate) steps, and recomputes."""
    implementation: Literal["auto", "scan", "cudnn"] = may_differ("auto")
    """How an lstm runs: by lax.scan, or by cuDNN (one NVIDIA GPU, padding last, no packed rows)."""
    hoist: bool = may_differ(False)
    """Take the products with the input out of the scan, into one."""
    unroll: int | None = may_differ(None)
    """Steps that an iteration of the scan runs; 1 if not given."""
    eos_ids: tuple[int, ...] = may_differ(())
    """Ids of the tokens that end a text, where generation stops."""
    recurrence: RecurrenceConfig = RecurrenceConfig()
    """Settings of gated_deltanet, mamba2 and mlstm."""

    def __post_init__(self) -> None:
        configuration.check(self)
        configuration.check_ids("eos_ids", self.eos_ids, self.vocab_size)
        sizes = "vocab_size", "in_size", "out_size", "hidden_size", "num_layers", "embed_size"
        configuration.check_positive(self, "", *sizes, "truncate", "unroll")
        require(0 <= self.dropout < 1, f"dropout={self.dropout}: must be in [0, 1)")
        require(
            (self.vocab_size is None) != (self.in_size is None),
            f"vocab_size={self.vocab_size}, in_size={self.in_size}: give one of them",
        )
        require(
            self.out_size is not None or (self.vocab_size is not None and self.pooling == "none"),
            f"in_size={self.in_size} and pooling={self.pooling!r} need an out_size",
        )
        require(
            not self.tie_embeddings
            or (self.out_size is None and self.width == self.embedding_size),
            f"tie_embeddings needs out_size=None and embed_size={self.width}, and they are "
            f"{self.out_size} and {self.embedding_size}",
        )
        require(
            self.implementation != "cudnn" or self.chunks(1) is None,
            f"implementation='cudnn' has no remat or truncate, and they are {self.remat!r} and "
            f"{self.truncate}",
        )
        width = ("hidden_size", self.hidden_size)
        check_settings(self.recurrence, "recurrence.", self.cell, width)
        require(
            self.cell in CELLS or not (self.bidirectional and self.pooling == "last"),
            f"pooling='last': a bidirectional network of cell={self.cell!r} has no last step; take "
            "'mean'",
        )

    @property
    def embedding_size(self) -> int:
        """Width of the embedding, given or derived."""
        return self.embed_size or self.hidden_size

    @property
    def in_sizes(self) -> list[int]:
        """Width of each layer's input."""
        return [self.in_size or self.embedding_size] + [self.width] * (self.num_layers - 1)

    @property
    def num_outputs(self) -> int:
        """Columns of the outputs."""
        return self.out_size or self.vocab_size or 0

    @property
    def width(self) -> int:
        """Width of a layer's output."""
        return self.hidden_size * (2 if self.bidirectional else 1)

    def chunks(self, seq: int) -> Chunks | None:
        """How time is cut, if it is."""
        if self.remat == "none" and self.truncate is None:
            return None
        size = self.truncate or math.isqrt(seq - 1) + 1
        return Chunks(min(size, seq), self.truncate is not None, self.remat)


def num_flops_per_token(config: Config) -> float:
    """Floating-point operations of training per token: six per weight in a product.

    For cells with a matrix as state, it is that of rows of whole chunks.
    """
    hidden = config.hidden_size
    if config.cell in MIXERS:
        num_products, settings = MIXERS[config.cell].num_products, config.recurrence
        directions, size = 2 if config.bidirectional else 1, settings.chunk_size
        weights = directions * sum(
            num_products(settings, in_size, hidden, size) for in_size in config.in_sizes
        )
    else:
        cell = CELLS[config.cell]
        gates_of_input, gates_of_state = len(cell.input_terms), len(cell.state_terms)
        weights = sum(
            (in_size * gates_of_input + hidden * gates_of_state) * config.width
            for in_size in config.in_sizes
        )
    if config.pooling == "none":
        weights += config.width * config.num_outputs
    return 6.0 * weights
