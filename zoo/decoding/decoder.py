"""Decoders, as `zoo.generate`, `zoo.stream` and `zoo.beam_search` take them, of any family.

A family is decoded by its adapter in `DECODERS`, which calls the parts of a model, a subclass's
parts too, in place of its forward pass. A subclass that overrides a method which the adapter
bypasses is refused, unless it is a decoder itself.
"""

import functools
import inspect
from typing import Any, ClassVar, Protocol, runtime_checkable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zoo.decoding.attention import AttentionDecoder
from zoo.rnn.config import Config
from zoo.rnn.model import RNN
from zoo.transformer.model import Transformer


@runtime_checkable
class Decoder(Protocol):
    """A model that continues texts.

    It is a tree of arrays, and its methods but for `check_decoder` are traced. The cache is a tree
    of arrays too; its `take(rows)` is the cache of some rows, in that order.
    """

    @property
    def config(self) -> Any:
        """A configuration with a `vocab_size`."""

    def check_decoder(self, length: int) -> None:
        """Raise a ValueError if the model cannot continue a text to that length."""

    def prefill(
        self, tokens: Int[Array, "batch seq"], mask: Bool[Array, "batch seq"], length: int
    ) -> tuple[Float[Array, "batch vocab"], Any]:
        """Read right-aligned prompts; `mask` is False at the padding before them.

        Returns the logits behind each, and a cache with room for `length` tokens per row, padding
        included.
        """

    def for_decoding(self) -> "Decoder":
        """The model as `decode` takes it."""

    def decode(
        self, tokens: Int[Array, "batch"], cache: Any
    ) -> tuple[Float[Array, "batch vocab"], Any]:
        """Read one more token per row: the logits behind it, and the cache."""


class RecurrentDecoder(eqx.Module):
    """A recurrent network as a `zoo.decoding.decoder.Decoder`."""

    model: RNN
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
        """Read prompts; the state takes the same room for any length."""
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


METHODS = ("check_decoder", "prefill", "for_decoding", "decode")
DECODERS: dict[type, type[AttentionDecoder] | type[RecurrentDecoder]] = {
    Transformer: AttentionDecoder,
    RNN: RecurrentDecoder,
}


def _place(cls: type, name: str) -> int:
    """The place, among a class and its bases in order, of the one that defines a name."""
    return next(i for i, base in enumerate(cls.__mro__) if name in vars(base))


def decoder_of(model: Any) -> Decoder:
    """The decoder of a model (a skeleton will do): the model itself, or its family's adapter on it.

    Raises:
        ValueError: a model that is no decoder, or of a class that its family's decoder bypasses;
            it names the class and the method.
    """
    cls = type(model)
    missing = [name for name in METHODS if not hasattr(cls, name)]
    if not missing:
        for family, adapter in DECODERS.items():
            for name in adapter.bypassed if issubclass(cls, family) else ():
                decodes = min(map(functools.partial(_place, cls), ("prefill", "decode")))
                if _place(cls, name) < min(decodes, cls.__mro__.index(family)):
                    raise ValueError(
                        f"{cls.__name__} overrides {name}, and its decoding would not call it: "
                        f"define {', '.join(METHODS)} as well"
                    )
        return model
    if len(missing) < len(METHODS):
        raise ValueError(f"{cls.__name__} has no {missing[0]}; a decoder has {', '.join(METHODS)}")
    for family, adapter in DECODERS.items():
        if issubclass(cls, family):
            for name in adapter.bypassed:
                if inspect.getattr_static(cls, name) is not inspect.getattr_static(family, name):
                    raise ValueError(
                        f"{cls.__name__} overrides {name}, and decoding would not call it: "
                        f"{adapter.__name__} calls the parts of the model itself. Override those "
                        f"parts, or define {', '.join(METHODS)} as well"
                    )
            return adapter(model)
    raise ValueError(f"{cls.__name__} is not a decoder: it has no next token")
