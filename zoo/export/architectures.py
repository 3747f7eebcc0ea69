"""The architectures of llama.cpp by the types of models, and a model's numbers for them."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from zoo.publishing import PublishError
from zoo.transformer.config import Config
from zoo.transformer.rotary import RopeScaling


@dataclass(frozen=True)
class Target:
    """An architecture of llama.cpp's, and what of the zoo's models it computes."""

    name: str
    """Its name in GGUF, such as "llama"."""
    mlp: tuple[str, ...] = ("swiglu",)
    interleaved: bool = False
    """Whether the two features of a rotary pair lie side by side."""
    windows: bool = False
    """Whether layers may have sliding windows."""
    head: bool = False
    """Whether it needs a head of its own, where ours is tied to the embedding."""
    biases: Literal["none", "out", "all", "needed"] = "none"
    """Biases beside those of queries, keys and values: none; on attention's output; also in the
    MLP; or all of them in each model."""
    normalized: bool | None = None
    """Whether the weights of a token's experts add up to one; None if the file says so."""
    rotating: tuple[str, ...] = ("rotary",)
    """The layers with rotary positions, repeated; "windows": all that have a window."""
    square: bool = False
    """Whether the heads together are as wide as the residual stream."""
    factors: Literal["none", "granite", "cohere"] = "none"
    """The factors of the residual stream and of the logits that it has."""


_DEEPSEEK = Target("deepseek2", interleaved=True)
_GELU = ("gelu", "gelu_erf")
_LLAMA = Target("llama", interleaved=True, biases="all", normalized=True)
_GRANITE = Target("granite", interleaved=True, biases="all", factors="granite")
_GEMMA2 = Target("gemma2", ("geglu",), windows=True)
TARGETS: Mapping[str, Target] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "ministral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": Target("qwen2", square=True),
    "qwen3": Target("qwen3"),
    "qwen2_moe": Target("qwen2moe", head=True, normalized=False, square=True),
    "qwen3_moe": Target("qwen3moe", normalized=True),
    "gemma": Target("gemma", ("geglu",)),
    "gemma2": _GEMMA2,
    "gemma3_text": Target("gemma3", ("geglu",), windows=True),
    "phi": Target("phi2", _GELU, head=True, biases="needed", square=True),
    "phi3": Target("phi3", square=True),
    "gpt2": Target("gpt2", _GELU, biases="needed", square=True),
    "gpt_bigcode": Target("starcoder", _GELU, biases="needed", square=True),
    "gpt_neox": Target("gptneox", _GELU, head=True, biases="needed", square=True),
    "falcon": Target("falcon", _GELU, square=True),
    "starcoder2": Target("starcoder2", _GELU, biases="needed", square=True),
    "stablelm": Target("stablelm", head=True, square=True),
    "olmo": Target("olmo", interleaved=True, square=True),
    "olmo2": Target("olmo2", head=True, square=True),
    "olmo3": Target("olmo2", windows=True, head=True, square=True),
    "olmoe": Target("olmoe", head=True, normalized=False, square=True),
    "smollm3": Target("smollm3", interleaved=True, rotating=("rotary",) * 3 + ("none",)),
    "granite": _GRANITE,
    "granitemoe": Target("granitemoe", interleaved=True, normalized=True, factors="granite"),
    "seed_oss": Target("seed_oss"),
    "arcee": Target("arcee", ("relu2",), interleaved=True),
    "nemotron": Target("nemotron", ("relu2",), head=True, biases="all", square=True),
    "jais2": Target("jais2", ("relu2",), biases="needed"),
    "exaone4": Target("exaone4", square=True),
    "glm4": Target("glm4", interleaved=True),
    "glm4_moe": Target("glm4moe"),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "ernie4_5": Target("ernie4_5", interleaved=True, biases="out"),
    "cohere": Target("command-r", interleaved=True, factors="cohere", square=True),
    "cohere2": Target(
        "cohere2",
        interleaved=True,
        windows=True,
        rotating=("windows",),
        square=True,
        factors="cohere",
    ),
    "gpt_oss": Target("gpt-oss", ("swiglu_clamped",), windows=True, head=True, biases="needed"),
}
# The architectures whose loader takes the factors of wavelengths; another refuses a file with them.
_BY_WAVE = ("llama", "granite", "granitemoe", "arcee", "exaone4")
# The layers by which llama.cpp knows the largest of these models, with another factor of logits.
_LARGEST = {"gemma2": 46, "gemma3": 62}


def target_of(model_type: str, config: Config) -> Target:
    """The architecture of llama.cpp's that computes a model.

    Raises:
        PublishError: none does; the message says which field it is.
    """
    if (target := TARGETS.get(model_type)) is None:
        raise PublishError(
            f"a model of the type {model_type!r} can't go out as GGUF: the types that can are "
            + ", ".join(sorted(TARGETS))
        )
    wrong = [f"{name}={value!r}" for name, value in _surplus(target, config).items()]
    if wrong:
        raise PublishError(
            f"llama.cpp's architecture {target.name!r} has no {', '.join(wrong)}: it would compute "
            "something else. Take the folder of Hugging Face's format to another engine"
        )
    return target


