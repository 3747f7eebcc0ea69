"""A flash kernel for GPUs, in Triton by Pallas, which skips what no document sees.

As FlashAttention-2 (Dao 2023): a program has a block of queries and goes over the keys; backward,
one has a block of queries and gives their gradient, and another a block of keys, so that no two
add to the same numbers. Which blocks see each other is found first, by their positions and their
smallest and largest segments: packed rows take the time of their documents, not of the square.

Legend of suffixes: B batch, T queries, S keys, K key-value heads, G query heads per key-value
head, H head size; M blocks of queries, C blocks of keys.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from zoo.nn.attention import masks
from zoo.nn.attention.masks import MASKED, NO_SEGMENT, Mask, Segments, attend, pad_to_multiple
from zoo.nn.remat import KEPT

LOG2E = math.log2(math.e)  # a GPU computes powers of two
# Products per pair of a query and a key.
PRODUCTS = {"_forward": 2, "_query_gradient": 3, "_key_gradients": 4}


class Blocks(NamedTuple):
    """Queries and keys of a block, a program's warps, and loads that run ahead of its products."""

    queries: int
    keys: int
    warps: int
    stages: int


class Tiling(NamedTuple):
    """The blocks of the kernels: forward, of the queries' gradient, and of the keys'."""

    forward: Blocks
    of_queries: Blocks
    of_keys: Blocks

    @staticmethod
    def of(head_dim: int) -> "Tiling":
        """The quickest of several on an H200; for larger heads, what registers have room for."""
        if head_dim <= 128:
            return Tiling(Blocks(128, 32, 4, 4), Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 2))
        return Tiling(Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 2), Blocks(32, 64, 8, 2))


class Triton(NamedTuple):
    """The kernel on one device, in bf16 or fp16; `interpret` runs it without a GPU."""

    mask: Mask
    scale: float
    soft_cap: float | None
    first: int = 0
    tiling: Tiling | None = None
    interpret: bool = False

    def under(self, mask: Mask, first: int = 0) -> "Triton":
        """The same with another mask, and another position of the first query among the keys."""
        return self._replace(mask=mask, first=first)

    def __call__(self, q: Array, k: Array, v: Array, segments: Segments | None) -> Array:
        """The output."""
        return attend(q, k, v, segments, self)

    def forward(
        self, q: Array, k: Array, v: Array, segments: Segments | None
    ) -> tuple[Array, Float[Array, "batch queries heads"]]:
        """The output, and the logarithms of the sums, which remat keeps."""
        inputs, blocks = Inputs.of(self, (q, k, v), segments), self.blocks(q).forward
        out, log_sum = inputs.by_queries(_forward, blocks, ("queries", "rows"))
        log_sum = jnp.einsum("bkgt->btkg", log_sum)
        out, log_sum = inputs.like(q, out), inputs.like(q[..., 0], log_sum)
        return checkpoint_name(out, KEPT), checkpoint_name(log_sum, KEPT)

    def backward(
        self,
        qkv: tuple[Array, Array, Array],
        segments: Segments | None,
        out: Array,
        log_sum: Float[Array, "batch queries heads"],
        g: Array,
    ) -> tuple[Array, Array, Array]:
        """The gradients of queries, keys and values."""
        inputs, tiling = Inputs.of(self, qkv, segments), self.blocks(qkv[0])
        delta = (out.astype(jnp.float32) * g.astype(jnp.float32)).sum(-1)
        sums = (jnp.einsum("btkg->bkgt", inputs.grouped(x)) for x in (log_sum, delta))
        of_rows = inputs.grouped(g), *sums
        [dq] = inputs.by_queries(_query_gradient, tiling.of_queries, ["queries"], *of_rows)
        dk, dv = inputs.by_keys(_key_gradients, tiling.of_keys, ["keys", "keys"], *of_rows)
        like = functools.partial(inputs.like, qkv[1])
        return inputs.like(qkv[0], dq), like(dk), like(dv)

    def blocks(self, q: Array) -> Tiling:
        """The blocks of the kernels."""
        return self.tiling or Tiling.of(q.shape[-1])

    def logits(
        self, q_TH: Array, k_SH: Array, ids: tuple[Array, Array], starts: tuple[Any, Any]
    ) -> tuple[Float[Array, "t s"], Float[Array, "t s"] | float]:
        """Base-two logits of a block, masked, and the derivative of unmasked ones by q·k.

        `starts` are the positions of the first query and key.
        """
        raw = triton.dot(q_TH, k_SH.T) * self.scale
        slope: Any = self.scale
        if self.soft_cap is not None:
            bounded = jnp.tanh(raw / self.soft_cap)
            raw, slope = self.soft_cap * bounded, self.scale * (1 - bounded * bounded)
        distance = starts[0] - starts[1] + jnp.arange(raw.shape[0])[:, None]
        distance = distance - jnp.arange(raw.shape[1])[None]
        seen = ids[0][:, None] == ids[1][None]
        if self.mask.causal:
            seen &= distance >= 0
        if self.mask.window is not None:
            seen &= jnp.abs(distance) < self.mask.window
        return jnp.where(seen, raw * LOG2E, MASKED), slope


