"""The floating-point operations of training a transformer."""

from zoo.nn.recurrences.mixers import MIXERS
from zoo.transformer.config import Config
from zoo.transformer.vision import VisionConfig


def num_flops_per_token(config: Config, seq_len: int) -> float:
    """Floating-point operations of training per token: forward and backward, no recomputation.

    Six per weight in a product (of experts, the ones a token goes to), and for attention twelve per
    layer, head feature and visible key, halved where it is causal (Chowdhery et al. 2022, appendix
    B, counts the whole square).
    """
    heads, kv_heads, size = config.num_heads, config.kv_heads, config.head_size
    of_heads = 3 if config.attention.output_gate else 2
    attention_weights = config.d_model * size * (of_heads * heads + 2 * kv_heads)
    latent, values = config.attention.latent, config.value_size
    if latent.kv_rank is not None:
        of_queries = config.d_model * heads * size
        if latent.q_rank is not None:
            of_queries = latent.q_rank * (config.d_model + heads * size)
        of_each = latent.kv_rank * (size - latent.rotary_dim + values) + values * config.d_model
        attention_weights = of_queries + heads * of_each
        attention_weights += config.d_model * (latent.kv_rank + latent.rotary_dim)
    weights: float = config.mixers.count("attention") * attention_weights
    if config.mixer.kind is not None:
        settings, width = config.mixer.recurrence, config.d_model
        num_products = MIXERS[config.mixer.kind].num_products
        chunk = min(settings.chunk_size, seq_len)
        per_layer = num_products(settings, width, width, chunk)
        weights += config.mixers.count("recurrence") * per_layer
    one, experts = config.d_model * (3 if config.gated else 2), config.experts
    with_experts = config.has_experts.count(True)
    of_experts = one * config.hidden_size * (experts.per_token + experts.num_shared)
    of_experts += config.d_model * ((experts.num_experts or 0) + experts.shared_gate)
    if config.mlp != "none":
        dense = (config.num_layers - with_experts) * one * config.dense_size
        weights += dense + with_experts * of_experts
    encoder = config.encoder
    weights += config.d_model * config.vocab_size * (encoder.head != "none")
    weights += config.d_model**2 * (encoder.head == "transformed")

    def visible(window: int | None) -> float:
        keys = min(seq_len, window or seq_len)
        return keys / 2 if config.causal and keys == seq_len else float(keys)

    kinds = [kind for kind in config.all_layer_kinds if kind != "recurrent"]
    all_visible = sum(visible(config.window_of(kind)) for kind in kinds)
    return 6.0 * weights + 6.0 * heads * (size + values) * all_visible


def num_flops_per_image(config: VisionConfig, visible: int | None = None) -> float:
    """Floating-point operations of training per image of the configuration's size.

    Each token sees all of an image, or `visible` of its tokens.
    """
    tokens = config.num_tokens
    seen = tokens if visible is None else visible
    of_blocks = tokens * num_flops_per_token(config.parts, seen)
    of_patches = config.grid**2 * config.patch_size**2 * config.channels * config.d_model
    return of_blocks + 6.0 * (of_patches + config.d_model * config.num_classes)