def _surplus(target: Target, config: Config) -> dict[str, Any]:
    """The fields of a configuration that an architecture does not follow, with their values."""
    attention, experts, scaling = config.attention, config.experts, config.positions.scaling
    kinds = config.all_layer_kinds
    rotating = [target.rotating[i % len(target.rotating)] for i in range(len(kinds))]
    if target.rotating == ("windows",):
        rotating = ["rotary" if kind.startswith("local") else "none" for kind in kinds]
    placed = ["none" if kind.endswith("nope") else "rotary" for kind in kinds]
    largest = config.num_layers == _LARGEST.get(target.name)
    size = config.d_model // config.num_heads if largest else config.head_size
    biases = {"attention.out_bias": attention.out_bias, "mlp_bias": config.mlp_bias}
    allowed = {"none": (False, False), "out": (None, False), "needed": (True, True)}
    no_bias = zip(biases, allowed.get(target.biases, (None, None)), strict=True)
    scale = None if attention.scale is None else attention.scale * size**0.5
    usual = 1.0
    if attention.latent.kv_rank is not None and not scaling.is_none:
        usual = _of_length(scaling) ** 2  # with DeepSeek's mscale and mscale_all_dim of 1
        scale = scale if scaling.ramp == "yarn" and scaling.attention_factor == 1 else 0.0
    found = {
        "mlp": config.mlp in target.mlp,
        "positions.pattern": config.positions.kind != "rotary" or placed == rotating,
        "positions.local_theta": config.positions.local_theta is None or target.windows,
        "positions.scaling.short_factors": not scaling.short_factors or target.name == "phi3",
        "positions.scaling.ramp": not _is_by_wave(scaling) or target.name in _BY_WAVE,
        "positions.scaling.query_growth": scaling.query_growth == 0,
        "attention.scale": target.factors == "granite"
        or abs((1.0 if scale is None else scale) / usual - 1) < 1e-6,
        # llama.cpp knows the models without it by their number of layers.
        "attention.latent.q_rank": target.name != "deepseek2"
        or (attention.latent.q_rank is None) == (config.num_layers in (26, 27)),
        "experts.group_score": experts.num_groups == 1 or experts.group_score == 2,
        "attention.soft_cap": (attention.soft_cap is not None) == (target.name == "gemma2"),
        "logit_soft_cap": config.logit_soft_cap is not None or target.name != "gemma2",
        "experts.normalize": experts.num_experts is None
        or target.normalized in (None, experts.normalize),
        "experts.interval": experts.interval == 1,
        "attention.head_dim": not target.square
        or config.num_heads * config.head_size == config.d_model,
        "attention.num_kv_heads": target.name != "olmoe" or config.kv_heads == config.num_heads,
    }
    if target.name not in ("gpt-oss",):  # whose biases its family has in each model
        found |= {name: only in (None, biases[name] or config.bias) for name, only in no_bias}
    if target.name not in ("glm4moe", "deepseek2"):
        found["experts.first_dense"] = experts.first_dense == 0
    wrong = (name for name, right in found.items() if not right)
    return {name: operator.attrgetter(name)(config) for name in wrong}


def _of_length(scaling: RopeScaling) -> float:
    """YaRN's factor of the attention for a length."""
    return 0.1 * float(np.log(scaling.factor)) + 1


def context_length(target: Target, config: Config) -> int:
    """Positions of a context: up to the window, where an architecture has no windows."""
    window = None if target.windows else config.attention.window
    if not any(kind.startswith("local") for kind in config.all_layer_kinds):
        window = None
    return config.max_seq_len if window is None else min(window, config.max_seq_len)


def notes(target: Target, config: Config) -> list[str]:
    """The differences of llama.cpp's maths, in sentences."""
    found, scaling = [], config.positions.scaling
    if (length := context_length(target, config)) < config.max_seq_len:
        found.append(
            f"llama.cpp's {target.name} has no sliding windows: the context ends at the window, "
            f"{length} positions in place of {config.max_seq_len}, up to which both are the same"
        )
    if not scaling.truncate:
        found.append("positions.scaling.truncate=False: llama.cpp's YaRN begins at a whole pair")
    if scaling.short_factors:
        found.append(
            "positions.scaling.long_factors: llama.cpp has them for all texts of a context beyond "
            f"{scaling.original_max_seq_len} positions, and else the short ones"
        )
    if "gelu" in config.mlp or config.mlp == "geglu":
        found.append(f"mlp={config.mlp!r}: llama.cpp's GELU is a table of float16, by tanh")
    return found


