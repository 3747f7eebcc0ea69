"""Ring attention: keys and values go around the devices that have the parts of a row.

Legend of suffixes: as in `zoo.nn.attention.attention`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from zoo.nn.attention.masks import Kernel, Mask, Segments, attend, run
from zoo.nn.remat import KEPT
from zoo.sharding import ShardingError, split_by


class Ring(NamedTuple):
    """Keys and values go around the devices that have the parts of a row (Liu et al. 2023).

    Each device has one part of them at a time, sends it to the next one while it multiplies it,
    and adds the output of these keys to its own so far, by the sums of their exponentials.
    Backward they go around again, with their gradients in fp32. It is a kernel of all of a row's
    keys, given those of one part.

    Causal queries, keys and values are cut in zigzag: of twice as many stretches, the part of rank
    r has the stretches r and 2·parts-1-r. So whichever part is here, the second stretch of queries
    sees all of the first stretch of keys; and if the keys' rank is the lower one, the first sees
    the first, else the second sees the second: the same work for all at each step.
    """

    kernel: Kernel
    axes: tuple[str, ...]
    parts: int

    @property
    def causal(self) -> bool:
        """Whether queries see no later keys."""
        return self.kernel.mask.causal

    def __call__(self, q: Array, k: Array, v: Array, segment_ids: Any) -> Array:
        """The output of queries in zigzag."""
        return attend(q, k, v, segment_ids, self)

    def attend(
        self, q: Array, k: Array, v: Array, segment_ids: Array | None, sinks: Array | None
    ) -> Array:
        """The output of this device's queries.

        Raises:
            ShardingError: a causal row whose parts have no halves.
        """
        if not self.causal:
            return run(self, q, k, v, segment_ids, sinks)
        if q.shape[1] % 2:
            raise ShardingError(
                f"a row of {self.parts * q.shape[1]} tokens, split by {split_by('inner_seq')}: "
                "causal attention cuts each part in two, for equal work; make the length a "
                f"multiple of {2 * self.parts}, or change the mesh"
            )
        q, k, v = (self._in_order(self._exchanged(x)) for x in (q, k, v))
        out = run(self, q, k, v, segment_ids, sinks)
        return self._exchanged(self._in_order(out))

    def forward(
        self, q: Array, k: Array, v: Array, ids: Array | None
    ) -> tuple[Array, Float[Array, "batch queries heads"]]:
        """The output, and the logarithms of the sums, which remat keeps."""
        others = self.kernel.under(Mask(causal=False, window=None))

        def step(carry: Any, number: Array) -> tuple[Any, None]:
            (out, log_sum), (k, v) = carry
            for queries, keys, size in self._seen(number, q.shape[1]):
                of_keys = functools.partial(cut, start=keys, size=size)
                segments = self._segments(ids, number, queries, keys, size)
                new = others.forward(cut(q, queries, size), of_keys(k), of_keys(v), segments)
                old = cut(out, queries, size), cut(log_sum, queries, size)
                out, log_sum = map(
                    functools.partial(_put, start=queries), (out, log_sum), _merged(old, new)
                )
            return ((out, log_sum), self._next((k, v))), None

        out, log_sum = self.kernel.forward(q, k, v, self._segments(ids, 0, 0, 0, q.shape[1]))
        start = (out.astype(jnp.float32), log_sum), self._next((k, v))
        ((out, log_sum), _), _ = jax.lax.scan(step, start, jnp.arange(1, self.parts))
        return checkpoint_name(out.astype(q.dtype), KEPT), checkpoint_name(log_sum, KEPT)

    def backward(
        self,
        qkv: tuple[Array, Array, Array],
        ids: Array | None,
        out: Array,
        log_sum: Float[Array, "batch queries heads"],
        g: Array,
    ) -> tuple[Array, Array, Array]:
        """The gradients of queries, keys and values."""
        others = self.kernel.under(Mask(causal=False, window=None))
        q, k, v = qkv

        def step(carry: Any, number: Array) -> tuple[Any, None]:
            dq, dkv, kv = carry
            dkv = self._next(dkv)
            for queries, keys, size in self._seen(number, q.shape[1]):
                of_queries = [cut(x, queries, size) for x in (q, out, log_sum, g)]
                of_keys = functools.partial(cut, start=keys, size=size)
                segments = self._segments(ids, number, queries, keys, size)
                inputs: Any = (of_queries[0], *map(of_keys, kv))
                new_q, *new = others.backward(inputs, segments, *of_queries[1:])
                dq = _added(dq, new_q, queries)
                dkv = tuple(_added(x, y, keys) for x, y in zip(dkv, new, strict=True))
            return (dq, dkv, self._next(kv)), None

        segments = self._segments(ids, 0, 0, 0, q.shape[1])
        found = self.kernel.backward(qkv, segments, out, log_sum, g)
        dq, dk, dv = (x.astype(jnp.float32) for x in found)
        start = dq, (dk, dv), self._next((k, v))
        (dq, dkv, _), _ = jax.lax.scan(step, start, jnp.arange(1, self.parts))
        dq, dk, dv = (x.astype(q.dtype) for x in (dq, *self._next(dkv)))
        return dq, dk, dv

    def _next(self, tree: Any) -> Any:
        """The tree of the device before this one."""
        ends = [(i, (i + 1) % self.parts) for i in range(self.parts)]
        return jax.lax.ppermute(tree, self.axes, ends)

    def _part(self, number: Array | int) -> Array:
        """The part whose keys and values are here after so many steps."""
        return (jax.lax.axis_index(self.axes) - number) % self.parts

    def _rank(self, part: Array) -> Array:
        """The number of its first stretch."""
        return jnp.minimum(2 * part, 2 * self.parts - 1 - 2 * part)

    def _seen(self, number: Array, length: int) -> list[tuple[Array | int, Array | int, int]]:
        """Where stretches of queries see all of a stretch of another part's keys, and how long."""
        if not self.causal:
            return [(0, 0, length)]
        half = length // 2
        is_later = self._rank(self._part(number)) > self._rank(self._part(0))
        later = jnp.where(is_later, half, 0)
        return [(half, 0, half), (later, later, half)]

    def _segments(
        self,
        ids: Array | None,
        number: Array | int,
        queries: Array | int,
        keys: Array | int,
        size: int,
    ) -> Segments | None:
        """The segments of queries, and of the keys here after so many steps, from the row's."""
        if ids is None:
            return None
        return cut(self._ids(ids, 0), queries, size), cut(self._ids(ids, number), keys, size)

    def _ids(self, ids: Array, number: Array | int) -> Array:
        part, length = self._part(number), ids.shape[1] // self.parts
        if not self.causal:
            return cut(ids, part * length, length)
        rank, half = self._rank(part), length // 2
        starts = (rank * half, (2 * self.parts - 1 - rank) * half)
        return jnp.concatenate([cut(ids, start, half) for start in starts], axis=1)

    def _exchanged(self, x: Array) -> Array:
        """The second half exchanged with the device as far from the other end."""
        first, second = jnp.split(x, 2, axis=1)
        ends = [(i, self.parts - 1 - i) for i in range(self.parts)]
        return jnp.concatenate([first, jax.lax.ppermute(second, self.axes, ends)], axis=1)

    def _in_order(self, x: Array) -> Array:
        """The halves after an exchange with the earlier one first, or back."""
        swaps = 2 * jax.lax.axis_index(self.axes) >= self.parts
        return jnp.where(swaps, jnp.roll(x, x.shape[1] // 2, axis=1), x)


def _merged(old: tuple[Array, Array], new: tuple[Array, Array]) -> tuple[Array, Array]:
    """Output and sums of the keys of both, in fp32."""
    log_sum = jnp.logaddexp(old[1], new[1])
    shares = (jnp.exp(part - log_sum)[..., None] for _, part in (old, new))
    out, more = (x.astype(jnp.float32) * y for (x, _), y in zip((old, new), shares, strict=True))
    return out + more, log_sum


def cut(x: Array, start: Array | int, size: int) -> Array:
    """Positions of [B, T, …] from a start on."""
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)


def _put(x: Array, part: Array, start: Array | int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis=1)


def _added(x: Array, part: Array, start: Array | int) -> Array:
    return _put(x, cut(x, start, part.shape[1]) + part.astype(x.dtype), start)
