"""Checks of a loss beside its maths: of the values of each batch, and once of what it computes.

Before the first step of a training the totals and weights of some rows are compared with those of
two copies of them. And products of two dtypes are found, which JAX computes in the wider one
without a word.
"""

import contextlib
import inspect
import logging
import os
import traceback
import warnings
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.extend import core
from jaxtyping import Array, PyTree

from zoo import sharding
from zoo.data.loader import Accepted
from zoo.nn.precision import Precision, scheme_of
from zoo.nn.products import platform
from zoo.training.loss_values import (
    EVAL_NAMES,
    LossFunction,
    accepted_by,
    call_loss,
    loss_values,
    unwrapped,
)
from zoo.training.state import TrainState

logger = logging.getLogger(__name__)
ROWS = 2  # of the comparison, at least: some losses squeeze an axis of one

# A comparison runs once, and takes longer to compile than to run.
QUICK_TO_COMPILE: dict[str, dict[str, Any]] = {"cpu": {"xla_backend_optimization_level": 0}}

PRODUCTS = {"dot_general", "conv_general_dilated"}
# They leave numbers as they are, but for their dtype.
MOVES = {"convert_element_type", "reshape", "transpose", "broadcast_in_dim", "squeeze", "copy"}
MOVES |= {"expand_dims", "slice", "dynamic_slice", "rev", "sharding_constraint"}
LIBRARIES = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (jax, eqx))
STANDARD_LIBRARY = os.path.dirname(contextlib.__file__)


class LossWarning(UserWarning):
    """A loss is no sum over the rows of a batch."""


class PrecisionWarning(UserWarning):
    """A part of a loss is computed in another dtype than a step was asked for."""


