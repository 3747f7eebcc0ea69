"""Shared by recurrences with a matrix per head as state: settings, decay, and a convolution.

A row is read in chunks, one after another: within a chunk all steps come at once, by products of
matrices, and from chunk to chunk goes the state. A document that begins within a chunk sees nothing
of what came before it: not the state, whose decay is then exp(-inf), and not the convolution's
inputs. All of it is in fp32, products too, which a TPU would take in bf16.

Legend of suffixes: B batch, T steps of a row or a chunk, N heads, K and V sizes of a head's keys
and values, H size of a head, C steps that a convolution keeps.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key, PyTree

from zoo.common import configuration
from zoo.common.configuration import may_differ
from zoo.nn.layers import normal
from zoo.nn.products import platform
from zoo.nn.recurrences.marks import Chunks, Marks, over_time
from zoo.sharding import mesh_axes, num_parts, partition_spec

CHUNK = {"cpu": 64, "gpu": 64, "tpu": 128}  # steps, by platform


@dataclass(frozen=True)
class RecurrenceConfig:
    """A recurrence whose state is a matrix per head."""

    num_heads: int = 4
    """Heads, each with a state of its own."""
    num_key_heads: int | None = None
    """Heads of keys and queries, each for several heads of values; as many if not given, and 1 for
    mamba2, where they are its groups."""
    key_dim: int | None = None
    """Size of a head's keys and queries (the state size of mamba2); value_dim if not given."""
    value_dim: int | None = None
    """Size of a head's values; the layer's width / num_heads if not given."""
    taps: int = 4
    """Steps that the causal convolution before the recurrence sees; mlstm has none."""
    negative_eigenvalues: bool = False
    """Let gated_deltanet write up to twice what it reads, so that a state may change its sign."""
    norm_eps: float | None = None
    """Constant that the norm of the output adds to the variance; that of the layer's other norms if
    not given, and in a recurrent network 1e-6, or 1e-5 for mamba2."""
    chunk: int | None = may_differ(None)
    """Steps that are computed at once; 64 if not given, and 128 on a TPU."""

    def __post_init__(self) -> None:
        configuration.check(self, "recurrence.")

    @property
    def chunk_size(self) -> int:
        """Steps that are computed at once, given or by the platform."""
        return self.chunk or CHUNK[platform()]

    def sizes(self, width: int) -> tuple[int, int]:
        """Sizes of a head's keys and values in a layer of that width."""
        value_dim = self.value_dim or width // self.num_heads
        return self.key_dim or value_dim, value_dim


@runtime_checkable
class Mixer(Protocol):
    """A recurrence as a part of a layer: [batch, seq, in] to [batch, seq, embed]."""

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype that it takes and gives."""

    def __call__(self, x: Array, state: PyTree, marks: Marks) -> tuple[PyTree, Array]:
        """The state behind the last step that counts, and the output of each step."""

    def initial_state(self, batch_size: int) -> PyTree:
        """The state before the first step, float32[batch, …]."""


def einsum(spec: str, *arrays: Float[Array, "..."]) -> Float[Array, "..."]:
    """`jnp.einsum` without rounding fp32 on the way."""
    return jnp.einsum(spec, *arrays, precision=lax.Precision.HIGHEST)


def heads_first(x: Float[Array, "batch seq heads ..."]) -> Float[Array, "batch heads seq ..."]:
    """Exchange the axes of steps and heads."""
    return x.swapaxes(1, 2)


class Decay(NamedTuple):
    """Logarithms of the share of something that is left, -inf where another document begins."""

    within: Float[Array, "batch heads seq seq"]
    """[t, s]: the share of step s's addition behind step t; -inf if s comes later."""
    start: Float[Array, "batch heads seq"]
    """The share, behind step t, of the state that the chunk starts with."""


def decay(log_decay_BTN: Float[Array, "batch seq heads"], marks: Marks) -> Decay:
    """The decay over a chunk, from the logarithm of each step's factor."""
    steps = jnp.arange(log_decay_BTN.shape[1])
    own = (steps[:, None] >= steps[None])[None, None]
    if marks.restart is not None:
        document = jnp.cumsum(marks.restart, 1)[:, None]
        own &= document[..., :, None] == document[..., None, :]
    log_BNT = heads_first(_marked(log_decay_BTN, marks._replace(restart=None)))
    within = jnp.where(own, _between(log_BNT), -jnp.inf)
    return Decay(within, heads_first(left_of_start(log_decay_BTN, marks)))


def _between(log_BNT: Float[Array, "batch heads seq"]) -> Float[Array, "batch heads seq seq"]:
    """[t, s]: the sum behind step s up to step t: the sum from the start to t less that to s.

    The difference alone would lose small numbers behind a large one. So each number is cut in two:
    coarse parts, whose sums are exact in fp32, and the rest, with sums of its own and the gradient.
    """
    fixed = lax.stop_gradient(log_BNT)
    bound = 2 * log_BNT.shape[2] * jnp.abs(fixed).max(2, keepdims=True)
    coarse = (fixed + bound) - bound
    # By a product, which takes half as long as a cumulative sum on a CPU.
    earlier = jnp.tril(jnp.ones((log_BNT.shape[2],) * 2))
    coarse, rest = einsum("ts,xbns->xbnt", earlier, jnp.stack([coarse, log_BNT - coarse]))
    return (coarse[..., :, None] - coarse[..., None, :]) + (rest[..., :, None] - rest[..., None, :])


