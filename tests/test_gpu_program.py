"""The program that a GPU's compiler is given, which needs no GPU.

The bf16 train step of a decoder of 124M's widths is lowered for CUDA, and its StableHLO examined:
the dtypes of its products, the kernel of its attention, and its largest logits in memory.
"""

import contextlib
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import jax
import numpy as np
import pytest

import zoo
from benchmarks.peers import jax_step, zoo_model
from benchmarks.peers.given import Transformer
from zoo import losses, transformer
from zoo.nn.attention import attention
from zoo.training.state import Blueprint

SHAPE = Transformer(2, 768, 12, 3072, vocab_size=50304, seq_len=1024, batch_size=16, tied=True)


@pytest.fixture(autouse=True)
def _promotion_as_users_have_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_gpu_program_uses_bf16_and_flash_attention(monkeypatch):
    text = lowered(SHAPE)
    products = dot_generals(text)
    assert products["bf16, bf16"] > 0
    assert not {operands for operands in products if "f32" in operands}
    assert sum("fmha" in name for name in custom_calls(text)) == 2  # forward and backward
    assert 0 < 4 * largest_logits(text, SHAPE) <= losses.LOGITS_BYTES
    # And where it is otherwise, the program says so.
    monkeypatch.setattr("zoo.training.losses.LOGITS_BYTES", 2**62)
    refusal = lambda *_: "is not for this test"
    monkeypatch.setattr(sys.modules[attention.__module__], "_refusal", refusal)
    text = lowered(SHAPE)
    assert not any("fmha" in name for name in custom_calls(text))
    assert largest_logits(text, SHAPE) == SHAPE.num_tokens * SHAPE.vocab_size
    product = "%2 = stablehlo.dot_general %0, %1 : (tensor<2x3xf32>, tensor<3x4xbf16>)"
    assert dot_generals(product) == {"f32, bf16": 1}


def lowered(shape: Transformer) -> str:
    """The StableHLO of the zoo's train step for CUDA; layers are scanned, so it has one of them."""
    config = zoo_model.transformer_sizes(shape, "none", scan=True)
    optimizer = jax_step.optimizer()
    tokens = jax.ShapeDtypeStruct((shape.batch_size, shape.seq_len), np.int32)
    weights = jax.ShapeDtypeStruct(tokens.shape, np.float32)
    with as_on_gpu():
        state = Blueprint(
            lambda key: transformer.Transformer(config, key=key), optimizer, key=jax.random.key(0)
        ).skeleton
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


def largest_logits(text: str, shape: Transformer) -> int:
    """Elements of the largest fp32 array over the vocabulary that is no parameter."""
    sizes = {tuple(map(int, each.split("x"))) for each in re.findall(r"<([\dx]+)xf32>", text)}
    parameters = shape.vocab_size * shape.d_model
    over_vocabulary = (math.prod(x) for x in sizes if shape.vocab_size in x)
    return max((size for size in over_vocabulary if size != parameters), default=0)
