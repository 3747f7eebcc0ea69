"""Cells through time: the sequential ones by a scan, the parallel ones by an associative scan.

On one NVIDIA GPU an LSTM may run by cuDNN, the only kernel that JAX has: no GRU, and no bf16.

Legend of suffixes: B batch, T time, I inputs, H hidden, G gates of a weight, P terms.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import rnn
from jaxtyping import Array, Bool, DTypeLike, Float

from zoo.nn.layers import add_bias
from zoo.nn.products import Static, custom_vjp, in_forward_mode, low_on_cpu, platform, product
from zoo.nn.recurrences.marks import Marks
from zoo.rnn.cells import CELLS, Cell, CellName, State, Terms
from zoo.sharding import constrain


class Weights(NamedTuple):
    """The weights of one direction of one layer; a parallel cell has no `hh`."""

    ih: Float[Array, "in gates hidden"]
    hh: Any  # Float[Array, "units gates hidden"] | None
    bias: Float[Array, "terms hidden"]


class Options(NamedTuple):
    """How a recurrence runs: whether from the end, and how the scan of a sequential cell does."""

    cell: CellName
    reverse: bool = False
    hoist: bool = False
    unroll: int | None = None


def recur(
    options: Options,
    weights: Weights,
    state: State,
    x_BTI: Float[Array, "batch seq in"],
    marks: Marks,
) -> tuple[State, Float[Array, "batch seq hidden"]]:
    """Run a cell over time: its final state, and its h of each step, in the dtype of x.

    A step that does not count leaves the state as it was.
    """
    cell = CELLS[options.cell]
    if cell.linear is None:
        return _scan(options, weights, state, x_BTI, marks)
    a_BTH, b_BTH = cell.linear(
        add_bias(_gates(x_BTI, weights.ih), weights.bias).astype(jnp.float32)
    )
    if marks.restart is not None:
        a_BTH = jnp.where(marks.restart[:, :, None], 0.0, a_BTH)
    if marks.valid is not None:
        a_BTH = jnp.where(marks.valid[:, :, None], a_BTH, 1.0)
        b_BTH = jnp.where(marks.valid[:, :, None], b_BTH, 0.0)
    h_BTH = linear_recurrence(a_BTH, b_BTH, state[0], options.reverse)
    return (h_BTH[:, 0 if options.reverse else -1],), h_BTH.astype(x_BTI.dtype)


@functools.partial(custom_vjp, nondiff_argnums=(3,))
def linear_recurrence(
    a_BTH: Float[Array, "batch seq hidden"],
    b_BTH: Float[Array, "batch seq hidden"],
    h_BH: Float[Array, "batch hidden"],
    reverse: bool = False,
) -> Float[Array, "batch seq hidden"]:
    """h[t] = a[t] · h[t-1] + b[t] at every t, in a depth of log(seq); `reverse` is from the end."""
    first = -1 if reverse else 0
    b_BTH = b_BTH.at[:, first].add(a_BTH[:, first] * h_BH)
    combine = lambda left, right: (left[0] * right[0], left[1] * right[0] + right[1])  # noqa: E731
    return lax.associative_scan(combine, (a_BTH, b_BTH), reverse=reverse, axis=1)[1]


def _linear_forward(a_BTH: Array, b_BTH: Array, h_BH: Array, reverse: bool) -> tuple[Array, tuple]:
    h_BTH = linear_recurrence(a_BTH, b_BTH, h_BH, reverse)
    return h_BTH, (a_BTH, h_BTH, h_BH)


def _linear_backward(reverse: bool, residuals: tuple, g_BTH: Array) -> tuple[Array, Array, Array]:
    # The gradient of a linear recurrence is one in the other direction.
    a_BTH, h_BTH, h_BH = residuals
    zeros = jnp.zeros_like(h_BH)
    after = _before(a_BTH, zeros, not reverse)
    dh_BTH = linear_recurrence(after, g_BTH, zeros, not reverse)
    first = -1 if reverse else 0
    da_BTH = dh_BTH * _before(h_BTH, h_BH, reverse)
    return da_BTH, dh_BTH, dh_BTH[:, first] * a_BTH[:, first]


linear_recurrence.defvjp(_linear_forward, _linear_backward)


def _before(x_BTH: Array, initial_BH: Array, reverse: bool) -> Array:
    """Each step's value one step earlier in the direction of the recurrence."""
    if reverse:
        return jnp.concatenate([x_BTH[:, 1:], initial_BH[:, None]], 1)
    return jnp.concatenate([initial_BH[:, None], x_BTH[:, :-1]], 1)


# The gradient is written out for its products: autodiff would add up the gradients of the weights
# step by step, where one product over all steps does it, and would keep every intermediate, where
# the terms and the states are enough. Pointwise functions are left to autodiff. No product is by
# `matmul`, which would merge the axes of gates and hidden, and so gather a sharded weight.
@functools.partial(custom_vjp, nondiff_argnums=(0,))
def _scan(options: Options, weights: Weights, state: State, x_BTI: Array, marks: Marks) -> Any:
    return _scan_forward(options, weights, state, x_BTI, marks, needed=None)[0]


