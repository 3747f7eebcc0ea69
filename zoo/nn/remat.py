"""Rematerialisation: named policies, and the checkpointed scan over stacked layers."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from zoo.nn.parameters import unshard, with_operands
from zoo.nn.products import PRODUCT

Policy = Literal["none", "dots", "dots_no_batch", "full"]
LayerFunction = Callable[[Any, PyTree, Array], PyTree]

# The name of arrays that every policy keeps, as they are far dearer to compute again than to keep:
# what a flash kernel gives, as large as a layer's input, and the orders of rows by their experts.
KEPT = "kept"


def _and_kept(policy: Callable[..., Any], *names: str) -> Callable[..., Any]:
    policies = jax.checkpoint_policies
    return policies.save_from_both_policies(policy, policies.save_only_these_names(KEPT, *names))


POLICIES: dict[str, Callable[..., Any] | None] = {
    "none": None,  # keep every intermediate
    "dots": _and_kept(jax.checkpoint_policies.dots_saveable, PRODUCT),  # keep every product
    # …with a weight
    "dots_no_batch": _and_kept(jax.checkpoint_policies.dots_with_no_batch_dims_saveable, PRODUCT),
    "full": _and_kept(jax.checkpoint_policies.nothing_saveable),  # keep a layer's input alone
}


# Within `overridden(policy)`, it replaces the ones that models ask for; None leaves them as they
# are. So a plan tries policies on a model of any family.
overridden = jax.make_user_context(default_value=None)


def checkpoint(
    function: Callable[..., Any], policy: Policy, *, in_scan: bool = False
) -> Callable[..., Any]:
    """Wrap a function so that its backward pass recomputes what the named policy does not keep.

    `in_scan` says that a `lax.scan` runs it: the loop alone then keeps XLA from merging the
    recomputation with the forward pass, and the barriers that would slow it down are left out.

    Raises:
        ValueError: a name that is no policy.
    """
    policy = overridden.value or policy
    if policy not in POLICIES:
        raise ValueError(f"remat={policy!r}: choose one of {sorted(POLICIES)}")
    if policy == "none":
        return function
    return jax.checkpoint(function, policy=POLICIES[policy], prevent_cse=not in_scan)


def scan_layers(
    function: LayerFunction | Sequence[LayerFunction],
    layers: PyTree,
    carry: PyTree,
    *,
    policy: Policy = "none",
    scan: bool = True,
) -> PyTree:
    """Run `carry = function(layer, carry, index)` over layers stacked along their arrays' axis 0.

    Several functions take turns: the loop is then over as many layers at once, and what is left
    over comes after it. Each layer's parameters are gathered where they are used, one layer at a
    time, inside the rematerialised body, so that no gathered copy is kept. `scan=False` unrolls
    the loop: faster to run on a few small layers, slower to compile.
    """
    functions = [function] if callable(function) else list(function)
    arrays, static = eqx.partition(layers, eqx.is_array)
    num_layers, turns = jax.tree.leaves(arrays)[0].shape[0], len(functions)

    def one(turn: int, in_scan: bool) -> LayerFunction:
        def body(layer: PyTree, carry: PyTree, index: Array) -> PyTree:
            whole = unshard(with_operands(eqx.combine(layer, static)))
            return functions[turn](whole, carry, index)

        return checkpoint(body, policy, in_scan=in_scan)

    def each(arrays: PyTree, carry: PyTree, first: int | Array, in_scan: bool = False) -> PyTree:
        for turn, layer in enumerate(_unstack(arrays)):
            carry = one(turn % turns, in_scan)(layer, carry, jnp.asarray(first + turn))
        return carry

    rounds = num_layers // turns if scan else 0
    if rounds == 0:
        return each(arrays, carry, 0)
    if turns == 1:
        body, xs = one(0, True), (arrays, jnp.arange(num_layers))
        return lax.scan(lambda carry, x: (body(x[0], carry, x[1]), None), carry, xs)[0]
    whole, rest = rounds * turns, num_layers % turns
    xs = jax.tree.map(lambda x: x[:whole].reshape(rounds, turns, *x.shape[1:]), arrays)
    xs = (xs, jnp.arange(0, whole, turns))
    carry = lax.scan(lambda carry, x: (each(x[0], carry, x[1], True), None), carry, xs)[0]
    return each(jax.tree.map(lambda x: x[whole:], arrays), carry, whole) if rest else carry


def _unstack(arrays: PyTree) -> list[PyTree]:
    """The layers one by one; not by indexing, whose gradient would add up whole stacks."""
    length = jax.tree.leaves(arrays)[0].shape[0]
    split = jax.tree.map(lambda x: lax.split(x, (1,) * length), arrays)
    return [
        jax.tree.map(lambda x, parts: parts[index][0], arrays, split)  # noqa: B023
        for index in range(length)
    ]