def left_of_start(
    log_decay_BTN: Float[Array, "batch seq heads"], marks: Marks
) -> Float[Array, "batch seq heads"]:
    """The logarithm of what is left behind each step of the state before the first."""
    return lax.cumsum(_marked(log_decay_BTN, marks), axis=1)


def _marked(log_decay_BTN: Array, marks: Marks) -> Float[Array, "batch seq heads"]:
    if marks.valid is not None:
        log_decay_BTN = jnp.where(marks.valid[:, :, None], log_decay_BTN, 0.0)
    if marks.restart is not None:
        log_decay_BTN = jnp.where(marks.restart[:, :, None], -jnp.inf, log_decay_BTN)
    return log_decay_BTN


class Part(NamedTuple):
    """A part of each row, and what came of it."""

    tokens: Any
    marks: Marks
    state: PyTree
    outputs: Float[Array, "batch seq heads values"]


class Recurrence(NamedTuple):
    """A recurrence over states [batch, heads, …] and steps [batch, seq, heads, …]."""

    step: Callable[[PyTree, Any], tuple[PyTree, Array]]
    """The state behind one step of each row, and its output."""
    chunk: Callable[[PyTree, Any, Marks], tuple[PyTree, Array]]
    """The same of some steps at once."""
    open: Callable[[PyTree, Any], tuple[PyTree, Any]]
    """The state and the steps that a part is read with, to say what it makes of any state."""
    summary: Callable[[Part], PyTree]
    """The map of such a part from the state before it to the one behind it."""
    after: Callable[[PyTree, PyTree], PyTree]
    """The state behind a part, from the state before it and the part's summary."""
    outputs: Callable[[PyTree, Part], Array]
    """The part's outputs, from the state before it."""


def in_chunks(
    recurrence: Recurrence, config: RecurrenceConfig, state: PyTree, tokens: Any, marks: Marks
) -> tuple[PyTree, Float[Array, "batch seq heads values"]]:
    """Run a recurrence over rows by chunks, or over one step by its step."""
    seq = jax.tree.leaves(tokens)[0].shape[1]
    if seq == 1 and marks.valid is None and marks.restart is None:
        state, out = recurrence.step(state, jax.tree.map(lambda x: x[:, 0], tokens))
        return state, out[:, None]
    size = config.chunk_size
    # Products within a chunk are quicker to compute again than to read, also on a CPU.
    chunks = None if seq <= size else Chunks(size, truncate=False, remat="full")
    return over_time(chunks, recurrence.chunk, state, tokens, marks)


def recur(
    recurrence: Recurrence, config: RecurrenceConfig, state: PyTree, tokens: Any, marks: Marks
) -> tuple[PyTree, Array]:
    """Run a recurrence over rows: the state behind them, and the output [batch, seq, heads, …].

    `tokens` are arrays [batch, seq, heads, …], and the state's are [batch, heads, …]. Where a mesh
    splits the steps, each device recurs over its part at the same time as the others: it reads the
    part from a state of zeros, and says what it makes of any other. Devices gather this summary,
    as small as a state, and each finds the state that its part begins with: none waits for
    another's steps, and no steps cross.
    """
    seq, parts = jax.tree.leaves(tokens)[0].shape[1], num_parts("inner_seq")
    if parts == 1 or seq % parts:
        return in_chunks(recurrence, config, state, tokens, marks)
    mesh = jax.sharding.get_abstract_mesh()
    axes = mesh_axes(partition_spec(["inner_seq"], mesh))

    def specs(tree: PyTree, *names: str) -> PyTree:
        return jax.tree.map(lambda x: partition_spec(names[: x.ndim], mesh), tree)

    def local(state: PyTree, tokens: Any, marks: Marks) -> tuple[PyTree, Array]:
        zeros, read = recurrence.open(state, tokens)
        part = Part(tokens, marks, *in_chunks(recurrence, config, zeros, read, marks))
        summaries = lax.all_gather(recurrence.summary(part), axes)
        turn = lambda before, summary: (recurrence.after(before, summary), before)  # noqa: E731
        final, starts = lax.scan(turn, state, summaries)
        start = jax.tree.map(lambda x: x[lax.axis_index(axes)], starts)
        return final, recurrence.outputs(start, part)

    of_state, of_steps = specs(state, "batch", "heads"), ("batch", "inner_seq", "heads")
    of_output = partition_spec(of_steps, mesh)
    return jax.shard_map(
        local,
        in_specs=(of_state, specs(tokens, *of_steps), specs(marks, *of_steps)),
        out_specs=(of_state, of_output),
        check_vma=False,
    )(state, tokens, marks)


