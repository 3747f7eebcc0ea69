"""What a step looks at besides its maths: the values of batches, and its first time.

The first time a loss's total and weight are compared for some rows and for two copies of them, and
it is said whether the gradient was clipped.
"""

import inspect
import logging
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from zoo.data.checks import Accepted, check_values
from zoo.nn.precision import Precision
from zoo.nn.products import platform
from zoo.training.loss_values import EVAL_NAMES, LossFunction, accepted_by, loss_values, unwrapped
from zoo.training.state import TrainState

logger = logging.getLogger(__name__)
ROWS = 2  # of the comparison, at least: some losses squeeze an axis of one

# A comparison is computed once, and compiled for longer than it is computed.
QUICK_TO_COMPILE: dict[str, dict[str, Any]] = {"cpu": {"xla_backend_optimization_level": 0}}


class LossWarning(UserWarning):
    """A loss is no sum over the rows of a batch."""


class Checks:
    """The checks of a step of a loss; those of the first time are for a step that trains."""

    def __init__(
        self, loss_fn: LossFunction, precision: Precision | str, clip_norm: float | None = None
    ):
        self._loss_fn, self._precision, self._clip_norm = loss_fn, precision, clip_norm
        self._accepted: Accepted | None = None
        self._compared = self._said = False

    def values(self, state: PyTree, batch: PyTree) -> None:
        """Refuse values of numpy arrays; see `check_values`."""
        check_values(batch, self.accepted(state))

    def accepted(self, state: PyTree) -> Accepted:
        """What the entries of batches may hold, by the loss and the sizes of the model."""
        if self._accepted is None:
            model = state.model if isinstance(state, TrainState) else state
            self._accepted = accepted_by(self._loss_fn, model)
        return self._accepted

    def sums(
        self,
        state: PyTree,
        batch: PyTree,
        parts: int,
        in_use: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Warn before the first step of a training if a loss of one's own is no sum over rows.

        It computes the loss alone, of a few rows of ones, without dropout. The tests do so for the
        losses of the zoo. `parts` is what the number of rows has to be a multiple of.
        """
        if self._compared or not isinstance(state, TrainState):
            return
        self._compared = True
        function = inspect.unwrap(unwrapped(self._loss_fn)[-1])
        module = getattr(function, "__module__", None) or type(function).__module__
        if module.split(".")[0] == "zoo" or not isinstance(state.step, jax.Array):
            return
        if int(state.step) > 0:
            return
        rows = parts * -(-ROWS // parts)
        with in_use():
            if text := compared(self._loss_fn, self._precision, state.model, batch, rows):
                code = getattr(function, "__code__", None)
                place = (code.co_filename, code.co_firstlineno) if code else ("a loss", 0)
                warnings.warn_explicit(text, LossWarning, *place)

    def clipping(self, metrics: dict[str, Array]) -> None:
        """Say once, of the metrics of the first step, that its gradient was clipped."""
        if self._said:
            return
        self._said = True
        if self._clip_norm is None or jax.process_index() != 0:
            return
        norm = float(metrics["grad_norm"])
        if norm > self._clip_norm:
            logger.warning(
                "gradient norm %.4g, clipped to %.4g; clip_norm=None turns that off",
                norm,
                self._clip_norm,
            )


def compared(
    loss_fn: LossFunction, precision: Precision | str, model: PyTree, batch: PyTree, rows: int
) -> str:
    """What is wrong with the sums of a loss for a batch like this; nothing where it can't be told.

    A loss that cannot be computed without a key, or that is not finite, tells nothing.
    """

    def sums(model: PyTree, copies: int) -> tuple[Array, Array]:
        like = lambda x: jnp.ones((copies * rows, *x.shape[1:]), x.dtype)  # noqa: E731
        values, _ = loss_values(
            loss_fn, precision, EVAL_NAMES, model, jax.tree.map(like, batch), None
        )
        return values["loss"], values["tokens"]

    options: Any = {"compiler_options": QUICK_TO_COMPILE.get(platform())}
    both = eqx.filter_jit(lambda model: (sums(model, 1), sums(model, 2)), **options)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (total, weight), (totals, weights) = jax.device_get(both(model))
    except Exception as error:  # of whatever kind: a step says it better
        logger.debug("the sums of the loss were not compared: %s", error)
        return ""
    if not np.isfinite([total, weight, totals, weights]).all():
        return ""
    if _is_double(total, totals) and _is_double(weight, weights):
        return ""
    return (
        f"the loss of {rows} equal rows has a total of {total:.4g} and a weight of {weight:.4g}, "
        f"that of {2 * rows} of them {totals:.4g} and {weights:.4g}: sums over rows double, and "
        "the gradient is that of total / weight. Return the summed loss and the summed weight, not "
        "means; a loss between rows, as a contrastive one, may leave it so"
    )


def _is_double(one: Any, two: Any) -> bool:
    return bool(abs(two - 2 * one) <= 0.01 * (abs(one) + abs(two)))
