"""Optimizers and learning-rate schedules by name, with weight decay on matrices only."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.typing import DTypeLike
from jaxtyping import Array, Key, PyTree

from zoo.common import configuration
from zoo.common.configuration import require
from zoo.nn.precision import DTYPES
from zoo.sharding.axes import keystr, map_parameters
from zoo.sharding.placement import with_whole_matrices
from zoo.sharding.rules import is_hidden_matrix, is_matrix, matrix_axes
from zoo.training import parametrization


@dataclass(frozen=True)
class Config:
    """An optimizer and its schedule."""

    name: Literal["adamw", "adam", "lion", "adafactor", "muon"] = "adamw"
    """Update rule; muon takes the hidden matrices and leaves the rest to adamw."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: cosine decay, warm-up-stable-decay, or constant."""
    warmup_steps: int = 100
    """Steps of linear warm-up from zero (at most a tenth of the run)."""
    decay_fraction: float = 0.2
    """Share of the run, at its end, in which wsd decays linearly."""
    final_fraction: float = 0.1
    """Learning rate at the end, as a share of the peak."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only (muon: hidden ones; adam: none)."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    moment_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the first moment between steps; bf16 saves 2 bytes per parameter."""
    parametrization: Literal["standard", "mup"] = "standard"
    """mup: initial scales and rates per matrix by the width, so that one rate fits all widths."""
    base_width: int | None = None
    """For mup: the width (d_model, hidden_size) that the learning rate was found at."""

    def __post_init__(self) -> None:
        configuration.check(self, "optimizer.")
        for name in ("learning_rate", "warmup_steps", "weight_decay"):
            value = getattr(self, name)
            require(value >= 0, f"optimizer.{name}={value}: must not be negative")
        for name in ("decay_fraction", "final_fraction"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"optimizer.{name}={value}: must be in [0, 1]")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"optimizer.{name}={value}: must be in [0, 1)")
        require(
            self.moment_dtype == "fp32" or self.name != "adafactor",
            f"optimizer.moment_dtype={self.moment_dtype!r}: adafactor keeps no first moment",
        )
        require(
            self.base_width is None or self.base_width > 0,
            f"optimizer.base_width={self.base_width}: must be positive",
        )
        require(
            (self.parametrization == "mup") == (self.base_width is not None),
            f"optimizer.parametrization={self.parametrization!r} and optimizer.base_width="
            f"{self.base_width}: 'mup' needs the width that the rate was found at, and 'standard' "
            "takes none",
        )


