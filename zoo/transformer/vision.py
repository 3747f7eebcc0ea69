"""Vision transformers (Dosovitskiy et al. 2021): images cut into patches, which are the tokens.

Legend of suffixes: B batch, T tokens, P patches, E embed, N heads, H head size.
"""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from zoo.common import configuration
from zoo.common.configuration import may_differ, of_training, require
from zoo.nn.attention.attention import Implementation
from zoo.nn.layers import ACTIVATIONS, Activation, Linear, Norm, add_bias
from zoo.nn.parameters import CastsAtUse, unshard
from zoo.nn.products import matmul
from zoo.nn.remat import Policy
from zoo.sharding import constrain
from zoo.transformer import config as layers
from zoo.transformer.blocks import MLP, Attention, Block, residual_norm
from zoo.transformer.encoder import EncoderConfig
from zoo.transformer.model import through_blocks
from zoo.transformer.part_configs import AttentionConfig, ResidualConfig
from zoo.transformer.patches import Patches, bicubic, rotary_of_patches, sines_of_patches
from zoo.transformer.rotary import PositionsConfig, Rotary


@dataclass(frozen=True)
class VisionConfig:
    """Hyperparameters of a vision transformer."""

    image_size: int = 224
    """Height and width of the images that the table of positions is for, in pixels."""
    patch_size: int = 16
    """Height and width of a patch, in pixels."""
    channels: int = 3
    """Numbers per pixel."""
    num_classes: int = 0
    """Outputs of the head; without one, 0, the model gives the vectors of its tokens."""
    d_model: int = 384
    """Width of the residual stream."""
    num_layers: int = 12
    """Number of blocks."""
    num_heads: int = 6
    """Heads per layer, each of d_model / num_heads."""
    d_ff: int | None = None
    """Hidden width of the MLP; 4 d_model if not given."""
    mlp: Activation = "gelu_erf"
    """Activation of the MLP; gelu is the tanh approximation of gelu_erf."""
    norm_eps: float = 1e-6
    """Constant that the norms add to the variance."""
    positions: Literal["learned", "sincos", "rotary"] = "learned"
    """A table, learned or of sines and cosines, added to the patches and interpolated for images of
    another size; or a rotation of queries and keys by row and column (DINOv3)."""
    theta: float = 100.0
    """Base of the rotary wavelengths."""
    class_token: bool = True
    """A token before the patches, whose vector stands for the image."""
    num_registers: int = 0
    """More tokens before the patches, which nothing reads (Darcet et al. 2024)."""
    mask_token: bool = False
    """A vector in the place of masked patches."""
    pooling: Literal["first", "mean", "attention"] = "first"
    """The image's vector: the class token's, the mean over the patches, or what a learned query
    finds in them (SigLIP)."""
    pooler: bool = False
    """A dense layer with tanh over that vector (ViT)."""
    qkv_bias: bool = True
    """Biases on queries, keys and values."""
    key_bias: bool = True
    """The bias on keys, where queries and values have theirs (not in DINOv3)."""
    layer_scale: float | None = None
    """Initial value of a learned factor per feature (LayerScale, Touvron et al. 2021)."""
    dropout: float = of_training(0.0)
    """Rate of dropout on the embedding and on each residual update."""
    kernel: Implementation = may_differ("auto")
    """Attention kernel, as a transformer's."""
    remat: Policy = may_differ("none")
    """Rematerialisation in the backward pass, as a transformer's."""
    scan_layers: bool = may_differ(True)
    """Run the layers by lax.scan (quick to compile), or unrolled (faster when they are small)."""

    def __post_init__(self) -> None:
        configuration.check(self)
        configuration.check_positive(self, "", "image_size", "patch_size", "channels", "theta")
        configuration.check_positive(self, "", "norm_eps", "layer_scale")
        for name in ("num_classes", "num_registers"):
            require(getattr(self, name) >= 0, f"{name}={getattr(self, name)}: must be 0 at least")
        require(
            self.image_size % self.patch_size == 0,
            f"patch_size={self.patch_size} does not divide image_size={self.image_size}",
        )
        require(
            self.class_token or self.pooling != "first",
            "pooling='first': is the class token's vector, and class_token=False; give 'mean'",
        )
        head_size = self.parts.head_size
        require(
            self.positions != "rotary" or head_size % 4 == 0,
            f"positions='rotary': rotates pairs by row and by column, and a head has {head_size} "
            "features; change num_heads, for a multiple of 4",
        )
        require(
            self.positions != "sincos" or self.d_model % 4 == 0,
            f"positions='sincos': d_model={self.d_model} must be a multiple of 4",
        )

    @property
    def parts(self) -> layers.Config:
        """The configuration of the blocks."""
        return layers.Config(
            vocab_size=1,
            d_model=self.d_model,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            d_ff=self.d_ff,
            mlp=self.mlp,
            mlp_bias=True,
            residual=ResidualConfig(
                norm="layer",
                norm_bias=True,
                norm_eps=self.norm_eps,
                layer_scale=self.layer_scale,
            ),
            positions=PositionsConfig("learned"),  # whatever they are, they come from here
            causal=False,
            dropout=self.dropout,
            attention=AttentionConfig(
                qkv_bias=self.qkv_bias,
                key_bias=self.key_bias,
                out_bias=True,
                kernel=self.kernel,
            ),
            encoder=EncoderConfig(head="none"),
            remat=self.remat,
            scan_layers=self.scan_layers,
        )

    @property
    def grid(self) -> int:
        """Patches of an image in each direction."""
        return self.image_size // self.patch_size

    @property
    def num_prefix(self) -> int:
        """Tokens before the patches."""
        return self.class_token + self.num_registers

    @property
    def num_tokens(self) -> int:
        """Tokens of an image of that size."""
        return self.grid**2 + self.num_prefix


