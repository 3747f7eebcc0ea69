"""The program that a GPU's compiler is given: evidence that needs no GPU.

The bf16 train step of the 124M decoder is lowered for CUDA, and its StableHLO examined: the dtypes
of its products, the kernel of its attention, and the largest part of its logits in memory.
"""

import contextlib
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import jax
import numpy as np

import zoo
from benchmarks.peers import jax_step
from benchmarks.peers.transformer import zoo_model
from benchmarks.peers.transformer.given import Shape
from benchmarks.report import Table
from zoo import losses, transformer
from zoo.training.state import abstract_state

GPT_124M = Shape(12, 768, 12, 3072, vocab_size=50304, seq_len=1024, batch_size=16, tied=True)


@dataclass(frozen=True)
class Options:
    """The train step as it is lowered for a GPU, in bf16."""

    shape: Shape = GPT_124M
    """Sizes of the decoder."""


def measure(options: Options) -> list[Table]:
    """One row per property of the program, and one failure per wrong property."""
    shape = options.shape
    text = lowered(shape)
    products, kernels = dot_generals(text), custom_calls(text)
    wide = {operands: n for operands, n in products.items() if "f32" in operands}
    attention = {name: n for name, n in kernels.items() if "fmha" in name}
    largest = largest_logits(text, shape)
    whole = shape.num_tokens * shape.vocab_size
    table = Table(
        f"bf16 train step of {shape.num_layers} layers of {shape.d_model}, batch "
        f"{shape.batch_size} of {shape.seq_len}, vocabulary {shape.vocab_size}, lowered for CUDA"
    )
    table.rows += [
        {"property": "products of (bf16, bf16)", "value": products["bf16, bf16"]},
        {"property": "products with an fp32 operand", "value": sum(wide.values())},
        {"property": "cuDNN's flash attention kernels", "value": ", ".join(attention)},
        {"property": "largest chunk of fp32 logits, MiB", "value": 4 * largest / 2**20},
        {"property": "all fp32 logits together, MiB", "value": 4 * whole / 2**20},
    ]
    if wide:
        table.failures.append(f"products with fp32 operands: {wide}")
    if len(attention) != 2:
        table.failures.append(f"no cuDNN attention, forward and backward: found {attention}")
    if 4 * largest > losses.LOGITS_BYTES:
        table.failures.append(f"a chunk of the logits takes {4 * largest} bytes")
    table.print()
    return [table]


def lowered(shape: Shape) -> str:
    """The StableHLO of the zoo's train step for CUDA; layers are scanned, so it has one of them."""
    config = zoo_model.sizes(shape, "none", scan=True)
    optimizer = jax_step.optimizer()
    tokens = jax.ShapeDtypeStruct((shape.batch_size, shape.seq_len), np.int32)
    weights = jax.ShapeDtypeStruct(tokens.shape, np.float32)
    with as_on_gpu():
        state = abstract_state(
            lambda key: transformer.Transformer(config, key=key), optimizer, key=jax.random.key(0)
        )
        step = zoo.make_train_step(losses.next_token, optimizer, precision="bf16")
        batch = {"tokens": tokens, "targets": tokens, "weights": weights}
        return step.trace(state, batch).lower(lowering_platforms=("cuda",)).as_text()


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """A context in which the zoo and JAX find an H100 with cuDNN 9.11."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn  # private, and used only here

    answers = {
        "check_cudnn_version": lambda: 91100,
        "check_compute_capability": lambda least: float(least) <= 9.0,
        "is_cuda_compute_capability_equal": lambda version: float(version) == 9.0,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(jax, "default_backend", return_value="gpu"))
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(cudnn, name, answer))
        yield


def dot_generals(text: str) -> Counter[str]:
    """The number of products of each pair of dtypes, such as "bf16, bf16"."""
    pairs = re.findall(r"stablehlo\.dot_general.*: \(tensor<([^>]*)>, tensor<([^>]*)>\)", text)
    return Counter(", ".join(each.split("x")[-1] for each in pair) for pair in pairs)


def custom_calls(text: str) -> Counter[str]:
    """The number of calls of each kernel."""
    return Counter(re.findall(r"custom_call @([\w$]+)", text))


def largest_logits(text: str, shape: Shape) -> int:
    """Elements of the largest fp32 array over the vocabulary that is no parameter."""
    sizes = {tuple(map(int, each.split("x"))) for each in re.findall(r"<([\dx]+)xf32>", text)}
    parameters = shape.vocab_size * shape.d_model
    over_vocabulary = (math.prod(x) for x in sizes if shape.vocab_size in x)
    return max((size for size in over_vocabulary if size != parameters), default=0)