def _scan_forward(
    options: Options,
    weights: Weights,
    state: State,
    x_BTI: Array,
    marks: Marks,
    *,
    needed: tuple[Weights, Any, Any, Any] | None,
) -> tuple[tuple[State, Array], tuple]:
    cell, dtype = CELLS[options.cell], x_BTI.dtype
    bias = weights.bias.astype(jnp.float32)[None]
    inputs = _gates(x_BTI, weights.ih) if options.hoist else x_BTI

    def step(state: State, inputs: tuple[Array, Marks]) -> tuple[State, tuple]:
        x, marks = inputs
        state = _start(marks, state)
        gates = x if options.hoist else product(x, weights.ih, ((1,), (0,)))
        h = constrain(state[0].astype(dtype), "batch", None)
        terms = _join(cell, gates, product(h, weights.hh, ((1,), (0,)))) + bias
        # Rounded before use, so that the gradient fits what was computed.
        terms = constrain(terms.astype(dtype), "batch", None, "hidden")
        after = _advance(cell, marks, _apart(terms), state)
        after = tuple(constrain(s, "batch", "hidden") for s in after)
        return after, (_bits(after[0].astype(dtype)), _bits(terms), state)

    final, (h_TBH, *kept) = lax.scan(
        step,
        state,
        _swap_time((inputs, marks)),
        reverse=options.reverse,
        unroll=options.unroll or 1,
    )
    of_weights = Static(needed and (needed[0].ih, needed[0].hh))
    h_BTH = _values(h_TBH, dtype).swapaxes(0, 1)
    return (final, h_BTH), (x_BTI, weights, marks, of_weights, *kept)


def _scan_backward(options: Options, residuals: tuple, gradients: tuple[State, Array]) -> tuple:
    x_BTI, weights, marks, of_weights, terms_TBPH, states_TBH = residuals
    cell, dtype = CELLS[options.cell], x_BTI.dtype
    # Every step multiplies by it, so that it is worth a transpose in memory.
    hh_GHI = lax.optimization_barrier(jnp.moveaxis(weights.hh, 0, -1))

    def step(d_after: State, inputs: tuple) -> tuple[State, Array]:
        dh, terms, state, marks = inputs
        terms = _values(terms, dtype)
        d_after = (d_after[0] + dh.astype(jnp.float32), *d_after[1:])

        # Term by term: XLA for CPU does not vectorise the gradient of a slice.
        _, pullback = jax.vjp(functools.partial(_advance, cell, marks), _apart(terms), state)
        d_apart, d_state = pullback(d_after)
        d_terms = jnp.stack(d_apart, axis=1).astype(dtype)
        through_h = product(_pick(d_terms, cell.state_terms), hh_GHI, ((1, 2), (0, 1)))
        return _start(marks, (d_state[0] + through_h, *d_state[1:])), _bits(d_terms)

    d_initial, d_terms = lax.scan(
        step,
        gradients[0],
        (gradients[1].swapaxes(0, 1), terms_TBPH, states_TBH, _swap_time(marks)),
        reverse=not options.reverse,
        unroll=options.unroll or 1,
    )
    d_terms = _values(d_terms, dtype).swapaxes(0, 1)
    h_BTH = states_TBH[0].swapaxes(0, 1).astype(dtype)
    of_ih, of_hh = of_weights.value
    kept = (x_BTI if of_ih else None, weights.ih)
    dx_BTI, d_ih = _gates_backward(kept, _pick(d_terms, cell.input_terms))
    d_hh = _weight_gradient(h_BTH, _pick(d_terms, cell.state_terms)) if of_hh else None
    d_bias = d_terms.astype(jnp.float32).sum((0, 1)).astype(dtype)
    return Weights(d_ih, d_hh, d_bias), d_initial, dx_BTI, None


_scan.defvjp(_scan_forward, _scan_backward, by_need=True)


# To write a step's part of an array of bf16, XLA for CPU converts all of it to fp32, and back.
def _bits(x: Array) -> Array:
    """An array for a scan to stack: bf16 and fp16 as uint16 on a CPU, where no gradient follows."""
    is_low = low_on_cpu(x) and not in_forward_mode()
    return lax.bitcast_convert_type(x, jnp.uint16) if is_low else x


def _values(x: Array, dtype: DTypeLike) -> Array:
    """The array that has these bits."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def _swap_time(tree: Any) -> Any:
    """Exchange the axes of batch and time: a scan runs over the first."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1), tree)


def _start(marks: Marks, state: State) -> State:
    """The state that a step begins with; or, as this is linear, the gradient back through it."""
    if marks.restart is None:
        return state
    return tuple(jnp.where(marks.restart[:, None], 0.0, s) for s in state)


