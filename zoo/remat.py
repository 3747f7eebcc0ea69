"""Rematerialisation: named policies, and the checkpointed scan over stacked layers."""

from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from zoo import sharding

Policy = Literal["none", "dots", "dots_no_batch", "full"]

POLICIES: dict[str, Callable[..., Any] | None] = {
    "none": None,  # keep every intermediate
    "dots": jax.checkpoint_policies.dots_saveable,  # keep every product
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # …with a weight
    "full": jax.checkpoint_policies.nothing_saveable,  # keep a layer's input alone
}


def checkpoint(
    function: Callable[..., Any], policy: Policy, *, in_scan: bool = False
) -> Callable[..., Any]:
    """Wrap a function so that its backward pass recomputes what the named policy does not keep.

    `in_scan` says that a `lax.scan` runs it: the loop alone then keeps XLA from merging the
    recomputation with the forward pass, and the barriers that would slow it down are left out.

    Raises:
        ValueError: a name that is no policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"remat={policy!r}: choose one of {sorted(POLICIES)}")
    if policy == "none":
        return function
    return jax.checkpoint(function, policy=POLICIES[policy], prevent_cse=not in_scan)


def scan_layers(
    function: Callable[[Any, PyTree, Array], PyTree],
    layers: PyTree,
    carry: PyTree,
    *,
    policy: Policy = "none",
    scan: bool = True,
) -> PyTree:
    """Run `carry = function(layer, carry, index)` over layers stacked along their arrays' axis 0.

    Each layer's parameters are gathered where they are used, one layer at a time, inside the
    rematerialised body, so that no gathered copy is kept. `scan=False` unrolls the loop: faster to
    run on a few small layers, slower to compile.
    """
    arrays, static = eqx.partition(layers, eqx.is_array)
    num_layers = jax.tree.leaves(arrays)[0].shape[0]

    def body(carry: PyTree, layer_and_index: tuple[PyTree, Array]) -> tuple[PyTree, None]:
        layer, index = layer_and_index
        layer = sharding.gather(eqx.combine(layer, static))
        return function(layer, carry, index), None

    body = checkpoint(body, policy, in_scan=scan)
    if scan:
        return lax.scan(body, carry, (arrays, jnp.arange(num_layers)))[0]
    # Not by indexing, whose gradient would add up as many whole stacks as there are layers.
    split = jax.tree.map(lambda x: lax.split(x, (1,) * num_layers), arrays)
    for index in range(num_layers):
        layer = jax.tree.map(lambda x, parts: parts[index][0], arrays, split)  # noqa: B023
        carry, _ = body(carry, (layer, jnp.asarray(index)))
    return carry
