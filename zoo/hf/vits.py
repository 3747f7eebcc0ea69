"""The model types of images: ViT, DINOv2, DINOv3 and the vision tower of SigLIP."""

# ruff: noqa: D102 (`Rule` documents the methods of all rules)

import dataclasses
import operator
from dataclasses import dataclass
from functools import partial
from typing import Any

from zoo.hf.encoders import layers
from zoo.hf.family import Family
from zoo.hf.gpts import GELUS
from zoo.hf.heads import labels, num_labels
from zoo.hf.layouts import table
from zoo.hf.rules import Choice, Computed, Fields, Fixed, Rule, Same, same, words
from zoo.transformer import VisionConfig, VisionTransformer


@dataclass(frozen=True)
class Labels(Rule):
    """The classes of a model with a head, by `id2label`, and the pooler of one without."""

    architecture: str
    pooler: bool

    def read(self, fields: Fields) -> dict[str, Any]:
        has_head = fields.values.get("architectures") == [self.architecture]
        return {
            "num_classes": num_labels(fields.values, fields.where) if has_head else 0,
            "pooler": self.pooler and not has_head,
        }

    def write(self, config: Any) -> dict[str, Any]:
        if not config.num_classes:
            return {}
        return {"architectures": [self.architecture], **labels(config.num_classes)}


def _canonical(config: VisionConfig) -> VisionConfig:
    """The canonical form: derived sizes filled in, and starts of training left out."""
    scale = None if config.layer_scale is None else 1.0
    theta = config.theta if config.positions == "rotary" else VisionConfig.theta
    d_ff = config.parts.hidden_size
    return dataclasses.replace(config, d_ff=d_ff, layer_scale=scale, theta=theta)


def _sizes(patch_size: int, hidden: bool = True, heads: int = 12) -> tuple[Rule, ...]:
    text = f"""hidden_size=d_model:{64 * heads} num_hidden_layers=num_layers:12
        num_attention_heads=num_heads:{heads} num_channels=channels:3"""
    wide = f" intermediate_size=d_ff:{256 * heads}" * hidden
    return (*same(text + wide), _square("image_size", 224), _square("patch_size", patch_size))


def _square(name: str, default: int) -> Rule:
    """A height and width that are one number, or a pair of equal ones."""
    one = lambda x, _: {name: x[0] if isinstance(x, list) and len({*x}) == 1 else x}  # noqa: E731
    return Computed(name, default, one, operator.attrgetter(name))


def _mlp_ratio(config: VisionConfig) -> int | float:
    ratio = config.parts.hidden_size / config.d_model
    return int(ratio) if ratio.is_integer() else ratio


vision = partial(Family, model=VisionTransformer, config=VisionConfig, canonical=_canonical)
OF_BACKBONES = words(
    "apply_layernorm reshape_hidden_states out_features out_indices stage_names drop_path_rate "
    "_out_features _out_indices"
)
PATCHES = "embed channels patch_rows patch_columns"


def _blocks(names: str) -> str:
    """The places of a block's parameters, by the modules of its parts."""
    *of_attention, first, second, up, down = names.split()
    return f"""
    {layers(" ".join([*of_attention, "none", up, down]))}
    blocks.attention_norm.scale  {first}.*
    blocks.mlp_norm.scale        {second}.*
    """


