"""JAX's flash kernel for TPUs, on one device: its mask, and the blocks of its grid.

Legend of suffixes: as in `zoo.nn.attention.attention`.
"""

import functools
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from zoo.nn.attention import masks
from zoo.nn.attention.masks import NO_SEGMENT, Mask, Segments, pad_to_multiple
from zoo.nn.remat import KEPT

LANES = 128  # a block is a multiple of it


class Blocks(NamedTuple):
    """Queries and keys of a block, forward and backward, and the keys of one product in it."""

    queries: int
    keys: int
    keys_per_product: int


def blocks_for(length: int, num_keys: int) -> Blocks:
    """The blocks for queries and keys of a row: halved until they pad it by an eighth at most.

    Not measured yet on any chip: large enough that a kernel's time is in its products, small enough
    for the memory of the smallest core.
    """

    def fitting(size: int) -> int:
        block = 512 if num_keys <= 8_192 else 1024
        while block > LANES and -size % block > size // 8:
            block //= 2
        return block

    return Blocks(fitting(length), fitting(num_keys), min(512, fitting(num_keys)))


class Splash(NamedTuple):
    """JAX's flash kernel, its backward pass in one kernel if `fused`.

    It is `jax.experimental.pallas.ops.tpu.splash_attention`, whose fused backward pass keeps a
    gradient of the queries for each block of keys. Remat keeps the output and the logarithms of
    the sums. `interpret` runs the kernel without a TPU.
    """

    mask: Mask
    scale: float
    soft_cap: float | None
    first: int = 0
    fused: bool = False
    blocks: Blocks | None = None
    interpret: bool = False

    def under(self, mask: Mask, first: int = 0) -> "Splash":
        """The same with another mask, and another position of the first query among the keys."""
        return self._replace(mask=mask, first=first)

    def __call__(self, q: Array, k: Array, v: Array, segments: Segments | None) -> Array:
        """The output."""
        padded = _Padded.of(self, q, k, v, segments)
        kernel = self._kernel(padded, residual_checkpoint_name=KEPT)
        with padded.scope:
            out_BNTH = jax.vmap(kernel)(*padded.qkv, padded.segments)
        return out_BNTH.swapaxes(1, 2)[:, : q.shape[1]]

    def forward(
        self, q: Array, k: Array, v: Array, segments: Segments | None
    ) -> tuple[Array, Float[Array, "batch queries heads"]]:
        """The output, and the logarithms of the sums."""
        padded = _Padded.of(self, q, k, v, segments)
        kernel = self._kernel(padded, save_residuals=True)
        with padded.scope:
            out_BNTH, (log_sum_BNT,) = jax.vmap(kernel)(*padded.qkv, padded.segments)
        out, log_sum = (x.swapaxes(1, 2)[:, : q.shape[1]] for x in (out_BNTH, log_sum_BNT))
        return out, log_sum

    def backward(
        self,
        qkv: tuple[Array, Array, Array],
        segments: Segments | None,
        out: Array,
        log_sum: Float[Array, "batch queries heads"],
        g: Array,
    ) -> tuple[Array, Array, Array]:
        """The gradients of queries, keys and values."""
        # The public kernel takes no sums of more keys than its own, as jax-ml/jax#32484 asks of
        # `jax.nn.dot_product_attention`.
        from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import (
            _splash_attention_bwd,
        )

        padded = _Padded.of(self, *qkv, segments)
        kernel = self._kernel(padded)

        def of_row(qkv: Any, segments: Any, out: Array, log_sum: Array, g: Array) -> Any:
            residuals = (*qkv, segments, None, out, log_sum)
            residuals = (*residuals, kernel.dq_mask_info, kernel.dkv_mask_info)
            return _splash_attention_bwd(**kernel.kwargs, res=residuals, do=g)[3:6]

        of_queries = [padded.queries(x) for x in (out, log_sum, g)]
        with padded.scope:
            found = jax.vmap(of_row)(padded.qkv, padded.segments, *of_queries)
        dq, dk, dv = (
            x.swapaxes(1, 2)[:, : like.shape[1]] for x, like in zip(found, qkv, strict=True)
        )
        return (dq.astype(jnp.float32) * self.scale).astype(dq.dtype), dk, dv

    def _kernel(self, padded: "_Padded", **options: Any) -> Any:
        from jax.experimental.pallas.ops.tpu import splash_attention

        blocks, fused = padded.blocks, self.fused
        sizes = splash_attention.BlockSizes(
            block_q=blocks.queries,
            block_kv=blocks.keys,
            block_kv_compute=blocks.keys_per_product,
            block_q_dkv=blocks.queries,
            block_kv_dkv=blocks.keys,
            block_kv_dkv_compute=blocks.keys_per_product,
            block_q_dq=None if fused else blocks.queries,
            block_kv_dq=None if fused else blocks.keys,
            use_fused_bwd_kernel=fused,
        )
        heads = padded.qkv[0].shape[1]
        return splash_attention.make_splash_mha(
            mask=splash_attention.MultiHeadMask([_lazy(self.mask, padded.shape, blocks)] * heads),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=self.soft_cap,
            interpret=self.interpret,
            **options,
        )


