"""Rematerialisation: its policies, and the checkpointed scan over stacked layers."""

import types
from collections.abc import Callable, Mapping, Sequence
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
Own = Mapping[str, Sequence[int]]

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
    own: Own = types.MappingProxyType({}),
    first: int = 0,
    policy: Policy = "none",
    scan: bool = True,
) -> PyTree:
    """Run `carry = function(layer, carry, index)` over layers stacked along their arrays' axis 0.

    Several functions take turns: the loop is then over as many layers at once, and what is left
    over comes after it, as the `first` layers come before it; `own` is as in `apart`. Each layer's
    parameters are gathered where they are used, one layer at a time, inside the rematerialised
    body, so that no gathered copy is kept. `scan=False` unrolls the loop: faster to run on a few
    small layers, slower to compile.
    """
    functions = [function] if callable(function) else list(function)
    arrays, static = eqx.partition(layers, eqx.is_array)
    num_layers, turns = _num_layers(arrays, own), len(functions)

    def one(index: int, in_scan: bool) -> LayerFunction:
        rest = _without_others(static, own, index)

        def body(layer: PyTree, carry: PyTree, index_: Array) -> PyTree:
            whole = unshard(with_operands(eqx.combine(layer, rest)))
            return functions[index % turns](whole, named(carry, "block_input"), index_)

        return checkpoint(body, policy, in_scan=in_scan)

    def each(
        arrays: PyTree, carry: PyTree, start: int, stop: int, index: Any, in_scan: bool = False
    ) -> PyTree:
        """Run layers like those from `start` on; `index` is the first one's."""
        parts = {x: [i - start for i in y if start <= i < stop] for x, y in own.items()}
        for turn, layer in enumerate(apart(arrays, parts, stop - start)):
            carry = one(start + turn, in_scan)(layer, carry, jnp.asarray(index + turn))
        return carry

    rounds = (num_layers - first) // turns if scan else 0
    if rounds == 0:
        return each(arrays, carry, 0, num_layers, 0)
    if turns == 1 and not first and not own:
        body, xs = one(0, True), (arrays, jnp.arange(num_layers))
        return lax.scan(lambda carry, x: (body(x[0], carry, x[1]), None), carry, xs)[0]

    def cut(start: int, stop: int) -> PyTree:
        def of(path: tuple, x: Array) -> Array:
            layers = own.get(_field(path), range(num_layers))
            begin, end = (sum(i < at for i in layers) for at in (start, stop))
            return x[begin:end]

        return jax.tree_util.tree_map_with_path(of, arrays)

    end, each_round = first + rounds * turns, first + turns
    in_rounds = jax.tree.map(
        lambda x: x.reshape(rounds, len(x) // rounds, *x.shape[1:]), cut(first, end)
    )
    carry = each(cut(0, first), carry, 0, first, 0) if first else carry
    xs = (in_rounds, jnp.arange(first, end, turns))
    carry = lax.scan(
        lambda carry, x: (each(x[0], carry, first, each_round, x[1], True), None), carry, xs
    )[0]
    return each(cut(end, num_layers), carry, end, num_layers, end) if end < num_layers else carry


def apart(
    layers: PyTree, own: Own = types.MappingProxyType({}), count: int | None = None
) -> list[PyTree]:
    """Stacked layers one by one; not by indexing, whose gradient would add up whole stacks.

    `own` names the fields of `layers` that only some layers have, and these layers; the others have
    None. `count` is the number of layers, if these are some of them.
    """
    arrays, static = eqx.partition(layers, eqx.is_array)
    split = jax.tree.map(lambda x: lax.split(x, (1,) * len(x)) if len(x) else [], arrays)

    def layer(index: int) -> PyTree:
        def pick(path: tuple, x: Array, parts: list[Array]) -> Array:
            layers = own.get(_field(path))
            return parts[index if layers is None else layers.index(index)][0]

        of_layer = [_without_others(x, own, index) for x in (arrays, split, static)]
        picked = jax.tree_util.tree_map_with_path(pick, *of_layer[:2])
        return eqx.combine(picked, of_layer[2])

    return [layer(index) for index in range(_num_layers(arrays, own) if count is None else count)]


def _num_layers(arrays: PyTree, own: Own) -> int:
    # Perhaps no array is in all layers: the last one that has an array counts.
    found = [(_field(path), len(x)) for path, x in jax.tree_util.tree_leaves_with_path(arrays)]
    return max(own[name][-1] + 1 if name in own else length for name, length in found)


def _field(path: tuple) -> str:
    return getattr(path[0], "name", "") if path else ""


def _without_others(layers: PyTree, own: Own, index: int) -> PyTree:
    """The layers with None for each field that layers other than this one have."""
    others = [name for name, layers in own.items() if index not in layers]
    if not others:
        return layers
    where, is_none = lambda x: [getattr(x, name) for name in others], lambda x: x is None
    return eqx.tree_at(where, layers, [None] * len(others), is_leaf=is_none)
