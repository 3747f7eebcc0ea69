"""The MLP family: a plain stack of layers, or pre-norm residual blocks.

Legend of suffixes: B batch, E embed (the width between blocks), M mlp (the width inside one).
Layers alternate between the axes "embed" and "mlp", so that tensor parallelism reduces once per
two layers, and the blocks of two layers are stacked and scanned.
"""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.common import configuration
from zoo.common.configuration import may_differ, of_training, require
from zoo.nn.layers import (
    ACTIVATIONS,
    Activation,
    Linear,
    Norm,
    OptionalNorm,
    add_bias,
    dropout,
    make_norm,
    normal,
)
from zoo.nn.parameters import CastsInputs, unshard
from zoo.nn.products import Operand, matmul
from zoo.nn.remat import Kept, Policy, named, scan_layers
from zoo.sharding import ShardingError, constrain, split_by


@dataclass(frozen=True)
class Config:
    """Hyperparameters of an MLP."""

    in_size: int
    """Features of an example."""
    out_size: int
    """Outputs: classes, or values of a regression."""
    hidden_size: int = 128
    """Width of the hidden layers."""
    num_layers: int = 2
    """Hidden layers; with residual, blocks of two layers each after the first layer."""
    activation: Activation = "gelu"
    """Function after each hidden layer."""
    norm: OptionalNorm = "none"
    """Norm before each activation; with residual, before each block and the head."""
    residual: bool = False
    """Pre-norm residual blocks in place of plain layers."""
    dropout: float = of_training(0.0)
    """Rate of dropout on each hidden layer, or on each residual update."""
    remat: Policy = may_differ("none")
    """Rematerialisation of the blocks in the backward pass: none, dots, dots_no_batch, full; or
    save:NAMES and offload:NAMES (to the host), of block_input and mlp_hidden."""

    def __post_init__(self) -> None:
        configuration.check(self)
        configuration.check_positive(self, "", "in_size", "out_size", "hidden_size", "num_layers")
        require(0 <= self.dropout < 1, f"dropout={self.dropout}: must be in [0, 1)")
        Kept.of(self.remat, ("block_input", "mlp_hidden"))


class Layer(eqx.Module):
    """A hidden layer: linear map, norm, activation, dropout."""

    linear: Linear
    norm: Norm | None
    config: Config = eqx.field(static=True)

    def __init__(
        self, config: Config, in_size: int, *, in_axis: str, out_axis: str, key: Key[Array, ""]
    ):
        size = config.hidden_size
        self.linear = Linear(in_size, size, in_axis=in_axis, out_axis=out_axis, key=key)
        self.norm = None if config.residual else make_norm(config.norm, size, axis=out_axis)
        self.config = config

    def __call__(
        self, x_BI: Float[Array, "batch in"], key: Key[Array, ""] | None
    ) -> Float[Array, "batch out"]:
        """Map a batch; the key is dropout's."""
        x = constrain(self.linear(x_BI), "batch", dict(self.linear.axes)["out"])
        if self.norm is not None:
            x = self.norm(x)
        return dropout(ACTIVATIONS[self.config.activation](x), self.config.dropout, key)


class PlainBlock(eqx.Module):
    """Two hidden layers, there and back between the axes "embed" and "mlp"."""

    up: Layer
    down: Layer

    def __init__(self, config: Config, *, key: Key[Array, ""]):
        up_key, down_key = jax.random.split(key)
        size = config.hidden_size
        self.up = Layer(config, size, in_axis="embed", out_axis="mlp", key=up_key)
        self.down = Layer(config, size, in_axis="mlp", out_axis="embed", key=down_key)

    def __call__(
        self, x_BE: Float[Array, "batch embed"], key: Key[Array, ""] | None
    ) -> Float[Array, "batch embed"]:
        """Apply both layers."""
        keys = (None, None) if key is None else jax.random.split(key)
        return self.down(named(self.up(x_BE, keys[0]), "mlp_hidden"), keys[1])


