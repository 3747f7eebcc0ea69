"""The RNN family: stacked recurrent layers over tokens or real-valued steps, one way or both.

Legend of suffixes: B batch, T time, H hidden, D the width of a layer's output: hidden, twice if
bidirectional. The cells are in `zoo.rnn.cells`.
"""

import functools
from collections.abc import Callable
from typing import Any, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from zoo.common.configuration import require
from zoo.nn.layers import Embedding, Linear, Norm, Readout, dropout, make_norm, normal
from zoo.nn.parameters import CastsInputs, cast_for_use, unshard
from zoo.nn.products import transposed
from zoo.nn.protocols import SequenceOptions
from zoo.nn.recurrences.chunks import Mixer
from zoo.nn.recurrences.marks import Chunks, Marks, make_marks, over_time
from zoo.nn.recurrences.mixers import MIXERS
from zoo.rnn.cells import CELLS
from zoo.rnn.config import Config
from zoo.rnn.recurrence import Options, Weights, cudnn_lstm, cudnn_refusal, recur
from zoo.sharding import ShardingError, constrain, split_by

Inputs = Int[Array, "batch seq"] | Float[Array, "batch seq features"]
Outputs = Float[Array, "batch seq out"] | Float[Array, "batch out"]


class Direction(eqx.Module):
    """The weights of one direction of a layer, gates in PyTorch's order."""

    weight_ih: Float[Array, "in gates hidden"]
    weight_hh: Float[Array, "units gates hidden"] | None
    bias: Float[Array, "terms hidden"]
    axes: tuple[tuple[str, str], ...] = eqx.field(static=True)

    def __init__(self, config: Config, in_size: int, in_axis: str, *, key: Key[Array, ""]):
        cell, hidden = CELLS[config.cell], config.hidden_size
        ih_key, hh_key = jax.random.split(key)
        gates = len(cell.input_terms)
        self.weight_ih = normal(ih_key, (in_size, gates, hidden), in_size)
        self.weight_hh = (
            normal(hh_key, (hidden, len(cell.state_terms), hidden), hidden)
            if cell.state_terms
            else None
        )
        self.bias = jnp.zeros((cell.num_terms, hidden))
        if cell.forget_term is not None:
            self.bias = self.bias.at[cell.forget_term].set(1.0)
        self.axes = (("in", in_axis), ("units", "embed"), ("terms", "gates"))

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype that the recurrence takes and gives."""
        return self.bias.dtype

    @property
    def weights(self) -> Weights:
        """The weights as `zoo.rnn.recurrence` takes them."""
        return Weights(self.weight_ih, self.weight_hh, self.bias)


class Layer(eqx.Module):
    """One recurrent layer: a direction or two, and a norm."""

    directions: tuple[Direction | Mixer, ...]
    norm: Norm | None

    def __init__(self, config: Config, in_size: int, in_axis: str, *, key: Key[Array, ""]):
        def direction(key: Key[Array, ""]) -> Direction | Mixer:
            if config.cell not in MIXERS:
                return Direction(config, in_size, in_axis, key=key)
            layer = MIXERS[config.cell].layer
            settings = config.recurrence
            given = {"eps": settings.norm_eps} if settings.norm_eps else {}
            return layer(settings, in_size, config.hidden_size, in_axis, key=key, **given)

        keys = jax.random.split(key, 2 if config.bidirectional else 1)
        self.directions = tuple(map(direction, keys))
        self.norm = make_norm(config.norm, config.width)


class State(eqx.Module):
    """The state of a network at the end of a stretch of its rows, to continue from."""

    layers: tuple[tuple[PyTree, ...], ...]
    """By layer and direction, float32[batch, …]: (h, c) of an LSTM, (h,) of other cells, and of one
    whose state is a matrix what its layer says."""
    segment_ids: Int[Array, "batch"]
    """The segment that each row is in; 0 before the first."""

    def take(self, rows: Int[Array, "rows"]) -> "State":
        """The state of some rows, in that order; one may come several times."""
        return jax.tree.map(lambda x: x[rows], self)


class RNN(CastsInputs):
    """A recurrent network: int32[batch, seq] or float[batch, seq, in_size] to float32 outputs.

    The outputs are [batch, seq, out] (vocab_size or out_size), or with a pooling [batch, out_size].
    """

    embedding: Embedding | None
    layers: tuple[Layer, ...]
    head: Linear | None
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: Key[Array, ""]):
        embedding_key, layers_key, head_key = jax.random.split(key, 3)
        self.config, self.embedding, self.head = config, None, None
        if config.vocab_size is not None:
            size = config.embedding_size
            self.embedding = Embedding(config.vocab_size, size, key=embedding_key)
        axes = ["embed" if config.in_size is None else "features"]
        axes += ["embed"] * (config.num_layers - 1)
        keys = jax.random.split(layers_key, config.num_layers)
        self.layers = tuple(
            Layer(config, in_size, in_axis, key=key)
            for in_size, in_axis, key in zip(config.in_sizes, axes, keys, strict=True)
        )
        if not config.tie_embeddings:
            out_axis = "vocab" if config.out_size is None else "classes"
            self.head = Linear(
                config.width, config.num_outputs, in_axis="embed", out_axis=out_axis, key=head_key
            )

    @property
    def width(self) -> int:
        """Size of the vectors that `hidden` gives."""
        return self.config.width

    @property
    def final_norm(self) -> Norm | None:
        """The norm before the output head."""
        return self.layers[-1].norm

    @property
    def is_causal(self) -> bool:
        """Whether a step depends only on itself and the steps before it."""
        return not self.config.bidirectional

    @property
    def is_pooled(self) -> bool:
        """Whether the head reads one vector per row."""
        return self.config.pooling != "none"

    def __call__(self, inputs: Inputs, **options: Unpack[SequenceOptions]) -> Outputs:
        """The outputs, from a state of zeros; it takes the options of `read`."""
        return self.run(inputs, **options)[0]

    def hidden(
        self, inputs: Inputs, **options: Unpack[SequenceOptions]
    ) -> Float[Array, "batch read width"]:
        """The input of the output head, from a state of zeros."""
        return self.read(inputs, self.initial_state(inputs.shape[0]), **options)[0]

    def initial_state(self, batch_size: int) -> State:
        """A state of zeros for that many rows."""
        zeros = jnp.zeros((batch_size, self.config.hidden_size))

        def begin(direction: Direction | Mixer) -> PyTree:
            if isinstance(direction, Direction):
                return (zeros,) * CELLS[self.config.cell].num_states
            return direction.initial_state(batch_size)

        layers = tuple(tuple(map(begin, layer.directions)) for layer in self.layers)
        return State(layers, jnp.zeros(batch_size, jnp.int32))

    def run(
        self,
        inputs: Inputs,
        state: State | None = None,
        **options: Unpack[SequenceOptions],
    ) -> tuple[Outputs, State]:
        """The outputs from a given state on, and the state at the end.

        So a stream can be read in pieces, with the outputs of the whole (except for the mean of its
        steps, and for a second direction, which begins at the end of each piece).
        """
        state = self.initial_state(inputs.shape[0]) if state is None else state
        x, state = self.read(inputs, state, **options)
        outputs = self.readout()(x)
        return outputs if self.config.pooling == "none" else outputs[:, 0], state

    def read(
        self,
        inputs: Inputs,
        state: State,
        *,
        segment_ids: Int[Array, "batch seq"] | None = None,
        positions: Int[Array, "batch seq"] | None = None,
        mask: Bool[Array, "batch seq"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "batch read width"], State]:
        """The input of the output head at each step, or with a pooling one vector per row.

        `segment_ids` tells the packed documents of a row apart (0 is padding): each begins with a
        state of zeros. `mask` is False at padding, on which no state and no other output depends.
        It may lie anywhere in a row, but only around documents for a cell with a convolution, which
        reads zeros there. `positions` make no difference here. A `key` turns dropout on.

        Raises:
            ValueError: implementation="cudnn" where it does not apply, with the reason.
            ShardingError: a mesh that splits the tokens of rows.
        """
        config = self.config
        require(
            inputs.ndim == (2 if config.in_size is None else 3),
            f"inputs of shape {inputs.shape}: [batch, seq] token ids, or [batch, seq, in_size]",
        )
        split = split_by("inner_seq")
        if split and (config.cell in CELLS or config.chunks(1) is not None):
            raise ShardingError(
                f"{split} of the mesh splits the steps of a row, which run one after another with "
                f"cell={config.cell!r}, remat={config.remat!r} and truncate={config.truncate}; "
                "take a mesh without that axis"
            )
        marks, segments = make_marks(segment_ids, mask, state.segment_ids)
        model = unshard(self)
        if self.embedding is not None:  # which gathers nothing by itself
            model = eqx.tree_at(lambda x: x.embedding, model, cast_for_use(self.embedding))
        chunks = config.chunks(inputs.shape[1])
        if config.bidirectional:
            # A direction needs all of the output of the layer below: each has chunks of its own.
            finals, x_BTD = model._stack(state.layers, inputs, marks, key, chunks)
        else:
            finals, x_BTD = over_time(
                chunks,
                lambda states, x, marks: model._stack(states, x, (marks,), key, None),
                state.layers,
                inputs,
                marks[0],
            )
        valid = marks[0].valid
        if valid is not None:
            x_BTD = jnp.where(valid[:, :, None], x_BTD, 0)
        if config.pooling == "last" and config.cell in MIXERS:
            steps = jnp.arange(x_BTD.shape[1], dtype=jnp.int32)[None]
            last = steps[:, -1:] if valid is None else jnp.where(valid, steps, 0).max(1)[:, None]
            x_BTD = jnp.take_along_axis(x_BTD, last[:, :, None], 1)
        elif config.pooling == "last":
            last_BTD = jnp.concatenate([h[:, None] for h, *_ in finals[-1]], -1)
            x_BTD = model._finish(config.num_layers, last_BTD.astype(x_BTD.dtype), key)
        if config.pooling == "mean":
            counted = jnp.ones(inputs.shape[:2], bool) if valid is None else valid
            count = jnp.maximum(counted.sum(1), 1).astype(jnp.float32)[:, None, None]
            x_BTD = (x_BTD.astype(jnp.float32).sum(1, keepdims=True) / count).astype(x_BTD.dtype)
        return x_BTD, State(finals, segments)

    def _stack(
        self,
        states: tuple,
        x: Inputs,
        marks: tuple[Marks, ...],
        key: Key[Array, ""] | None,
        chunks: Chunks | None,
    ) -> tuple[tuple, Float[Array, "batch seq out"]]:
        """All layers over a stretch of time: their final states, and the output of the last."""
        dtype = self.layers[0].directions[0].dtype
        if self.embedding is not None:
            x = self.embedding(constrain(x, "batch", "inner_seq"))
        elif marks[0].valid is not None:
            x = jnp.where(marks[0].valid[:, :, None], x, 0)
        x = self._finish(0, x.astype(dtype), key)
        finals = []
        for index, (layer, state) in enumerate(zip(self.layers, states, strict=True)):
            final, x = self._run_layer(layer, state, x, marks, chunks)
            x = self._finish(index + 1, x, key)
            finals.append(final)
        return tuple(finals), x

    def _run_layer(
        self,
        layer: Layer,
        states: tuple[PyTree, ...],
        x_BTI: Float[Array, "batch seq in"],
        marks: tuple[Marks, ...],
        chunks: Chunks | None,
    ) -> tuple[tuple[PyTree, ...], Float[Array, "batch seq out"]]:
        """The final states, and the directions' h side by side."""
        config = self.config
        if _use_cudnn(config, marks[0]):
            weights = [d.weights for d in layer.directions if isinstance(d, Direction)]
            return cudnn_lstm(x_BTI, weights, states, marks[0].valid)
        finals, outputs = [], []
        for index, (direction, state) in enumerate(zip(layer.directions, states, strict=True)):
            run: Callable[..., Any]
            if isinstance(direction, Direction):
                options = Options(config.cell, index == 1, config.hoist, config.unroll)
                run = functools.partial(recur, options, direction.weights)
            else:
                run = functools.partial(_run_mixer, direction, index == 1)
            final, h_BTH = over_time(chunks, run, state, x_BTI, marks[index], reverse=index == 1)
            finals.append(final)
            outputs.append(h_BTH)
        return tuple(finals), jnp.concatenate(outputs, -1)

    def _finish(
        self, index: int, x_BTD: Float[Array, "batch seq width"], key: Key[Array, ""] | None
    ) -> Float[Array, "batch seq width"]:
        """Norm and dropout of the output of layer `index`, counted from one; 0 is the embedding."""
        norm = self.layers[index - 1].norm if index > 0 else None
        x_BTD = constrain(x_BTD if norm is None else norm(x_BTD), "batch", "inner_seq", "embed")
        if key is None or self.config.dropout == 0:
            return x_BTD
        # One mask for all steps (Gal & Ghahramani 2016): it is the same however time is cut.
        ones = jnp.ones((x_BTD.shape[0], 1, x_BTD.shape[2]), x_BTD.dtype)
        return x_BTD * dropout(ones, self.config.dropout, jax.random.fold_in(key, index))

    def readout(self) -> Readout:
        """The output head: from `hidden` to outputs in fp32."""
        if self.head is None:
            assert self.embedding is not None
            return Readout(transposed(unshard(self.embedding).weight))
        head = unshard(self.head)
        return Readout(head.weight, head.bias, head.axes)

    def without_head(self) -> "RNN":
        """The network without the parameters that `hidden` does not use."""
        return self if self.head is None else eqx.tree_at(lambda model: model.head, self, None)


def _run_mixer(
    mixer: Mixer, reverse: bool, state: PyTree, x_BTI: Array, marks: Marks
) -> tuple[PyTree, Float[Array, "batch seq hidden"]]:
    """As `recur`, for a cell whose state is a matrix."""
    turn = lambda x: x[:, ::-1] if reverse else x  # noqa: E731
    state, y_BTH = mixer(turn(x_BTI), state, jax.tree.map(turn, marks))
    return state, turn(y_BTH)


def _use_cudnn(config: Config, marks: Marks) -> bool:
    if config.implementation == "scan":
        return False
    refusal = cudnn_refusal(config.cell, packed=marks.restart is not None)
    if config.implementation == "auto":
        # Where padding lies is not known here, and cuDNN wants it last.
        return refusal is None and marks.valid is None and config.chunks(1) is None
    require(refusal is None, f"implementation='cudnn' {refusal}; choose 'auto' or 'scan'")
    return True