class AttentionPooling(eqx.Module):
    """Attention of one learned query to the tokens, and an MLP behind it (SigLIP)."""

    probe: Float[Array, "positions embed"]
    attention: Attention
    norm: Norm
    mlp: MLP

    def __init__(self, config: layers.Config, *, key: Key[Array, ""]):
        keys = jax.random.split(key, 3)
        self.probe = 0.02 * jax.random.normal(keys[0], (1, config.d_model))
        self.attention = Attention(config, key=keys[1])
        self.norm = residual_norm(config)
        self.mlp = MLP(config, key=keys[2])

    def __call__(self, x_BTE: Float[Array, "batch seq embed"]) -> Float[Array, "batch embed"]:
        """One vector per row."""
        of = self.attention
        q_NH = add_bias(matmul(self.probe, of.wq), of.bq)[0]
        k_BTNH = add_bias(matmul(x_BTE, of.wk), of.bk)
        v_BTNH = add_bias(matmul(x_BTE, of.wv), of.bv)
        logits = jnp.einsum("nh,btnh->bnt", q_NH, k_BTNH, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(logits * q_NH.shape[-1] ** -0.5, axis=-1).astype(x_BTE.dtype)
        out_BNH = jnp.einsum("bnt,btnh->bnh", weights, v_BTNH)
        x_BE = add_bias(matmul(out_BNH, of.wo, contract=2), of.bo)
        mlp = self.mlp  # which is called on whole rows alone
        hidden = ACTIVATIONS[mlp.kind](add_bias(matmul(self.norm(x_BE), mlp.w_up), mlp.b_up))
        return x_BE + add_bias(matmul(hidden, mlp.w_down), mlp.b_down)


class VisionTransformer(CastsAtUse):
    """A transformer over images: [batch, height, width, channels] to [batch, classes] logits."""

    patches: Patches
    class_token: Float[Array, "positions embed"] | None
    registers: Float[Array, "positions embed"] | None
    mask_token: Float[Array, "positions embed"] | None
    positions: Float[Array, "positions embed"] | None
    blocks: Block
    final_norm: Norm
    attention_pooling: AttentionPooling | None
    pooler: Linear | None
    head: Linear | None
    config: VisionConfig = eqx.field(static=True)
    is_causal: ClassVar[bool] = False
    is_pooled: ClassVar[bool] = False

    def __init__(self, config: VisionConfig, *, key: Key[Array, ""]):
        keys, size = jax.random.split(key, 7), config.d_model
        rows = lambda key, count: 0.02 * jax.random.normal(key, (count, size))  # noqa: E731
        self.config = config
        self.patches = Patches(config.patch_size, config.channels, size, key=keys[0])
        self.class_token = rows(keys[1], 1) if config.class_token else None
        self.registers = rows(keys[2], config.num_registers) if config.num_registers else None
        self.mask_token = jnp.zeros((1, size)) if config.mask_token else None
        self.positions = None
        if config.positions == "learned":
            self.positions = rows(keys[3], config.grid**2 + config.class_token)
        self.blocks = Block.stacked(config.parts, key=keys[4])
        self.final_norm = residual_norm(config.parts)
        self.attention_pooling = self.pooler = self.head = None
        if config.pooling == "attention":
            self.attention_pooling = AttentionPooling(config.parts, key=keys[5])
        if config.pooler:
            self.pooler = Linear(size, size, in_axis="embed", out_axis="features", key=keys[5])
        if config.num_classes:
            self.head = Linear(
                size, config.num_classes, in_axis="embed", out_axis="classes", key=keys[6]
            )

    @property
    def width(self) -> int:
        """Size of the vectors that `hidden` gives."""
        return self.config.d_model

    def __call__(
        self,
        images: Float[Array, "batch height width channels"],
        *,
        masked: Bool[Array, "batch patches"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "batch *tokens outputs"]:
        """The logits, float32[batch, classes]; without a head what `hidden` gives.

        Raises:
            ValueError: as `hidden`.
        """
        x_BTE = self.hidden(images, masked=masked, key=key)
        if self.head is None:
            return x_BTE
        head, x_BE = unshard(self.head), self.pooled(x_BTE)
        logits = add_bias(matmul(x_BE, head.weight, dtype=jnp.float32), head.bias)
        return constrain(logits, "batch", None)

    def hidden(
        self,
        images: Float[Array, "batch height width channels"],
        *,
        masked: Bool[Array, "batch patches"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "batch seq embed"]:
        """The vectors of the tokens, [batch, seq, d_model]: class token, registers, patches.

        `masked` is True at patches that the mask token stands for, and a `key` turns dropout on.

        Raises:
            ValueError: images whose size patches do not divide, or with other channels; `masked` of
                a model without a mask token.
        """
        config = self.config.parts
        x_BTE, rotary = self.embedded(images, masked=masked)
        x_BTE, _ = through_blocks(config, self.blocks, x_BTE, None, {"global": rotary}, key)
        return constrain(unshard(self.final_norm)(x_BTE), "batch", "inner_seq", "embed")

    def embedded(
        self,
        images: Float[Array, "batch height width channels"],
        *,
        masked: Bool[Array, "batch patches"] | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], Rotary | None]:
        """The tokens before the first block, and the tables of their rotary positions.

        Raises:
            ValueError: as `hidden`.
        """
        config = self.config
        height, width, channels = images.shape[1:]
        size = config.patch_size
        require(
            height % size == 0 and width % size == 0,
            f"images of {height} x {width} pixels: patch_size={size} does not divide them; resize "
            "or crop them",
        )
        require(
            channels == config.channels,
            f"images have {channels} channels, and the model channels={config.channels}",
        )
        images = constrain(images, "batch", None, None, None)
        x_BPE = unshard(self.patches)(images)
        if masked is not None:
            if self.mask_token is None:
                raise ValueError("masked: mask_token=False, the model has no such token")
            mask_token = unshard(self.mask_token)[None].astype(x_BPE.dtype)
            x_BPE = jnp.where(masked[:, :, None], mask_token, x_BPE)
        tokens, grid = [x_BPE], (height // size, width // size)
        if (table := self._table(grid)) is not None:
            tokens = [x_BPE + table[None, -x_BPE.shape[1] :].astype(x_BPE.dtype)]
        if (first := unshard(self.class_token)) is not None:
            if config.positions == "learned" and table is not None:
                first = first + table[:1].astype(first.dtype)
            tokens.insert(0, first)
        if self.registers is not None:
            tokens.insert(len(tokens) - 1, unshard(self.registers))
        spread = lambda x: jnp.broadcast_to(x, (len(x_BPE), *x.shape[-2:])).astype(x_BPE.dtype)  # noqa: E731
        x_BTE = constrain(jnp.concatenate([*map(spread, tokens)], 1), "batch", "seq", "embed")
        rotary = None
        if config.positions == "rotary":
            rotary = rotary_of_patches(
                grid, config.num_prefix, config.parts.head_size, config.theta
            )
        return x_BTE, rotary

    def pooled(self, x_BTE: Float[Array, "batch seq embed"]) -> Float[Array, "batch embed"]:
        """The vector of each image, from those of its tokens."""
        if self.attention_pooling is not None:
            x_BE = unshard(self.attention_pooling)(x_BTE)
        elif self.config.pooling == "mean":
            patches = x_BTE[:, self.config.num_prefix :].astype(jnp.float32)
            x_BE = patches.mean(1).astype(x_BTE.dtype)
        else:
            x_BE = x_BTE[:, 0]
        return x_BE if self.pooler is None else jnp.tanh(unshard(self.pooler)(x_BE))

    def without_head(self) -> "VisionTransformer":
        """The model without the parameters that `hidden` does not use."""
        of_head = lambda model: (model.attention_pooling, model.pooler, model.head)  # noqa: E731
        return eqx.tree_at(of_head, self, (None,) * 3, is_leaf=lambda x: x is None)

    def with_head(self, num_classes: int, *, key: Key[Array, ""]) -> "VisionTransformer":
        """The model with a new head for that many classes, and no pooler."""
        head = Linear(self.width, num_classes, in_axis="embed", out_axis="classes", key=key)
        changed = {
            "config": dataclasses.replace(self.config, num_classes=num_classes, pooler=False),
            "head": head,
            "pooler": None,
        }
        other: VisionTransformer = object.__new__(type(self))
        for name, value in {**vars(self), **changed}.items():
            object.__setattr__(other, name, value)
        return other

    def _table(self, grid: tuple[int, int]) -> Float[Array, "positions embed"] | None:
        """The vectors that are added, the class token's first: for a grid of patches."""
        config = self.config
        if config.positions == "sincos":
            return jnp.asarray(sines_of_patches(grid, config.d_model))
        table = unshard(self.positions)
        if table is None or grid == (config.grid,) * 2:
            return table
        first, square = table[: config.class_token], table[config.class_token :].astype(jnp.float32)
        square = square.reshape(config.grid, config.grid, -1)
        rows, columns = (jnp.asarray(bicubic(config.grid, size)) for size in grid)
        patches = jnp.einsum("rx,cy,xye->rce", rows, columns, square)
        return jnp.concatenate([first.astype(jnp.float32), patches.reshape(-1, config.d_model)])
