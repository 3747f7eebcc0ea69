"""Configurations of published sizes, by name, for plans that need no weights.

From the `config.json` of each model on the Hugging Face hub: meta-llama/Meta-Llama-3-8B and -70B
(Grattafiori et al. 2024), Qwen/Qwen3-0.6B to -32B and -30B-A3B (Yang et al. 2025), and
mistralai/Mixtral-8x7B-v0.1 (Jiang et al. 2024).
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from zoo.nn.products import Kind
from zoo.nn.stateful import cast
from zoo.publishing.tensors import quantized_skeleton
from zoo.transformer.config import (
    AttentionConfig,
    Config,
    ExpertsConfig,
    PositionsConfig,
    ResidualConfig,
)
from zoo.transformer.model import Transformer

_LLAMA3 = Config(
    vocab_size=128_256,
    max_seq_len=8192,
    attention=AttentionConfig(num_kv_heads=8),
    positions=PositionsConfig(theta=500_000.0),
    residual=ResidualConfig(norm_eps=1e-5),
)
_QWEN3 = Config(
    vocab_size=151_936,
    max_seq_len=40_960,
    attention=AttentionConfig(num_kv_heads=8, head_dim=128, qk_norm="per_head"),
    positions=PositionsConfig(theta=1_000_000.0),
)


def _sized(
    base: Config, d_model: int, layers: int, heads: int, d_ff: int, *, tied: bool = False
) -> Config:
    return dataclasses.replace(
        base, d_model=d_model, num_layers=layers, num_heads=heads, d_ff=d_ff, tie_embeddings=tied
    )


SIZES: dict[str, Config] = {
    "llama3-8b": _sized(_LLAMA3, 4096, 32, 32, 14_336),
    "llama3-70b": _sized(_LLAMA3, 8192, 80, 64, 28_672),
    "qwen3-0.6b": _sized(_QWEN3, 1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _sized(_QWEN3, 2048, 28, 16, 6144, tied=True),
    "qwen3-4b": _sized(_QWEN3, 2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _sized(_QWEN3, 4096, 36, 32, 12_288),
    "qwen3-14b": _sized(_QWEN3, 5120, 40, 40, 17_408),
    "qwen3-32b": _sized(_QWEN3, 5120, 64, 64, 25_600),
    "qwen3-30b-a3b": dataclasses.replace(
        _sized(_QWEN3, 2048, 48, 32, 768),
        attention=dataclasses.replace(_QWEN3.attention, num_kv_heads=4),
        experts=ExpertsConfig(num_experts=128, per_token=8),
    ),
    "mixtral-8x7b": dataclasses.replace(
        _sized(_LLAMA3, 4096, 32, 32, 14_336),
        vocab_size=32_000,
        max_seq_len=32_768,
        positions=PositionsConfig(theta=1_000_000.0),
        experts=ExpertsConfig(num_experts=8, per_token=2),
    ),
}


def named(name: str) -> Config:
    """The configuration of a published size.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    if name.lower() not in SIZES:
        raise ValueError(f"{name!r} is no published size; there are {', '.join(SIZES)}")
    return SIZES[name.lower()]


def skeleton(name: str, *, quantize: Kind | None = None) -> PyTree:
    """The skeleton of a model of a published size, in bf16 as it is published, or quantised.

    Raises:
        ValueError: as `named`.
    """

    def make(key: Key[Array, ""]) -> Transformer:
        return cast(Transformer(named(name), key=key), jnp.bfloat16)

    return quantized_skeleton(eqx.filter_eval_shape(make, jax.random.key(0)), quantize)
