"""The output head: from a model's last layer to its logits."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.nn.layers import add_bias
from zoo.nn.products import Operand, matmul
from zoo.sharding import constrain


class Readout(eqx.Module):
    """An output head as it is used: gathered, in the compute dtype, the embedding's where tied."""

    weight: Float[Array, "embed out"] | Operand
    bias: Float[Array, "out"] | None = None
    axes: tuple[tuple[str, str], ...] = eqx.field(static=True, default=(("out", "vocab"),))
    soft_cap: float | None = eqx.field(static=True, default=None)

    def __call__(self, x_BTE: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq out"]:
        """The outputs in fp32; with a soft cap, its multiple of tanh (Gemma 2)."""
        outputs = add_bias(matmul(x_BTE, self.weight, dtype=jnp.float32), self.bias)
        outputs = constrain(outputs, "batch", "inner_seq", dict(self.axes)["out"])
        return (
            outputs if self.soft_cap is None else self.soft_cap * jnp.tanh(outputs / self.soft_cap)
        )
