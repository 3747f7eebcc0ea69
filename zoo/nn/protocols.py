"""The interfaces of models that losses, wrappers and tasks rely on, whatever the family."""

from typing import Any, Protocol, TypedDict, Unpack, runtime_checkable

from jaxtyping import Array, Bool, Float, Int, Key

from zoo.nn.layers import Readout
from zoo.nn.stateful import Balance


class SequenceOptions(TypedDict, total=False):
    """The optional inputs of a sequence model, each by name; None is the same as leaving it out."""

    segment_ids: Int[Array, "batch seq"] | None
    """Tells the packed documents of a row apart; 0 is padding."""
    positions: Int[Array, "batch seq"] | None
    """Position of each token in its document; its index in the row if not given."""
    mask: Bool[Array, "batch seq"] | None
    """False at padding."""
    key: Key[Array, ""] | None
    """Turns dropout on."""


@runtime_checkable
class HasReadout(Protocol):
    """A model of tokens that gives its last hidden states and its output head apart."""

    def hidden(
        self, tokens: Array, **options: Unpack[SequenceOptions]
    ) -> Float[Array, "batch seq width"]:
        """The input of the output head."""

    def readout(self) -> Readout:
        """The output head: from `hidden` to logits in fp32."""


@runtime_checkable
class HasBalance(HasReadout, Protocol):
    """Such a model that can be a mixture of experts."""

    def hidden_and_balance(
        self,
        tokens: Array,
        *,
        weights: Float[Array, "batch seq"] | None = None,
        **options: Unpack[SequenceOptions],
    ) -> tuple[Float[Array, "batch seq width"], Balance | None]:
        """`hidden`, and what each row's routers give to a loss; None without experts.

        `weights` of positions in the balance are 1 if not given; padding has none.
        """


@runtime_checkable
class SequenceModel(Protocol):
    """A model that can have a head of another kind."""

    @property
    def config(self) -> Any:
        """The configuration of the model."""

    @property
    def width(self) -> int:
        """Size of the vectors that `hidden` gives."""

    @property
    def is_causal(self) -> bool:
        """Whether a vector depends on the tokens up to its own alone, not on those after it."""

    @property
    def is_pooled(self) -> bool:
        """Whether `hidden` gives one vector per row, not one per token."""

    def hidden(
        self, tokens: Array, **options: Unpack[SequenceOptions]
    ) -> Float[Array, "batch seq width"]:
        """The last hidden states."""

    def without_head(self) -> "SequenceModel":
        """The model without the parameters that `hidden` does not use."""


@runtime_checkable
class ImageModel(Protocol):
    """A classifier of pictures."""

    def with_head(self, num_classes: int, *, key: Key[Array, ""]) -> "ImageModel":
        """The model with a new head for that many classes."""