class Shape(NamedTuple):
    """The queries and keys before padding, and the first query's position among the keys."""

    length: int
    num_keys: int
    first: int = 0


class _Padded(NamedTuple):
    """Inputs of a kernel: whole blocks, heads before time, segments where there is padding."""

    qkv: tuple[Array, Array, Array]
    segments: Any
    shape: Shape
    blocks: Blocks
    scope: Any

    @staticmethod
    def of(kernel: Splash, q: Array, k: Array, v: Array, segments: Segments | None) -> "_Padded":
        # Imported here: it takes a second, which only TPUs need.
        from jax.experimental.pallas.ops.tpu import splash_attention

        shape = Shape(q.shape[1], k.shape[1], kernel.first)
        blocks = kernel.blocks or blocks_for(shape.length, shape.num_keys)
        if shape.num_keys % blocks.keys and not kernel.mask.causal and segments is None:
            segments = jnp.zeros(q.shape[:2], jnp.int32), jnp.zeros(k.shape[:2], jnp.int32)
        ids = None
        if segments is not None:
            sizes = (blocks.queries, blocks.keys)
            padded = (
                pad_to_multiple(x, n, NO_SEGMENT) for x, n in zip(segments, sizes, strict=True)
            )
            ids = splash_attention.SegmentIds(*padded)
        scaled = (q.astype(jnp.float32) * kernel.scale).astype(q.dtype)
        q = pad_to_multiple(scaled, blocks.queries).swapaxes(1, 2)
        k, v = (pad_to_multiple(x, blocks.keys).swapaxes(1, 2) for x in (k, v))
        scope = jax.named_scope(_scope(kernel.mask, shape, blocks))
        return _Padded((q, k, v), ids, shape, blocks, scope)

    def queries(self, x: Array) -> Array:
        """[B, T, N, …] as queries are."""
        return pad_to_multiple(x, self.blocks.queries).swapaxes(1, 2)


def _scope(mask: Mask, shape: Shape, blocks: Blocks) -> str:
    """The name by which a plan knows how many of a kernel's steps do anything."""
    sizes = (shape.first, shape.length, shape.num_keys, mask, blocks.queries, blocks.keys)
    counts = Counter(query for query, _ in masks.pairs(*sizes))
    return f"runs_{counts.total()}_of_{max(counts.values()) * len(counts)}_steps"


@functools.cache
def _lazy(mask: Mask, shape: Shape, blocks: Blocks) -> Any:
    """The mask as the kernel takes it: by position, and without an array of [seq, seq]."""
    from jax.experimental.pallas.ops.tpu import splash_attention

    # The position of each query among the keys; those of padding go on.
    padded = shape.length + -shape.length % blocks.queries
    queries = shape.first + np.arange(padded, dtype=np.int32)
    sizes = padded, shape.num_keys + -shape.num_keys % blocks.keys
    if mask == Mask(causal=False, window=None):
        return splash_attention.FullMask(sizes)

    class Blockwise(splash_attention.LocalMask):
        """Asked block by block, of which most are wholly visible or hidden: one element says so."""

        def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
            rows, keys = self.q_sequence[block[0]], block[1]
            first, last = int(rows.min()), int(rows.max())
            whole = mask.keys_of(last, first + 1, sizes[1])
            some = mask.keys_of(first, last + 1, sizes[1])
            if whole[0] <= keys.start and keys.stop <= whole[1]:
                return np.ones((1, 1), bool)
            if keys.stop <= some[0] or some[1] <= keys.start:
                return np.zeros((1, 1), bool)
            return super().__getitem__(block)

    reach = None if mask.window is None else mask.window - 1
    found = Blockwise(sizes, (reach, 0 if mask.causal else reach), offset=0)
    found.q_sequence = queries
    return found