class Convolution(eqx.Module):
    """A causal convolution over time of each channel by itself, and SiLU, in fp32 inside.

    Padding lies before or behind the steps of a document, not between them.
    """

    weight: Float[Array, "taps heads head_dim"]
    """The last tap is for the step itself."""
    bias: Float[Array, "heads head_dim"] | None
    axes: tuple[tuple[str, str], ...] = eqx.field(static=True)

    def __init__(
        self, taps: int, heads: int, size: int, *, axis: str, bias: bool, key: Key[Array, ""]
    ):
        self.weight = normal(key, (taps, heads, size), taps)
        self.bias = jnp.zeros((heads, size)) if bias else None
        self.axes = (("heads", axis),)

    def initial_state(self, batch_size: int) -> Float[Array, "batch kept heads head_dim"]:
        """Steps of zeros."""
        return jnp.zeros((batch_size, self.weight.shape[0] - 1, *self.weight.shape[1:]))

    def __call__(
        self,
        x_BTNH: Float[Array, "batch seq heads head_dim"],
        before_BCNH: Float[Array, "batch kept heads head_dim"],
        marks: Marks,
    ) -> tuple[Float[Array, "batch kept heads head_dim"], Float[Array, "batch seq heads head_dim"]]:
        """The last inputs of the row's document, and the outputs in the dtype of `x`."""
        taps, (batch, seq) = self.weight.shape[0], x_BTNH.shape[:2]
        window = _Window.of(marks, batch, seq, taps - 1)
        x32 = x_BTNH.astype(jnp.float32)
        inputs = window.place(x32 if marks.valid is None else _where(marks.valid, x32), before_BCNH)
        y = jnp.zeros_like(x32) if self.bias is None else self.bias.astype(jnp.float32)[None, None]
        for tap, weight in enumerate(self.weight.astype(jnp.float32)):
            y = y + window.shifted(inputs, tap) * weight[None, None]
        return window.last(inputs), jax.nn.silu(y).astype(x_BTNH.dtype)


class _Window(NamedTuple):
    """Where a row's steps and those kept from before it lie, as a convolution reads them.

    The kept ones come right before the first step that counts.
    """

    seq: int
    kept: int
    first: Int[Array, "batch"] | None
    end: Int[Array, "batch"] | None
    document: Int[Array, "batch all"] | None
    """The number of each step's document, 0 for the one from before."""

    @classmethod
    def of(cls, marks: Marks, batch: int, seq: int, kept: int) -> "_Window":
        first = end = document = None
        if marks.valid is not None:
            some = marks.valid.any(1)
            first = jnp.where(some, marks.valid.argmax(1), 0)
            end = jnp.where(some, seq - marks.valid[:, ::-1].argmax(1), 0)
        if marks.restart is not None:
            document = jnp.pad(jnp.cumsum(marks.restart, 1), ((0, 0), (kept, 0)))
        return cls(seq, kept, first, end, document)

    def place(self, x: Array, before: Array) -> Array:
        """The steps behind the kept ones, [batch, kept + seq, …]."""
        if self.first is None:
            return jnp.concatenate([before, x], 1)
        x = jnp.pad(x, ((0, 0), (self.kept, 0), (0, 0), (0, 0)))
        if self.kept == 0:
            return x
        index = jnp.arange(x.shape[1])[None] - self.first[:, None]
        moved = jnp.take_along_axis(before, jnp.clip(index, 0, self.kept - 1)[..., None, None], 1)
        return jnp.where(((index >= 0) & (index < self.kept))[..., None, None], moved, x)

    def shifted(self, inputs: Array, tap: int) -> Array:
        """The inputs that a tap reads at each step: zeros beyond the step's own document."""
        x = inputs[:, tap : tap + self.seq]
        if self.document is None:
            return x
        own = self.document[:, self.kept :] == self.document[:, tap : tap + self.seq]
        return _where(own, x)

    def last(self, inputs: Array) -> Array:
        """The steps to keep behind the row: those of its last document alone."""
        if self.end is None:
            where = jnp.arange(self.seq, self.seq + self.kept)[None]
        else:
            where = self.end[:, None] + jnp.arange(self.kept)[None]
        x = jnp.take_along_axis(inputs, where[..., None, None], 1)
        if self.document is None:
            return x
        documents = jnp.take_along_axis(self.document, where, 1)
        return _where(documents == self.document[:, -1:], x)


def _where(keep: Array, x: Array) -> Array:
    return jnp.where(keep[:, :, None, None], x, 0.0)


def inverse_softplus(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The value whose softplus is x."""
    return x + jnp.log(-jnp.expm1(-x))


def draw_gates(
    key: Key[Array, ""], num_heads: int
) -> tuple[Float[Array, "heads"], Float[Array, "heads"]]:
    """The logarithms of rates in [1, 16), and biases of time steps in [0.001, 0.1) (Mamba-2)."""
    rate_key, step_key = jax.random.split(key)
    rates = jax.random.uniform(rate_key, (num_heads,), minval=1.0, maxval=16.0)
    steps = jax.random.uniform(step_key, (num_heads,), minval=math.log(0.001), maxval=math.log(0.1))
    return jnp.log(rates), inverse_softplus(jnp.exp(steps))
