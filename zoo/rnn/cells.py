"""Recurrent cells, such as LSTM and GRU, in one table. A new cell is an entry in it.

A cell whose state is a matrix is a layer of its own, in the table `zoo.nn.recurrences.mixers`. Any
other computes with its terms, the inputs of its non-linearities: each is a gate of the input (a
product with `weight_ih`), one of the state (with `weight_hh`), or their sum, plus a bias.

Legend of suffixes: B batch, T time, P terms, H hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.nn.recurrences.mixers import MixerName

CellName = Literal["lstm", "gru", "elman", "mingru", "minlstm", MixerName]
State = tuple[Float[Array, "batch hidden"], ...]  # float32: (h, c) of an LSTM, (h,) of the others
Terms = tuple[Float[Array, "batch hidden"], ...]  # float32


@dataclass(frozen=True)
class Cell:
    """A recurrence of one step.

    A sequential cell moves its state by `advance(terms, state)`; a parallel one has `linear`,
    which maps the terms [B, T, P, H] to (a, b) of the recurrence h = a · h + b. Both are pointwise,
    in fp32.
    """

    num_terms: int
    input_terms: tuple[int, ...]  # the terms that the gates of the input add to
    state_terms: tuple[int, ...]  # … and the gates of the state
    num_states: int = 1
    forget_term: int | None = None  # its bias begins at one, open (Jozefowicz et al. 2015)
    advance: Callable[[Terms, State], State] | None = None
    linear: Callable[[Array], tuple[Array, Array]] | None = None


def _lstm(terms: Terms, state: State) -> State:
    i, f, g, o = terms
    c = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _gru(terms: Terms, state: State) -> State:
    r, z, n_input, n_state = terms
    n = jnp.tanh(n_input + jax.nn.sigmoid(r) * n_state)
    return (n + jax.nn.sigmoid(z) * (state[0] - n),)


def _elman(terms: Terms, state: State) -> State:
    return (jnp.tanh(terms[0]),)


def _mingru(terms_BTPH: Array) -> tuple[Array, Array]:
    z, candidate = jax.nn.sigmoid(terms_BTPH[:, :, 0]), terms_BTPH[:, :, 1]
    return 1 - z, z * candidate


def _minlstm(terms_BTPH: Array) -> tuple[Array, Array]:
    f, i, candidate = (terms_BTPH[:, :, p] for p in range(3))
    # σ(f) / (σ(f) + σ(i)), which cannot be 0 / 0 this way.
    share = jax.nn.sigmoid(jax.nn.log_sigmoid(f) - jax.nn.log_sigmoid(i))
    return share, (1 - share) * candidate


# Terms in PyTorch's order. The GRU is PyTorch's, which resets the product with the state, bias
# included; its bias has both terms of the candidate apart. The parallel cells are by Feng et al.
# 2024 without their log-space form: nothing divides here by a product of gates, so that the
# plain form is stable, and it leaves the state its sign.
CELLS: dict[CellName, Cell] = {
    "lstm": Cell(4, (0, 1, 2, 3), (0, 1, 2, 3), num_states=2, forget_term=1, advance=_lstm),
    "gru": Cell(4, (0, 1, 2), (0, 1, 3), advance=_gru),
    "elman": Cell(1, (0,), (0,), advance=_elman),
    "mingru": Cell(2, (0, 1), (), linear=_mingru),
    "minlstm": Cell(3, (0, 1, 2), (), linear=_minlstm),
}
