"""The dense types with most of Llama's names: Phi, OLMo, EXAONE, GLM, Cohere and others."""

# ruff: noqa: D102 (`Rule` documents the methods of all rules)

from dataclasses import dataclass, replace
from typing import Any

from zoo.hf.gpts import GELUS
from zoo.hf.heads import OF_DECODERS
from zoo.hf.llamas import (
    DENSE,
    GATE_UP,
    INTERLEAVED,
    PAIRS,
    POST_NORMS,
    common,
    decoder,
    layer,
    side_by_side,
)
from zoo.hf.mambas import FACTORS
from zoo.hf.rotary import GivenRotary, Rotary
from zoo.hf.rules import (
    Choice,
    Computed,
    Each,
    Fields,
    Fixed,
    LayerTypes,
    RotaryInWindows,
    Rule,
    Same,
    kinds_of,
    layer_types,
    same,
    shortest,
    words,
)

OF_ATTENTION = "attention.qkv_bias attention.out_bias"
BIASES = Each("attention_bias", OF_ATTENTION, False)
RELU2 = Choice("hidden_act", "mlp", {"relu2": "relu2"}, "relu2")


@dataclass(frozen=True)
class NoRope(Rule):
    """SmolLM3's: rotary positions where `no_rope_layers` has 1, and windows where it has 0."""

    def read(self, fields: Fields) -> dict[str, Any]:
        interval = fields.take("no_rope_layer_interval", 4)
        count = fields.values.get("num_hidden_layers", 0)
        given = fields.take("no_rope_layers", None) or [(i + 1) % interval for i in range(count)]
        if len(given) != count:
            raise fields.refusal(f"no_rope_layers={given!r}: must have a number for each layer")
        used, window = fields.take("use_sliding_window", False), fields.take("sliding_window", None)
        types = fields.take("layer_types", None)
        found = {"positions.pattern": shortest(tuple("rotary" if x else "none" for x in given))}
        if not used or window is None:
            if types and "sliding_attention" in types:
                raise fields.refusal("layer_types has a window, but use_sliding_window is false")
            return found
        by_default = ["full_attention" if x else "sliding_attention" for x in given]
        reaches = shortest(kinds_of(fields, types or by_default))
        return found | {"attention.window": window, "attention.window_pattern": reaches}

    def write(self, config: Any) -> dict[str, Any]:
        kinds, window = config.all_layer_kinds, config.attention.window
        return {
            "no_rope_layers": [int(not kind.endswith("nope")) for kind in kinds],
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "layer_types": layer_types(config),
        }


