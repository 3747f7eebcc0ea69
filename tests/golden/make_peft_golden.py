"""Writes peft/: tiny models with adapters as PEFT saves them, and the logits that PEFT computes.

Needs PyTorch, transformers and PEFT, which the tests do not: `python
tests/golden/make_peft_golden.py`. A folder per base and per case, which has golden.npz beside
the adapters. Shapes are odd, biases are random, and so are B and the magnitudes,
which PEFT begins with zeros and with the norms of the matrices.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers

FOLDER = Path(__file__).parent / "peft"
SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 14,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
BASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {**SIZES, "hidden_size": 20, "head_dim": 6}),
    "qwen2": (transformers.Qwen2Config, {**SIZES, "tie_word_embeddings": True}),
    "gpt2": (
        transformers.GPT2Config,
        {"vocab_size": 37, "n_embd": 12, "n_head": 3, "n_layer": 2, "n_positions": 32}
        | {"bos_token_id": None, "eos_token_id": None},
    ),
    "moe": (
        transformers.Qwen3MoeConfig,
        {**SIZES, "num_hidden_layers": 2, "head_dim": 6, "moe_intermediate_size": 12}
        | {"num_experts": 5, "num_experts_per_tok": 2, "mlp_only_layers": [0]},
    ),
}
ATTENTION = ["q_proj", "v_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": "all-linear", "lora_alpha": 7}),
    "some_layers": ("llama", {"target_modules": ATTENTION, "layers_to_transform": [0, 2]}),
    "patterns": (
        "qwen2",
        {
            "target_modules": r".*\.(q_proj|o_proj|down_proj)",
            "rank_pattern": {"o_proj": 2, r"layers\.1\.self_attn\.q_proj": 5},
            "alpha_pattern": {"down_proj": 11},
        },
    ),
    "rslora": ("qwen2", {"target_modules": ATTENTION, "use_rslora": True}),
    "dora": ("qwen2", {"target_modules": "all-linear", "use_dora": True, "use_rslora": True}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj"]}),
    "conv1d_dora": ("gpt2", {"target_modules": ["c_attn"], "use_dora": True}),
    "experts": (
        "moe",
        {
            "target_modules": ATTENTION,
            "target_parameters": ["mlp.experts.gate_up_proj", "experts.down_proj"],
            "rank_pattern": {"experts.down_proj": 2},
            "lora_dropout": 0.0,
        },
    ),
    "head": ("llama", {"target_modules": [*ATTENTION, "lm_head"]}),
    "tokens": ("llama", {"target_modules": ATTENTION, "trainable_token_indices": [36, 3, 11]}),
    "tied_tokens": ("qwen2", {"target_modules": ATTENTION, "trainable_token_indices": [2, 30]}),
    "gpt2_tokens": (
        "gpt2",
        {"target_modules": ["c_attn"], "trainable_token_indices": {"wte": [7, 5]}},
    ),
    "whole": (
        "llama",
        {"target_modules": ATTENTION, "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "tied_whole": (
        "qwen2",
        {"target_modules": ATTENTION, "modules_to_save": ["embed_tokens"]}
        | {"ensure_weight_tying": True},
    ),
}


def make_base(name: str) -> Any:
    kind, values = BASES[name]
    config = kind(**values)
    config._attn_implementation = "eager"
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for path, x in model.named_parameters():
            scale = 0.3 if x.ndim == 1 else 0.8 / x.shape[-1] ** 0.5
            x.copy_(scale * torch.randn(x.shape) + (path.endswith("norm.weight")))
    model.save_pretrained(FOLDER / name)
    (FOLDER / name / "generation_config.json").unlink(missing_ok=True)
    return model


def make(name: str, tokens: np.ndarray) -> None:
    base, values = CASES[name]
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER / base)
    options = {"r": 3, "lora_alpha": 6, "lora_dropout": 0.1, "task_type": "CAUSAL_LM", **values}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**options)).eval()
    torch.manual_seed(sum(map(ord, name)))
    with torch.no_grad():
        for path, x in adapted.named_parameters():
            if "lora_B" in path:
                x.copy_(0.2 * torch.randn(x.shape))
            elif "magnitude" in path:
                x.mul_(1 + 0.3 * torch.randn(x.shape))
            elif "trainable_tokens" in path or "modules_to_save" in path:
                x.add_(0.3 * torch.randn(x.shape))
        logits = adapted(torch.from_numpy(tokens)).logits.numpy()
        with adapted.disable_adapter():
            plain = adapted(torch.from_numpy(tokens)).logits.numpy()
    folder = FOLDER / name
    adapted.save_pretrained(folder)
    (folder / "README.md").unlink()
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = base  # the test makes a path of it
    config["target_modules"] = sorted(x) if isinstance(x := config["target_modules"], list) else x
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    np.savez_compressed(folder / "golden.npz", tokens=tokens.astype(np.int32), logits=logits)
    effect = np.abs(logits - plain).max()
    print(f"{name:15} logits to {np.abs(logits).max():.1f}, of which the adapters {effect:.1f}")


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name in BASES:
        make_base(name)
    tokens = np.random.default_rng(0).integers(0, 37, (2, 9))
    for name in CASES:
        make(name, tokens)
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    print(f"{sum(path.stat().st_size for path in files):,} bytes in {len(files)} files")


if __name__ == "__main__":
    main()