def make_schedule(config: Config, steps: int) -> optax.Schedule:
    """The learning rate of each step of a run of `steps` steps."""
    peak, final = config.learning_rate, config.learning_rate * config.final_fraction
    warmup = min(config.warmup_steps, steps // 10)
    rest = max(steps - warmup, 1)
    if config.schedule == "cosine":
        main = optax.cosine_decay_schedule(peak, rest, config.final_fraction)
    elif config.schedule == "wsd":
        decay = min(max(round(steps * config.decay_fraction), 1), rest)
        main = optax.linear_schedule(peak, final, decay, transition_begin=rest - decay)
    else:
        main = optax.constant_schedule(peak)
    # The first step is not wasted on a rate of zero.
    ramp = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([ramp, main], [warmup]) if warmup else main


def make_optimizer(config: Config, steps: int) -> optax.GradientTransformation:
    """The optimizer for a run of `steps` steps; clipping is the train step's.

    With parametrization "mup", give `init_state` what `initialise` makes of `make_model`. Weights
    then decay by rate · weight_decay at every width, whatever the rate of their matrix.
    """
    rate = make_schedule(config, steps)
    if config.base_width is None:
        return _make_rule(config, rate, config.weight_decay)
    is_muon, decay = config.name == "muon", 0.0 if config.name == "adam" else config.weight_decay
    return optax.chain(
        _make_rule(config, 1.0, 0.0),
        parametrization.scale_by_width(config.base_width, orthogonal=is_muon),
        # Minus, as these updates descend already.
        optax.add_decayed_weights(-decay, hidden_matrices if is_muon else matrices),
        optax.scale_by_schedule(rate),
    )


def initialise(config: Config, make_model: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """The `make_model` of `init_state` with the initial scales of the parametrization.

    Raises:
        ValueError: at its call, a pretrained model with parametrization "mup", or a model that has
            no such parametrization (see `parametrization.factors`).
    """
    base_width = config.base_width
    if base_width is None:
        return make_model

    def make_scaled(key: Key[Array, ""], *pretrained: PyTree) -> PyTree:
        require(
            not pretrained,
            "optimizer.parametrization='mup' draws its own initial scales, and a pretrained model "
            "has others: choose 'standard'",
        )
        return parametrization.initialise(make_model(key), base_width)

    return make_scaled


def _make_rule(
    config: Config, rate: float | optax.Schedule, weight_decay: float
) -> optax.GradientTransformation:
    dtype: dict[str, Any] = {"mu_dtype": DTYPES[config.moment_dtype]}
    moments = {"b1": config.beta1, "b2": config.beta2, **dtype}
    decay: dict[str, Any] = {"weight_decay": weight_decay}
    match config.name:
        case "adamw":
            return optax.adamw(rate, **moments, **decay, mask=matrices)
        case "adam":
            return optax.adam(rate, **moments)
        case "lion":
            return optax.lion(rate, **moments, **decay, mask=matrices)
        case "adafactor":
            # `optax.adafactor` would decay by the whole weight_decay per step, whatever the rate.
            return optax.chain(
                optax.scale_by_factored_rms(),
                optax.clip_by_block_rms(1.0),
                optax.add_decayed_weights(weight_decay, matrices),
                optax.scale_by_learning_rate(rate),
            )
        case "muon":
            hidden = optax.chain(
                _scale_by_muon(dtype["mu_dtype"]),
                optax.add_decayed_weights(weight_decay),
                optax.scale_by_learning_rate(rate),
            )
            rest = optax.adamw(rate, **moments, weight_decay=0.0, nesterov=True)
            return optax.partition(
                {"muon": hidden, "adam": rest},
                lambda tree: jax.tree.map(lambda x: "muon" if x else "adam", hidden_matrices(tree)),
            )
    raise ValueError(f"optimizer.name={config.name!r} is unknown")


def matrices(parameters: PyTree) -> Any:
    """A tree of booleans: whether a parameter is a matrix by its logical axes, not a vector.

    Raises, as the two functions below:
        ShardingError: a logical axis that neither the table nor the rules in use know.
    """
    return map_parameters(lambda path, names, _: is_matrix(names, field=keystr(path)), parameters)


def hidden_matrices(parameters: PyTree) -> Any:
    """A tree of booleans: whether a matrix is between the model's inputs and outputs."""
    return map_parameters(
        lambda path, names, _: is_hidden_matrix(names, field=keystr(path)), parameters
    )


def muon_dimensions(parameters: PyTree) -> Any:
    """The axes that Muon orthogonalises: the hidden matrices', each of a stack by itself.

    None for vectors, and for matrices with the model's inputs or outputs for an axis.
    """

    def dimensions(path: tuple, names: tuple[str | None, ...], _: Any) -> Any:
        if not is_hidden_matrix(names, field=keystr(path)):
            return None
        return optax.contrib.MuonDimensionNumbers(*matrix_axes(names))

    return map_parameters(dimensions, parameters)


def _scale_by_muon(dtype: DTypeLike) -> optax.GradientTransformation:
    """`optax.contrib.scale_by_muon`, but on a mesh each matrix is orthogonalised on one device.

    For optax's own, XLA gathers all matrices on every device. Updates have AdamW's size, so that
    one rate fits both (Liu et al. 2025).
    """
    beta, rms = 0.95, 0.2  # of the momentum, and of an update
    # Without a momentum it only orthogonalises.
    rule = optax.contrib.scale_by_muon(
        beta=0.0, nesterov=False, weight_dimension_numbers=muon_dimensions
    )

    def orthogonalise(matrices: PyTree) -> PyTree:
        return rule.update(matrices, rule.init(matrices))[0]

    def scaled(x: Array, dimensions: Any) -> Array:
        sizes = (math.prod(x.shape[axis] for axis in axes) for axes in dimensions)
        return jnp.sqrt(jnp.maximum(*sizes)) * rms * x

    def update(gradients: PyTree, state: Any, parameters: PyTree = None) -> tuple[PyTree, Any]:
        del parameters
        count = optax.safe_increment(state.count)
        moments = optax.tree.update_moment(gradients, state.mu, beta, 1)
        ahead = jax.tree.map(
            lambda m, g: beta * m + (1 - beta) * g,
            optax.tree.bias_correction(moments, beta, optax.safe_increment(count)),
            optax.tree.bias_correction(gradients, beta, count),
        )
        updates = with_whole_matrices(orthogonalise, ahead)
        updates = jax.tree.map(scaled, updates, muon_dimensions(updates))
        return updates, state._replace(count=count, mu=optax.tree.cast(moments, dtype))

    return optax.GradientTransformation(optax.contrib.scale_by_muon(mu_dtype=dtype).init, update)