class ResidualBlock(eqx.Module):
    """Norm, up, activation, down, dropout, added to the block's input."""

    norm: Norm | None
    w_up: Float[Array, "embed mlp"] | Operand
    b_up: Float[Array, "mlp"]
    w_down: Float[Array, "mlp embed"] | Operand
    b_down: Float[Array, "embed"]
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: Key[Array, ""]):
        up_key, down_key = jax.random.split(key)
        size = config.hidden_size
        self.norm = make_norm(config.norm, size)
        self.w_up = normal(up_key, (size, size), size)
        self.b_up = jnp.zeros(size)
        # Divided by the number of blocks that add to the residual stream.
        self.w_down = normal(down_key, (size, size), size * config.num_layers)
        self.b_down = jnp.zeros(size)
        self.config = config

    def __call__(
        self, x_BE: Float[Array, "batch embed"], key: Key[Array, ""] | None
    ) -> Float[Array, "batch embed"]:
        """Apply the block to the residual stream."""
        normed_BE = x_BE if self.norm is None else self.norm(x_BE)
        hidden_BM = constrain(add_bias(matmul(normed_BE, self.w_up), self.b_up), "batch", "mlp")
        hidden_BM = ACTIVATIONS[self.config.activation](named(hidden_BM, "mlp_hidden"))
        added_BE = add_bias(matmul(hidden_BM, self.w_down), self.b_down)
        added_BE = constrain(added_BE, "batch", "embed")
        return x_BE + dropout(added_BE, self.config.dropout, key)


class MLP(CastsInputs):
    """A multi-layer perceptron: float[batch, in_size] to float32[batch, out_size]."""

    first: Layer
    blocks: PlainBlock | ResidualBlock | None
    last: Layer | None  # the one left over of an even number of plain layers
    final_norm: Norm | None
    head: Linear
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: Key[Array, ""]):
        first_key, blocks_key, last_key, head_key = jax.random.split(key, 4)
        size, residual = config.hidden_size, config.residual
        self.first = Layer(
            config, config.in_size, in_axis="features", out_axis="embed", key=first_key
        )
        block_class: type = ResidualBlock if residual else PlainBlock
        num_blocks = config.num_layers if residual else (config.num_layers - 1) // 2
        self.blocks, self.last = None, None
        if num_blocks:
            self.blocks = eqx.filter_vmap(lambda key: block_class(config, key=key))(
                jax.random.split(blocks_key, num_blocks)
            )
        if not residual and config.num_layers % 2 == 0:
            self.last = Layer(config, size, in_axis="embed", out_axis="mlp", key=last_key)
        self.final_norm = make_norm(config.norm, size) if residual else None
        head_axis = "embed" if self.last is None else "mlp"
        self.head = Linear(
            size, config.out_size, in_axis=head_axis, out_axis="classes", key=head_key
        )
        self.config = config

    def __call__(
        self, x: Float[Array, "batch in_size"], *, key: Key[Array, ""] | None = None
    ) -> Float[Array, "batch out_size"]:
        """The outputs, float32[batch, out_size]; a `key` turns dropout on.

        Raises:
            ShardingError: a mesh that splits the tokens of rows: these rows have no tokens.
        """
        if split := split_by("inner_seq"):
            raise ShardingError(
                f"{split} of the mesh splits the tokens of a row, and an MLP's rows have none: its "
                "devices would all compute the same; take a mesh without that axis"
            )
        first_key, blocks_key, last_key = (None,) * 3 if key is None else jax.random.split(key, 3)
        x = constrain(x.astype(self.head.weight.dtype), "batch", "features")
        x = unshard(self.first)(x, first_key)
        if self.blocks is not None:

            def block(block: PlainBlock | ResidualBlock, x_BE: Array, index: Array) -> Array:
                key = None if blocks_key is None else jax.random.fold_in(blocks_key, index)
                return block(x_BE, key)

            x = scan_layers(block, self.blocks, x, policy=self.config.remat)
        if self.last is not None:
            x = unshard(self.last)(x, last_key)
        if self.final_norm is not None:
            x = unshard(self.final_norm)(x)
        head = unshard(self.head)
        outputs = add_bias(matmul(x, head.weight, dtype=jnp.float32), head.bias)
        return constrain(outputs, "batch", "classes")


def num_flops_per_example(config: Config) -> float:
    """Floating-point operations of training per example: six per weight in a product."""
    size = config.hidden_size
    squares = 2 * config.num_layers if config.residual else config.num_layers - 1
    return 6.0 * (config.in_size * size + squares * size * size + size * config.out_size)
