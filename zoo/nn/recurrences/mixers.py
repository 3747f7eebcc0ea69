"""The recurrences with a matrix per head as state, by name, for layers of any family.

A new one is a file beside this one, with its layer, and an entry here.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from zoo.common.configuration import check_positive, require
from zoo.nn.recurrences import gated_deltanet, mamba2, mlstm
from zoo.nn.recurrences.chunks import Mixer, RecurrenceConfig

MixerName = Literal["gated_deltanet", "mamba2", "mlstm"]


class MixerKind(NamedTuple):
    """A recurrence whose state is a matrix per head, as a layer with its own projections."""

    layer: Callable[..., Mixer]
    num_products: Callable[[RecurrenceConfig, int, int, int], float]
    """Multiplications per step, of the settings, the widths of input and layer, and the steps of a
    chunk."""
    settings: tuple[str, ...]
    """The fields of `RecurrenceConfig` that it has beside the common ones."""


MIXERS: dict[MixerName, MixerKind] = {
    "gated_deltanet": MixerKind(
        gated_deltanet.GatedDeltaNet,
        gated_deltanet.num_products,
        ("num_key_heads", "taps", "negative_eigenvalues"),
    ),
    "mamba2": MixerKind(mamba2.Mamba2, mamba2.num_products, ("num_key_heads", "taps")),
    "mlstm": MixerKind(mlstm.MLSTM, mlstm.num_products, ()),
}
_OF_ALL = ("num_heads", "key_dim", "value_dim", "norm_eps")


def check_settings(
    config: RecurrenceConfig, prefix: str, kind: str | None, width: tuple[str, int]
) -> None:
    """Refuse what a recurrence of that kind can't have, in a layer of a width with that name.

    `prefix` precedes the fields' names in errors; a kind not in `MIXERS` has no setting.

    Raises:
        ValueError: it names the field and its value.
    """
    check_positive(config, prefix, *_OF_ALL, "num_key_heads", "taps", "chunk")
    for name in (*_OF_ALL, "num_key_heads", "taps", "negative_eigenvalues"):
        kinds = [k for k, mixer in MIXERS.items() if name in (*_OF_ALL, *mixer.settings)]
        value = getattr(config, name)
        require(
            kind in kinds or value == getattr(RecurrenceConfig, name),
            f"{prefix}{name}={value!r}: is for {' and '.join(kinds)}, and this is {kind!r}",
        )
    heads, (width_name, size) = config.num_heads, width
    require(
        heads % (config.num_key_heads or 1) == 0,
        f"{prefix}num_key_heads={config.num_key_heads} does not divide {prefix}num_heads={heads}",
    )
    require(
        kind not in MIXERS or config.value_dim is not None or size % heads == 0,
        f"{prefix}num_heads={heads} does not divide {width_name}={size}: change either, or set "
        f"{prefix}value_dim",
    )
