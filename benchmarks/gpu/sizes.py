"""The sizes to measure: decoders and their goals; and tiny sizes, to test the benchmark itself."""

from dataclasses import dataclass, field

from benchmarks.peers.rnn.given import Shape as RNNShape
from benchmarks.peers.transformer.given import Shape


@dataclass(frozen=True)
class Decoder:
    """A decoder to train in bf16 over fp32 weights, with AdamW, at the largest batch that fits."""

    shape: Shape
    batch_sizes: list[int]
    """Batch sizes to try, the largest first."""
    goal: float
    """MFU to reach, in percent."""
    seconds: float
    """Time limit of each peer."""


def _gpt(layers: int, d_model: int, heads: int, seq_len: int) -> Shape:
    return Shape(layers, d_model, heads, 4 * d_model, vocab_size=50304, seq_len=seq_len, tied=True)


@dataclass(frozen=True)
class Sizes:
    """All sizes of a run of the benchmark."""

    decoders: dict[str, Decoder] = field(
        default_factory=lambda: {
            "124M": Decoder(_gpt(12, 768, 12, 1024), [128, 64, 32, 16, 8], 45, 210),
            "350M": Decoder(_gpt(24, 1024, 16, 1024), [64, 32, 16, 8, 4], 50, 240),
            "1.3B": Decoder(_gpt(24, 2048, 16, 2048), [16, 8, 4, 2, 1], 55, 300),
        }
    )
    compiled: bool = True
    """Whether PyTorch runs compiled, or eagerly."""
    steps: int = 10
    """Steps in each of three measurements."""
    text: float = 1.0
    """Fraction of the standard library's files to tokenize."""
    lstm: RNNShape = RNNShape(hidden_size=1024, vocab_size=2048, seq_len=512, batch_size=64)
    lstm_precisions: tuple[str, ...] = ("fp32", "bf16")
    parity: Shape = Shape(num_layers=4, d_model=256, num_heads=4, d_ff=1024, batch_size=4)
    attention: tuple[int, int, int, int] = (4, 1024, 12, 64)
    """Batch size, sequence length, heads, head size."""
    profile_batch: int = 16


def tiny() -> Sizes:
    """Sizes for two minutes on a CPU."""
    shape = Shape(2, 64, 2, 256, vocab_size=512, seq_len=64, tied=True)
    return Sizes(
        decoders={"tiny": Decoder(shape, [4, 2], 45, 60)},
        compiled=False,
        steps=2,
        text=0.02,
        lstm=RNNShape(hidden_size=16, vocab_size=32, seq_len=16, batch_size=4),
        lstm_precisions=("fp32",),
        parity=Shape(2, 32, 2, 64, vocab_size=64, seq_len=32, batch_size=2),
        attention=(1, 128, 2, 16),
        profile_batch=2,
    )