def _forward(kernel: Triton, blocks: Blocks, *refs: Any) -> None:
    """A block of queries: their output, and the logarithms of their sums."""
    q_ref, k_ref, v_ref, of_queries, of_keys, range_ref, out_ref, log_sum_ref = refs
    q, ids = q_ref[...], of_queries[...]
    first = kernel.first + pallas.program_id(0) * blocks.queries

    def body(block: Array, carry: Any) -> Any:
        out, top, total = carry
        start = block * blocks.keys
        keys = pallas.ds(start, blocks.keys)
        v = v_ref[keys, :]
        logits, _ = kernel.logits(q, k_ref[keys, :], (ids, of_keys[keys]), (first, start))
        new_top = jnp.maximum(top, logits.max(-1))
        kept, powers = jnp.exp2(top - new_top), jnp.exp2(logits - new_top[:, None])
        total = kept * total + powers.sum(-1)
        return kept[:, None] * out + triton.dot(powers.astype(v.dtype), v), new_top, total

    length, size = q.shape
    empty = jnp.zeros((length, size)), jnp.full(length, MASKED), jnp.zeros(length)
    out, top, total = jax.lax.fori_loop(range_ref[0], range_ref[1], body, empty)
    total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)  # nothing was seen
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    log_sum_ref[...] = (top + jnp.log2(total)) / LOG2E


def _query_gradient(kernel: Triton, blocks: Blocks, *refs: Any) -> None:
    """A block of queries: their gradient."""
    q_ref, k_ref, v_ref, of_queries, of_keys, range_ref, g_ref, sum_ref, delta_ref, dq_ref = refs
    q, g, ids = q_ref[...], g_ref[...], of_queries[...]
    log_sum, delta = sum_ref[...] * LOG2E, delta_ref[...]
    first = kernel.first + pallas.program_id(0) * blocks.queries

    def body(block: Array, dq: Array) -> Array:
        start = block * blocks.keys
        keys = pallas.ds(start, blocks.keys)
        k = k_ref[keys, :]
        logits, slope = kernel.logits(q, k, (ids, of_keys[keys]), (first, start))
        dweights = triton.dot(g, v_ref[keys, :].T) - delta[:, None]
        dlogits = jnp.exp2(logits - log_sum[:, None]) * dweights * slope
        return dq + triton.dot(dlogits.astype(k.dtype), k)

    dq = jax.lax.fori_loop(range_ref[0], range_ref[1], body, jnp.zeros(q.shape))
    dq_ref[...] = dq.astype(dq_ref.dtype)


def _key_gradients(kernel: Triton, blocks: Blocks, *refs: Any) -> None:
    """A block of keys: their gradient and that of their values, from all heads of queries."""
    q_ref, k_ref, v_ref, of_queries, of_keys, range_ref, *more = refs
    g_ref, sum_ref, delta_ref, dk_ref, dv_ref = more
    k, v, ids = k_ref[...], v_ref[...], of_keys[...]
    first, last = range_ref[0], range_ref[1]
    start = pallas.program_id(0) * blocks.keys

    def body(step: Array, carry: Any) -> Any:
        dk, dv = carry
        head, block = step // (last - first), first + step % (last - first)
        at = block * blocks.queries
        rows = pallas.ds(at, blocks.queries)
        q, g = q_ref[rows, head, :], g_ref[rows, head, :]
        starts = kernel.first + at, start
        logits, slope = kernel.logits(q, k, (of_queries[rows], ids), starts)
        weights = jnp.exp2(logits - (sum_ref[head, rows] * LOG2E)[:, None])
        dweights = triton.dot(g, v.T) - delta_ref[head, rows][:, None]
        dlogits = (weights * dweights * slope).astype(q.dtype)
        return dk + triton.dot(dlogits.T, q), dv + triton.dot(weights.astype(g.dtype).T, g)

    steps = (last - first) * q_ref.shape[1]
    zeros = jnp.zeros(k.shape), jnp.zeros(k.shape)
    dk, dv = jax.lax.fori_loop(0, steps, body, zeros)
    dk_ref[...], dv_ref[...] = dk.astype(dk_ref.dtype), dv.astype(dv_ref.dtype)


