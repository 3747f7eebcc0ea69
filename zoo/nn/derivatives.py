"""Functions with a gradient that is written out, and forward mode through them.

A written gradient serves reverse mode alone. Within `forward_mode` each of these functions is
differentiated by its own operations instead, so that `jax.jvp` goes through.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

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


class custom_vjp:
    """`jax.custom_vjp`, for a function whose own operations can be differentiated too."""

    def __init__(self, function: Callable[..., Any], nondiff_argnums: tuple[int, ...] = ()):
        functools.update_wrapper(self, function)
        self._plain = function
        self._with_rule = jax.custom_vjp(function, nondiff_argnums=nondiff_argnums)
        self.defvjp = self._with_rule.defvjp

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        if in_forward_mode():
            return self._plain(*args, **kwargs)
        # JAX's error of forward mode shows the line in its traceback, so the line says the way out.
        return self._with_rule(*args, **kwargs)  # for forward mode, use zoo.forward_mode()
