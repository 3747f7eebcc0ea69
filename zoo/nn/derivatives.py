"""Functions with a gradient that is written out, and forward mode through them.

A written gradient serves reverse mode alone. Within `forward_mode` each of these functions is
differentiated by its own operations instead, so that `jax.jvp` goes through.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

# A context of JAX's own: what was traced outside is not taken from a cache inside, nor the reverse.
_forward_mode = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def forward_mode() -> Iterator[None]:
    """Within, `jax.jvp`, `jax.jacfwd`, `jax.linearize` and `jax.hessian` go through any model.

    For example `jax.jvp(jax.grad(loss), (params,), (direction,))` is a Hessian-vector product. The
    gradients inside are by autodiff: the same values but for rounding, slower, and with more
    memory, as attention and losses keep all logits. Compiled steps outside do not change.
    """
    with _forward_mode(True):
        yield


def in_forward_mode() -> bool:
    """Whether functions are differentiated by their own operations here."""
    return bool(_forward_mode.value)


class Static(eqx.Module):
    """A value that is no array, among the residuals of a gradient."""

    value: Any = eqx.field(static=True)


class custom_vjp:
    """`jax.custom_vjp`, for a function whose own operations can be differentiated too."""

    def __init__(self, function: Callable[..., Any], nondiff_argnums: tuple[int, ...] = ()):
        functools.update_wrapper(self, function)
        self._plain, self._nondiff_argnums = function, nondiff_argnums
        self._with_rule = jax.custom_vjp(function, nondiff_argnums=nondiff_argnums)

    def defvjp(
        self,
        forward: Callable[..., tuple[Any, Any]],
        backward: Callable[..., Any],
        *,
        by_need: bool = False,
    ) -> None:
        """Give the rule, as `jax.custom_vjp.defvjp` takes it.

        With `by_need`, `forward` gets one more argument, `needed`: the differentiable inputs with
        a boolean for each array, whether its gradient is asked for, which that of a frozen
        parameter is not. `backward` gives None in the place of one that is not.
        """
        if not by_need:
            self._with_rule.defvjp(forward, backward)
            return

        @functools.wraps(forward)
        def forward_by_need(*args: Any) -> tuple[Any, Any]:
            inputs = tuple(x for i, x in enumerate(args) if i not in self._nondiff_argnums)
            needed = _map(CustomVJPPrimal, lambda x: x.perturbed, inputs)
            return forward(*_map(CustomVJPPrimal, lambda x: x.value, args), needed=needed)

        @functools.wraps(backward)
        def backward_by_need(*args: Any) -> Any:
            return backward(*_map(SymbolicZero, lambda x: jnp.zeros(x.shape, x.dtype), args))

        self._with_rule.defvjp(forward_by_need, backward_by_need, symbolic_zeros=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        if in_forward_mode():
            return self._plain(*args, **kwargs)
        # JAX's error of forward mode shows the line in its traceback, so the line says the way out.
        return self._with_rule(*args, **kwargs)  # for forward mode, use zoo.forward_mode()


def _map(cls: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with a function of each node of a class in its place."""
    is_one = lambda x: isinstance(x, cls)  # noqa: E731
    return jax.tree.map(lambda x: function(x) if is_one(x) else x, tree, is_leaf=is_one)