class Checks:
    """The checks of a loss's step; the one of its sums is for a step that trains."""

    def __init__(
        self, loss_fn: LossFunction, precision: Precision | str, clip_norm: float | None = None
    ):
        self._loss_fn, self._precision, self._clip_norm = loss_fn, precision, clip_norm
        self._accepted: Accepted | None = None
        self._compared, self._looked = False, precision == "fp32"

    def accepted(self, state: PyTree) -> Accepted:
        """The values that entries of a batch may have, by name: from the loss and the model."""
        if self._accepted is None:
            model = state.model if isinstance(state, TrainState) else state
            self._accepted = accepted_by(self._loss_fn, model)
        return self._accepted

    def sums(self, state: PyTree, batch: PyTree, layout: sharding.Layout) -> None:
        """Warn before the first step of a training if a loss of one's own is no sum over rows.

        It computes the loss alone, of a few rows of ones, without dropout. The tests do so for the
        losses of the zoo.
        """
        if self._compared or not isinstance(state, TrainState):
            return
        self._compared = True
        function = inspect.unwrap(unwrapped(self._loss_fn)[-1])
        module = getattr(function, "__module__", None) or type(function).__module__
        is_own = module.split(".")[0] != "zoo"
        if not is_own or not isinstance(state.step, jax.Array) or int(state.step) > 0:
            return
        parts = sharding.num_batch_parts(layout)
        rows = parts * -(-ROWS // parts)
        with sharding.use(layout):
            if text := compared(self._loss_fn, self._precision, state.model, batch, rows):
                code = getattr(function, "__code__", None)
                place = (code.co_filename, code.co_firstlineno) if code else ("a loss", 0)
                warnings.warn_explicit(text, LossWarning, *place)

    def clipping(self, metrics: dict[str, Array]) -> None:
        """Say once, from the first step's metrics, that its gradient was clipped."""
        limit, self._clip_norm = self._clip_norm, None
        if limit is not None and jax.process_index() == 0:
            norm = float(metrics["grad_norm"])
            if norm > limit:
                text = "gradient norm %.4g, clipped to %.4g; clip_norm=None turns that off"
                logger.warning(text, norm, limit)

    def dtypes(self, model: PyTree, batch: PyTree, key: Array | None) -> None:
        """Give PrecisionWarnings, once, from the trace of the loss alone: nothing is computed.

        There is one for each line with a product in fp32 of which one operand comes from bf16 or
        fp16 by casts and moves alone, and the other does not, as where parameters in the compute
        dtype meet an activation in fp32. Two operands that were both cast to fp32 do not count, as
        that is deliberate. And there is one for a total or a weight that was summed up in bf16 or
        fp16.

        Raises:
            ValueError: a scheme, such as "int8", for a model without a matrix to multiply so.
        """
        if self._looked:
            return
        given = {"model": model, "batch": batch, "key": key}
        arrays, static = eqx.partition(given, eqx.is_array)

        def loss(arrays: PyTree) -> Any:
            return call_loss(self._loss_fn, self._precision, **eqx.combine(arrays, static))[:2]

        jaxpr = jax.make_jaxpr(loss)(arrays).jaxpr
        if (scheme := scheme_of(self._precision)) is not None:
            scheme.check_loss(jaxpr)
        inputs = [
            _Origin(x.dtype, path[0].key + jtu.keystr(path[1:]))
            for path, x in jtu.tree_leaves_with_path(arrays)
        ]
        self._looked = True
        for text, file, line in dict.fromkeys(_findings(jaxpr, inputs)):
            warnings.warn_explicit(text, PrecisionWarning, file, line)


def compared(
    loss_fn: LossFunction, precision: Precision | str, model: PyTree, batch: PyTree, rows: int
) -> str:
    """The mistake in the sums of a loss for a batch like this; "" where there is no sign of one.

    A loss that needs a key, or is not finite, gives no sign.
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
    once, twice = np.array([total, weight]), np.array([totals, weights])
    if not np.isfinite([once, twice]).all() or np.allclose(twice, 2 * once, 0.015, 0):
        return ""
    return (
        f"the loss of {rows} equal rows has a total of {total:.4g} and a weight of {weight:.4g}, "
        f"that of {2 * rows} of them {totals:.4g} and {weights:.4g}: sums over rows double, and "
        "the gradient is that of total / weight. Return the summed loss and the summed weight, not "
        "means; a loss between rows, as a contrastive one, may leave it so"
    )


# --- Products of two dtypes ----------------------------------------------------------------------


class _Origin(NamedTuple):
    """The narrowest dtype that a value had, and the argument that it comes from."""

    dtype: Any  # None for what is no array
    name: str = ""

    @property
    def is_low(self) -> bool:
        is_float = self.dtype is not None and jnp.issubdtype(self.dtype, jnp.floating)
        return is_float and self.dtype.itemsize < 4


def _findings(jaxpr: Any, inputs: list[_Origin]) -> list[tuple[str, str, int]]:
    """The warnings about a loss, each with its file and line."""
    found: list[tuple[str, str, int]] = []
    outputs = _visit(jaxpr, inputs, found)
    made_by = {x: equation for equation in jaxpr.eqns for x in equation.outvars}
    for what, x, origin in zip(("total", "weight"), jaxpr.outvars, outputs, strict=True):
        if origin.is_low:
            text = (
                f"the loss's {what} is a sum in {origin.dtype}: sum in float32, or keep an entry "
                "of the batch as it is by zoo.losses.keeps_dtype"
            )
            is_constant = isinstance(x, core.Literal)
            found.append((text, *_place(None if is_constant else made_by.get(x))))
    return found


def _visit(jaxpr: Any, inputs: list[_Origin], found: list[tuple[str, str, int]]) -> list[_Origin]:
    """The origins of a jaxpr's outputs, given those of its inputs; adds the products found."""
    origins: dict[Any, _Origin] = dict(zip(jaxpr.invars, inputs, strict=True))

    def origin(x: Any) -> _Origin:
        own = _Origin(getattr(x.aval, "dtype", None))
        return own if isinstance(x, core.Literal) else origins.get(x, own)

    for equation in jaxpr.eqns:
        name, operands = equation.primitive.name, [origin(x) for x in equation.invars]
        if name in PRODUCTS and (text := _mixed(equation, operands[:2])):
            found.append((text, *_place(equation)))
        results: list[_Origin] = []
        # Not of a kernel, whose products are as its author chose them.
        for inner in () if name == "pallas_call" else core.jaxprs_in_params(equation.params):
            # A branch has an operand in front of its own, and a loop may have some.
            given = operands[len(operands) - len(inner.invars) :]
            fits = len(given) == len(inner.invars)
            own = [_Origin(getattr(x.aval, "dtype", None)) for x in inner.invars]
            results = _visit(inner, given if fits else own, found)
        if name in MOVES:
            before, after = operands[0], equation.outvars[0].aval.dtype
            keeps = before.is_low and jnp.issubdtype(after, jnp.floating)
            narrower = keeps and before.dtype.itemsize <= after.itemsize
            results = [_Origin(before.dtype if narrower else after, before.name)]
        if len(results) == len(equation.outvars):
            origins.update(zip(equation.outvars, results, strict=True))
    return [origin(x) for x in jaxpr.outvars]


def _mixed(equation: Any, operands: list[_Origin]) -> str | None:
    """The warning about a product of two dtypes in fp32; None for any other."""
    computed = max((x.aval.dtype for x in equation.invars[:2]), key=lambda dtype: dtype.itemsize)
    dtypes = {operand.dtype for operand in operands}
    if computed.itemsize < 4 or len(dtypes) == 1 or not any(x.is_low for x in operands):
        return None
    first, second = (
        f"{operand.name} {operand.dtype}{list(x.aval.shape)}".strip()
        for operand, x in zip(operands, equation.invars, strict=False)
    )
    return f"a product of {first} and {second} is computed in {computed}: cast one of the two"


def _place(equation: Any) -> tuple[str, int]:
    """The file and the line of an equation, if any, outside of JAX and Equinox."""
    trace = equation and equation.source_info.traceback
    frames = traceback.extract_tb(trace.as_python_traceback()) if trace else []
    for frame in reversed(frames):
        inside = frame.filename.startswith(LIBRARIES)
        if not inside and os.path.dirname(frame.filename) != STANDARD_LIBRARY:
            return frame.filename, frame.lineno or 0
    return "a loss", 0
