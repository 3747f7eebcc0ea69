"""The cross-entropy of large logits on a mesh, one tile of the vocabulary after another.

A tile of the output head is gathered for its products alone, and its gradient goes at once to where
it is stored: no device has a whole head, or a gradient of one. The backward pass computes the
logits again, for one more product.

Legend of suffixes: P parts that the mesh cuts a batch and its rows into, R rows of a part, T time,
E embed.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo import sharding
from zoo.nn.layers import Readout
from zoo.nn.parameters import unshard
from zoo.nn.products import Operand, custom_vjp
from zoo.sharding.axes import map_parameters
from zoo.sharding.specs import num_shards
from zoo.training.chunked_loss import PARTS, added_over_parts, cut, each_part, joined


def num_tiles(readout: Any, at_least: int) -> int | None:
    """How many tiles an output head stored in slices has; None where it is whole.

    None too if no number up to four times the least one divides the outputs of a device.
    """
    if not sharding.is_sharding() or not isinstance(readout, Readout):
        return None
    mesh, names = jax.sharding.get_abstract_mesh(), ("embed", dict(readout.axes)["out"])
    stored = sharding.partition_spec(names, mesh)
    if isinstance(readout.weight, Operand) or stored == sharding.spec_in_use(names, mesh):
        return None
    width = readout.weight.shape[1] // _num_parts(readout)
    return next((n for n in range(at_least, 4 * at_least + 1) if width % n == 0), None)


def _num_parts(readout: Readout) -> int:
    """Into how many parts the mesh cuts the outputs where they are stored."""
    mesh, names = jax.sharding.get_abstract_mesh(), ("embed", dict(readout.axes)["out"])
    return num_shards([sharding.partition_spec(names, mesh)[1]], mesh)


def tiled_losses(
    count: int,
    readout: Readout,
    x_BTE: Float[Array, "batch seq embed"],
    targets_BT: Int[Array, "batch seq"],
) -> Float[Array, "batch seq"]:
    """`zoo.losses.token_losses` of the logits `readout(x_BTE)`, by `count` tiles of them.

    The readout is as it is stored, in the compute dtype.
    """
    losses_PRT = _losses(count, readout, cut(x_BTE, 1)[0], cut(targets_BT, 1)[0])
    return joined(losses_PRT[None])


def _tiles(count: int, readout: Readout) -> tuple[Readout, Array]:
    """The head's tiles, and the indices of their outputs; the tiles are the first axis.

    A tile has an equal share of each part that the mesh cuts the outputs into.
    """
    parts = _num_parts(readout)

    def tiles(x: Array) -> Array:
        cut = x.reshape(*x.shape[:-1], parts, count, -1)
        return jnp.moveaxis(cut, -2, 0).reshape(count, *x.shape[:-1], -1)

    def leaf(path: tuple, names: tuple, x: Array) -> Array:
        return sharding.constrain(tiles(x), None, *names)

    indices = jnp.arange(readout.weight.shape[-1], dtype=jnp.int32)
    return map_parameters(leaf, readout), tiles(indices)


def _joined(tiles: Readout, like: Readout) -> Readout:
    """The head from its tiles."""
    parts = _num_parts(like)

    def leaf(path: tuple, names: tuple, x: Array) -> Array:
        cut = x.reshape(*x.shape[:-1], parts, -1)
        whole = jnp.moveaxis(cut, 0, -2).reshape(*x.shape[1:-1], -1)
        return sharding.constrain(whole, *names[1:])

    return map_parameters(leaf, tiles)


def _zeros(shape: tuple[int, ...]) -> Array:
    return sharding.constrain(jnp.zeros(shape, jnp.float32), PARTS, *(None for _ in shape[1:]))


@partial(custom_vjp, nondiff_argnums=(0,))
def _losses(count: int, readout: Readout, x_PRTE: Array, targets: Array) -> Array:
    return _forward(count, readout, x_PRTE, targets)[0]


def _forward(count: int, readout: Readout, x_PRTE: Array, targets: Array) -> tuple[Array, tuple]:
    def one(tile: tuple, x: Array, targets: Array, *sums: Array) -> tuple[Array, Array, Array]:
        (readout, indices), (top, total, of_target) = tile, sums
        logits = readout(x)
        above = jax.lax.stop_gradient(jnp.maximum(top, logits.max(-1)))
        total = total * jnp.exp(top - above) + jnp.exp(logits - above[..., None]).sum(-1)
        of_tile = jnp.where(indices[None, None] == targets[..., None], logits, 0.0).sum(-1)
        return above, total, of_target + of_tile

    def add(sums: tuple, tile: tuple) -> tuple[tuple, None]:
        return each_part(one)((unshard(tile[0]), tile[1]), x_PRTE, targets, *sums), None

    zeros = _zeros(targets.shape)
    sums, _ = jax.lax.scan(add, (zeros - jnp.inf, zeros, zeros), _tiles(count, readout))
    top, total, of_target = sums
    log_sum = jnp.log(total) + top
    is_class = (targets >= 0) & (targets < readout.weight.shape[-1])
    losses = log_sum - jnp.where(is_class, of_target, jnp.nan)
    return losses, (readout, x_PRTE, targets, log_sum)


def _backward(count: int, residuals: tuple, g: Array) -> tuple[Readout, Array, None]:
    readout, x_PRTE, targets, log_sum = residuals

    def one(tile: tuple, x: Array, targets: Array, log_sum: Array, g: Array) -> tuple:
        readout, indices = tile
        logits, gradients = jax.vjp(lambda readout, x: readout(x), readout, x)
        is_target = (indices[None, None] == targets[..., None]).astype(jnp.float32)
        probabilities = jnp.exp(logits - log_sum[..., None])
        # Where nothing depends on the loss, logits that are not finite do not matter.
        return gradients(
            jnp.where(g[..., None] == 0, 0.0, (probabilities - is_target) * g[..., None])
        )

    def add(of_x: Array, tile: tuple) -> tuple[Array, Readout]:
        gathered = unshard(tile[0]), tile[1]
        of_tile, more = each_part(one)(gathered, x_PRTE, targets, log_sum, g)
        return of_x + more.astype(jnp.float32), added_over_parts(of_tile)

    of_x, of_tiles = jax.lax.scan(add, _zeros(x_PRTE.shape), _tiles(count, readout))
    return _joined(of_tiles, readout), of_x.astype(x_PRTE.dtype), None


_losses.defvjp(_forward, _backward)
