"""The hyperparameters of a transformer's parts: attention, experts, mixers, the residual stream."""

from dataclasses import dataclass
from typing import Literal

from zoo.common import configuration
from zoo.common.configuration import may_differ, require
from zoo.nn.attention.attention import Implementation
from zoo.nn.layers import NormKind
from zoo.nn.recurrences.chunks import RecurrenceConfig
from zoo.nn.recurrences.mixers import MixerName
from zoo.transformer.dispatch import Dispatch

Reach = Literal["local", "global"]
Scores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class LatentConfig:
    """Keys and values of all heads from one latent vector (DeepSeek-AI 2024, DeepSeek-V2)."""

    kv_rank: int | None = None
    """Size of the latent vector; each position has keys and values of its own if not given."""
    q_rank: int | None = None
    """Size of a latent vector that queries come from; from the layer's input if not given."""
    rotary_dim: int = 64
    """Features of a head that rotate, with one key for all heads; a part of head_dim."""
    value_dim: int | None = None
    """Size of a head's values; that of its features that do not rotate if not given."""

    def __post_init__(self) -> None:
        configuration.check(self, "attention.latent.")
        sizes = ("kv_rank", "q_rank", "rotary_dim", "value_dim")
        configuration.check_positive(self, "attention.latent.", *sizes)
        require(
            self.kv_rank is not None or (self.q_rank is None and self.value_dim is None),
            f"attention.latent.q_rank={self.q_rank}, value_dim={self.value_dim}: are for latent "
            "attention; set attention.latent.kv_rank",
        )


@dataclass(frozen=True)
class AttentionConfig:
    """How positions see each other."""

    num_kv_heads: int | None = None
    """Key and value heads per layer, for grouped queries; as many as query heads if not given."""
    head_dim: int | None = None
    """Size of a head; d_model / num_heads if not given."""
    qkv_bias: bool = False
    """Biases on queries, keys and values only (Qwen 2)."""
    key_bias: bool = True
    """The bias on keys, where queries and values have theirs (not in DINOv3)."""
    out_bias: bool = False
    """A bias on the last projection of attention (Seed-OSS)."""
    clip: float | None = None
    """Bounds the features of queries, keys and values, before all else (OLMo)."""
    qk_norm: Literal["none", "per_head", "across_heads"] = "none"
    """RMSNorm of queries and keys: over each head (Henry et al. 2020), or all together (OLMo 2)."""
    window: int | None = None
    """Sliding window: a token sees that many positions, its own included."""
    window_pattern: tuple[Reach, ...] = ("local",)
    """Which layers have the window, repeated over the layers: local ones do, global ones do not."""
    scale: float | None = None
    """Factor of the attention logits; head_dim^-0.5 if not given."""
    soft_cap: float | None = None
    """Bounds the attention logits by cap · tanh(logits / cap)."""
    output_gate: bool = False
    """Multiply the output of each head, before the last projection, by a sigmoid of the layer's
    input (Qwen3-Next)."""
    sinks: bool = False
    """A logit per head that takes part in the softmax, and has no value (gpt-oss)."""
    latent: LatentConfig = LatentConfig()
    kernel: Implementation = may_differ("auto")
    """Attention kernel: auto, chunked, xla, cudnn or triton (GPUs), splash or splash_fused (TPUs);
    or auto with ring or exchange, where a mesh splits rows: keys go around the devices, or these
    exchange heads."""

    def __post_init__(self) -> None:
        configuration.check(self, "attention.")
        configuration.check_positive(
            self, "attention.", "num_kv_heads", "head_dim", "window", "scale", "soft_cap", "clip"
        )
        require(
            len(self.window_pattern) > 0,
            "attention.window_pattern=(): needs a 'local' or 'global' at least",
        )


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts, each an MLP of its own, in place of one MLP for all tokens."""

    num_experts: int | None = None
    """Experts per layer; one MLP for all tokens if not given."""
    per_token: int = 2
    """Experts that each token goes to: those with the highest scores."""
    normalize: bool = True
    """Make the weights of a token's experts add up to one (Mixtral)."""
    router: Scores = "softmax"
    """Scores of the experts: softmax over all of them, or a sigmoid of each (DeepSeek-V3)."""
    bias_rate: float | None = None
    """Step of a bias per expert that evens out their load, such as 0.001; no bias if not given."""
    scale: float = 1.0
    """Factor of the weights of a token's experts (DeepSeek-V3)."""
    num_shared: int = 0
    """Experts that every token goes to, beside the ones that its router chooses."""
    shared_gate: bool = False
    """Multiply the shared experts' output by a sigmoid of the token (Qwen2-MoE, Qwen3-Next)."""
    num_groups: int = 1
    """Groups that the experts are cut into; a token's come from a few of them (DeepSeek)."""
    groups_per_token: int = 1
    """Groups that a token's experts are in: those with the highest scores."""
    group_score: int = 2
    """Best experts of a group whose scores add up to the group's: 2 (DeepSeek-V3) or 1 (V2)."""
    first_dense: int = 0
    """Layers before the first one with experts, which have one MLP for all tokens (DeepSeek)."""
    interval: int = 1
    """Every interval-th layer has experts; the others have one MLP for all tokens (Llama 4)."""
    dense_d_ff: int | None = None
    """Hidden width of the MLP of layers without experts; that of an expert if not given."""
    dispatch: Dispatch = may_differ("auto")
    """How tokens reach experts on other devices: all_reduce, or all_to_all, which sends less where
    there are more devices than experts per token."""
    buffer: float = may_differ(2.0)
    """Rows that a device has room for in all_to_all, over its even share; more come in rounds."""

    def __post_init__(self) -> None:
        configuration.check(self, "experts.")
        configuration.check_positive(
            self, "experts.", "num_experts", "bias_rate", "scale", "num_groups", "groups_per_token"
        )
        configuration.check_positive(self, "experts.", "group_score", "interval", "dense_d_ff")
        require(self.num_shared >= 0, f"experts.num_shared={self.num_shared}: must be 0 at least")
        require(self.buffer >= 1, f"experts.buffer={self.buffer}: must be 1 at least")
        require(
            self.num_shared > 0 or not self.shared_gate,
            "experts.shared_gate=True: is for shared experts; set experts.num_shared",
        )
        names = ("router", "bias_rate", "scale", "num_shared", "num_groups", "first_dense")
        for name in (*names, "interval", "dense_d_ff"):
            value = getattr(self, name)
            require(
                self.num_experts is not None or value == getattr(ExpertsConfig, name),
                f"experts.{name}={value!r}: is for models with experts; set experts.num_experts",
            )
        require(
            self.num_experts is None or 0 < self.per_token <= self.num_experts,
            f"experts.per_token={self.per_token}: must be in 1 to experts.num_experts="
            f"{self.num_experts}",
        )
        require(
            self.first_dense >= 0, f"experts.first_dense={self.first_dense}: must be 0 at least"
        )
        if self.num_groups > 1:
            self._check_groups(self.num_experts or 0)

    def _check_groups(self, num_experts: int) -> None:
        size, groups = num_experts // self.num_groups, self.groups_per_token
        require(
            num_experts % self.num_groups == 0,
            f"experts.num_groups={self.num_groups} does not divide experts.num_experts="
            f"{num_experts}",
        )
        require(
            groups <= self.num_groups and self.per_token <= groups * size,
            f"experts.groups_per_token={groups}: must be in 1 to experts.num_groups="
            f"{self.num_groups}, and their experts, {groups * size}, enough for experts.per_token="
            f"{self.per_token}",
        )
        require(
            self.group_score <= size,
            f"experts.group_score={self.group_score}: must be in 1 to the {size} of a group",
        )


