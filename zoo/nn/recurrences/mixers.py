"""The recurrences with a matrix per head as state, by name, for layers of any family."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from zoo.nn.recurrences import gated_deltanet, mamba2, mlstm
from zoo.nn.recurrences.chunks import Mixer, RecurrenceConfig

MixerName = Literal["gated_deltanet", "mamba2", "mlstm"]


class MixerKind(NamedTuple):
    """A recurrence whose state is a matrix per head, as a layer with its own projections."""

    layer: Callable[..., Mixer]
    num_products: Callable[[RecurrenceConfig, int, int, int], float]
    """Multiplications per step, of the settings, the widths of input and layer, and the steps of a
    chunk."""


MIXERS: dict[MixerName, MixerKind] = {
    "gated_deltanet": MixerKind(gated_deltanet.GatedDeltaNet, gated_deltanet.num_products),
    "mamba2": MixerKind(mamba2.Mamba2, mamba2.num_products),
    "mlstm": MixerKind(mlstm.MLSTM, mlstm.num_products),
}
