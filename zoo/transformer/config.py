"""The hyperparameters of a transformer, and the sizes that follow from them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from zoo.common import configuration
from zoo.common.configuration import may_differ, of_training, require
from zoo.nn.attention.attention import Implementation
from zoo.nn.layers import GATED_MLPS, Activation, MLPKind, NormKind
from zoo.nn.recurrences.chunks import RecurrenceConfig
from zoo.nn.recurrences.mixers import MixerName
from zoo.nn.remat import NAMES, Kept, Policy
from zoo.transformer.dispatch import Dispatch
from zoo.transformer.encoder import EncoderConfig
from zoo.transformer.rotary import PositionsConfig

Reach = Literal["local", "global"]
LayerKind = Literal[Reach, "local_nope", "global_nope", "recurrent"]
Scores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class LatentConfig:
    """Keys and values of all heads from one latent vector (DeepSeek-AI 2024, DeepSeek-V2)."""

    kv_rank: int | None = None
    """Size of the latent vector; each position has keys and values of its own if not given."""
    q_rank: int | None = None
    """Size of a latent vector that queries come from; from the layer's input if not given."""
    rotary_dim: int = 64
    """Features of a head that rotate, whose key all heads share; head_dim has them and others."""
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
    """Multiply what the shared experts give by a sigmoid of each token (Qwen2-MoE, Qwen3-Next)."""
    num_groups: int = 1
    """Groups of experts, one behind another, a few of which a token's experts are in (DeepSeek)."""
    groups_per_token: int = 1
    """Groups that a token's experts are in: those with the highest scores."""
    group_score: int = 2
    """Best experts of a group, whose scores add up to its own: 2 (DeepSeek-V3) or 1 (V2)."""
    first_dense: int = 0
    """Layers before the first one with experts, which have one MLP for all tokens (DeepSeek)."""
    interval: int = 1
    """Each so manieth layer has experts, and the others one MLP for all tokens (Llama 4)."""
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
    """The mixer of each layer, repeated over the layers; of recurrences there is one kind."""
    recurrence: RecurrenceConfig = RecurrenceConfig()
    """Of gated_deltanet, mamba2 and mlstm."""
    norm_placement: Literal["pre", "post", "both"] | None = None
    """Where norms are in layers with a recurrence; as residual.norm_placement, which then is that
    of layers with attention, if not given (Olmo-Hybrid)."""

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
    """RMSNorm, LayerNorm, either one with a scale that is stored less one (Gemma, Nemotron), or
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
    """Start of a learned factor per feature of what each part adds; none if not given."""
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


@dataclass(frozen=True)
class Config:
    """Hyperparameters of a transformer."""

    vocab_size: int
    """Number of token ids; logits have as many columns."""
    d_model: int = 512
    """Width of the residual stream."""
    num_layers: int = 8
    """Number of blocks."""
    num_heads: int = 8
    """Query heads per layer."""
    d_ff: int | None = None
    """Hidden width of the MLP; 4 d_model if not given, and 8/3 of it (rounded up) when gated."""
    mlp: MLPKind | Literal["none"] = "swiglu"
    """Kind of MLP: gated by SiLU (swiglu; swiglu_clamped of gpt-oss has bounds), gated by GELU
    (geglu), or plain, with that activation; with none a layer is its mixer alone (Mamba-2)."""
    bias: bool = False
    """Biases in the projections of attention, MLPs and routers (and in LayerNorm)."""
    mlp_bias: bool = False
    """Biases in MLPs and routers only."""
    head_bias: bool = False
    """A bias in the output head (Phi, GPT-J, BERT)."""
    max_seq_len: int = 2048
    """Longest sequence; learned positions have a table of that many rows."""
    causal: bool = True
    """A decoder; False gives an encoder, whose positions see each other both ways."""
    tie_embeddings: bool = False
    """Use the embedding as the output head: one leaf."""
    logit_multiplier: float = 1.0
    """Factor of the output logits, before the bound (one over Granite's logits_scaling)."""
    logit_soft_cap: float | None = None
    """Bounds the output logits by cap · tanh(logits / cap) (Gemma 2)."""
    dropout: float = of_training(0.0)
    """Rate of dropout on the embedding and on each residual update."""
    remat: Policy = may_differ("none")
    """Rematerialisation in the backward pass: none, dots, dots_no_batch, full; or save:NAMES and
    offload:NAMES (to the host), as save:query,key,value+offload:block_input."""
    scan_layers: bool = may_differ(True)
    """Run the layers by lax.scan (quick to compile), or unrolled (faster when they are small)."""
    eos_ids: tuple[int, ...] = may_differ(())
    """Ids of the tokens that end a text, where generation stops."""
    origin: str = may_differ("")
    """The type of the checkpoint that the model came from, where several have the same maths:
    exports and adapters keep to its names."""
    attention: AttentionConfig = AttentionConfig()
    positions: PositionsConfig = PositionsConfig()
    experts: ExpertsConfig = ExpertsConfig()
    residual: ResidualConfig = ResidualConfig()
    mixer: MixerConfig = MixerConfig()
    encoder: EncoderConfig = EncoderConfig()

    def __post_init__(self) -> None:
        configuration.check(self)
        configuration.check_positive(
            self, "", "vocab_size", "d_model", "num_layers", "num_heads", "d_ff", "max_seq_len"
        )
        configuration.check_positive(self, "", "logit_soft_cap", "logit_multiplier")
        configuration.check_ids("eos_ids", self.eos_ids, self.vocab_size)
        require(0 <= self.dropout < 1, f"dropout={self.dropout}: must be in [0, 1)")
        require(
            self.experts.num_experts is None or self.gated,
            f"experts.num_experts={self.experts.num_experts}: experts are gated MLPs, and mlp="
            f"{self.mlp!r}",
        )
        require(
            self.experts.num_experts is None or any(self.has_experts),
            f"experts.first_dense={self.experts.first_dense} and experts.interval="
            f"{self.experts.interval} leave none of num_layers={self.num_layers} with experts",
        )
        require(
            self.encoder.head != "none" or not (self.head_bias or self.tie_embeddings),
            f"encoder.head='none': has neither head_bias={self.head_bias} nor tie_embeddings="
            f"{self.tie_embeddings}",
        )
        require(
            self.encoder.first_norm or self.residual.norm_placement == "pre",
            f"encoder.first_norm=False: is for residual.norm_placement='pre', and it is "
            f"{self.residual.norm_placement!r}",
        )
        require(
            self.mlp != "none" or self.d_ff is None,
            f"d_ff={self.d_ff}: is the width of an MLP, and mlp='none'",
        )
        self._check_mixers()
        missing = [] if "attention" in self.mixers else ["query", "key", "value", "attention"]
        if self.mlp == "none":
            missing += ["mlp_input"]
        if not {"shared_mlp", "dense_mlp"} & self.parts.keys() and (
            self.mlp == "none" or self.experts.num_experts
        ):
            missing += ["mlp_hidden"]
        Kept.of(self.remat, [name for name in NAMES if name not in missing])

    def _check_mixers(self) -> None:
        """Refuse attention and recurrences that layers can't have."""
        kind, residual = self.mixer.kind, self.residual
        require(
            self.mixer.norm_placement is None
            or (residual.norm_placement != "stream" and residual.parallel == "none"),
            f"mixer.norm_placement={self.mixer.norm_placement!r}: goes with norms before the parts "
            f"or after them, one behind another, and residual.norm_placement="
            f"{residual.norm_placement!r}, parallel={residual.parallel!r}",
        )
        self.mixer.recurrence.check(
            "mixer.recurrence.", kind or "attention", ("d_model", self.d_model)
        )
        require(
            self.causal or kind is None,
            f"mixer.pattern has {kind}, which sees no later positions, and causal=False: choose "
            "attention alone for an encoder",
        )
        if "attention" not in self.mixers:
            return
        if self.attention.latent.kv_rank is not None:
            self._check_latent(self.attention, self.attention.latent)
        require(
            self.attention.head_dim is not None or self.d_model % self.num_heads == 0,
            f"num_heads={self.num_heads} does not divide d_model={self.d_model}: change either, "
            "or set attention.head_dim",
        )
        require(
            self.num_heads % self.kv_heads == 0,
            f"attention.num_kv_heads={self.kv_heads} does not divide num_heads={self.num_heads}",
        )
        rotating = self.head_size * self.positions.rotary_fraction
        require(
            self.positions.kind != "rotary" or abs(rotating / 2 - round(rotating / 2)) < 1e-6,
            f"attention.head_dim={self.head_size} times positions.rotary_fraction="
            f"{self.positions.rotary_fraction} is no even number: rotary positions rotate pairs",
        )
        factors = len(self.positions.scaling.short_factors)
        require(
            factors in (0, self.rotary_size // 2),
            f"positions.scaling.short_factors has {factors} numbers, and a head "
            f"{self.rotary_size // 2} pairs that rotate",
        )

    def _check_latent(self, attention: AttentionConfig, latent: LatentConfig) -> None:
        """Refuse what latent attention has not."""
        names = ("qkv_bias", "qk_norm", "output_gate", "sinks", "num_kv_heads")
        for name in names:
            value, none = getattr(attention, name), getattr(AttentionConfig, name)
            require(
                value == none or (name == "num_kv_heads" and value == self.num_heads),
                f"attention.{name}={value!r}: latent attention has none; leave it out, or "
                "attention.latent.kv_rank",
            )
        require(
            self.causal and not self.bias and self.positions.rotary_fraction == 1,
            f"attention.latent.kv_rank={latent.kv_rank}: is for decoders without biases, whose "
            "features that rotate are attention.latent.rotary_dim",
        )
        require(
            latent.rotary_dim < self.head_size and latent.rotary_dim % 2 == 0,
            f"attention.latent.rotary_dim={latent.rotary_dim}: must be even, and less than "
            f"attention.head_dim={self.head_size}",
        )
        require(
            self.value_size <= self.head_size,
            f"attention.latent.value_dim={latent.value_dim}: must be at most attention.head_dim="
            f"{self.head_size}",
        )

    @property
    def value_size(self) -> int:
        """Size of a head's values, given or derived."""
        latent = self.attention.latent
        if latent.kv_rank is None:
            return self.head_size
        return latent.value_dim or self.head_size - latent.rotary_dim

    @property
    def cached(self) -> tuple[int, int]:
        """Heads and features of what a cache keeps of a position, once or for keys and values."""
        latent = self.attention.latent
        if latent.kv_rank is None:
            return self.kv_heads, self.head_size
        return 1, latent.rotary_dim + latent.kv_rank

    @property
    def head_size(self) -> int:
        """Size of a head, given or derived."""
        return self.attention.head_dim or self.d_model // self.num_heads

    @property
    def rotary_size(self) -> int:
        """Features of a head that rotate."""
        if self.attention.latent.kv_rank is not None:
            return self.attention.latent.rotary_dim
        return round(self.head_size * self.positions.rotary_fraction)

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads, given or derived."""
        return self.attention.num_kv_heads or self.num_heads

    @property
    def hidden_size(self) -> int:
        """Hidden width of the MLP (of each expert), given or derived."""
        if self.d_ff is not None:
            return self.d_ff
        return 64 * math.ceil(self.d_model / 24) if self.gated else 4 * self.d_model

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies by a gate."""
        return self.mlp in GATED_MLPS

    @property
    def dense_size(self) -> int:
        """Hidden width of the MLP of layers without experts, given or derived."""
        return self.experts.dense_d_ff or self.hidden_size

    @property
    def has_experts(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        experts = self.experts
        return tuple(
            experts.num_experts is not None
            and index >= experts.first_dense
            and (index + 1) % experts.interval == 0
            for index in range(self.num_layers)
        )

    @property
    def num_parts(self) -> int:
        """Parts of all layers that add to the residual stream."""
        return self.num_layers * (1 if self.mlp == "none" else 2)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers that take turns: attention is global where there is no window."""
        windows = ("global",) if self.attention.window is None else self.attention.window_pattern
        mixers = self.mixer.pattern
        placed = self.positions.pattern if self.positions.kind == "rotary" else ("rotary",)

        def kind(index: int) -> LayerKind:
            if mixers[index % len(mixers)] != "attention":
                return "recurrent"
            reach = windows[index % len(windows)]
            if placed[index % len(placed)] == "rotary":
                return reach
            return "local_nope" if reach == "local" else "global_nope"

        length = math.lcm(len(windows), len(mixers), len(placed), self.experts.interval)
        return tuple(map(kind, range(length)))

    @property
    def all_layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        kinds = self.layer_kinds
        return tuple(kinds[index % len(kinds)] for index in range(self.num_layers))

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """The layers that have each part, by its field of `Block`."""
        mixers, experts = self.mixers, self.has_experts
        has: dict[str, Sequence[bool]] = {
            name: [x == name for x in mixers] for name in ("attention", "recurrence")
        }
        if self.experts.num_experts is not None:
            has |= {"mlp": experts, "dense_mlp": [not x for x in experts]}
            has |= {"shared_mlp": experts} if self.experts.num_shared else {}
            has |= {"shared_gate": experts} if self.experts.shared_gate else {}
        elif self.mlp != "none":
            has["mlp"] = [True] * self.num_layers
        elsewhere = self.residual.norm_placement
        of_recurrence = self.mixer.norm_placement or elsewhere
        placed = [of_recurrence if x == "recurrence" else elsewhere for x in mixers]
        before, after = [x in ("pre", "both") for x in placed], [x != "pre" for x in placed]
        first = [self.encoder.first_norm, *[True] * (self.num_layers - 1)]
        has |= {"attention_norm": [x and y for x, y in zip(before, first, strict=True)]}
        has |= {"attention_out_norm": after}
        if self.residual.layer_scale is not None:
            has |= {"attention_scale": [True] * self.num_layers}
            has |= {"mlp_scale": [self.mlp != "none"] * self.num_layers}
        if self.mlp != "none":
            has |= {"mlp_out_norm": after}
            has |= {"mlp_norm": before} if self.residual.parallel != "one_norm" else {}
        found = {name: tuple(i for i, x in enumerate(each) if x) for name, each in has.items()}
        return {name: layers for name, layers in found.items() if layers}

    @property
    def own(self) -> dict[str, tuple[int, ...]]:
        """The layers that have each part that not all have, for `scan_layers`."""
        parts = self.parts.items()
        return {name: layers for name, layers in parts if len(layers) < self.num_layers}

    @property
    def num_first(self) -> int:
        """Layers before the ones that are alike, or take turns."""
        return max(self.experts.first_dense, int(not self.encoder.first_norm))

    @property
    def activation(self) -> Activation:
        """The activation of the MLP, or of its gate."""
        return cast(Activation, GATED_MLPS.get(cast(Activation, self.mlp), self.mlp))

    @property
    def mixers(self) -> tuple[str, ...]:
        """The field of `Block` that has each layer's mixer."""
        return tuple(map(mixer_of, self.all_layer_kinds))

    def window_of(self, kind: LayerKind) -> int | None:
        """The sliding window of a layer of that kind."""
        return self.attention.window if kind.startswith("local") else None


def mixer_of(kind: LayerKind) -> Literal["attention", "recurrence"]:
    """The field of `Block` that has the mixer of layers of that kind."""
    return "recurrence" if kind == "recurrent" else "attention"
