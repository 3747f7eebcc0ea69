"""The hyperparameters of a transformer, and the sizes that follow from them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from zoo.common import configuration
from zoo.common.configuration import may_differ, of_training, require
from zoo.nn.layers import GATED_MLPS, Activation, MLPKind
from zoo.nn.recurrences.mixers import check_settings
from zoo.nn.remat import NAMES, Kept, Policy
from zoo.transformer.encoder import EncoderConfig
from zoo.transformer.part_configs import (
    AttentionConfig,
    ExpertsConfig,
    LatentConfig,
    MixerConfig,
    Reach,
    ResidualConfig,
)
from zoo.transformer.rotary import PositionsConfig

LayerKind = Literal[Reach, "local_nope", "global_nope", "recurrent"]


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
    mlp: MLPKind | Literal["xielu", "none"] = "swiglu"
    """Kind of MLP: gated by SiLU (swiglu; swiglu_clamped of gpt-oss has bounds), gated by GELU
    (geglu), or plain, with that activation (xielu learns its own, Apertus); with none a layer is
    its mixer alone (Mamba-2)."""
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
    """Factor of the output logits, before bias and bound (one over Granite's logits_scaling)."""
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
            self.encoder.mask_id is None or not self.causal,
            f"encoder.mask_id={self.encoder.mask_id}: scales tokens by the masks behind them too, "
            "which a decoder may not see; give causal=False",
        )
        require(
            self.encoder.position_offset == 0 or self.positions.kind == "learned",
            f"encoder.position_offset={self.encoder.position_offset}: is of a table of positions, "
            f"and positions.kind={self.positions.kind!r}; give 'learned'",
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
        recurrence, width = self.mixer.recurrence, ("d_model", self.d_model)
        check_settings(recurrence, "mixer.recurrence.", kind or "attention", width)
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
        """Refuse settings that latent attention lacks."""
        names = ("qkv_bias", "out_bias", "clip", "qk_norm", "output_gate", "sinks", "num_kv_heads")
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
        """The layers of each part that only some of them have, for `scan_layers`."""
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