def _apart(terms_BPH: Array) -> Terms:
    """The terms of a step one by one, in fp32."""
    return tuple(terms_BPH[:, p].astype(jnp.float32) for p in range(terms_BPH.shape[1]))


def _advance(cell: Cell, marks: Marks, terms: Terms, state: State) -> State:
    """The state after a step."""
    assert cell.advance is not None
    after = cell.advance(terms, state)
    if marks.valid is None:
        return after
    valid = marks.valid[:, None]
    return tuple(jnp.where(valid, new, old) for new, old in zip(after, state, strict=True))


def _join(cell: Cell, input_gates: Array, state_gates: Array) -> Array:
    """The terms that the gates add up to, fp32[B, P, H], without the bias."""
    input_gates = input_gates.astype(jnp.float32)
    if cell.input_terms == cell.state_terms:
        return input_gates + state_gates
    terms = [jnp.zeros_like(state_gates[:, 0])] * cell.num_terms
    for gates, where in ((input_gates, cell.input_terms), (state_gates, cell.state_terms)):
        for gate, term in enumerate(where):
            terms[term] = terms[term] + gates[:, gate]
    return jnp.stack(terms, axis=1)


def _pick(terms: Array, which: tuple[int, ...]) -> Array:
    """Some of the terms [..., P, H]: the gradient of the gates that add to them."""
    if len(which) == terms.shape[-2]:
        return terms
    return jnp.concatenate([terms[..., p : p + 1, :] for p in which], axis=-2)


@custom_vjp
def _gates(x_BTI: Array, w_IGH: Array) -> Array:
    """The products of all inputs with their weight, [B, T, G, H], in the dtype of x."""
    gates = product(x_BTI, w_IGH, ((2,), (0,)), x_BTI.dtype)
    return constrain(gates, "batch", "inner_seq", None, "hidden")


def _gates_forward(
    x_BTI: Array, w_IGH: Array, *, needed: tuple[bool, bool]
) -> tuple[Array, tuple[Array | None, Array]]:
    return _gates(x_BTI, w_IGH), (x_BTI if needed[1] else None, w_IGH)


def _gates_backward(residuals: tuple[Array | None, Array], g_BTGH: Array) -> tuple[Array, Any]:
    x_BTI, w_IGH = residuals
    dx_BTI = product(g_BTGH, w_IGH, ((2, 3), (1, 2)), g_BTGH.dtype)
    return dx_BTI, None if x_BTI is None else _weight_gradient(x_BTI, g_BTGH)


def _weight_gradient(x_BTI: Array, g_BTGH: Array) -> Array:
    return product(x_BTI, g_BTGH, ((0, 1), (0, 1)), x_BTI.dtype)


_gates.defvjp(_gates_forward, _gates_backward, by_need=True)


def cudnn_refusal(cell: CellName, *, packed: bool) -> str | None:
    """Why cuDNN's LSTM cannot serve here, or None if it can."""
    if cell != "lstm":
        return f"runs cell='lstm' only, and this is {cell!r}"
    if packed:
        return "can't begin afresh between the segments of packed rows: pass mask, not segment_ids"
    if in_forward_mode():
        return "has no rule for forward mode"
    if platform() != "gpu":
        return f"needs an NVIDIA GPU, and this run is on {platform()!r}"
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1:
        return "runs on one device, and the mesh has more"
    return None


def cudnn_lstm(
    x_BTI: Float[Array, "batch seq in"],
    directions: Sequence[Weights],
    states: Sequence[State],
    valid: Bool[Array, "batch seq"] | None,
) -> tuple[tuple[State, ...], Float[Array, "batch seq out"]]:
    """One layer by cuDNN, in fp32: the directions' final states, and their h side by side.

    Padding has to come last in a row. `jax.experimental.rnn` documents the layout of the weights.
    """
    batch, seq, in_size = x_BTI.shape
    lengths = jnp.full(batch, seq) if valid is None else valid.sum(1)
    matrices = [
        jnp.moveaxis(w, 0, -1).reshape(-1)
        for d in directions
        for w in (d.ih, d.hh)
        if w is not None
    ]
    biases = [b.reshape(-1) for d in directions for b in (d.bias, jnp.zeros_like(d.bias))]
    h, *final = rnn.lstm(
        x_BTI.astype(jnp.float32),
        *(jnp.stack(s) for s in zip(*states, strict=True)),
        jnp.concatenate(matrices + biases).astype(jnp.float32),
        # A row with nothing but padding has a length of one, and its result is thrown away.
        jnp.maximum(lengths, 1).astype(jnp.int32),
        input_size=in_size,
        hidden_size=directions[0].bias.shape[-1],
        num_layers=1,
        dropout=0.0,
        bidirectional=len(directions) == 2,
    )
    kept = (lengths > 0)[:, None]
    finals = tuple(
        tuple(jnp.where(kept, new[d], old) for new, old in zip(final, state, strict=True))
        for d, state in enumerate(states)
    )
    return finals, h.astype(x_BTI.dtype)