class Inputs(NamedTuple):
    """Inputs of the kernels: whole blocks, and head sizes that are a power of two."""

    kernel: Triton
    q_BTKGH: Array
    k_BSKH: Array
    v_BSKH: Array
    ids_BT: Int[Array, "b t"]
    ids_BS: Int[Array, "b s"]

    @staticmethod
    def of(kernel: Triton, qkv: tuple[Array, Array, Array], segments: Segments | None) -> "Inputs":
        """The inputs from queries, keys and values; without segments, each row is one document."""
        q, k, v = qkv
        if segments is None:
            segments = jnp.zeros(q.shape[:2], jnp.int32), jnp.zeros(k.shape[:2], jnp.int32)
        size = max(16, pallas.next_power_of_2(q.shape[-1]))
        most = [max(b[i] for b in kernel.blocks(q)) for i in range(2)]

        def padded(x: Array, multiple: int) -> Array:
            x = jnp.pad(x, [(0, 0)] * 3 + [(0, size - x.shape[-1])])
            return pad_to_multiple(x, multiple)

        q_BTNH, k, v = (padded(x, n) for x, n in zip(qkv, (most[0], most[1], most[1]), strict=True))
        q_BTKGH = q_BTNH.reshape(*q_BTNH.shape[:2], k.shape[2], -1, size)
        ids = (pad_to_multiple(x, n, NO_SEGMENT) for x, n in zip(segments, most, strict=True))
        return Inputs(kernel, q_BTKGH, k, v, *ids)

    def grouped(self, x: Array) -> Array:
        """[B, T, N] or [B, T, N, H] as queries are."""
        length = self.q_BTKGH.shape[1]
        x = pad_to_multiple(x, length)
        if x.ndim == 4:
            x = jnp.pad(x, [(0, 0)] * 3 + [(0, self.q_BTKGH.shape[-1] - x.shape[-1])])
        return x.reshape(self.q_BTKGH.shape[: x.ndim + 1])

    def like(self, given: Array, x: Array) -> Array:
        """A result in the shape of what was given, without the padding."""
        x = x[:, : given.shape[1]]
        if given.ndim == 4:
            x = x[..., : given.shape[3]]
        return x.reshape(given.shape)

    def seen(self, blocks: Blocks) -> Bool[Array, "b m c"]:
        """Which blocks of queries may see which blocks of keys."""
        mask, (queries, keys) = self.kernel.mask, blocks[:2]
        batch = self.ids_BT.shape[0]
        of_queries = self.ids_BT.reshape(batch, -1, queries)
        of_keys = self.ids_BS.reshape(batch, -1, keys)
        smallest, largest = of_queries.min(-1)[..., None], of_queries.max(-1)[..., None]
        seen = (smallest <= of_keys.max(-1)[:, None]) & (largest >= of_keys.min(-1)[:, None])
        first = self.kernel.first + queries * jnp.arange(of_queries.shape[1])[:, None]
        # From a block's first query to the last key, and from its last to the first.
        ahead = keys * jnp.arange(of_keys.shape[1])[None] - first
        if mask.causal:
            seen &= (ahead < queries)[None]
        elif mask.window is not None:
            seen &= (ahead < queries + mask.window - 1)[None]
        if mask.window is not None:
            seen &= (ahead + keys > 1 - mask.window)[None]
        return seen

    def by_queries(
        self, function: Callable[..., None], blocks: Blocks, outputs: Sequence[str], *of_rows: Array
    ) -> list[Array]:
        """Run a program per block of queries and head; `outputs` are "queries", "keys", "rows"."""
        batch, length, heads, group, size = self.q_BTKGH.shape
        keys, block = self.k_BSKH.shape[1], blocks.queries
        spec = lambda shape, index: pallas.BlockSpec(  # noqa: E731
            shape, lambda i, n, b: index(b, i, n // group, n % group)
        )
        specs = {
            "queries": spec((None, block, None, None, size), lambda b, i, k, g: (b, i, k, g, 0)),
            "keys": spec((None, keys, None, size), lambda b, i, k, g: (b, 0, k, 0)),
            "rows": spec((None, None, None, block), lambda b, i, k, g: (b, k, g, i)),
            "of_queries": spec((None, block), lambda b, i, k, g: (b, i)),
            "of_keys": spec((None, keys), lambda b, i, k, g: (b, 0)),
            "ranges": spec((None, None, 2), lambda b, i, k, g: (b, i, 0)),
        }
        grid = (length // block, heads * group, batch)
        return self._run(function, blocks, grid, specs, outputs, self.seen(blocks), *of_rows)

    def by_keys(
        self, function: Callable[..., None], blocks: Blocks, outputs: Sequence[str], *of_rows: Array
    ) -> list[Array]:
        """Run a program per block of keys and key-value head."""
        batch, length, heads, group, size = self.q_BTKGH.shape
        spec, block = pallas.BlockSpec, blocks.keys
        specs = {
            "queries": spec((None, length, None, group, size), lambda j, k, b: (b, 0, k, 0, 0)),
            "keys": spec((None, block, None, size), lambda j, k, b: (b, j, k, 0)),
            "rows": spec((None, None, group, length), lambda j, k, b: (b, k, 0, 0)),
            "of_queries": spec((None, length), lambda j, k, b: (b, 0)),
            "of_keys": spec((None, block), lambda j, k, b: (b, j)),
            "ranges": spec((None, None, 2), lambda j, k, b: (b, j, 0)),
        }
        grid = (self.k_BSKH.shape[1] // block, heads, batch)
        seen = self.seen(blocks).swapaxes(1, 2)
        return self._run(function, blocks, grid, specs, outputs, seen, *of_rows)

    def _run(
        self,
        function: Callable[..., None],
        blocks: Blocks,
        grid: tuple[int, ...],
        specs: dict[str, Any],
        outputs: Sequence[str],
        seen: Bool[Array, "b blocks others"],
        *of_rows: Array,
    ) -> list[Array]:
        batch, length, heads, group, _ = self.q_BTKGH.shape
        likes = {"queries": self.q_BTKGH, "keys": self.k_BSKH}
        shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in likes.items()}
        shapes["rows"] = jax.ShapeDtypeStruct((batch, heads, group, length), jnp.float32)
        inputs = ["queries", "keys", "keys", "of_queries", "of_keys", "ranges"]
        inputs += ["queries", "rows", "rows"][: len(of_rows)]
        call = pallas.pallas_call(
            functools.partial(function, self.kernel, blocks),
            grid=grid,
            in_specs=[specs[name] for name in inputs],
            out_specs=[specs[name] for name in outputs],
            out_shape=[shapes[name] for name in outputs],
            compiler_params=triton.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
            cost_estimate=self._cost(function, blocks),
            interpret=self.kernel.interpret,
            name=f"attention{function.__name__}",
        )
        return list(call(*self[1:], ranges(seen), *of_rows))

    def _cost(self, function: Callable[..., None], blocks: Blocks) -> Any:
        """An estimate for rows of one document: how they are packed is known only as it runs."""
        batch, length, heads, group, size = self.q_BTKGH.shape
        sizes = (length, self.k_BSKH.shape[1], self.kernel.mask, *blocks[:2])
        count = sum(1 for _ in masks.pairs(self.kernel.first, *sizes))
        entries = count * blocks.queries * blocks.keys * batch * heads * group
        flops = 2 * PRODUCTS[function.__name__] * entries * size
        moved = sum(x.size * x.dtype.itemsize for x in self[1:4])
        return pallas.CostEstimate(flops=flops, bytes_accessed=2 * moved, transcendentals=entries)


def ranges(seen: Bool[Array, "b m c"]) -> Int[Array, "b m 2"]:
    """The first of the blocks that each block sees, and the end of them."""
    some, number = seen.any(-1), seen.shape[-1]
    first, end = seen.argmax(-1), number - seen[..., ::-1].argmax(-1)
    return jnp.where(some[..., None], jnp.stack([first, end], -1), 0).astype(jnp.int32)
