"""Published sizes of models, which `python -m zoo plan` takes by name."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from zoo.nn.products import Kind
from zoo.nn.recurrences.chunks import RecurrenceConfig
from zoo.nn.stateful import cast
from zoo.publishing.tensors import quantized_skeleton
from zoo.transformer.config import Config as Sizes
from zoo.transformer.model import Transformer
from zoo.transformer.part_configs import AttentionConfig, ExpertsConfig, MixerConfig, ResidualConfig
from zoo.transformer.rotary import PositionsConfig
from zoo.transformer.vision import VisionConfig, VisionTransformer

NUM_CLASSES = 1000  # of ImageNet-1k

# From the `config.json` of each model on the Hugging Face hub: meta-llama/Meta-Llama-3-8B and -70B
# (Grattafiori et al. 2024), Qwen/Qwen3-0.6B to -32B, -30B-A3B and -235B-A22B (Yang et al. 2025),
# mistralai/Mixtral-8x7B-v0.1 (Jiang et al. 2024), and Qwen/Qwen3-Next-80B-A3B-Instruct; and the
# model card of Qwen/Qwen3.5-27B, its part for text. Vision transformers are of the sizes of
# Dosovitskiy et al. 2021, table 1, and S of Touvron et al. 2021, with a head for ImageNet-1k.
_LLAMA3 = Sizes(
    vocab_size=128_256,
    max_seq_len=8192,
    attention=AttentionConfig(num_kv_heads=8),
    positions=PositionsConfig(theta=500_000.0),
    residual=ResidualConfig(norm_eps=1e-5),
)
_QWEN3 = Sizes(
    vocab_size=151_936,
    max_seq_len=40_960,
    attention=AttentionConfig(num_kv_heads=8, head_dim=128, qk_norm="per_head"),
    positions=PositionsConfig(theta=1_000_000.0),
)


def _sized(
    base: Sizes, d_model: int, layers: int, heads: int, d_ff: int, *, tied: bool = False
) -> Sizes:
    return dataclasses.replace(
        base, d_model=d_model, num_layers=layers, num_heads=heads, d_ff=d_ff, tie_embeddings=tied
    )


def _hybrid(
    width: int, layers: int, d_ff: int, *, num_heads: int, num_kv_heads: int, value_heads: int
) -> Sizes:
    """Three gated delta nets to one attention, as Qwen3-Next has them."""
    delta = RecurrenceConfig(num_heads=value_heads, num_key_heads=16, key_dim=128, value_dim=128)
    return dataclasses.replace(
        _sized(_QWEN3, width, layers, num_heads, d_ff),
        mixer=MixerConfig((*3 * ("gated_deltanet",), "attention"), delta),
        attention=dataclasses.replace(
            _QWEN3.attention, num_kv_heads=num_kv_heads, head_dim=256, output_gate=True
        ),
        positions=PositionsConfig(theta=10_000_000.0, rotary_fraction=0.25),
        residual=dataclasses.replace(_QWEN3.residual, norm="rms_offset"),
    )


def _vision(d_model: int, layers: int, heads: int) -> VisionConfig:
    return VisionConfig(
        d_model=d_model, num_layers=layers, num_heads=heads, num_classes=NUM_CLASSES
    )


SIZES: dict[str, Sizes | VisionConfig] = {
    "vit-s16": _vision(384, 12, 6),
    "vit-b16": _vision(768, 12, 12),
    "vit-l16": _vision(1024, 24, 16),
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
    "qwen3-235b-a22b": dataclasses.replace(
        _sized(_QWEN3, 4096, 94, 64, 1536),
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
    "qwen3-next-80b-a3b": dataclasses.replace(
        _hybrid(2048, 48, 512, num_heads=16, num_kv_heads=2, value_heads=32),
        experts=ExpertsConfig(num_experts=512, per_token=10, num_shared=1, shared_gate=True),
    ),
    "qwen3.5-27b": dataclasses.replace(
        _hybrid(5120, 64, 17_408, num_heads=24, num_kv_heads=4, value_heads=48),
        vocab_size=248_320,
    ),
}


def published(name: str, *, quantize: Kind | None = None) -> PyTree:
    """The skeleton of a model of a published size, in bf16 as it is published, or quantised."""

    config = SIZES[name.lower()]

    def make(key: Key[Array, ""]) -> PyTree:
        if isinstance(config, VisionConfig):
            return cast(VisionTransformer(config, key=key), jnp.bfloat16)
        return cast(Transformer(config, key=key), jnp.bfloat16)

    return quantized_skeleton(eqx.filter_eval_shape(make, jax.random.key(0)), quantize)