PHI3 = decoder(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    heads=OF_DECODERS,
    rules=(
        *common(Rotary(max_seq_len=4096, fraction=1.0), eps=1e-5, head_dim="derived"),
        # The length that LongRoPE begins with, which the rule of rotary positions reads.
        Computed(
            "original_max_position_embeddings",
            None,
            lambda *_: {},
            lambda config: config.positions.scaling.original_max_seq_len or config.max_seq_len,
        ),
        Same("sliding_window", "attention.window", None),
        Fixed("attention_bias", False, written=False),
    ),
    tensors=DENSE | GATE_UP | layer("blocks.attention.{wq,wk,wv} self_attn.qkv_proj.weight qkv:"),
    splits={"qkv": side_by_side},
)
SMOLLM3 = decoder(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    heads=OF_DECODERS,
    rules=(
        *common(Rotary(theta=2_000_000.0, max_seq_len=32768), tied=True, kv_heads=4),
        NoRope(),
        BIASES,
        Fixed("mlp_bias", False),
    ),
    ignored=frozenset({"max_window_layers", "pretraining_tp"}),
)
GRANITE_DENSE = decoder(
    model_type="granite",
    architecture="GraniteForCausalLM",
    rules=(*common(Rotary()), *FACTORS, BIASES, Fixed("mlp_bias", False)),
)
OLMO = decoder(
    model_type="olmo",
    architecture="OlmoForCausalLM",
    rules=(*common(Rotary(), eps=None), BIASES, Same("clip_qkv", "attention.clip", None)),
    always={"residual.norm": "layer_plain", "residual.norm_eps": 1e-5},
)
OLMO3 = decoder(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    rules=(
        *common(Rotary(theta=500_000.0, local="theta"), eps=1e-5),
        LayerTypes(period=4),
        Fixed("attention_bias", False),
    ),
    always={"attention.qk_norm": "across_heads", "residual.norm_placement": "post"},
    tensors=DENSE | POST_NORMS,
)
EXAONE4 = decoder(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    rules=(*common(Rotary(), eps=1e-5, kv_heads=32), RotaryInWindows(period=4, or_all=True)),
    always={"attention.qk_norm": "per_head", "residual.norm_placement": "post"},
    tensors=DENSE | POST_NORMS,
)
SEED_OSS = decoder(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    rules=(
        *common(Rotary(max_seq_len=524288), kv_heads=8, head_dim=128),
        *same("attention_bias=attention.qkv_bias:True attention_out_bias=attention.out_bias:False"),
        Fixed("mlp_bias", False),
    ),
    ignored=frozenset({"pretraining_tp", "residual_dropout"}),
)
ARCEE = decoder(
    model_type="arcee",
    architecture="ArceeForCausalLM",
    rules=(
        *common(Rotary(max_seq_len=4096), RELU2, eps=1e-5),
        BIASES,
        Same("mlp_bias", "mlp_bias", False),
    ),
)
NEMOTRON = decoder(
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    rules=(
        *common(Rotary(max_seq_len=4096, fraction=0.5), RELU2, eps=1e-5, eps_name="norm_eps"),
        BIASES,
        Same("mlp_bias", "mlp_bias", False),
    ),
    always={"residual.norm": "layer_offset", "residual.norm_bias": True},
)
JAIS2 = decoder(
    model_type="jais2",
    architecture="Jais2ForCausalLM",
    rules=(
        *common(Rotary(max_seq_len=8192), RELU2, eps=1e-5, eps_name="layer_norm_eps"),
        Each("attention_bias", OF_ATTENTION, True),
        Same("mlp_bias", "mlp_bias", True),
    ),
    always={"residual.norm": "layer", "residual.norm_bias": True},
    ignored=frozenset({"rms_norm_eps"}),
)
MINISTRAL = decoder(
    model_type="ministral",
    architecture="MinistralForCausalLM",
    rules=(*common(Rotary(max_seq_len=131072), kv_heads=8), LayerTypes(period=None)),
)
APERTUS = decoder(
    model_type="apertus",
    architecture="ApertusForCausalLM",
    rules=(
        *common(
            GivenRotary(theta=12_000_000.0, max_seq_len=65536),
            Choice("hidden_act", "mlp", {"xielu": "xielu"}, "xielu"),
            eps=1e-5,
            head_dim="derived",
        ),
        BIASES,
    ),
    always={"attention.qk_norm": "per_head"},
    tensors=DENSE
    | layer(
        """
        blocks.attention_norm.scale     attention_layernorm.weight
        blocks.mlp_norm.scale           feedforward_layernorm.weight
        blocks.mlp.activation.positive  mlp.act_fn.alpha_p  1
        blocks.mlp.activation.negative  mlp.act_fn.alpha_n  1
        blocks.mlp.activation.slope     mlp.act_fn.beta
        blocks.mlp.activation.bound     mlp.act_fn.eps
        """
    ),
)
STARCODER2 = decoder(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    rules=(
        *common(
            Rotary(max_seq_len=4096),
            Choice("hidden_act", "mlp", GELUS, "gelu_pytorch_tanh"),
            tied=True,
            eps=1e-5,
            eps_name="norm_epsilon",
            kv_heads=2,
        ),
        Same("sliding_window", "attention.window", None),
        Each("use_bias", f"{OF_ATTENTION} mlp_bias", True),
    ),
    always={"residual.norm": "layer", "residual.norm_bias": True},
    tensors=DENSE
    | layer(
        """
        blocks.mlp.w_up    mlp.c_fc.*
        blocks.mlp.w_down  mlp.c_proj.*
        """
    ),
    ignored=words("embedding_dropout residual_dropout mlp_type norm_type"),
)
STABLELM = decoder(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    rules=(
        *common(
            Rotary(max_seq_len=4096, fraction=0.25),
            eps=1e-5,
            eps_name="layer_norm_eps",
            kv_heads=32,
            head_dim="derived",
        ),
        Same("use_qkv_bias", "attention.qkv_bias", False),
        Choice(
            "use_parallel_residual", "residual.parallel", {False: "none", True: "one_norm"}, False
        ),
        Fixed("qk_layernorm", False),
    ),
    always={"residual.norm": "layer", "residual.norm_bias": True},
    ignored=frozenset({"hidden_dropout"}),
)
PHI = decoder(
    model_type="phi",
    architecture="PhiForCausalLM",
    rules=(
        *common(
            Rotary(max_seq_len=2048, fraction=0.5),
            Choice("hidden_act", "mlp", GELUS, "gelu_new"),
            eps=1e-5,
            eps_name="layer_norm_eps",
            head_dim="derived",
        ),
        Fixed("qk_layernorm", False),
    ),
    always={
        "bias": True,
        "head_bias": True,
        "residual.norm": "layer",
        "residual.parallel": "one_norm",
    },
    tensors=DENSE
    | layer(
        """
        final_norm.scale     {prefix}final_layernorm.*
        blocks.attention.wo  self_attn.dense.*
        blocks.mlp.w_up      mlp.fc1.*
        blocks.mlp.w_down    mlp.fc2.*
        """
    ),
)
# Types with the two of a rotary pair side by side in the checkpoint.
HELIUM = decoder(
    model_type="helium",
    architecture="HeliumForCausalLM",
    rules=(
        *common(Rotary(theta=100_000.0, max_seq_len=4096), eps=1e-8, kv_heads=20, head_dim=128),
        Fixed("attention_bias", False),
        Fixed("mlp_bias", False),
    ),
    tensors=DENSE | INTERLEAVED,
    splits=PAIRS,
)
ERNIE4_5 = decoder(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    rules=(
        *common(
            Rotary(theta=500_000.0, max_seq_len=131072),
            tied=True,
            eps=1e-5,
            kv_heads=2,
            head_dim=128,
        ),
        Fixed("use_bias", False),
    ),
    tensors=DENSE | INTERLEAVED,
    splits=PAIRS,
)
GLM = decoder(
    model_type="glm",
    architecture="GlmForCausalLM",
    rules=(
        *common(Rotary(max_seq_len=131072, fraction=0.5), eps=1.5625e-07, kv_heads=2, head_dim=128),
        Same("attention_bias", "attention.qkv_bias", True),
    ),
    tensors=DENSE | INTERLEAVED | GATE_UP,
    splits=PAIRS,
)
GLM4 = replace(
    GLM,
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    always={"residual.norm_placement": "both"},
    tensors={
        **GLM.tensors,
        **layer(
            """
            blocks.attention_out_norm.scale  post_self_attn_layernorm.weight
            blocks.mlp_out_norm.scale        post_mlp_layernorm.weight
            """
        ),
    },
)


def _cohere(theta: float) -> tuple[Rule, ...]:
    return (
        *common(
            Rotary(theta=theta, max_seq_len=8192),
            tied=True,
            eps=1e-5,
            eps_name="layer_norm_eps",
            head_dim="derived",
        ),
        Same("logit_scale", "logit_multiplier", 0.0625),
        BIASES,
        Fixed("use_qk_norm", False),
    )


COHERE = decoder(
    model_type="cohere",
    architecture="CohereForCausalLM",
    rules=_cohere(500_000.0),
    always={"residual.norm": "layer", "residual.parallel": "one_norm"},
    tensors=DENSE | INTERLEAVED,
    splits=PAIRS,
)
COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    rules=(*_cohere(10_000.0), RotaryInWindows(period=4)),
)
