"""Log-probabilities of tokens, by a model or by the one under its adapters, and losses of them.

Logits that are large are never all in memory.

Legend of suffixes: B batch, T time, E embed.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, PyTree

from zoo.nn.parameters import dropping_out
from zoo.nn.products import in_forward_mode
from zoo.training import losses
from zoo.wrappers import lora

Metrics = dict[str, Any]


class Tempered(eqx.Module):
    """A readout whose logits are divided by a temperature."""

    readout: Callable[[Array], Array]
    temperature: float = eqx.field(static=True)

    def __call__(self, x: Array) -> Array:
        """The logits."""
        logits = self.readout(x)
        return logits if self.temperature == 1 else logits / self.temperature


def of_tokens(
    model: PyTree, batch: dict[str, Array], temperature: float = 1.0
) -> Float[Array, "batch seq"]:
    """The log-probability of each target at a temperature, without dropout or a gradient."""
    with dropping_out(None):
        readout, x_BTE = losses.readout_and_input(model, batch, None)
    readout = Tempered(readout, temperature)
    return -losses.token_values(losses.token_losses, readout, x_BTE, batch["targets"])


def of_base(
    model: PyTree, batch: dict[str, Array], flag: str, temperature: float = 1.0
) -> Float[Array, "batch seq"]:
    """`of_tokens` of the model under the trained adapters, without a copy of it.

    Raises:
        ValueError: a model without trained adapters, which names the `flag` that asks for them.
    """
    if not lora.has_trained_adapters(model):
        raise ValueError(
            f"{flag}: the reference is the frozen model under trained adapters, and the model has "
            f"none: adapt it with zoo.lora.adapt (--method lora), or take another {flag}"
        )
    return of_tokens(jax.lax.stop_gradient(lora.base(model)), batch, temperature)


def differentiable(
    sums: Callable[[Array], tuple[Array, Metrics]],
    readout: Callable[[Array], Array],
    x_BTE: Array,
    targets_BT: Array,
) -> tuple[Array, Metrics]:
    """`sums` of the targets' log-probabilities, a total, which has a gradient, and metrics.

    Unlike a chunked loss, the total is no sum over tokens. Where logits are large its gradient is
    that of a chunked loss whose weights are its derivatives by the losses, from a first pass.
    """
    if in_forward_mode() or losses.num_chunks(jax.eval_shape(readout, x_BTE)) == 1:
        return sums(-losses.token_losses(readout(x_BTE), targets_BT))
    log_probs_BT = -losses.token_values(losses.token_losses, readout, x_BTE, targets_BT)
    (total, metrics), slopes_BT = jax.value_and_grad(sums, has_aux=True)(log_probs_BT)
    linear, _ = losses.readout_cross_entropy(
        readout, x_BTE, targets_BT, jax.lax.stop_gradient(-slopes_BT)
    )
    stopped = jax.lax.stop_gradient((total - linear, metrics))
    return linear + stopped[0], stopped[1]
