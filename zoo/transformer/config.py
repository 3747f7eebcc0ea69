"""The hyperparameters of a transformer, and the numbers that follow from them alone."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Array

from zoo.base import configuration
from zoo.base.configuration import added, formerly, may_differ, of_training, require
from zoo.nn import attention as attention_module
from zoo.nn.layers import ACTIVATIONS, GATED_MLPS, MLPKind, NormKind, RopeScaling
from zoo.nn.remat import Policy
from zoo.transformer.dispatch import Dispatch
from zoo.transformer.routing import Scores

LayerKind = Literal["local", "global"]


def _rope_scaling(value: Any) -> Any:
    """A `RopeScaling` as JSON, of the list of no, one or four numbers that it was."""
    if not isinstance(value, list) or len(value) not in (0, 1, 4):
        return value
    *factors, length = value if len(value) == 4 else (*value, None)
    if isinstance(length, float) and length.is_integer():
        length = int(length)
    names = [field.name for field in dataclasses.fields(RopeScaling)]
    given = dict(zip(names, factors, strict=False))
    return {**dataclasses.asdict(RopeScaling()), **given, names[-1]: length}


# Fields that are positive where they are given.
POSITIVE = ["vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "d_ff"]
POSITIVE += ["num_experts", "norm_eps", "rope_theta", "local_rope_theta", "max_seq_len", "window"]
POSITIVE += [
    "router_bias_rate",
    "expert_scale",
    "attention_scale",
    "attention_soft_cap",
    "logit_soft_cap",
]


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
    num_kv_heads: int | None = None
    """Key and value heads per layer, for grouped queries; as many as query heads if not given."""
    head_dim: int | None = None
    """Size of a head; d_model / num_heads if not given."""
    d_ff: int | None = None
    """Hidden width of the MLP; 4 d_model if not given, and 8/3 of it (rounded up) when gated."""
    mlp: MLPKind = "swiglu"
    """Kind of MLP: gated by SiLU, gated by GELU (geglu), or plain, with that activation."""
    num_experts: int | None = None
    """Experts per layer, each an MLP of its own, in place of one for all tokens."""
    experts_per_token: int = 2
    """Experts that each token goes to: those with the highest router probabilities."""
    normalize_experts: bool = True
    """Make the weights of a token's experts add up to one (Mixtral)."""
    router: Scores = added("softmax")
    """Scores of the experts: softmax over all of them, or a sigmoid of each (DeepSeek-V3)."""
    router_bias_rate: float | None = added(None)
    """Step of a bias per expert that evens out their load, such as 0.001; no bias if not given."""
    expert_scale: float = added(1.0)
    """Factor of the weights of a token's experts (DeepSeek-V3)."""
    shared_experts: int = added(0)
    """Experts that every token goes to, beside those that its router chooses."""
    moe_dispatch: Dispatch = added("auto", may_differ=True)
    """Exchange of a mesh axis of experts: all_reduce, all_to_all (of more devices than choices)."""
    moe_buffer: float = added(2.0, may_differ=True)
    """Rows that a device has room for in a round of all_to_all, over its even share of them."""
    norm: NormKind = "rms"
    """RMSNorm, LayerNorm, or RMSNorm whose scale is stored less one (Gemma)."""
    norm_placement: Literal["pre", "post", "both"] = formerly("norms", default="pre")
    """Where norms are: before each part, after it (OLMo 2), or both (Gemma 2); one at the end."""
    norm_eps: float = 1e-6
    """Constant that the norms add to the variance."""
    positions: Literal["rotary", "learned"] = "rotary"
    """Rotary positions in each attention, or learned ones added to the embedding."""
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling = formerly(default=RopeScaling(), convert=_rope_scaling)
    """How the rotary wavelengths are stretched, except those of local_rope_theta."""
    local_rope_theta: float | None = None
    """Base in layers with a window, which are not stretched then; as elsewhere if not given."""
    max_seq_len: int = 2048
    """Longest sequence; learned positions have a table of that many rows."""
    causal: bool = True
    """A decoder; False gives an encoder, whose positions see each other both ways."""
    bias: bool = False
    """Biases in the projections (and in LayerNorm)."""
    qkv_bias: bool = False
    """Biases on queries, keys and values alone (Qwen 2)."""
    qk_norm: bool = False
    """RMSNorm over each head's queries and keys (Henry et al. 2020)."""
    qk_norm_per_head: bool = True
    """Whether that norm is over each head by itself, or over all of them together (OLMo 2)."""
    tie_embeddings: bool = False
    """Use the embedding as the output head: one leaf."""
    scale_embedding: bool = False
    """Multiply the embedding of tokens by the square root of d_model (Gemma)."""
    window: int | None = None
    """Sliding window: a token sees that many positions, its own included."""
    window_pattern: tuple[LayerKind, ...] = ("local",)
    """Which layers have the window, repeated over the layers: local ones do, global ones do not."""
    attention_scale: float | None = None
    """Factor of the attention logits; head_dim^-0.5 if not given."""
    attention_soft_cap: float | None = None
    """Bounds the attention logits by cap · tanh(logits / cap)."""
    logit_soft_cap: float | None = None
    """Bounds the output logits likewise (Gemma 2)."""
    dropout: float = of_training(0.0)
    """Rate of dropout on the embedding and on each residual update."""
    attention: attention_module.Implementation = may_differ("auto")
    """Attention kernel: auto, chunked, xla, cudnn (its flash kernel, NVIDIA GPUs) or splash (TPUs);
    or auto with gather or exchange, where a mesh splits rows: keys come to the queries, or devices
    exchange heads."""
    remat: Policy = may_differ("none")
    """Rematerialisation in the backward pass: none, dots, dots_no_batch, full."""
    scan_layers: bool = may_differ(True)
    """Run the layers by lax.scan (quick to compile), or unrolled (faster when they are small)."""
    eos_ids: tuple[int, ...] = added((), may_differ=True)
    """Ids of the tokens that end a text, where generation stops."""

    def __post_init__(self) -> None:
        configuration.check(self)
        configuration.check_ids("eos_ids", self.eos_ids, self.vocab_size)
        for name in POSITIVE:
            value = getattr(self, name)
            require(value is None or value > 0, f"{name}={value}: must be positive")
        require(
            self.head_dim is not None or self.d_model % self.num_heads == 0,
            f"num_heads={self.num_heads} does not divide d_model={self.d_model}: change either, "
            "or set head_dim",
        )
        require(
            self.num_kv_heads is None or self.num_heads % self.num_kv_heads == 0,
            f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}",
        )
        require(
            self.positions != "rotary" or self.head_size % 2 == 0,
            f"head_dim={self.head_size} is odd: rotary positions rotate pairs",
        )
        require(0 <= self.dropout < 1, f"dropout={self.dropout}: must be in [0, 1)")
        require(
            len(self.window_pattern) > 0, "window_pattern=(): needs a 'local' or 'global' at least"
        )
        require(self.shared_experts >= 0, f"shared_experts={self.shared_experts}: is negative")
        for name, default in (
            ("router", "softmax"),
            ("router_bias_rate", None),
            ("expert_scale", 1.0),
            ("shared_experts", 0),
        ):
            value = getattr(self, name)
            require(
                self.num_experts is not None or value == default,
                f"{name}={value!r}: is for models with experts; set num_experts",
            )
        require(self.moe_buffer >= 1, f"moe_buffer={self.moe_buffer}: must be 1 at least")
        if self.num_experts is not None:
            require(
                0 < self.experts_per_token <= self.num_experts,
                f"experts_per_token={self.experts_per_token}: must be in 1 to num_experts="
                f"{self.num_experts}",
            )
            require(
                self.gated and not self.bias,
                f"num_experts={self.num_experts}: experts are gated MLPs without biases, and mlp="
                f"{self.mlp!r}, bias={self.bias}",
            )

    @property
    def head_size(self) -> int:
        """Size of a head, given or derived."""
        return self.head_dim or self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads, given or derived."""
        return self.num_kv_heads or self.num_heads

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
    def activation(self) -> Callable[[Array], Array]:
        """The activation of the MLP, or of its gate."""
        return ACTIVATIONS[GATED_MLPS.get(self.mlp, self.mlp)]

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers that take turns: all are global where there is no window."""
        return ("global",) if self.window is None else self.window_pattern

    @property
    def all_layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        kinds = self.layer_kinds
        return tuple(kinds[index % len(kinds)] for index in range(self.num_layers))

    def window_of(self, kind: LayerKind) -> int | None:
        """The sliding window of a layer of that kind."""
        return self.window if kind == "local" else None


def num_flops_per_token(config: Config, seq_len: int) -> float:
    """Floating-point operations of training per token: forward and backward, no recomputation.

    Six per weight in a product (of experts, those that a token goes to), and twelve per layer, head
    feature and visible key for attention, halved where it is causal (Chowdhery et al. 2022,
    appendix B, counts the whole square).
    """
    heads, kv_heads, size = config.num_heads, config.kv_heads, config.head_size
    attention_weights = config.d_model * size * (2 * heads + 2 * kv_heads)
    mlp_weights = config.d_model * config.hidden_size * (3 if config.gated else 2)
    if config.num_experts is not None:
        mlp_weights *= config.experts_per_token + config.shared_experts
        mlp_weights += config.d_model * config.num_experts
    weights = config.num_layers * (attention_weights + mlp_weights)
    weights += config.d_model * config.vocab_size

    def visible(window: int | None) -> float:
        keys = min(seq_len, window or seq_len)
        return keys / 2 if config.causal and keys == seq_len else float(keys)

    all_visible = sum(visible(config.window_of(kind)) for kind in config.all_layer_kinds)
    return 6.0 * weights + 12.0 * heads * size * all_visible
