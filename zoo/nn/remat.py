"""Rematerialisation: its policies, and the checkpointed scan over stacked layers."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, PyTree

from zoo.common.configuration import require
from zoo.nn.parameters import unshard, with_operands
from zoo.nn.products import PRODUCT, platform

# One of `POLICIES`, or `Kept` as text: "save:query,key,value+offload:block_input".
Policy = str
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


# The arrays of a layer that a policy may name: its input, queries, keys and values as attention
# takes them, its output before the product behind it, the input of the MLP's part, and the
# products in the MLP before its activation.
NAMES = ("block_input", "query", "key", "value", "attention", "mlp_input", "mlp_hidden")


class Kept(NamedTuple):
    """The named arrays that a policy keeps, on the device or in the host's memory."""

    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()

    @staticmethod
    def of(policy: Policy, names: Sequence[str] = NAMES) -> "Kept":
        """The names that a policy keeps and offloads, of a model whose layers have these names.

        Raises:
            ValueError: it is no policy, or has another name, or one twice.
        """
        if policy in POLICIES:
            return Kept()
        found: dict[str, tuple[str, ...]] = {}
        for part in policy.split("+"):
            where, _, listed = part.partition(":")
            found[where] = (*found.get(where, ()), *listed.split(","))
        chosen = sum(found.values(), ())
        require(
            {*found} <= {*Kept._fields} and {*chosen} <= {*names} and len({*chosen}) == len(chosen),
            f"remat={policy!r}: choose one of {sorted(POLICIES)}, or save:NAMES, offload:NAMES or "
            f"save:NAMES+offload:NAMES, each of {', '.join(names)} once, with commas between",
        )
        return Kept(**found)


def _policy(policy: Policy) -> Callable[..., Any] | None:
    """A policy as `jax.checkpoint` takes it; None keeps every intermediate."""
    if policy in POLICIES:
        return POLICIES[policy]
    kept = Kept.of(policy)
    require(
        not kept.offload or platform() != "cpu",
        f"remat={policy!r}: a CPU has the host's memory alone; write save: for offload:",
    )
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[KEPT, *kept.save],
        names_which_can_be_offloaded=[*kept.offload],
        offload_src="device",
        offload_dst="pinned_host",
    )


# Within `overridden(policy)`, it replaces the ones that models ask for; None leaves them as they
# are. So a plan tries policies on a model of any family.
overridden = jax.make_user_context(default_value=None)


def checkpoint(
    function: Callable[..., Any], policy: Policy, *, in_scan: bool = False
) -> Callable[..., Any]:
    """Wrap a function so that its backward pass recomputes what the policy does not keep.

    `in_scan` says that a `lax.scan` runs it: the loop alone then keeps XLA from merging the
    recomputation with the forward pass, and the barriers that would slow it down are left out.

    Raises:
        ValueError: what is no policy, or one that offloads on a CPU.
    """
    policy = overridden.value or policy
    if policy == "none":
        return function
    return jax.checkpoint(function, policy=_policy(policy), prevent_cse=not in_scan)


def named(tree: PyTree, name: str) -> PyTree:
    """The same under a name of `NAMES`, by which a policy may keep it."""
    return jax.tree.map(lambda x: checkpoint_name(x, name), tree)


def scan_layers(
    function: LayerFunction | Sequence[LayerFunction],
    layers: PyTree,
    carry: PyTree,
    *,
    own: Sequence[str] = (),
    policy: Policy = "none",
    scan: bool = True,
) -> PyTree:
    """Run `carry = function(layer, carry, index)` over layers stacked along their arrays' axis 0.

    Several functions take turns: the loop is then over as many layers at once, and what is left
    over comes after it; `own` is as in `apart`. Each layer's parameters are gathered where they are
    used, one layer at a time, inside the rematerialised body, so that no gathered copy is kept.
    `scan=False` unrolls the loop: faster to run on a few small layers, slower to compile.
    """
    functions = [function] if callable(function) else list(function)
    arrays, static = eqx.partition(layers, eqx.is_array)
    num_layers, turns = _num_layers(arrays), len(functions)

    def one(turn: int, in_scan: bool) -> LayerFunction:
        rest = _without_others(static, own, turn)

        def body(layer: PyTree, carry: PyTree, index: Array) -> PyTree:
            whole = unshard(with_operands(eqx.combine(layer, rest)))
            return functions[turn](whole, named(carry, "block_input"), index)

        return checkpoint(body, policy, in_scan=in_scan)

    def each(arrays: PyTree, carry: PyTree, first: int | Array, in_scan: bool = False) -> PyTree:
        for turn, layer in enumerate(apart(arrays, own)):
            carry = one(turn % turns, in_scan)(layer, carry, jnp.asarray(first + turn))
        return carry

    rounds = num_layers // turns if scan else 0
    if rounds == 0:
        return each(arrays, carry, 0)
    if turns == 1:
        body, xs = one(0, True), (arrays, jnp.arange(num_layers))
        return lax.scan(lambda carry, x: (body(x[0], carry, x[1]), None), carry, xs)[0]

    def in_rounds(path: tuple, x: Array) -> Array:
        each_round = own.count(_field(path)) or turns
        return x[: rounds * each_round].reshape(rounds, each_round, *x.shape[1:])

    def left_over(path: tuple, x: Array) -> Array:
        return x[rounds * (own.count(_field(path)) or turns) :]

    by_path, whole = jax.tree_util.tree_map_with_path, rounds * turns
    xs = (by_path(in_rounds, arrays), jnp.arange(0, whole, turns))
    carry = lax.scan(lambda carry, x: (each(x[0], carry, x[1], True), None), carry, xs)[0]
    return each(by_path(left_over, arrays), carry, whole) if num_layers % turns else carry


def apart(layers: PyTree, own: Sequence[str] = ()) -> list[PyTree]:
    """Stacked layers one by one; not by indexing, whose gradient would add up whole stacks.

    `own` names fields of `layers`, for one layer after another, repeated: a field is stacked over
    the layers that it is named for, and is None in the others.
    """
    arrays, static = eqx.partition(layers, eqx.is_array)
    split = jax.tree.map(lambda x: lax.split(x, (1,) * len(x)) if len(x) else [], arrays)

    def layer(index: int) -> PyTree:
        names = [own[i % len(own)] for i in range(index + 1)] if own else []

        def pick(path: tuple, x: Array, parts: list[Array]) -> Array:
            return parts[names[:-1].count(names[-1]) if _field(path) in own else index][0]

        of_layer = [_without_others(x, own, index) for x in (arrays, split, static)]
        picked = jax.tree_util.tree_map_with_path(pick, *of_layer[:2])
        return eqx.combine(picked, of_layer[2])

    return [layer(index) for index in range(_num_layers(arrays))]


def _num_layers(arrays: PyTree) -> int:
    return max(len(x) for x in jax.tree.leaves(arrays))


def _field(path: tuple) -> str | None:
    return getattr(path[0], "name", None) if path else None


def _without_others(layers: PyTree, own: Sequence[str], turn: int) -> PyTree:
    """The layers with None for each field that layers of other turns alone have."""
    others = {*own} - {own[turn % len(own)]} if own else ()
    if not others:
        return layers
    where, is_none = lambda x: [getattr(x, name) for name in others], lambda x: x is None
    return eqx.tree_at(where, layers, [None] * len(others), is_leaf=is_none)
