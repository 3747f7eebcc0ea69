"""JAX's flash kernel for TPUs on the devices of a mesh: each has its rows and its heads.

Legend of suffixes: as in `zoo.nn.attention.choice`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Float, Int

from zoo.nn.attention import masks
from zoo.nn.attention.blocks import Blocks, blocks_for
from zoo.nn.attention.masks import Mask
from zoo.nn.remat import KEPT
from zoo.sharding import is_sharding
from zoo.sharding.rules import mesh_axes
from zoo.sharding.specs import partition_spec

_NO_SEGMENT = np.iinfo(np.int32).min  # of what is padded at the end of a row


def splash(
    q_BTNH: Float[Array, "batch queries heads head_dim"],
    k_BSKH: Float[Array, "batch keys kv_heads head_dim"],
    v_BSKH: Float[Array, "batch keys kv_heads head_dim"],
    segment_ids: Int[Array, "batch keys"] | None,
    mask: Mask,
    scale: float,
    soft_cap: float | None,
    *,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> Float[Array, "batch queries heads head_dim"]:
    """Attention by `jax.experimental.pallas.ops.tpu.splash_attention`, its backward pass unfused.

    The fused one keeps a gradient of the queries for each block of keys. Remat keeps the output
    and the logarithms of the sums. `interpret` runs the kernel without a TPU.
    """
    length = q_BTNH.shape[1]
    blocks = blocks or blocks_for(length)
    padding = -length % max(blocks.queries, blocks.keys)
    if padding and not mask.causal and segment_ids is None:
        segment_ids = jnp.zeros(q_BTNH.shape[:2], jnp.int32)
    if segment_ids is not None:
        segment_ids = jnp.pad(segment_ids, ((0, 0), (0, padding)), constant_values=_NO_SEGMENT)
    q_BTNH = (q_BTNH.astype(jnp.float32) * scale).astype(q_BTNH.dtype)
    q_BNTH, k_BKSH, v_BKSH = (
        jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))).swapaxes(1, 2)
        for x in (q_BTNH, k_BSKH, v_BSKH)
    )
    attend = functools.partial(
        _on_one_device, mask=mask, soft_cap=soft_cap, blocks=blocks, interpret=interpret
    )
    out_BNTH = _on_each_device(attend, q_BNTH, k_BKSH, v_BKSH, segment_ids)
    return out_BNTH.swapaxes(1, 2)[:, :length]


def _on_each_device(
    attend: Callable[..., Array],
    q_BNTH: Array,
    k_BKSH: Array,
    v_BKSH: Array,
    segment_ids: Array | None,
) -> Float[Array, "batch heads queries head_dim"]:
    """`attend` on each device's rows and heads: XLA does not split a kernel by itself."""
    if not is_sharding():
        return attend(q_BNTH, k_BKSH, v_BKSH, segment_ids)
    mesh = jax.sharding.get_abstract_mesh()
    rows, heads = partition_spec(["batch", "heads"], mesh)
    _, kv_heads = partition_spec(["batch", "kv_heads"], mesh)
    of_queries = PartitionSpec(rows, heads)
    of_keys = PartitionSpec(rows, kv_heads if kv_heads == heads else None)
    total_heads, total_kv_heads = q_BNTH.shape[1], k_BKSH.shape[1]

    def local(q: Array, k: Array, v: Array, segment_ids: Array | None) -> Array:
        if kv_heads != heads:
            group = total_heads // total_kv_heads
            first = _index(heads, mesh) * q.shape[1]
            k, v = (_heads_of(x, first, q.shape[1], group) for x in (k, v))
        return attend(q, k, v, segment_ids)

    # The kernel's results do not say over which axes they vary, which the check would ask for.
    return jax.shard_map(
        local,
        in_specs=(of_queries, of_keys, of_keys, PartitionSpec(rows)),
        out_specs=of_queries,
        check_vma=False,
    )(q_BNTH, k_BKSH, v_BKSH, segment_ids)


def _index(entry: Any, mesh: AbstractMesh) -> Array | int:
    """The number of this device's part, along the mesh axes of an entry of a spec."""
    axes = mesh_axes([entry])
    return jax.lax.axis_index(axes) if axes else 0


def _heads_of(x_BKSH: Array, first: Array | int, num_heads: int, group: int) -> Array:
    """The key-value heads of `num_heads` query heads from `first` on, of `group` each."""
    if num_heads % group == 0 or group % num_heads == 0:
        num = max(num_heads // group, 1)
        return jax.lax.dynamic_slice_in_dim(x_BKSH, first // group, num, axis=1)
    return jnp.take(x_BKSH, (first + jnp.arange(num_heads)) // group, axis=1)


def _on_one_device(
    q_BNTH: Array,
    k_BKSH: Array,
    v_BKSH: Array,
    segment_ids: Array | None,
    *,
    mask: Mask,
    soft_cap: float | None,
    blocks: Blocks,
    interpret: bool,
) -> Float[Array, "batch heads queries head_dim"]:
    # Imported here: it takes a second, which only TPUs need.
    from jax.experimental.pallas.ops.tpu import splash_attention

    heads, length = q_BNTH.shape[1:3]
    sizes = splash_attention.BlockSizes(
        block_q=blocks.queries,
        block_kv=blocks.keys,
        block_kv_compute=blocks.keys_per_product,
        block_q_dkv=blocks.queries,
        block_kv_dkv=blocks.keys,
        block_kv_dkv_compute=blocks.keys_per_product,
        block_q_dq=blocks.queries,
        block_kv_dq=blocks.keys,
    )
    kernel = splash_attention.make_splash_mha_single_device(
        mask=splash_attention.MultiHeadMask([_lazy(mask, length)] * heads),
        block_sizes=sizes,
        attn_logits_soft_cap=soft_cap,
        residual_checkpoint_name=KEPT,
        interpret=interpret,
    )

    def one_row(q: Array, k: Array, v: Array, segment_ids: Array | None) -> Array:
        ids = segment_ids
        both = None if ids is None else splash_attention.SegmentIds(ids, ids)
        return kernel(q, k, v, both)

    with jax.named_scope(_scope(mask, length, blocks)):
        return jax.vmap(one_row)(q_BNTH, k_BKSH, v_BKSH, segment_ids)


def _scope(mask: Mask, length: int, blocks: Blocks) -> str:
    """The name by which a plan knows how many of a kernel's steps do anything."""
    rows = [query for query, _ in masks.pairs(length, mask, blocks.queries, blocks.keys)]
    width = max(rows.count(query) for query in set(rows))
    return f"runs_{len(rows)}_of_{width * len(set(rows))}_steps"


@functools.cache
def _lazy(mask: Mask, length: int) -> Any:
    """The mask as the kernel takes it: by position, and without an array of [seq, seq]."""
    from jax.experimental.pallas.ops.tpu import splash_attention

    if mask == Mask(causal=False, window=None):
        return splash_attention.FullMask((length, length))

    class Blockwise(splash_attention.LocalMask):
        """Asked block by block, of which most are wholly visible or hidden: one element says so."""

        def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
            queries, keys = block
            whole = mask.keys_of(queries.stop - 1, queries.start + 1, length)
            some = mask.keys_of(queries.start, queries.stop, length)
            if whole[0] <= keys.start and keys.stop <= whole[1]:
                return np.ones((1, 1), bool)
            if keys.stop <= some[0] or some[1] <= keys.start:
                return np.zeros((1, 1), bool)
            return super().__getitem__(block)

    reach = None if mask.window is None else mask.window - 1
    return Blockwise((length, length), (reach, 0 if mask.causal else reach), offset=0)