_VIT_ATTENTION = "attention.attention.query attention.attention.key attention.attention.value"
VIT = vision(
    model_type="vit",
    architecture="ViTModel",
    rules=(
        *_sizes(16),
        *same("layer_norm_eps=norm_eps:1e-12 qkv_bias=qkv_bias:True"),
        Choice("hidden_act", "mlp", GELUS, "gelu"),
        Fixed("pooler_act", "tanh"),
        Labels("ViTForImageClassification", pooler=True),
    ),
    tensors=table(
        f"""
        patches.weight   {{prefix}}embeddings.patch_embeddings.projection.*  {PATCHES}
        class_token      {{prefix}}embeddings.cls_token            1 positions embed
        positions        {{prefix}}embeddings.position_embeddings  1 positions embed
        final_norm.scale {{prefix}}layernorm.*
        pooler.weight    {{prefix}}pooler.dense.*
        head.weight      classifier.*                              classes embed
        """
        + _blocks(
            f"{_VIT_ATTENTION} attention.output.dense layernorm_before layernorm_after "
            "intermediate.dense output.dense"
        ),
        layer="{prefix}encoder.layer.{layer}.",
    ),
    prefixes=("", "vit."),
    head_prefix="vit.",
    marker="{prefix}embeddings.cls_token",
    ignored=words("encoder_stride pooler_output_size"),
)
DINOV2 = vision(
    model_type="dinov2",
    architecture="Dinov2Model",
    rules=(
        *_sizes(14, hidden=False),
        Computed(
            "mlp_ratio",
            4,
            lambda ratio, values: {"d_ff": int(values.get("hidden_size", 768) * ratio)},
            _mlp_ratio,
        ),
        Same("layer_norm_eps", "norm_eps", 1e-6),
        Same("qkv_bias", "qkv_bias", True),
        Same("layerscale_value", "layer_scale", 1.0),
        Same("use_mask_token", "mask_token", True),
        Choice("hidden_act", "mlp", GELUS, "gelu"),
        Fixed("use_swiglu_ffn", False),
    ),
    tensors=table(
        f"""
        patches.weight   {{prefix}}embeddings.patch_embeddings.projection.*  {PATCHES}
        class_token      {{prefix}}embeddings.cls_token            1 positions embed
        mask_token       {{prefix}}embeddings.mask_token
        positions        {{prefix}}embeddings.position_embeddings  1 positions embed
        final_norm.scale {{prefix}}layernorm.*
        blocks.attention_scale  layer_scale1.lambda1
        blocks.mlp_scale        layer_scale2.lambda1
        """
        + _blocks(f"{_VIT_ATTENTION} attention.output.dense norm1 norm2 mlp.fc1 mlp.fc2"),
        layer="{prefix}encoder.layer.{layer}.",
    ),
    prefixes=("", "dinov2."),
    marker="{prefix}embeddings.cls_token",
    ignored=OF_BACKBONES,
)
DINOV3 = vision(
    model_type="dinov3_vit",
    architecture="DINOv3ViTModel",
    rules=(
        *_sizes(16, heads=6),
        Same("layer_norm_eps", "norm_eps", 1e-5),
        Same("rope_theta", "theta", 100.0),
        Same("query_bias", "qkv_bias", True),
        Same("key_bias", "key_bias", False),
        Fixed("proj_bias", True),
        Fixed("mlp_bias", True),
        Fixed("use_gated_mlp", False),
        *same("layerscale_value=layer_scale:1.0 num_register_tokens=num_registers:0"),
        Choice("hidden_act", "mlp", GELUS, "gelu"),
        Fixed("value_bias", True),
    ),
    always={"positions": "rotary", "mask_token": True},
    tensors=table(
        f"""
        patches.weight   {{prefix}}embeddings.patch_embeddings.*  {PATCHES}
        class_token      {{prefix}}embeddings.cls_token        1 positions embed
        mask_token       {{prefix}}embeddings.mask_token       1 positions embed
        registers        {{prefix}}embeddings.register_tokens  1 positions embed
        final_norm.scale {{prefix}}norm.*
        blocks.attention_scale  layer_scale1.lambda1
        blocks.mlp_scale        layer_scale2.lambda1
        """
        + _blocks(
            "attention.q_proj attention.k_proj attention.v_proj attention.o_proj norm1 norm2 "
            "mlp.up_proj mlp.down_proj"
        ),
        layer="{prefix}layer.{layer}.",
    ),
    marker="{prefix}embeddings.cls_token",
    buffers=("embeddings.register_tokens",),  # of no rows, where there are none
    # Of training: where patches are moved to.
    ignored=OF_BACKBONES | words("pos_embed_shift pos_embed_jitter pos_embed_rescale"),
)
SIGLIP = vision(
    model_type="siglip_vision_model",
    architecture="SiglipVisionModel",
    rules=(
        *_sizes(16),
        Same("layer_norm_eps", "norm_eps", 1e-6),
        Choice("hidden_act", "mlp", GELUS, "gelu_pytorch_tanh"),
        Choice("vision_use_head", "pooling", {True: "attention", False: "mean"}, True),
    ),
    always={"class_token": False},
    tensors=table(
        f"""
        patches.weight                 {{prefix}}embeddings.patch_embedding.*  {PATCHES}
        positions                      {{prefix}}embeddings.position_embedding.weight
        final_norm.scale               {{prefix}}post_layernorm.*
        attention_pooling.probe        {{prefix}}head.probe            1 positions embed
        attention_pooling.attention.{{wq,wk,wv}}  {{prefix}}head.attention.in_proj_*  /
        attention_pooling.attention.wo {{prefix}}head.attention.out_proj.*
        attention_pooling.norm.scale   {{prefix}}head.layernorm.*
        attention_pooling.mlp.w_up     {{prefix}}head.mlp.fc1.*
        attention_pooling.mlp.w_down   {{prefix}}head.mlp.fc2.*
        """
        + _blocks(
            "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj layer_norm1 "
            "layer_norm2 mlp.fc1 mlp.fc2"
        ),
        layer="{prefix}encoder.layers.{layer}.",
    ),
    prefixes=("", "vision_model."),
    within="siglip",
    described_by="vision_config",
    left_out={
        "text_model.": "a text tower",
        "logit_": "the scale and bias of similarities",
    },
    marker="{prefix}embeddings.patch_embedding.weight",
)
