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
from zoo.nn.attention.masks import NO_SEGMENT, Mask, Places, Segments, pad_pieces, without_padding
from zoo.nn.remat import KEPT

LANES = 128  # a block is a multiple of it


class Blocks(NamedTuple):
    """Queries and keys of a block, forward and backward, and the keys of one product in it."""

    queries: int
    keys: int
    keys_per_product: int


def blocks_for(length: int, num_keys: int) -> Blocks:
    """The blocks for queries and keys of a row: halved until they add an eighth of it at most.

    Not measured yet on any chip: large enough that a kernel's time is in its products, small enough
    for the memory of the smallest core.
    """

    def fitting(size: int) -> int:
        block = 512 if num_keys <= 8_192 else 1024
        while block > LANES and -size % block > size // 8:
            block //= 2
        return block

    return Blocks(fitting(length), fitting(num_keys), min(512, fitting(num_keys)))


def splash(
    q_BTNH: Float[Array, "batch queries heads head_dim"],
    k_BSKH: Float[Array, "batch keys kv_heads head_dim"],
    v_BSKH: Float[Array, "batch keys kv_heads head_dim"],
    segments: Segments | None,
    places: Places,
    part: Array | int,
    *,
    mask: Mask,
    scale: float,
    soft_cap: float | None,
    fused: bool = False,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> Float[Array, "batch queries heads head_dim"]:
    """Attention of one part of a row on one device, its backward pass in one kernel if `fused`.

    It is `jax.experimental.pallas.ops.tpu.splash_attention`, whose fused backward pass keeps a
    gradient of the queries for each block of keys. Remat keeps the output and the logarithms of
    the sums. `interpret` runs the kernel without a TPU.
    """
    length, num_keys = q_BTNH.shape[1] // places.pieces, k_BSKH.shape[1]
    blocks = blocks or blocks_for(length, num_keys)
    pad_queries = functools.partial(pad_pieces, pieces=places.pieces, multiple=blocks.queries)
    pad_keys = functools.partial(pad_pieces, pieces=1, multiple=blocks.keys)
    if num_keys % blocks.keys and not mask.causal and segments is None:
        batch = q_BTNH.shape[0]
        segments = jnp.zeros(q_BTNH.shape[:2], jnp.int32), jnp.zeros((batch, num_keys), jnp.int32)
    if segments is not None:
        of_queries, of_keys = segments
        segments = pad_queries(of_queries, value=NO_SEGMENT), pad_keys(of_keys, value=NO_SEGMENT)
    q_BTNH = (q_BTNH.astype(jnp.float32) * scale).astype(q_BTNH.dtype)
    q_BNTH = pad_queries(q_BTNH).swapaxes(1, 2)
    k_BKSH, v_BKSH = (pad_keys(x).swapaxes(1, 2) for x in (k_BSKH, v_BSKH))
    shape = Shape(places, length, num_keys)
    kernel = _kernel(mask, shape, q_BNTH.shape[1], blocks, soft_cap, fused, interpret, part)

    def one_row(q: Array, k: Array, v: Array, segments: Any) -> Array:
        # Imported here: it takes a second, which only TPUs need.
        from jax.experimental.pallas.ops.tpu import splash_attention

        return kernel(q, k, v, segments and splash_attention.SegmentIds(*segments))

    with jax.named_scope(_scope(mask, shape, blocks)):
        out_BNTH = jax.vmap(one_row)(q_BNTH, k_BKSH, v_BKSH, segments)
    return without_padding(out_BNTH.swapaxes(1, 2), places.pieces, length)


class Shape(NamedTuple):
    """The queries and keys of a part of a row: their places, the length of a piece, the keys."""

    places: Places
    length: int
    num_keys: int


def _kernel(
    mask: Mask,
    shape: Shape,
    heads: int,
    blocks: Blocks,
    soft_cap: float | None,
    fused: bool,
    interpret: bool,
    part: Array | int,
) -> Any:
    """The kernel of one part of a row."""
    from jax.experimental.pallas.ops.tpu import splash_attention
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info

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
    parts = len(shape.places.starts)
    kernel = splash_attention.make_splash_mha(
        mask=splash_attention.MultiHeadMask([_lazy(mask, shape, blocks)] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=parts,
        attn_logits_soft_cap=soft_cap,
        residual_checkpoint_name=KEPT,
        interpret=interpret,
    )
    if parts == 1:
        return kernel

    def of_part(info: Any) -> Any:
        """A part's own of the tables of all parts, which follow one another by queries."""
        assert info.partial_mask_blocks is None  # the mask is a function of the position

        def cut(x: Array | None, axis: int) -> Array | None:
            if x is None:
                return None
            size = x.shape[axis] // parts
            return jax.lax.dynamic_slice_in_dim(x, part * size, size, axis)

        tables = {name: cut(getattr(info, name), 1) for name in ("data_next", "block_mask")}
        return info._replace(**tables, q_sequence=cut(info.q_sequence, 0))

    is_info = lambda x: isinstance(x, splash_attention_mask_info.MaskInfo)  # noqa: E731
    return jax.tree.map(of_part, kernel, is_leaf=is_info)


def _scope(mask: Mask, shape: Shape, blocks: Blocks) -> str:
    """The name by which a plan knows how many of a kernel's steps do anything."""
    runs, width, rows = 0, 0, 0
    for starts in shape.places.starts:
        sizes = (shape.length, shape.num_keys, mask, blocks.queries, blocks.keys)
        counts = Counter(query for query, _ in masks.pairs(starts, *sizes))
        runs, rows = max(runs, counts.total()), len(counts)
        width = max(width, *counts.values())
    return f"runs_{runs}_of_{width * rows}_steps"


@functools.cache
def _lazy(mask: Mask, shape: Shape, blocks: Blocks) -> Any:
    """The mask as the kernel takes it: by position, and without an array of [seq, seq]."""
    from jax.experimental.pallas.ops.tpu import splash_attention

    # The position of each query of all parts, among the keys; those of padding go on.
    padded = shape.length + -shape.length % blocks.queries
    pieces = [start + np.arange(padded) for starts in shape.places.starts for start in starts]
    queries = np.concatenate(pieces).astype(np.int32)
    sizes = len(queries), shape.num_keys + -shape.num_keys % blocks.keys
    if mask == Mask(causal=False, window=None):
        return splash_attention.FullMask((len(queries) // len(shape.places.starts), sizes[1]))

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
