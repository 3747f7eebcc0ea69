"""Decoding with a recurrent network, whose state takes the place of a cache.

Legend of suffixes: B batch, T time, 1 the last token of a row, D the width that the head reads.
"""

from typing import Any, ClassVar, Protocol, runtime_checkable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zoo.nn.readout import Readout
from zoo.rnn.config import Config


@runtime_checkable
class RecurrentModel(Protocol):
    """The parts of a recurrent network that decoding calls in the place of its forward pass."""

    @property
    def config(self) -> Config:
        """The configuration."""

    def initial_state(self, batch_size: int) -> Any:
        """The state before the first token of that many rows; its `take(rows)` chooses rows."""

    def read(
        self, inputs: Any, state: Any, *, mask: Bool[Array, "batch seq"] | None = None
    ) -> tuple[Float[Array, "batch seq width"], Any]:
        """The input of the output head at each token, and the state behind the last."""

    def run(self, inputs: Any, state: Any = None) -> tuple[Float[Array, "batch seq vocab"], Any]:
        """The logits at each token, and the state behind the last."""

    def readout(self) -> Readout:
        """The output head."""


class RecurrentDecoder(eqx.Module):
    """A recurrent network as a `zoo.decoding.decoder.Decoder`."""

    model: RecurrentModel
    bypassed: ClassVar[tuple[str, ...]] = ("__call__", "hidden", "run")

    @property
    def config(self) -> Config:
        """The configuration of the model."""
        return self.model.config

    def check_decoder(self, length: int) -> None:
        """Refuse a network that reads from the end, pools its steps, or gives no tokens."""
        for name, wanted in (("bidirectional", False), ("pooling", "none"), ("out_size", None)):
            if (value := getattr(self.config, name)) != wanted:
                raise ValueError(
                    f"{name}={value!r}: this network has no next token; a language model has "
                    f"{wanted!r}"
                )

    def prefill(
        self, tokens: Int[Array, "batch seq"], mask: Bool[Array, "batch seq"], length: int
    ) -> tuple[Float[Array, "batch vocab"], Any]:
        """Read prompts; the state takes the same room whatever the length."""
        count = mask.sum(1, dtype=jnp.int32)
        # With the padding last, as cuDNN wants it.
        order = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] - count[:, None]
        tokens, mask = (jnp.take_along_axis(x, order % x.shape[1], 1) for x in (tokens, mask))
        start = self.model.initial_state(tokens.shape[0])
        x_BTD, state = self.model.read(tokens, start, mask=mask)
        x_B1D = jnp.take_along_axis(x_BTD, count[:, None, None] - 1, 1)
        return self.model.readout()(x_B1D)[:, 0], state

    def for_decoding(self) -> "RecurrentDecoder":
        """The network as it is."""
        return self

    def decode(
        self, tokens: Int[Array, "batch"], cache: Any
    ) -> tuple[Float[Array, "batch vocab"], Any]:
        """Read one more token per row."""
        outputs, state = self.model.run(tokens[:, None], cache)
        return outputs[:, 0], state