@dataclass(frozen=True)
class MixerConfig:
    """The mixer of the positions of a row in each layer: attention, or a recurrence over them."""

    pattern: tuple[Literal["attention", MixerName], ...] = ("attention",)
    """The mixer of each layer, repeated over the layers, with one kind of recurrence at most."""
    recurrence: RecurrenceConfig = RecurrenceConfig()
    """Settings of gated_deltanet, mamba2 and mlstm."""
    norm_placement: Literal["pre", "post", "both"] | None = None
    """Where norms are in layers with a recurrence, and residual.norm_placement in the others
    (Olmo-Hybrid); the same in all if not given."""

    def __post_init__(self) -> None:
        configuration.check(self, "mixer.")
        require(len(self.pattern) > 0, "mixer.pattern=(): needs a mixer at least")
        kinds = sorted({*self.pattern} - {"attention"})
        require(
            len(kinds) < 2,
            f"mixer.pattern={self.pattern} has {' and '.join(kinds)}: choose one of them, beside "
            "attention",
        )
        require(
            self.norm_placement is None or len({*self.pattern}) == 2,
            f"mixer.norm_placement={self.norm_placement!r}: is for layers with a recurrence beside "
            f"others with attention, and mixer.pattern={self.pattern}; set residual.norm_placement",
        )

    @property
    def kind(self) -> MixerName | None:
        """The kind of the recurrence, if there is one."""
        return next((name for name in self.pattern if name != "attention"), None)


@dataclass(frozen=True)
class ResidualConfig:
    """The residual stream, and the norms between it and the parts that add to it."""

    norm: NormKind = "rms"
    """RMSNorm, LayerNorm, either with its scale stored minus one (Gemma, Nemotron), or
    LayerNorm without a scale (OLMo)."""
    norm_bias: bool = False
    """Biases in LayerNorm."""
    parallel: Literal["none", "one_norm", "two_norms"] = "none"
    """Let the MLP read what attention reads, beside it and not after it, behind the same norm
    (GPT-J, Cohere) or behind its own (GPT-NeoX)."""
    norm_placement: Literal["pre", "post", "both", "stream"] = "pre"
    """Where norms are: before each part, after it (OLMo 2), both (Gemma 2), or on the sum of it and
    the residual stream (BERT)."""
    norm_eps: float = 1e-6
    """Constant that the norms add to the variance."""
    scale_embedding: bool = False
    """Multiply the embedding of tokens by the square root of d_model (Gemma)."""
    embedding_multiplier: float = 1.0
    """Factor of the embedding of tokens (Granite)."""
    multiplier: float = 1.0
    """Factor of what each part adds to the residual stream (Granite)."""
    layer_scale: float | None = None
    """Initial value of a learned factor per feature of what each part adds; none if not given."""
    final_norm: bool = True
    """A norm of the residual stream behind the last layer (not in BERT, whose stream is normed)."""

    def __post_init__(self) -> None:
        configuration.check(self, "residual.")
        configuration.check_positive(
            self, "residual.", "norm_eps", "embedding_multiplier", "multiplier", "layer_scale"
        )
        require(
            self.parallel == "none" or self.norm_placement == "pre",
            f"residual.parallel={self.parallel!r}: has norms before the parts, and "
            f"residual.norm_placement={self.norm_placement!r}",
        )