def numbers(target: Target, config: Config) -> dict[str, Any]:
    """The metadata of a model, by keys without the architecture."""
    attention, experts, residual = config.attention, config.experts, config.residual
    norm = "layer_norm" if residual.norm.startswith("layer") else "layer_norm_rms"
    found: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": context_length(target, config),
        "embedding_length": config.d_model,
        "feed_forward_length": config.dense_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_size,
        "attention.value_length": config.head_size,
        f"attention.{norm}_epsilon": residual.norm_eps,
        "attention.clamp_kqv": attention.clip,
        "attn_logit_softcapping": attention.soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
        **_factors(target, config),
    }
    latent = attention.latent
    if latent.kv_rank is not None:
        found |= {
            "attention.head_count_kv": 1,
            "attention.key_length": latent.kv_rank + latent.rotary_dim,
            "attention.value_length": latent.kv_rank,
            "attention.key_length_mla": config.head_size,
            "attention.value_length_mla": config.value_size,
            "attention.kv_lora_rank": latent.kv_rank,
            "attention.q_lora_rank": latent.q_rank,
        }
    if config.positions.kind == "rotary":
        found |= _rotary(config)
    if residual.parallel != "none" or target.name == "gptneox":
        found["use_parallel_residual"] = residual.parallel != "none"
    if target.windows and attention.window is not None:
        local = [kind.startswith("local") for kind in config.all_layer_kinds]
        found["attention.sliding_window"] = attention.window
        found["attention.sliding_window_pattern"] = local
    if target.name == "falcon":
        found["tensor_data_layout"] = "jploski"
    if experts.num_experts is not None:
        found |= {
            "expert_count": experts.num_experts,
            "expert_used_count": experts.per_token,
            "expert_feed_forward_length": config.hidden_size,
            "expert_shared_feed_forward_length": experts.num_shared * config.hidden_size or None,
            "expert_shared_count": experts.num_shared or None,
            "expert_gating_func": 2 if experts.router == "sigmoid" else 1,
            "expert_weights_norm": experts.normalize,
            "expert_weights_scale": None if experts.scale == 1 else experts.scale,
            "leading_dense_block_count": experts.first_dense or None,
        }
        if experts.num_groups > 1:
            found["expert_group_count"] = experts.num_groups
            found["expert_group_used_count"] = experts.groups_per_token
    return {name: value for name, value in found.items() if value is not None}


def _factors(target: Target, config: Config) -> dict[str, Any]:
    """Granite divides the logits by its factor, and Cohere multiplies them."""
    residual = config.residual
    if target.factors == "cohere":
        return {"logit_scale": float(config.logit_multiplier)}
    if target.factors == "none":
        return {}
    return {
        "logit_scale": 1 / config.logit_multiplier,
        "residual_scale": residual.multiplier,
        "embedding_scale": residual.embedding_multiplier,
        "attention.scale": config.attention.scale,
    }


def _rotary(config: Config) -> dict[str, Any]:
    positions, scaling = config.positions, config.positions.scaling
    found: dict[str, Any] = {
        "rope.dimension_count": config.rotary_size,
        "rope.freq_base": positions.theta,
        "rope.freq_base_swa": positions.local_theta,
    }
    if scaling.is_none or _is_by_wave(scaling):
        return found
    found["rope.scaling.original_context_length"] = scaling.original_max_seq_len
    if scaling.short_factors:
        factor = scaling.attention_factor
        return found | {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": factor}
    yarn = scaling.ramp == "yarn"
    found["rope.scaling.type"] = "yarn" if yarn else "linear"
    found["rope.scaling.factor"] = scaling.factor
    if yarn:
        found |= {
            "rope.scaling.yarn_beta_fast": scaling.high_freq_factor,
            "rope.scaling.yarn_beta_slow": scaling.low_freq_factor,
        }
        if config.attention.latent.kv_rank is not None:
            return found | {"rope.scaling.yarn_log_multiplier": 0.1}
        # llama.cpp multiplies it by its own.
        found["rope.scaling.attn_factor"] = scaling.attention_factor / _of_length(scaling)
    return found


def _is_by_wave(scaling: RopeScaling) -> bool:
    """Whether the scaling is Llama 3's, which a file holds as the factor of each wavelength."""
    return scaling.low_freq_factor is not None and scaling.ramp == "llama3"


def wave_factors(config: Config) -> dict[str, np.ndarray]:
    """The factors of the rotary wavelengths one by one, by the names of their tensors."""
    scaling = config.positions.scaling
    if config.positions.kind != "rotary" or scaling.is_none:
        return {}
    if scaling.short_factors:
        return {
            "rope_factors_short.weight": np.array(scaling.short_factors, np.float32),
            "rope_factors_long.weight": np.array(scaling.long_factors, np.float32),
        }
    if not _is_by_wave(scaling):
        return {}
    size, theta = config.rotary_size, config.positions.theta
    frequency = theta ** -(np.arange(0, size, 2, dtype=np.float64) / size)
    low, high = scaling.low_freq_factor or 0.0, scaling.high_freq_factor or 0.0
    fits = (scaling.original_max_seq_len or 0) * frequency / (2 * np.pi)
    kept = np.clip((fits - low) / (high - low), 0, 1)
    factors = 1 / ((1 - kept) / scaling.factor + kept)
    return {"rope_freqs.weight": factors.astype(np.float32)}
